"""The lab for measurements: its own folder and environment, kernels, and a quiet machine.

A real kernel is used as by a front end: cells go in, outputs come out.  Messages are read from
the sockets directly, because the work of jupyter_client's own clients would be a part of each
figure.  Each process that a measurement starts inherits a mark in its environment, even if it
outlives its parent or leaves its session, by which leftovers are found.
"""

from __future__ import annotations

import compileall
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import zmq
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager

import nbdist
from tests.traces import with_variable

UP_TIMEOUT = 60.0
CELL_TIMEOUT = 120.0
ASK_AGAIN_SECONDS = 0.5

REQUEST = {"silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": False}
DISPLAYS = ("display_data", "update_display_data", "execute_result")
OUTPUTS = ("stream", "error", "comm_open", *DISPLAYS)


class CellFailed(Exception):
    """A cell of a measurement raised, or gave no reply in time."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An output of a cell: seconds after sending, kind, content, and size on the wire."""

    after: float
    kind: str
    content: Mapping[str, Any]
    size: int

    @property
    def text(self) -> str:
        """The output's text, from a stream or from the plain text of a display."""
        data = self.content.get("data", {})
        return str(self.content.get("text") or data.get("text/plain", ""))


@dataclass(slots=True)
class Sent:
    """Cells that were sent, and their replies and outputs so far."""

    ids: tuple[str, ...]
    started: float
    may_fail: bool = False
    seconds: float = 0.0
    replies: int = 0
    idle: int = 0
    outputs: list[Shown] = field(default_factory=list)

    @property
    def replied(self) -> bool:
        return self.replies == len(self.ids)

    @property
    def done(self) -> bool:
        return self.replied and self.idle == len(self.ids)

    @property
    def printed(self) -> str:
        return "".join(output.text for output in self.outputs if output.kind == "stream")

    @property
    def raw(self) -> str:
        """All outputs as JSON, in which a text can be searched."""
        contents = (output.content for output in self.outputs)
        return "".join(json.dumps(content, ensure_ascii=False) for content in contents)

    @property
    def displays(self) -> list[Shown]:
        return [output for output in self.outputs if output.kind in DISPLAYS]


REPLIED = attrgetter("replied")
DONE = attrgetter("done")
"""Conditions to wait for: all replies have come, or the ends of all cells as well."""


