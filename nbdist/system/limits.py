"""The machine's limits, with name and remedy: processes and threads, open files, memory.

In a container or a Slurm job a control group (cgroups(7)) limits memory, not the machine: beyond it
the kernel kills as a rule the biggest process, the notebook.  Asked before memory is shared.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from nbdist.words import LACKED_MEMORY

SIGNS = ("can't start new thread", os.strerror(errno.EAGAIN), "pthread_create")
"""What C code and Python write where they get no thread."""

NOT_RUNNABLE = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
"""Where it is the program that is wrong, and no limit."""

AGENT_FILES, FILES_OF_RANK = 64, 20
"""What an agent has open (32 before there is a rank, and what it reads now and then), and for each
rank: 16 of zmq's, pipes and logs, and four while it starts."""

WORKER_FILES, FILES_OF_PEER = 128, 2
"""What a worker has open: 60, a reserve of 48 and some; for each other rank: gloo's connections."""


class Lack(ChildProcessError):
    """A process could not be started, or not live, for a reason, which it names: a limit mostly."""


# --- processes and threads ------------------------------------------------------------------


def word_lack(code: int | None) -> str:
    """Word why a process could not be started: the limit that is in the way, and the remedy."""
    if code in NOT_RUNNABLE:
        return os.strerror(code or 0)
    if code != errno.EAGAIN:
        return f"no further process can be started: {os.strerror(code or 0)}"
    which = "`ulimit -u` or pids.max of a control group is reached"
    for name, most, there in process_limits()[:1]:
        which = f"{name} is {most}, and {there} processes and threads are there"
    return f"no further process or thread can be started: {which}. Raise it, or use fewer workers"


def lack_in(last_lines: Iterable[str]) -> str:
    """Word the same; "" where nothing of it is in the last lines of a process."""
    has_lacked = any(sign in line for line in last_lines for sign in SIGNS)
    return word_lack(errno.EAGAIN) if has_lacked else ""


def process_limits() -> list[tuple[str, int, int]]:
    """Find all limits of processes and threads: name, limit, how many there are; tightest first."""
    found = []
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.getuid() != 0 and allowed != resource.RLIM_INFINITY:  # root is free of it
        own = 0
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or shows nothing of itself
                if process.stat().st_uid == os.getuid():
                    own += len(os.listdir(process / "task"))
        found.append(("`ulimit -u`", allowed, own))
    for group in control_groups("pids"):
        with suppress(OSError, ValueError):  # it has none, or it is "max"
            most, there = (group.folder / name for name in ("pids.max", "pids.current"))
            name = f"pids.max of {group.folder}"
            found.append((name, int(most.read_text()), int(there.read_text())))
    return sorted(found, key=lambda each: each[1] - each[2])


# --- open files -----------------------------------------------------------------------------


