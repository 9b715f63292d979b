"""What can be found out about the death of a worker, from what it and the kernel have left."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from nbdist.node.dumps import CRASHED, StackFile, calls_of, frames_of
from nbdist.node.looking import own_frames, with_code
from nbdist.wire.messages import Cell

CRASHES = frozenset(
    -number
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL)
)
OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def crash_text(stacks: StackFile, exit_code: int, cell: Cell | None) -> str:
    """The Python stack of a worker that has crashed, "" of one that ended otherwise."""
    if exit_code not in CRASHES or not (dump := stacks.read_crash()):
        return ""
    number, source = (cell.execution_count, cell.source) if cell else (None, "")
    frames = with_code(own_frames(frames_of(calls_of(dump, CRASHED), number, source)))
    calls = [line for frame in frames for line in frame.lines] or ["  no Python code"]
    return "\n".join([f"{dump.splitlines()[0]}, in", *calls, ""])


class OomKills:
    """How many processes the kernel has killed for lack of memory, where a worker lives.

    In its control group, or on the whole machine where that cannot be read.
    """

    def __init__(self, pid: int) -> None:
        self._file = next(filter(_counts, _files(pid)), None)
        self._before = self._read()

    def __repr__(self) -> str:
        return f"<OomKills {self._file} {self._before}>"

    def text(self, exit_code: int) -> str:
        """A line on a worker that has died, "" where lack of memory is not why."""
        now = self._read()
        if exit_code != -signal.SIGKILL or now <= self._before:
            return ""
        return (
            "most likely killed by the kernel for lack of memory: oom_kill in "
            f"{self._file} went from {self._before} to {now}\n"
        )

    def _read(self) -> int:
        found = OOM_KILL.search(_text_of(self._file)) if self._file else None
        return int(found[1]) if found else 0


def _files(pid: int) -> list[Path]:
    """Where the count may be, the most special first (cgroups(7), proc(5))."""
    files = []
    for line in _text_of(Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        root, name = Path("/sys/fs/cgroup"), "memory.events"
        if "memory" in controllers.split(","):
            root, name = root / "memory", "memory.oom_control"
        elif controllers:
            continue
        # In a container the path can be the one outside, and the root its own.
        files += [root / path.lstrip("/") / name, root / name]
    return [*files, Path("/proc/vmstat")]


def _counts(file: Path) -> bool:
    return OOM_KILL.search(_text_of(file)) is not None


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
