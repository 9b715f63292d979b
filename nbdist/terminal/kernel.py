"""Calls functions in a notebook's kernel, by sending code as the notebook's page does.

`nbdist mcp` uses this file for questions that only the notebook can answer. It finds the kernel's
connection file, which must belong to this user, in the kernel's command line. The code runs between
the user's cells; if the kernel is busy for too long, the code does not run at all.
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
"""Seconds for a kernel to become free; the kernel refuses a call that begins later."""

STEP = 0.5

GUEST = "nbdist.notebook.mcp_calls"


def connection_file(pid: int) -> Path:
    """Return the connection file of the kernel with this process id.

    Raises UsageError if the process does not seem to be a Jupyter kernel of this user.
    """
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
    """Send SIGINT to a kernel, as the Stop button does.

    Raises UsageError if the process with the id `pid` does not seem to be a Jupyter kernel.
    """
    connection_file(pid)  # raises UsageError for another program, which SIGINT could end
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)


@contextmanager
def connected(pid: int) -> Iterator[BlockingKernelClient]:
    """Connect to the kernel with the process id `pid`, and wait until it runs no cell.

    Raises UsageError if the process is no kernel, or runs cells for more than `FREE_TIMEOUT`.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    client = BlockingKernelClient(connection_file=str(connection_file(pid)), context=context)
    client.load_connection_file()
    client.start_channels(stdin=False, hb=False, control=False)
    try:
        deadline = time.monotonic() + FREE_TIMEOUT
        # The first message on iopub shows that this client's subscription works: from then on no
        # message is missed.
        while not any(_messages(client, client.kernel_info(), STEP)):
            if time.monotonic() > deadline:
                raise UsageError(
                    "the notebook runs a cell: status, stacks, why and output work meanwhile; "
                    "all else waits for its end"
                )
        yield client
    finally:
        client.stop_channels()


def ask(pid: int, function: str, *arguments: object, timeout: float) -> str:
    """Call a function of `nbdist.notebook.mcp_calls` in the kernel; return its output as text.

    The text has no colours. If a display was updated, the text has only its last state. Raises
    UsageError if the kernel does not become free, or if the call takes longer than `timeout`.
    """
    shown: dict[str, str] = {}
    with connected(pid) as client:
        call_arguments = ", ".join(map(repr, (time.time() + FREE_TIMEOUT, *arguments)))
        code = f"__import__({GUEST!r}, fromlist=['_']).{function}({call_arguments})"
        # `stop_on_error` is False, so that the user's queued cells run even if this code fails.
        options = {"silent": True, "store_history": False, "stop_on_error": False}
        number = client.execute(code, **options, allow_stdin=False)
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
        message = f"it still runs after {timeout:.0f} s: `interrupt` ends it"
        raise UsageError(f"{message}\n{text}" if text else message)
    return text


def _messages(
    client: BlockingKernelClient, number: str, timeout: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the type and content of each output that the kernel publishes during a request.

    `number` is the id of the request. The request can also show outputs under a cell of the user;
    these are yielded, too. The last item is the status `idle`, by which the kernel ends the
    request. It is missing if the request takes longer than `timeout` seconds.
    """
    deadline, has_begun = time.monotonic() + timeout, False
    while (seconds_left := deadline - time.monotonic()) > 0:
        with suppress(Empty):
            message = client.get_iopub_msg(timeout=seconds_left)
            kind, content = message["header"]["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") == number and kind == "status":
                if content["execution_state"] == "idle":
                    yield kind, content
                    return
                has_begun = True
            elif has_begun and kind != "status":
                yield kind, content
