"""A notebook's kernel, asked beside its page: for what only the notebook can do on its workers.

It is the process that has the world; its connection file is named on its command line, and is
this user's alone.  What is asked runs between the cells of the user, and never later than it was
asked for.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty
from typing import Any

import zmq
from jupyter_client.blocking.client import BlockingKernelClient

from nbdist.errors import UsageError
from nbdist.output.ansi import strip

FREE_TIMEOUT = 4.0
"""Seconds for a kernel to be free: what it has not begun by then it will not begin."""

STEP = 0.5

GUEST = "nbdist.notebook.guest"


def connection_file(pid: int) -> Path:
    """Find that of a notebook's kernel; UsageError where the process is none."""
    with suppress(OSError):
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
        for word in words:
            file = Path(re.sub(r"^(?:--?f=?)?", "", word))
            if file.suffix == ".json" and file.is_absolute() and file.exists():
                if file.stat().st_uid != os.geteuid():
                    break
                return file
    raise UsageError(
        f"process {pid}, which has this world, is no Jupyter kernel that can be asked: "
        "status, stacks, why and output work without it"
    )


def interrupt(pid: int) -> None:
    """Do as the Stop button does; UsageError where the process is no kernel."""
    connection_file(pid)  # another program would end
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)


@contextmanager
def connected(pid: int) -> Iterator[BlockingKernelClient]:
    """Connect to the kernel of that process; UsageError unless it is free."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    client = BlockingKernelClient(connection_file=str(connection_file(pid)), context=context)
    client.load_connection_file()
    client.start_channels(stdin=False, hb=False, control=False)
    try:
        until = time.monotonic() + FREE_TIMEOUT
        # Its answers are seen, too: what it publishes arrives from now on.
        while not any(_messages(client, client.kernel_info(), STEP)):
            if time.monotonic() > until:
                raise UsageError(
                    "the notebook runs a cell: status, stacks, why and output work meanwhile; "
                    "all else waits for its end"
                )
        yield client
    finally:
        client.stop_channels()


def ask(pid: int, function: str, *arguments: object, timeout: float) -> str:
    """Call a function of `nbdist.notebook.guest` there; return what it shows.

    All of it is text without colours, of a display that changes the last.  It raises UsageError
    where the kernel is not free, or for longer than that.
    """
    shown: dict[str, str] = {}
    with connected(pid) as client:
        given = ", ".join(map(repr, (time.time() + FREE_TIMEOUT, *arguments)))
        code = f"__import__({GUEST!r}, fromlist=['_']).{function}({given})"
        # The user's cells that wait behind it run in any case.
        way = {"silent": True, "store_history": False, "stop_on_error": False}
        number = client.execute(code, **way, allow_stdin=False)
        is_over = False
        for kind, content in _messages(client, number, timeout):
            key = f"{kind} {len(shown)}"
            match kind:
                case "stream":
                    shown[key] = content["text"]
                case "display_data" | "update_display_data" | "execute_result":
                    key = content.get("transient", {}).get("display_id") or key
                    shown[key] = str(content["data"].get("text/plain", ""))
                case "error":
                    shown[key] = "\n".join(content["traceback"])
                case "status":
                    is_over = True
    text = strip("\n".join(each.rstrip("\n") for each in shown.values() if each.strip()))
    if not is_over:
        said = f"it still runs after {timeout:.0f} s: `interrupt` ends it"
        raise UsageError(f"{said}\n{text}" if text else said)
    return text


def _messages(
    client: BlockingKernelClient, number: str, timeout: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what the kernel publishes until it is done with this request, that last.

    What it shows meanwhile under a cell of the user is of this request, too.
    """
    until, has_begun = time.monotonic() + timeout, False
    while (left := until - time.monotonic()) > 0:
        with suppress(Empty):
            message = client.get_iopub_msg(timeout=left)
            kind, content = message["header"]["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") == number and kind == "status":
                if content["execution_state"] == "idle":
                    yield kind, content
                    return
                has_begun = True
            elif has_begun and kind != "status":
                yield kind, content
