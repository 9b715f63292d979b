"""Reads limits of processes, threads, open files and memory, and makes messages about them.

In a container or a Slurm job a control group (cgroups(7)) often allows less memory than the machine
has.  Beyond that limit Linux usually kills the biggest process, often the notebook.  So nbdist
checks the limits before a process shares or pickles big values.
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

_AGAIN = re.escape(os.strerror(errno.EAGAIN))

SIGNS = re.compile(
    r"can't start new thread"  # Python
    r"|pthread_create|Thread creation failed"  # OpenBLAS, libgomp
    rf"|{_AGAIN} \(src/thread\.cpp"  # libzmq
    rf"|(^|RuntimeError: |what\(\):  ){_AGAIN}$"  # std::thread, for example in torch
    rf"|fork: (retry: )?{_AGAIN}"  # shells
    rf"|gloo cannot use it \({_AGAIN}\)"  # nbdist, if gloo cannot start its thread
)
"""Matches the messages of a process that could not start a thread or process.

The text of EAGAIN in another message does not match: errors of locked files have it, too."""

NOT_RUNNABLE = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
"""Error numbers of a program that is missing or cannot be run."""

OF_LIMITS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Error numbers which mean that a limit of processes, open files or memory is reached.

An error with such a number means this even if the error names a file."""

AGENT_FILES, FILES_OF_RANK = 64, 20
"""How many files an agent has open at most: without ranks, and in addition for each rank.

An agent has 32 files open before the first rank starts, and some more now and then.  For a rank the
agent needs 16 files for zmq, pipes and logs, and four more while the rank starts."""

WORKER_FILES, FILES_OF_PEER = 128, 2
"""How many files a worker has open at most: alone, and in addition for each other rank.

Alone, a worker has 60 files open and keeps 48 in reserve (`DESCRIPTOR_RESERVE`); the rest is spare.
For each other rank it has gloo's connections."""


class Lack(ChildProcessError):
    """Raised if a process could not start, or exited while it started; the message says why."""


# --- processes and threads ------------------------------------------------------------------


def word_lack(code: int | None) -> str:
    """Return a message which says why a process could not be started; `code` is the errno.

    For EAGAIN the message says which limit is reached, and what the user can do.
    """
    if code in NOT_RUNNABLE:
        return os.strerror(code or 0)
    if code != errno.EAGAIN:
        return f"no further process can be started: {os.strerror(code or 0)}"
    which = "`ulimit -u` or pids.max of a control group is reached"
    for name, limit, count in process_limits()[:1]:
        which = f"{name} is {limit}, and {count} processes and threads are there"
    return f"no further process or thread can be started: {which}. Raise it, or use fewer workers"


def word_start_error(error: OSError) -> str:
    """Return a message which says why a process could not be started, from the error of the start.

    If the error has a file, the message names it, unless the number of the error means that a limit
    is reached (`OF_LIMITS`).
    """
    if error.filename is None or error.errno in OF_LIMITS:
        return word_lack(error.errno)
    return f"{error.filename}: {error.strerror}"


def lack_in(last_lines: Iterable[str]) -> str:
    """Return a message about a reached limit if the last lines of a process show one, else "".

    The lines show that the process could not start a thread or process if they match `SIGNS`.
    """
    return word_lack(errno.EAGAIN) if any(map(SIGNS.search, last_lines)) else ""


def process_limits() -> list[tuple[str, int, int]]:
    """Return the limits of how many processes and threads may exist, and how many there are.

    Each item is (name of the limit, limit, present number).  The limit that allows the fewest
    further processes comes first.
    """
    limits = []
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.getuid() != 0 and allowed != resource.RLIM_INFINITY:  # Linux does not limit root
        thread_count = 0
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has exited, or its threads may not be listed
                if process.stat().st_uid == os.getuid():
                    thread_count += len(os.listdir(process / "task"))
        limits.append(("`ulimit -u`", allowed, thread_count))
    for group in control_groups("pids"):
        with suppress(OSError, ValueError):  # the group has no such file, or its limit is "max"
            limit_file, count_file = (group.folder / name for name in ("pids.max", "pids.current"))
            name = f"pids.max of {group.folder}"
            limits.append((name, int(limit_file.read_text()), int(count_file.read_text())))
    return sorted(limits, key=lambda each: each[1] - each[2])


# --- open files -----------------------------------------------------------------------------


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def word_lack_of_files(workers: int) -> str:
    """Return "", or a message if a world of `workers` ranks needs more open files than are allowed.

    A process of the world may have as many open files as its hard limit allows (`ulimit -Hn`).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    agent_files = AGENT_FILES + FILES_OF_RANK * workers
    needed = max(agent_files, WORKER_FILES + FILES_OF_PEER * (workers - 1))
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return ""
    count = min((hard - AGENT_FILES) // FILES_OF_RANK, (hard - WORKER_FILES) // FILES_OF_PEER + 1)
    instead = f", or use {count} workers at most" if count > 0 else ""
    return (
        f"{workers} workers take {needed} open files in one process, and `ulimit -Hn` allows "
        f"{hard}. Raise it before the notebook is started{instead}"
    )


# --- control groups ---------------------------------------------------------------------------


ASKED_FROM, UNLIMITED = 32 << 20, 1 << 60
"""The sizes in bytes from which `require_memory` checks a value, and a limit counts as no limit.

Smaller values are not worth the 0.2 ms that reading the limits takes."""

OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

_PROC = Path("/proc")

_MEMORY_FILES = {
    2: ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current"),
    1: (
        *("memory.limit_in_bytes", "memory.usage_in_bytes"),
        *("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
    ),
}
"""By the version of control groups: the names of the files with the limit and use of memory, then
with the limit and use of swap.

