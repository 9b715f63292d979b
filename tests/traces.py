"""What a test can leave behind, looked at from outside, by process id.

Processes, wherever they have been reparented to, and this process's threads and descriptors,
shared memory and runtime folders.  What is only ending gets some seconds.
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
import pytest

from tests.waiting import SOON

# Long enough for an agent that ends its workers politely first.
LEAK_TIMEOUT = float(os.environ.get("NBDIST_LEAK_TIMEOUT", SOON * 8 / 60))
LONGEST_WAIT = 30.0
POLL_SECONDS = 0.02

# Seconds for which a process may be becoming another program.
LONGEST_START = 1.0

# Every process that a test starts inherits this, also when it outlives its parent, or has
# left its session.
MARK = f"NBDIST_TEST_RUN={uuid.uuid4().hex}"

# Kinds of descriptors that somebody has to close.  Others belong to libraries, which
# open them once for the whole process (zmq's eventfds, asyncio's epoll).
CLOSABLE = ("socket:", "pipe:", "anon_inode:[pidfd]", "/memfd:nbdist")


@dataclass(frozen=True)
class Traces:
    """What exists now, of everything that a test can leave behind."""

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
                if name.startswith("nbdist-")  # Other programs keep theirs.
            ),
        )

    def left_since(self, before: Traces) -> list[str]:
        """One line for each thing that is here and was not before, and is ours."""
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
            continue  # The one of the listing itself.
        # pytest itself puts other files in the place of the standard streams.
        if target.startswith(CLOSABLE) and int(fd) > 2:
            yield fd, target


def _is_ours(pid: str) -> bool:
    """Whether this test run started it and it has not ended.

    By the mark in its environment, or by its parent: a test can start one with an environment of
    its own.  While it is becoming another program it shows neither environment nor arguments.
    """
    if pid == str(os.getpid()):
        return True
    deadline, has_arguments = time.monotonic() + LONGEST_START, False
    try:
        while not (environ := Path(f"/proc/{pid}/environ").read_bytes()):
            os.readlink(f"/proc/{pid}/exe")  # a thread of the kernel, and who is ending, has none
            if has_arguments or time.monotonic() > deadline:
                break
            has_arguments = Path(f"/proc/{pid}/cmdline").read_bytes() != b""
            time.sleep(POLL_SECONDS / 10)
        # What stands before is the program's name, which may hold anything.
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:2]
    except OSError:
        return False  # It has ended, or belongs to somebody else.
    return state != "Z" and (MARK.encode() in environ or (parent != "0" and _is_ours(parent)))


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "ended just now"


def shows(pid: int, secret: str) -> str | None:
    """Where in sight a process has the secret; None for one that has ended."""
    try:
        texts = {name: Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")}
    except OSError:
        return None
    return "".join(name for name, text in texts.items() if secret.encode() in text)


def with_variable(name: str, value: str) -> list[int]:
    """The ids of all processes whose environment has this; what has ended shows none."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value:
                found.append(process.pid)
    return found


def _is_spare(pid: str) -> bool:
    """Whether Ray or Chromium keeps it for what may come, as long as they are up; no actor."""
    spares = r"ray::IDLE|workers/default_worker\.py|/chrom(e|ium) --type="
    return re.search(spares, _command(pid)) is not None


def _waited(pid: str) -> float:
    """Seconds for which its main thread has waited for a processor."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _doing(pid: str) -> str:
    """Its state, and where in the kernel it waits: for whoever finds out why it is there."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
        return f"{pid} {state} {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return f"{pid} has ended"


def _is_anothers(segment: str) -> bool:
    """Whether it is left on purpose in a run that `tests/test_leaks.py` has started."""
    return segment.startswith("nbdist-test-") and segment != os.environ.get("LEAK")


def _is_unused(segment: str) -> bool:
    """Whether no process that is not ours has the segment mapped: they have tests too.

    Told by its inode: glibc makes a semaphore under another name.
    """
    try:
        inode = str(os.stat(f"/dev/shm/{segment}").st_ino)
    except FileNotFoundError:
        return False  # It has gone.
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
    """Fails unless all that is new has gone, after some seconds at most.

    Seconds in which what is left waits for a processor, since other programs have them, do not
    count.  What a test was blamed for, and `told` holds, the module is not blamed for again.
    """
    begun = time.monotonic()
    first: dict[str, float] = {}
    collected = False
    while left := [line for line in Traces.now().left_since(before) if line not in told]:
        if not collected:
            # Sockets and threads may wait for the cycle that holds them.
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
            pytest.fail(f"left behind by {where}:\n{lines}({doing})", pytrace=False)
        time.sleep(POLL_SECONDS)
