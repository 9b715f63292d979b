"""Where the worker's main thread is: in which line of the cell, waiting for which collective.

Asked from the control thread, while the main thread runs or waits.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nbdist.wire.calls import FunctionCall
from nbdist.wire.cells import cell_numbers
from nbdist.worker.compat import torch as seam
from nbdist.worker.frames import awaited, described
from nbdist.worker.nccl import Pending, UnderWay
from nbdist.worker.recording import Counts, Recording
from nbdist.worker.store import FreeableStore

if TYPE_CHECKING:
    from nbdist.worker.group import Group
    from nbdist.worker.scripts import Scripts

IN_TORCH = os.path.join("torch", "distributed") + os.sep
WAITS = "send or recv" if seam.RECORDS_GLOO else "send, recv or an asynchronous collective"
FUTEX = 202 if os.uname().machine == "x86_64" else 98
TCP_INFO, TCP_INFO_BYTES = 11, struct.Struct("=120xQQ")
"""`tcpi_bytes_acked` and `tcpi_bytes_received` of struct tcp_info (linux/tcp.h)."""

_wait_for_work = dist.Work.wait


def _wait(self: dist.Work, *args: Any, **options: Any) -> Any:
    """Stands for `Work.wait`, so that a thread that waits there has a frame that shows it."""
    return _wait_for_work(self, *args, **options)


dist.Work.wait = _wait  # type: ignore[method-assign]


class Watcher:
    """Looks at the main thread; cheap enough for ten times a second."""

    def __init__(self, shell: Any, group: Group | None, scripts: Scripts) -> None:
        self._shell = shell
        self._scripts = scripts
        self._loop = asyncio.get_event_loop()  # the main thread's, which makes this
        self._group = group
        self._ident = threading.main_thread().ident or 0
        # Not `native_id`, which a forked process takes over from its parent (Python 3.11).
        self._native_id = os.getpid()
        self._recording = Recording()
        self._nccl = UnderWay() if group is not None and group.uses_nccl else None

    def __repr__(self) -> str:
        return f"<Watcher of thread {self._native_id}>"

    def look(self) -> dict[str, Any]:
        """The fields of `nbdist.wire.messages.Place`."""
        frames = list(self._frames())
        counts, nccl = self._recording.counts(), self._pending()
        begun = {number: each.begun for number, each in counts.items()}
        return {
            **self._spot(frames),
            "operation": self._operation(frames, counts, nccl),
            # Who is in the next one of the same name has moved on.
            "counts": begun if self._nccl is None else {**begun, "nccl": nccl.number},
            "moved": self._moved(),
            "is_calm": self._is_calm(),
            "unfinished": sum(each.unfinished for each in counts.values()) + nccl.count,
        }

    def where(self) -> dict[str, Any]:
        """What of the fields of `Place` people read, with few system calls.

        Each lets go of the GIL, and where Python code runs it takes 5 ms to come back.
        """
        return self._where(self._stack())

    def stack(self) -> dict[str, Any]:
        """`where`, and the calls from the innermost out."""
        frames = self._stack()
        shown = [frame for frame in frames if frame.f_code is not _wait.__code__]
        return {"place": self._where(frames), "frames": described(shown, self._cells())}

    def last_collective(self) -> dict[str, Any]:
        """The fields of `Collective`, of the one that was begun last; none if there was none."""
        return self._recording.last()

    def start_over(self) -> None:
        """The groups are being formed anew: what their backends so far have begun is over."""
        self._recording.start_over()
        if self._nccl is not None:
            self._nccl.start_over()

    def _where(self, frames: list[FrameType]) -> dict[str, Any]:
        operation = _called(frames)
        if not operation or self._group is None or not self._is_in_futex():
            operation = self._operation(frames, self._recording.counts(), self._pending())
        return {**self._spot(frames), "operation": operation}

    def _pending(self) -> Pending:
        return Pending() if self._nccl is None else self._nccl.look()

    @property
    def waits_for_nccl(self) -> bool:
        """Whether a cell runs that has begun collectives of nccl's which have not ended."""
        return self.is_in_cell and self._pending().count > 0

    def _frames(self) -> Iterator[FrameType]:
        """From the innermost out."""
        frame = sys._current_frames().get(self._ident)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def _stack(self) -> list[FrameType]:
        """The same, or those of a cell that awaits something."""
        frames, cells = list(self._frames()), self._cells()
        if any(frame.f_code.co_filename in cells for frame in frames):
            return frames
        return awaited(self._loop, cells) or frames

    @property
    def is_in_cell(self) -> bool:
        """Whether the main thread runs a cell, or a script."""
        return self._scripts.running is not None or self._line(list(self._frames())) > 0

    def _spot(self, frames: list[FrameType]) -> dict[str, Any]:
        """The line of the cell or script that runs."""
        return self._scripts.spot(frames) or {"line": self._line(frames)}

    def _line(self, frames: list[FrameType]) -> int:
        """The line of the cell that runs, 0 when none does; of a function that is called."""
        cells, inner = self._cells(), None
        for frame in frames:
            if frame.f_code is FunctionCall.__call__.__code__ and inner is not None:
                return inner.f_lineno
            inner = frame
        return next((f.f_lineno for f in reversed(frames) if f.f_code.co_filename in cells), 0)

    def _cells(self) -> Mapping[str, int]:
        """The number of each cell by the name of its file."""
        return cell_numbers()

    def _operation(
        self, frames: list[FrameType], counts: Mapping[str, Counts], nccl: Pending
    ) -> str:
        """What the thread waits for: a collective, by torch's name; "" when it does not wait.

        In a futex wait, with a collective begun that has not ended; or (Flight Recorder
        does not record what goes from rank to rank) inside one of torch.distributed's
        functions.  Or in the store, for the others to make a group.
        """
        if self._group is None:
            return ""
        if any(frame.f_code is FreeableStore.wait.__code__ for frame in frames):
            return _called(frames) or "store" if self._group.waits_to_meet else ""
        if nccl.name:
            return nccl.name
        if not self._is_in_futex():
            return ""
        if begun := self._recording.waited_for(counts):
            return begun
        if any(frame.f_code is _wait.__code__ for frame in frames):
            return (not seam.RECORDS_GLOO and _called(frames)) or WAITS
        return _called(frames) or (_in_backward(frames) if not seam.RECORDS_GLOO else "")

    def _is_in_futex(self) -> bool:
        try:
            with open(f"/proc/self/task/{self._native_id}/syscall", encoding="ascii") as file:
                return file.read().startswith(f"{FUTEX} ")
        except OSError:
            return False

    def _moved(self) -> int:
        """Bytes that gloo's connections have carried so far."""
        if self._group is None:
            return 0
        total = 0
        for connection in self._group.connections():
            info = connection.getsockopt(6, TCP_INFO, TCP_INFO_BYTES.size)
            total += sum(TCP_INFO_BYTES.unpack(info))
        return total

    def _is_calm(self) -> bool:
        """Whether none of gloo's threads has anything to do; the kernel's own often have.

        What nccl does on a GPU cannot be seen.
        """
        return self._nccl is None and not any(
            _is_at_work(tid) for tid in os.listdir("/proc/self/task")
        )


def _called(frames: list[FrameType]) -> str:
    """The function of torch.distributed that user code called, a public one if there is any."""
    names = [f.f_code.co_name for f in frames if IN_TORCH in f.f_code.co_filename]
    names = [name for name in names if name != "wrapper"]
    public = [name for name in names if not name.startswith("_")]
    return next(reversed(public or names), "")


def _in_backward(frames: list[FrameType]) -> str:
    """ "backward" where autograd waits in C++, as it does for what a DDP module reduces."""
    is_there = any(frame.f_code.co_name == "_engine_run_backward" for frame in frames)
    return "backward" if is_there else ""


def _is_at_work(tid: str) -> bool:
    """Whether the thread is one of gloo's (`gloo_tcp_loop`, `pt_gloo_runloop`), and runs."""
    try:
        with open(f"/proc/self/task/{tid}/stat", encoding="ascii", errors="replace") as file:
            name, _, rest = file.read().rpartition(") ")
    except OSError:
        return False  # it has ended
    return "gloo" in name and rest[0] in "RD"
