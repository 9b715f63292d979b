"""Where measurements are made: a folder and an environment of their own, and no noise.

Whatever a measurement starts inherits a mark in its environment, also what outlives its
parent or leaves its session, so that it is found from outside by its process id.
"""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import nbdist
from tests.bench.notebook import Notebook

END_TIMEOUT = 10.0
"""Seconds that processes have to be gone after their notebook kernel has ended."""

SAMPLE_SECONDS = 0.3
QUIET_SHARE = 0.1
"""Of all processors' time; below this nothing that matters is running."""


class Lab:
    """Makes notebook kernels for measurements, one after the other."""

    def __init__(self, runs: int, quiet_timeout: float) -> None:
        self.runs = runs
        self._was_busy = self._told = False
        self._quiet_timeout = quiet_timeout
        # A short path: it holds unix sockets.
        self.folder = Path(tempfile.mkdtemp(prefix="nbb-"))
        self._mark = f"NBDIST_BENCH={uuid.uuid4().hex}"
        self._environ = self._make_environ()
        # As an installed package is, also where Python writes no bytecode by itself.
        compileall.compile_dir(str(Path(nbdist.__file__).parent), quiet=2)

    def __repr__(self) -> str:
        return f"<Lab {self.folder} {self.runs} runs>"

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_leftovers()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def notebook(self) -> Iterator[Notebook]:
        """A fresh notebook kernel that is up, on a quiet machine; nothing of it is left after."""
        self._wait_until_quiet()
        notebook = Notebook(self.folder, self._environ)
        try:
            notebook.wait_until_up()
            yield notebook
        finally:
            notebook.close()
            self._end_leftovers()

    @contextmanager
    def new_folder(self) -> Iterator[Path]:
        """A new folder for what a measurement writes, on a quiet machine."""
        self._wait_until_quiet()
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            yield Path(folder)

    @contextmanager
    def notebooks(self, count: int) -> Iterator[list[Notebook]]:
        """Several plain kernels that are up at once: a peer."""
        self._wait_until_quiet()
        kernels = [Notebook(self.folder, self._environ) for _ in range(count)]
        try:
            for kernel in kernels:
                kernel.wait_until_up()
            yield kernels
        finally:
            for kernel in kernels:
                kernel.close()
            self._end_leftovers()

    def was_busy(self) -> bool:
        """Whether others used the machine during the last measurements, since it was last said.

        Figures of the same measurements get the same answer.
        """
        self._told = True
        return self._was_busy

    def processes(self) -> list[int]:
        """The ids of all processes that measurements started and that are still there."""
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in pids if pid != os.getpid() and self._is_ours(pid)]

    # --- inside ---------------------------------------------------------------------------

    def _make_environ(self) -> dict[str, str]:
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
            and not name.startswith("NBDIST_")
        }
        name, _, value = self._mark.partition("=")
        runtime, ipython = self.folder / "run", self.folder / "ipython"
        for folder in (runtime, ipython):
            folder.mkdir(mode=0o700)
        ours = {"XDG_RUNTIME_DIR": runtime, "IPYTHONDIR": ipython, "XDG_STATE_HOME": self.folder}
        return {**environ, name: value, **{key: str(folder) for key, folder in ours.items()}}

    def _is_ours(self, pid: int) -> bool:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False  # it went, or is somebody else's
        return self._mark.encode() in environ.split(b"\0")

    def _wait_until_quiet(self) -> None:
        """Remembers for `was_busy` when there was no quiet moment within the time allowed."""
        if self._told:
            self._was_busy = self._told = False
        deadline = time.monotonic() + self._quiet_timeout
        while self._quiet_timeout and busy_share(SAMPLE_SECONDS) > QUIET_SHARE:
            if time.monotonic() > deadline:
                self._was_busy = True
                return

    def _end_leftovers(self) -> None:
        """Wait for what is ending; then tell and kill what is not."""
        deadline = time.monotonic() + END_TIMEOUT
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)  # there is no event for the end of somebody else's child
        for pid in left:
            sys.stderr.write(f"left behind and killed: process {pid}\n")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def busy_share(seconds: float) -> float:
    """Which part of the processors' time was used, measured for so long (proc(5), stat)."""
    before = _processor_ticks()
    time.sleep(seconds)
    used, idle = (now - then for now, then in zip(_processor_ticks(), before, strict=True))
    return used / max(1, used + idle)


def _processor_ticks() -> tuple[int, int]:
    """Used and idle, since boot."""
    with open("/proc/stat", encoding="ascii") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    idle = fields[3] + fields[4]
    return sum(fields) - idle, idle