In version 1 the last two count memory and swap together."""


class ControlGroup(NamedTuple):
    """A control group of Linux (cgroups(7)): its version, 1 or 2, and the folder with its files."""

    version: int
    folder: Path


def control_groups(
    controller: str, pid: int | str = "self", proc: Path = _PROC
) -> Iterator[ControlGroup]:
    """Yield the control groups of a process in which a controller may have files, innermost first.

    The controller is the part of Linux that limits a resource, such as "memory" or "pids".  Groups
    of version 2 are yielded even if this controller has no files in them, so the caller must expect
    that files are missing.
    """
    try:
        entries = (proc / str(pid) / "cgroup").read_text().splitlines()
        # Read this process's mounts even for another process, such as a worker in a container: this
        # process will open the paths.
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
    """Yield the folder of a control group, and the folders above it up to the mount point.

    `path` is the group, as /proc/PID/cgroup names it.  `mounted` is the mount point, which has the
    files of the group `root`.  Yields nothing if `path` is None.
    """
    if path is None:
        return
    # In a container `path` may be the path outside the container, which does not exist here.
    below = os.path.relpath(path, root)
    folder = mounted if below.startswith("..") else mounted / below
    yield folder
    yield from (each for each in folder.parents if each == mounted or mounted in each.parents)


# --- memory ---------------------------------------------------------------------------------


class MemoryLimit(NamedTuple):
    """A limit of memory, and how much of it is free, both in bytes.

    `where` names the limited machine or control group, for messages.
    """

    where: str
    limit: int
    free: int


def require_memory(size: int) -> None:
    """Raise NotEnoughMemory if fewer than `size` bytes of memory are free.

    For sizes below `ASKED_FROM` nothing is checked.
    """
    if size < ASKED_FROM:
        return
    for limit in memory_limits():
        if size > limit.free:
            # Import the error only here: each import of an agent delays the start of its fork
            # server.
            from nbdist.errors import NotEnoughMemory

            raise NotEnoughMemory(size, limit.where, limit.limit, max(0, limit.free))


def memory_limits(proc: Path = _PROC) -> Iterator[MemoryLimit]:
    """Yield the memory limits of this process, from its control groups and from the machine."""
    machine = _fields(proc / "meminfo")
    swap = machine.get("SwapFree:", 0) << 10
    for group in control_groups("memory", proc=proc):
        # Skip a group whose files cannot be read, since its limit is not known.
        with suppress(OSError, ValueError):
            yield from _limit_of(group, swap)
    if "MemAvailable:" in machine:
        free = (machine["MemAvailable:"] << 10) + swap
        yield MemoryLimit("this machine", machine["MemTotal:"] << 10, free)


def _limit_of(group: ControlGroup, swap: int) -> Iterator[MemoryLimit]:
    memory, used, extra, extra_used = (group.folder / name for name in _MEMORY_FILES[group.version])
    limit = _number(memory)
    if limit >= UNLIMITED:
        return
    stat = _fields(group.folder / "memory.stat")
    prefix = "" if group.version == 2 else "total_"
    # Memory that caches files counts as free: Linux reclaims such memory when processes need it.
    cached = sum(stat.get(f"{prefix}{name}_file", 0) for name in ("inactive", "active"))
    free = limit - _number(used) + cached
    with suppress(OSError):  # raised if Linux does not count swap
        if group.version == 2:
            swap = min(swap, _number(extra) - _number(extra_used))
        else:
            swap = min(swap, max(0, _number(extra) - _number(extra_used) + cached - free))
    yield MemoryLimit(f"its group {group.folder}", limit, free + swap)


def _number(file: Path) -> int:
    text = file.read_text().strip()
    return UNLIMITED if text == "max" else int(text)


def _fields(file: Path) -> dict[str, int]:
    """Return the numbers in lines such as `inactive_file 4096`; {} if the file cannot be read."""
    with suppress(OSError):
        lines = (line.split() for line in file.read_text().splitlines())
        return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
    return {}


class OomKills:
    """Finds out whether Linux has probably killed a process for lack of memory.

    Linux counts such kills (OOM kills).  The object compares the count from before the process's
    death with the count after.  The count is that of the process's innermost control group that has
    a count, or else that of the whole machine.
    """

    def __init__(self, pid: int) -> None:
        """Record the number of kills so far, for the process `pid`."""
        names = {2: "memory.events", 1: "memory.oom_control"}  # files with a line `oom_kill`
        groups = control_groups("memory", pid)
        files = (*(group.folder / names[group.version] for group in groups), Path("/proc/vmstat"))
        counts = ((file, _oom_kills_in(file)) for file in files)
        self.file, self._before = next((each for each in counts if each[1] >= 0), (files[-1], 0))

    def text(self, exit_code: int) -> str:
        """Return a line which says that the process was probably killed for lack of memory.

        Returns "" unless SIGKILL has ended the process and the number of OOM kills has grown.
        """
        now = _oom_kills_in(self.file)
        if exit_code != -signal.SIGKILL or now <= self._before:
            return ""
        return f"{LACKED_MEMORY}: oom_kill in {self.file} went from {self._before} to {now}\n"


def _oom_kills_in(file: Path) -> int:
    """Return the number of kills for lack of memory that a file counts; -1 if it counts none."""
    with suppress(OSError):
        match = OOM_KILL.search(file.read_text(encoding="utf-8", errors="replace"))
        return int(match[1]) if match else -1
    return -1
