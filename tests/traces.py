"""Finds the processes, memory, folders, threads and descriptors that a test leaves behind.

Processes are found in /proc, also after their parent has ended; threads and descriptors are
those of this process.  Processes and threads that are just ending get some seconds.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.waiting import SOON

# Long enough for an agent that ends its workers politely first.
LEAK_TIMEOUT = float(os.environ.get("NBDIST_LEAK_TIMEOUT", SOON * 8 / 60))
LONGEST_WAIT = 30.0
POLL_SECONDS = 0.02

# Seconds that a process may need to become another program (exec).
LONGEST_START = 1.0

# An environment variable that every process of a test inherits, also if the process outlives
# its parent or leaves its session.
MARK = f"NBDIST_TEST_RUN={uuid.uuid4().hex}"

# Kinds of descriptors that have to be closed.  Others belong to libraries, which open them
# once for the whole process (zmq's eventfds, asyncio's epoll).
CLOSABLE = ("socket:", "pipe:", "anon_inode:[pidfd]", "/memfd:nbdist")


@dataclass(frozen=True)
class Traces:
    """All things of the kinds that a test can leave behind, as they existed at one moment."""

    processes: frozenset[str]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[str, str]]
    shared_memory: frozenset[str]
    folders: frozenset[str]

    @classmethod
    def now(cls) -> Traces:
        return cls(
            processes=frozenset(name for name in os.listdir("/proc") if name.isdigit()),
            threads=frozenset(threading.enumerate()),
            descriptors=frozenset(_descriptors()),
            shared_memory=frozenset(_listing("/dev/shm")),
            folders=frozenset(
                name
                for name in _listing(os.environ.get("XDG_RUNTIME_DIR", ""))
                if name.startswith("nbdist-")  # other programs have folders here too
            ),
        )

    def left_since(self, before: Traces) -> list[str]:
        """Return a line for each thing of this test run that did not exist before."""
        processes = (
            pid for pid in self.processes - before.processes if _is_ours(pid) and not _is_spare(pid)
        )
        new = self.shared_memory - before.shared_memory
        memory = (name for name in new if not _is_anothers(name) and _is_unused(name))
        return [
            *(f"process {pid}: {_command(pid)}" for pid in sorted(processes, key=int)),
            *(f"thread {thread.name}" for thread in self.threads - before.threads),
            *(f"descriptor {fd}: {to}" for fd, to in self.descriptors - before.descriptors),
            *(f"shared memory /dev/shm/{name}" for name in memory),
            *(f"runtime folder {name}" for name in self.folders - before.folders),
        ]


def _listing(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _descriptors() -> Iterator[tuple[str, str]]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the descriptor by which this folder was listed
        # pytest itself puts other files in the place of the standard streams.
        if target.startswith(CLOSABLE) and int(fd) > 2:
            yield fd, target


def _is_ours(pid: str) -> bool:
    """Whether a process was started by this test run and has not ended.

    Its environment or its parent shows that: a test can start a process with another environment.
    During exec a process shows neither its environment nor its arguments.
    """
    if pid == str(os.getpid()):
        return True
    deadline, has_arguments = time.monotonic() + LONGEST_START, False
    try:
        while not (environ := Path(f"/proc/{pid}/environ").read_bytes()):
            os.readlink(f"/proc/{pid}/exe")  # fails for kernel threads and for ending processes
            if has_arguments or time.monotonic() > deadline:
                break
            has_arguments = Path(f"/proc/{pid}/cmdline").read_bytes() != b""
            time.sleep(POLL_SECONDS / 10)
        # Before the last `) ` is the program's name, which may contain anything.
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]
    except OSError:
        return False  # the process has ended, or belongs to another user
    return state != "Z" and (MARK.encode() in environ or (parent != "0" and _is_ours(parent)))


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "ended just now"


def command_line(process: psutil.Process) -> list[str]:
    """Return the words of a process's command line, none if the process has just ended."""
    with suppress(psutil.NoSuchProcess):  # also the parent of ZombieProcess
        return process.cmdline()
    return []


def environ_of(process: psutil.Process) -> dict[str, str]:
    """Return a process's environment, empty if the process has just ended."""
    with suppress(psutil.NoSuchProcess):  # also the parent of ZombieProcess
        return process.environ()
    return {}


def shows(pid: int, secret: str) -> str | None:
    """Return which files of a process in /proc show a secret; None if the process has ended."""
    try:
        texts = {name: Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")}
    except OSError:
        return None
    return "".join(name for name, text in texts.items() if secret.encode() in text)


def with_variable(name: str, value: str) -> list[int]:
    """Return the ids of all processes that have not ended and have a variable of this value."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value:
                found.append(process.pid)
    return found


def _is_spare(pid: str) -> bool:
    """Whether Ray or Chromium keeps a process in reserve until they end; no actor of Ray is one."""
    spares = r"ray::IDLE|workers/default_worker\.py|/chrom(e|ium) --type="
    return re.search(spares, _command(pid)) is not None


def _waited(pid: str) -> float:
    """Return the seconds for which a process's main thread has waited for a processor."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _doing(pid: str) -> str:
    """Return a process's state and the place in the kernel at which it waits, for the report."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
        return f"{pid} {state} {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return f"{pid} has ended"


def _is_anothers(segment: str) -> bool:
    """Whether another run, which `tests/test_leaks.py` started, leaves a segment on purpose."""
    return segment.startswith("nbdist-test-") and segment != os.environ.get("LEAK")


def _is_unused(segment: str) -> bool:
    """Whether no process of others, who may run tests too, has a segment mapped.

    The inode decides, and not the name: glibc makes a semaphore under another name.
    """
    try:
        inode = str(os.stat(f"/dev/shm/{segment}").st_ino)
    except FileNotFoundError:
        return False  # the segment has been removed
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        mapped = any("/dev/shm/" in line and line.split()[4] == inode for line in lines)
        if mapped and not _is_ours(pid):
            return False
    return True


def complain(before: Traces, where: str, told: set[str]) -> None:
    """Fail unless all new things are gone after some seconds.

    Seconds in which a remaining process waits for a processor, because other programs use them, do
    not count.  `told` has the lines of earlier failures, which do not fail again.
    """
    begun = time.monotonic()
    first: dict[str, float] = {}
    collected = False
    while left := [line for line in Traces.now().left_since(before) if line not in told]:
        if not collected:
            # Garbage in a cycle may keep sockets and threads alive.
            gc.collect()
            collected = True
            continue
        pids = [line.split()[1].rstrip(":") for line in left if line.startswith("process ")]
        waited = max(
            (_waited(pid) - first.setdefault(pid, _waited(pid)) for pid in pids), default=0
        )
        seconds = time.monotonic() - begun
        if seconds > LEAK_TIMEOUT + min(waited, LONGEST_WAIT):
            told.update(left)
            doing = "; ".join([f"after {seconds:.1f} s", *map(_doing, pids)])
            lines = "".join(f"  {line}\n" for line in left)
            import pytest  # not at the top: `python -m tests.faults.actions` has no pytest

            pytest.fail(f"left behind by {where}:\n{lines}({doing})", pytrace=False)
        time.sleep(POLL_SECONDS)