def raise_file_limit() -> None:
    """Have as many open files as the hard limit allows; for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def word_lack_of_files(workers: int) -> str:
    """Word why there cannot be so many workers; "" where the limit of open files allows them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    of_agent = AGENT_FILES + FILES_OF_RANK * workers
    needed = max(of_agent, WORKER_FILES + FILES_OF_PEER * (workers - 1))
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return ""
    most = min((hard - AGENT_FILES) // FILES_OF_RANK, (hard - WORKER_FILES) // FILES_OF_PEER + 1)
    instead = f", or use {most} workers at most" if most > 0 else ""
    return (
        f"{workers} workers take {needed} open files in one process, and `ulimit -Hn` allows "
        f"{hard}. Raise it before the notebook is started{instead}"
    )


# --- control groups ---------------------------------------------------------------------------


ASKED_FROM, UNLIMITED = 32 << 20, 1 << 60
"""Bytes: less than that is not looked at, which takes 0.2 ms; no limit from that on."""

OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

_PROC = Path("/proc")

_MEMORY_FILES = {
    2: ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current"),
    1: (
        *("memory.limit_in_bytes", "memory.usage_in_bytes"),
        *("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
    ),
}
"""By version: limit and use of memory, then of swap, in version 1 of both together."""


class ControlGroup(NamedTuple):
    """A group of processes for which the kernel counts, and limits, what they use."""

    version: int
    folder: Path


def control_groups(
    controller: str, pid: int | str = "self", proc: Path = _PROC
) -> Iterator[ControlGroup]:
    """Find the groups with this controller that a process is in, innermost first.

    Those of version 2 are among them even where it is version 1 that has the controller: the
    files of the controller are missing there.
    """
    try:
        entries = (proc / str(pid) / "cgroup").read_text().splitlines()
        # As they are seen from here: a worker that is wrapped can have mounts of its own.
        mounts = [line.split() for line in (proc / "self" / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    paths = {}
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if not controllers or controller in controllers.split(","):
            paths[1 if controllers else 2] = path
    for mount in mounts:
        kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and controller in options):
            version = 2 if kind == "cgroup2" else 1
            for folder in _upwards(Path(mount[4]), mount[3], paths.get(version)):
                yield ControlGroup(version, folder)


def _upwards(mounted: Path, root: str, path: str | None) -> Iterator[Path]:
    """Yield the group's folder and those above it, as far as they are mounted here."""
    if path is None:
        return
    # In a container the path can be the one outside.
    below = os.path.relpath(path, root)
    folder = mounted if below.startswith("..") else mounted / below
    yield folder
    yield from (each for each in folder.parents if each == mounted or mounted in each.parents)


# --- memory ---------------------------------------------------------------------------------


class MemoryLimit(NamedTuple):
    """Bytes that a group of processes has, and how many of them are free; `where` is its name."""

    where: str
    limit: int
    free: int


def require_memory(size: int) -> None:
    """Raise NotEnoughMemory where as many bytes more would be too many."""
    if size < ASKED_FROM:
        return
    for found in memory_limits():
        if size > found.free:
            # Not at the top: the agent imports this before it starts the fork server.
            from nbdist.errors import NotEnoughMemory

            raise NotEnoughMemory(size, found.where, found.limit, max(0, found.free))


def memory_limits(proc: Path = _PROC) -> Iterator[MemoryLimit]:
    """Find those of each group with a limit that this process is in, and of the machine."""
    machine = _fields(proc / "meminfo")
    swap = machine.get("SwapFree:", 0) << 10
    for group in control_groups("memory", proc=proc):
        # What cannot be read is no limit that is known.
        with suppress(OSError, ValueError):
            yield from _limit_of(group, swap)
    if "MemAvailable:" in machine:
        free = (machine["MemAvailable:"] << 10) + swap
        yield MemoryLimit("this machine", machine["MemTotal:"] << 10, free)


def _limit_of(group: ControlGroup, swap: int) -> Iterator[MemoryLimit]:
    memory, used, more, more_used = (group.folder / name for name in _MEMORY_FILES[group.version])
    limit = _number(memory)
    if limit >= UNLIMITED:
        return
    stat = _fields(group.folder / "memory.stat")
    prefix = "" if group.version == 2 else "total_"
    # What files have been read into can be had back.
    cached = sum(stat.get(f"{prefix}{name}_file", 0) for name in ("inactive", "active"))
    free = limit - _number(used) + cached
    with suppress(OSError):  # a kernel that does not count swap
        if group.version == 2:
            swap = min(swap, _number(more) - _number(more_used))
        else:
            swap = min(swap, max(0, _number(more) - _number(more_used) + cached - free))
    yield MemoryLimit(f"its group {group.folder}", limit, free + swap)


def _number(file: Path) -> int:
    text = file.read_text().strip()
    return UNLIMITED if text == "max" else int(text)


def _fields(file: Path) -> dict[str, int]:
    """Read lines such as `MemTotal:  16384 kB` or `inactive_file 4096`."""
    with suppress(OSError):
        lines = (line.split() for line in file.read_text().splitlines())
        return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
    return {}


class OomKills:
    """Counts the processes killed for lack of memory in a process's control group, or anywhere."""

    def __init__(self, pid: int) -> None:
        """Count those of this process's groups by now; the most special group comes first."""
        names = {2: "memory.events", 1: "memory.oom_control"}  # cgroups(7), proc(5)
        groups = control_groups("memory", pid)
        files = (*(group.folder / names[group.version] for group in groups), Path("/proc/vmstat"))
        counts = ((file, _oom_kills_in(file)) for file in files)
        self.file, self._before = next((each for each in counts if each[1] >= 0), (files[-1], 0))

    def text(self, exit_code: int) -> str:
        """Word a line on that one once it has died, "" where lack of memory is not why."""
        now = _oom_kills_in(self.file)
        if exit_code != -signal.SIGKILL or now <= self._before:
            return ""
        return f"{LACKED_MEMORY}: oom_kill in {self.file} went from {self._before} to {now}\n"


def _oom_kills_in(file: Path) -> int:
    """Read the count of such kills; -1 where there is none."""
    with suppress(OSError):
        found = OOM_KILL.search(file.read_text(encoding="utf-8", errors="replace"))
        return int(found[1]) if found else -1
    return -1
