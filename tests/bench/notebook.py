"""A real notebook kernel and the front end that looks at it: cells go in, outputs come out.

Messages are read from the sockets at once, because what jupyter_client's own clients do
around them would be a part of each figure.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.manager import KernelManager

UP_TIMEOUT = 60.0
CELL_TIMEOUT = 120.0
ASK_AGAIN_SECONDS = 0.5

DISPLAYS = ("display_data", "update_display_data", "execute_result")


class CellFailed(Exception):
    """A cell of a measurement raised, or gave no reply in time."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One output: when it came, in seconds after sending, its text, and its size on the wire."""

    after: float
    kind: str
    text: str
    size: int


@dataclass(slots=True)
class Sent:
    """Cells on their way, and what has come of them so far."""

    ids: tuple[str, ...]
    started: float
    may_fail: bool = False
    seconds: float = 0.0
    replies: int = 0
    idle: int = 0
    outputs: list[Shown] = field(default_factory=list)

    @property
    def replied(self) -> bool:
        """Whether all have been answered."""
        return self.replies == len(self.ids)

    @property
    def done(self) -> bool:
        """Whether all outputs are here too."""
        return self.replied and self.idle == len(self.ids)

    @property
    def printed(self) -> str:
        """What the notebook kernel itself printed."""
        return "".join(output.text for output in self.outputs if output.kind == "stream")

    @property
    def displays(self) -> list[Shown]:
        """Displays and their updates, in order."""
        return [output for output in self.outputs if output.kind in DISPLAYS]


REPLIED = attrgetter("replied")
DONE = attrgetter("done")
"""How much of what was sent to wait for."""


class Notebook:
    """An ipykernel in a process of its own, over TCP as JupyterLab starts it."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._manager = KernelManager(
            kernel_name="python3", connection_file=str(folder / f"{uuid.uuid4().hex}.json")
        )
        self._manager.start_kernel(
            env=dict(environ), cwd=str(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._shell = self._manager.connect_shell()
        self._iopub = self._manager.connect_iopub()
        self._poller = zmq.Poller()
        for socket in (self._shell, self._iopub):
            socket.linger = socket.rcvhwm = 0
            self._poller.register(socket, zmq.POLLIN)

    def __repr__(self) -> str:
        return f"<Notebook {self.pid}>"

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return int(getattr(self._manager.provisioner, "pid", 0))

    def wait_until_up(self) -> None:
        """Return when cells can be sent and no output of theirs can be missed."""
        deadline = time.monotonic() + UP_TIMEOUT
        while time.monotonic() < deadline:
            asked = self._send("kernel_info_request", [{}])
            if self._read(asked, DONE, ASK_AGAIN_SECONDS):
                return
        raise CellFailed(f"the notebook kernel was not up after {UP_TIMEOUT:.0f} s")

    def run(self, *sources: str, may_fail: bool = False) -> Sent:
        """Send cells at once, wait until all are done; `seconds` is until the last reply."""
        sent = self.send(*sources)
        sent.may_fail = may_fail
        self.wait(sent, DONE)
        return sent

    def send(self, *sources: str) -> Sent:
        """Send cells; `wait` for them."""
        return self._send("execute_request", [_request(source) for source in sources])

    def wait(self, sent: Sent, is_enough: Callable[[Sent], bool]) -> None:
        """Take in what comes, until it is enough."""
        if not self._read(sent, is_enough, CELL_TIMEOUT):
            raise CellFailed(f"no reply within {CELL_TIMEOUT:.0f} s")

    def close(self) -> None:
        """End the kernel: politely, and after five seconds not."""
        for socket in (self._shell, self._iopub):
            socket.close()
        self._manager.shutdown_kernel()
        self._manager.context.term()

    # --- inside ---------------------------------------------------------------------------

    def _send(self, kind: str, contents: list[dict[str, Any]]) -> Sent:
        session = self._manager.session
        messages = [session.msg(kind, content) for content in contents]
        ids = tuple(message["header"]["msg_id"] for message in messages)
        sent = Sent(ids, time.perf_counter())
        for message in messages:
            session.send(self._shell, message)
        return sent

    def _read(self, sent: Sent, is_enough: Callable[[Sent], bool], timeout: float) -> bool:
        """Whether it was enough in time."""
        deadline = time.monotonic() + timeout
        while not is_enough(sent):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for socket, _ in self._poller.poll(left * 1000):
                self._take(sent, socket)
        return True

    def _take(self, sent: Sent, socket: zmq.Socket[bytes]) -> None:
        frames = socket.recv_multipart()
        after = time.perf_counter() - sent.started
        session = self._manager.session
        message = session.deserialize(session.feed_identities(frames)[1])
        if message["parent_header"].get("msg_id") not in sent.ids:
            return
        kind, content = message["header"]["msg_type"], message["content"]
        if socket is self._shell:
            sent.replies += 1
            sent.seconds = after
            if content["status"] != "ok" and not sent.may_fail:
                raise CellFailed(f"{content.get('ename')}: {content.get('evalue')}")
        elif kind == "status":
            sent.idle += content["execution_state"] == "idle"
        elif kind == "stream" or kind in DISPLAYS:
            size = sum(len(frame) for frame in frames)
            sent.outputs.append(Shown(after, kind, _text(content), size))


def _request(source: str) -> dict[str, Any]:
    return {
        "code": source,
        "silent": False,
        "store_history": True,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": False,
    }


def _text(content: Mapping[str, Any]) -> str:
    """An output's text, in whatever form it has."""
    return str(content.get("text") or content.get("data", {}).get("text/plain", ""))
