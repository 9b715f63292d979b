"""Where the worker's main thread is: in which line of the cell, waiting for which collective.

Asked from the control thread, while the main thread runs or waits.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch._C import _distributed_c10d as c10d

from nbdist.wire.calls import FunctionCall
from nbdist.wire.cells import cell_numbers
from nbdist.worker.frames import awaited, described
from nbdist.worker.nccl import UnderWay
from nbdist.worker.store import FreeableStore

if TYPE_CHECKING:
    from nbdist.worker.group import Group
    from nbdist.worker.scripts import Scripts

IN_TORCH = os.path.join("torch", "distributed") + os.sep
FUTEX = 202 if os.uname().machine == "x86_64" else 98
TCP_INFO, TCP_INFO_BYTES = 11, struct.Struct("=120xQQ")
"""`tcpi_bytes_acked` and `tcpi_bytes_received` of struct tcp_info (linux/tcp.h)."""

_wait_for_work = c10d.Work.wait


def _wait(self: c10d.Work, *args: Any, **options: Any) -> Any:
    """Stands for `Work.wait`, so that a thread that waits there has a frame that shows it."""
    return _wait_for_work(self, *args, **options)


c10d.Work.wait = _wait  # type: ignore[method-assign]


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
        self._over: set[str] = set()
        self._nccl = UnderWay() if group is not None and group.uses_nccl else None
        self._last: tuple[dict[str, int], dict[str, Any] | None] = {}, None

    def __repr__(self) -> str:
        return f"<Watcher of thread {self._native_id}>"

    def look(self) -> dict[str, Any]:
        """The fields of `nbdist.wire.messages.Place`."""
        frames = list(self._frames())
        groups = self._groups()
        return {
            **self._spot(frames),
            "operation": self._operation(frames, groups),
            "counts": {name: _begun_by(group) for name, group in groups.items()},
            "moved": self._moved(),
            "is_calm": self._is_calm(),
            "unfinished": sum(map(_unfinished_by, groups.values())),
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
        """The fields of `Collective`, of the one that was begun last; none if there was none.

        Costs 26 ms where Flight Recorder is full, unless no other has begun since.
        """
        groups = self._groups()
        begun = {number: _begun_by(group) for number, group in groups.items()}
        if begun != self._last[0]:
            self._last = begun, _newest_entry()
        entry = self._last[1]
        if entry is None or str(entry["pg_id"]) not in groups:
            return {}
        number = int(entry["collective_seq_id"])
        completed = int(groups[str(entry["pg_id"])]["last_completed_collective"])
        is_done = number <= completed or bool((_newest_entry() or entry)["retired"])
        return {"name": _name(entry), "number": number, "is_done": is_done}

    def start_over(self) -> None:
        """The groups are being formed anew: what their backends so far have begun is over.

        Flight Recorder keeps their numbers, and never takes what failed for completed.
        """
        self._over = set(_recorded(entries=False)["pg_status"])
        if self._nccl is not None:
            self._nccl.start_over()

    def _groups(self) -> dict[str, Any]:
        """What Flight Recorder has of each backend in use, by its number."""
        status = _recorded(entries=False)["pg_status"]
        return {number: group for number, group in status.items() if number not in self._over}

    def _where(self, frames: list[FrameType]) -> dict[str, Any]:
        operation = _called(frames)
        if not operation or self._group is None or not self._is_in_futex():
            operation = self._operation(frames, self._groups())
        return {**self._spot(frames), "operation": operation}

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

    def _operation(self, frames: list[FrameType], groups: Mapping[str, Any]) -> str:
        """What the thread waits for: a collective, by torch's name; "" when it does not wait.

        In a futex wait, with a collective begun that is not completed; or (Flight Recorder
        does not record what goes from rank to rank) inside one of torch.distributed's
        functions.  Or in the store, for the others to make a group.
        """
        if self._group is None:
            return ""
        if any(frame.f_code is FreeableStore.wait.__code__ for frame in frames):
            return _called(frames) or "store" if self._group.waits_to_meet else ""
        if self._nccl is not None and (begun := self._nccl.last()):
            return begun
        if not self._is_in_futex():
            return ""
        if begun := _begun(groups):
            return begun
        if any(frame.f_code is _wait.__code__ for frame in frames):
            return "send or recv"
        return _called(frames)

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


def _begun_by(group: Mapping[str, Any]) -> int:
    """How many collectives the group has begun."""
    return int(group["last_enqueued_collective"])


def _unfinished_by(group: Mapping[str, Any]) -> int:
    """How many of them seem not to be completed (-1 stands for none completed).

    Some may be: when two end at once, the number of the earlier one can be written last.
    """
    return _begun_by(group) - max(0, int(group["last_completed_collective"]))


def _begun(groups: Mapping[str, Any]) -> str:
    """The collective that was begun last, of those that are not completed; "" for none."""
    if not any(map(_unfinished_by, groups.values())):
        return ""  # asking for all entries takes a thousand times as long
    for entry in reversed(_recorded(entries=True)["entries"]):
        if str(entry["pg_id"]) in groups and not entry["retired"]:
            return _name(entry)
    return ""


def _newest_entry() -> dict[str, Any] | None:
    """What Flight Recorder has of the collective that was begun last, of any group.

    The others are not parsed: 8 ms where it is full, and ten times that beside Python code.
    """
    dump = c10d._dump_fr_trace_json(True, False).decode()  # type: ignore[attr-defined]  # noqa: FBT003
    start = dump.rfind('{"collective_seq_id"')
    if start < 0:
        return None
    entry: dict[str, Any] = json.JSONDecoder().raw_decode(dump, start)[0]
    return entry


def _name(entry: Mapping[str, Any]) -> str:
    """The collective's, without its backend's: `all_reduce`."""
    return re.sub(r"^\w+:", "", entry["profiling_name"])


def _recorded(*, entries: bool) -> dict[str, Any]:
    """What Flight Recorder has: the state of each group, and each collective if asked for."""
    dump = c10d._dump_fr_trace_json(entries, False)  # type: ignore[attr-defined]  # noqa: FBT003
    return {"pg_status": {}, "entries": [], **json.loads(dump)}


def _is_at_work(tid: str) -> bool:
    """Whether the thread is one of gloo's (`gloo_tcp_loop`, `pt_gloo_runloop`), and runs."""
    try:
        with open(f"/proc/self/task/{tid}/stat", encoding="ascii", errors="replace") as file:
            name, _, rest = file.read().rpartition(") ")
    except OSError:
        return False  # it has ended
    return "gloo" in name and rest[0] in "RD"
