"""The machine's limits, in words: processes and threads, open files."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

from nbdist.wire.cgroups import control_groups

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
    found = sorted((*_limits_of_user(), *_limits_of_groups()), key=lambda each: each[1] - each[2])
    which = "`ulimit -u` or pids.max of a control group is reached"
    for name, most, there in found[:1]:
        which = f"{name} is {most}, and {there} processes and threads are there"
    return f"no further process or thread can be started: {which}. Raise it, or use fewer workers"


def lack_in(last_lines: Iterable[str]) -> str:
    """Word the same; "" where nothing of it is in the last lines of a process."""
    has_lacked = any(sign in line for line in last_lines for sign in SIGNS)
    return word_lack(errno.EAGAIN) if has_lacked else ""


def _limits_of_user() -> Iterator[tuple[str, int, int]]:
    """Yield `ulimit -u`, which root is free of: name, limit, and how many there are."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.getuid() != 0 and most != resource.RLIM_INFINITY:
        yield "`ulimit -u`", most, sum(map(_threads_of_ours, Path("/proc").glob("[0-9]*")))


def _threads_of_ours(process: Path) -> int:
    try:
        if process.stat().st_uid != os.getuid():
            return 0
        return len(os.listdir(process / "task"))
    except OSError:
        return 0  # it has ended, or shows nothing of itself


def _limits_of_groups() -> Iterator[tuple[str, int, int]]:
    """Yield those of every control group that this process is in."""
    for group in control_groups("pids"):
        try:
            most, there = (
                int((group.folder / name).read_text()) for name in ("pids.max", "pids.current")
            )
        except (OSError, ValueError):
            continue  # it has none, or it is "max"
        yield f"pids.max of {group.folder}", most, there


# --- open files -----------------------------------------------------------------------------


def raise_file_limit() -> None:
    """Have as many open files as the hard limit allows; for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def word_lack_of_files(workers: int) -> str:
    """Word why there cannot be so many workers; "" where the limit of open files allows them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(
        AGENT_FILES + FILES_OF_RANK * workers, WORKER_FILES + FILES_OF_PEER * (workers - 1)
    )
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return ""
    most = min((hard - AGENT_FILES) // FILES_OF_RANK, (hard - WORKER_FILES) // FILES_OF_PEER + 1)
    instead = f", or use {most} workers at most" if most > 0 else ""
    return (
        f"{workers} workers take {needed} open files in one process, and `ulimit -Hn` allows "
        f"{hard}. Raise it before the notebook is started{instead}"
    )