class Notebook:
    """A kernel in a process of its own, over TCP as JupyterLab starts it.

    `argv` starts another kernel than this Python's ipykernel; `input()` gets `answer`, if given.
    `elsewhere` has the outputs of other cells than the last.
    """

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str],
        argv: Sequence[str] = (),
        answer: str | None = None,
        interrupt_mode: str = "signal",
    ) -> None:
        self.began = time.perf_counter()
        self.elsewhere: list[Shown] = []
        self._manager = KernelManager(
            kernel_name="python3", connection_file=str(folder / f"{uuid.uuid4().hex}.json")
        )
        if argv:
            self._manager.kernel_spec_manager = _OneSpec(argv, interrupt_mode)
        self._manager.start_kernel(
            env=dict(environ), cwd=str(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._answer = answer
        identity = self._manager.session.bsession
        self._shell = self._manager.connect_shell(identity)
        self._iopub = self._manager.connect_iopub()
        self._stdin = self._manager.connect_stdin(identity)
        self._poller = zmq.Poller()
        for socket in (self._shell, self._iopub, self._stdin):
            socket.linger = socket.rcvhwm = 0
            self._poller.register(socket, zmq.POLLIN)

    @property
    def pid(self) -> int:
        return int(getattr(self._manager.provisioner, "pid", 0))

    @property
    def is_alive(self) -> bool:
        return bool(self._manager.is_alive())

    def wait_until_up(self) -> None:
        """Return when cells can be sent and no output of theirs can be missed."""
        deadline = time.monotonic() + UP_TIMEOUT
        while time.monotonic() < deadline:
            asked = self._send("kernel_info_request", [{}])
            if self.look(asked, DONE, ASK_AGAIN_SECONDS):
                return
        raise CellFailed(f"the notebook kernel was not up after {UP_TIMEOUT:.0f} s")

    def run(self, *sources: str, may_fail: bool = False) -> Sent:
        """Send cells at once, wait until all are done; `seconds` is until the last reply."""
        sent = self.send(*sources)
        sent.may_fail = may_fail
        self.wait(sent, DONE)
        return sent

    def send(self, *sources: str) -> Sent:
        """Send cells and return at once; `wait` waits for their ends."""
        request = {**REQUEST, "allow_stdin": self._answer is not None}
        contents = [{**request, "code": source} for source in sources]
        return self._send("execute_request", contents)

    def wait(
        self, sent: Sent, is_enough: Callable[[Sent], bool], timeout: float = CELL_TIMEOUT
    ) -> None:
        """Receive messages until `is_enough`; CellFailed if that takes longer than `timeout`."""
        if not self.look(sent, is_enough, timeout):
            raise CellFailed(f"no reply within {timeout:.0f} s")

    def interrupt(self) -> None:
        """Press Stop in the notebook."""
        self._manager.interrupt_kernel()

    def restart(self) -> None:
        """Restart the kernel, as the front end's button does."""
        self._manager.restart_kernel()
        self.wait_until_up()

    def subscribe(self, target: str) -> None:
        """Open a comm, by which the kernel sends the changes of its displays."""
        self._send("comm_open", [{"comm_id": uuid.uuid4().hex, "target_name": target, "data": {}}])

    def close(self) -> None:
        """End the kernel gently, and after five seconds by force."""
        for socket in (self._shell, self._iopub, self._stdin):
            socket.close()
        self._manager.shutdown_kernel()
        self._manager.context.term()

    def _send(self, kind: str, contents: list[dict[str, Any]]) -> Sent:
        session = self._manager.session
        messages = [session.msg(kind, content) for content in contents]
        ids = tuple(message["header"]["msg_id"] for message in messages)
        sent = Sent(ids, time.perf_counter())
        for message in messages:
            session.send(self._shell, message)
        return sent

    def look(self, sent: Sent, is_enough: Callable[[Sent], bool], timeout: float) -> bool:
        """Receive all messages until `is_enough`; return True if that came true in time."""
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
        kind, content = message["header"]["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") not in sent.ids:
            if kind in OUTPUTS:
                self.elsewhere.append(Shown(after, kind, content, 0))
        elif socket is self._stdin:
            session.send(self._stdin, "input_reply", {"value": self._answer}, message)
        elif socket is self._shell:
            sent.replies += 1
            sent.seconds = after
            if content["status"] != "ok" and not sent.may_fail:
                raise CellFailed(f"{content.get('ename')}: {content.get('evalue')}")
        elif kind == "status":
            sent.idle += content["execution_state"] == "idle"
        elif kind in OUTPUTS:
            size = sum(len(frame) for frame in frames)
            sent.outputs.append(Shown(after, kind, content, size))
        elif kind == "comm_msg" and "snapshot" in content["data"]:
            sent.outputs = [each for each in sent.outputs if each.kind != kind]
            sent.outputs.append(Shown(after, kind, content["data"]["snapshot"], 0))


class _OneSpec(KernelSpecManager):
    """Finds a single kernel specification, by any name."""

    def __init__(self, argv: Sequence[str], interrupt_mode: str) -> None:
        super().__init__()
        self._argv, self._interrupt_mode = list(argv), interrupt_mode

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(
            argv=self._argv, display_name=kernel_name, interrupt_mode=self._interrupt_mode
        )


END_TIMEOUT = 10.0
"""Seconds in which all processes have to end after their notebook kernel."""

SAMPLE_SECONDS = 0.3
QUIET_PERCENT = 10
"""Percent of all processors' time, up to which the machine counts as quiet."""


class Lab:
    """Makes notebook kernels for measurements, one after the other."""

    def __init__(self, runs: int, quiet_timeout: float) -> None:
        self.runs = runs
        self._was_busy = self._told = False
        self._quiet_timeout = quiet_timeout
        # A short path, since the folder holds unix sockets.
        self.folder = Path(tempfile.mkdtemp(prefix="nbb-"))
        self._mark = uuid.uuid4().hex
        self._environ = self._make_environ()
        # An installed package has bytecode, even if Python writes none by itself.
        compileall.compile_dir(str(Path(nbdist.__file__).parent), quiet=2)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_leftovers()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def notebook(
        self,
        argv: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Iterator[Notebook]:
        """A fresh notebook kernel that is up, on a quiet machine; leftovers are ended after it."""
        with self.notebooks(1, environ, argv=argv, **options) as (notebook,):
            yield notebook

    @contextmanager
    def notebooks(
        self, count: int, environ: Mapping[str, str] | None = None, **options: Any
    ) -> Iterator[list[Notebook]]:
        """Several notebook kernels at once, as a peer."""
        self._wait_until_quiet()
        environ = {**self._environ, **(environ or {})}
        kernels = [Notebook(self.folder, environ, **options) for _ in range(count)]
        try:
            for kernel in kernels:
                kernel.wait_until_up()
            yield kernels
        finally:
            for kernel in kernels:
                kernel.close()
            self._end_leftovers()

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """A new folder for the files of a measurement, on a quiet machine."""
        self._wait_until_quiet()
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            yield Path(folder)

    def was_busy(self) -> bool:
        """Whether other programs used the machine before any measurement since the last answer.

        Figures of the same measurements get the same answer.
        """
        self._told = True
        return self._was_busy

    def processes(self) -> list[int]:
        """The ids of all processes that measurements started and that are still there."""
        return with_variable("NBDIST_BENCH", self._mark)

    def _make_environ(self) -> dict[str, str]:
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
            and not name.startswith("NBDIST_")
        }
        runtime, ipython = self.folder / "run", self.folder / "ipython"
        for folder in (runtime, ipython):
            folder.mkdir(mode=0o700)
        ours = {"XDG_RUNTIME_DIR": runtime, "IPYTHONDIR": ipython, "XDG_STATE_HOME": self.folder}
        return {
            **environ,
            "NBDIST_BENCH": self._mark,
            **{key: str(folder) for key, folder in ours.items()},
        }

    def _wait_until_quiet(self) -> None:
        """Wait for a quiet moment; remember for `was_busy` if none comes in the time allowed."""
        if self._told:
            self._was_busy = self._told = False
        deadline = time.monotonic() + self._quiet_timeout
        while self._quiet_timeout and psutil.cpu_percent(SAMPLE_SECONDS) > QUIET_PERCENT:
            if time.monotonic() > deadline:
                self._was_busy = True
                return

    def _end_leftovers(self) -> None:
        deadline = time.monotonic() + END_TIMEOUT
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)  # the end of another process's child is no event
        for pid in left:
            sys.stderr.write(f"left behind and killed: process {pid}\n")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that a call of `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# --- figures, their statistics, and the table --------------------------------------------------

WIDTHS = (9, 48, 9, 9, 9, 5, 8, 6)
TITLES = ("row", "what", "median", "min", "max", "unit", "budget", "ratio")


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of the table: a value from each of several runs."""

    row: str
    what: str
    unit: str
    values: tuple[float, ...]
    budget: float | None = None
    busy: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def ratio(self) -> float | None:
        return None if self.budget is None else self.median / self.budget

    @property
    def remark(self) -> str:
        missed = self.ratio is not None and self.ratio > 1
        return " ".join(filter(None, ["miss" if missed else "", "busy" if self.busy else ""]))


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that so many percent of the values do not exceed, interpolated."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def header(runs: int) -> str:
    """Return the machine and the load of the figures, and the titles of the table."""
    loads = " ".join(f"{load:.2f}" for load in os.getloadavg())
    where = f"Python {platform.python_version()}, {os.cpu_count()} cores, {runs} runs"
    titles = _columns(TITLES)
    return f"{where}, load average {loads}\n{titles}\n{'-' * len(titles)}"


def line(figure: Figure) -> str:
    """Return the figure as a line of the table."""
    budget = "-" if figure.budget is None else _short(figure.budget)
    ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
    spread = [_short(value) for value in (figure.median, min(figure.values), max(figure.values))]
    cells = (figure.row, figure.what, *spread, figure.unit, budget, ratio)
    return f"{_columns(cells)}  {figure.remark}".rstrip()


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _columns(cells: Iterable[str]) -> str:
    padded = [
        cell.ljust(width) if index in (0, 1, 5) else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    ]
    return " ".join(padded)
