"""Tests of `nbdist.system.limits`: limits of this machine, of processes and of control groups.

Control groups of both versions count, at any level.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.errors import NotEnoughMemory
from nbdist.system.limits import (
    ControlGroup,
    MemoryLimit,
    OomKills,
    control_groups,
    lack_in,
    memory_limits,
    require_memory,
    word_lack,
    word_lack_of_files,
)

GB = 1 << 30
MEMINFO = "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\nSwapFree: {swap} kB\n"


class Machine:
    """A made-up /proc and control groups, mounted as on a machine or in a container."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.mounted = folder / "proc", folder / "memory"
        (self.proc / "self").mkdir(parents=True)
        self.mounted.mkdir()

    def has(self, cgroup: str, mount: str, swap: int = 0) -> None:
        """Write the files of /proc with this process's groups and mounts; `swap` is free bytes."""
        (self.proc / "meminfo").write_text(MEMINFO.format(swap=swap >> 10))
        (self.proc / "self" / "cgroup").write_text(cgroup)
        (self.proc / "self" / "mountinfo").write_text(mount.format(self.mounted))

    def group(self, path: str, **files: object) -> Path:
        """Make a group with some files; `__` in a file's name becomes a dot."""
        folder = self.mounted / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n")
        return folder

    @property
    def limits(self) -> list[MemoryLimit]:
        *groups, machine = memory_limits(self.proc)
        assert machine.where == "this machine"
        return groups


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


V2 = "30 23 0:26 / {} rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "31 23 0:27 {root} {{}} rw,nosuid - cgroup cgroup rw,memory\n"


def test_limits_of_version_2_count(machine: Machine) -> None:
    """Limits of groups above the process's own count; cached files and swap count as free."""
    machine.has("0::/job/step\n", V2)
    machine.group("job/step", memory__max="max", memory__current=GB)
    stat = f"anon 5\ninactive_file {GB // 4}\nactive_file {GB // 4}"
    above = machine.group("job", memory__max=3 * GB, memory__current=2 * GB, memory__stat=stat)
    assert machine.limits == [MemoryLimit(f"its group {above}", 3 * GB, GB + GB // 2)]
    machine.has("0::/\n", V2, swap=GB)
    sizes = {"memory__max": GB, "memory__current": GB, "memory__swap__current": 0}
    for most, free in ((3 * GB, GB), (GB // 2, GB // 2), (0, 0)):
        machine.group("", **sizes, memory__swap__max=most)
        assert [found.free for found in machine.limits] == [free]


@pytest.mark.parametrize(
    ("root", "path", "folder"),
    [
        ("/", "/a/b", "a/b"),  # the machine itself
        ("/docker/1", "/docker/1", ""),  # a container that sees its own group alone
        ("/", "/../../other", ""),  # a group that is not mounted here
    ],
)
def test_limits_of_version_1_count(machine: Machine, root: str, path: str, folder: str) -> None:
    """Limits of version 1 count, also in containers, and beside version 2 without memory."""
    machine.has(f"5:cpu:/x\n4:memory:{path}\n0::/\n", V1.format(root=root))
    group = machine.group(
        folder,
        memory__limit_in_bytes=2 * GB,
        memory__usage_in_bytes=GB,
        memory__stat=f"inactive_file 7\ntotal_inactive_file {GB // 2}",
    )
    assert machine.limits == [MemoryLimit(f"its group {group}", 2 * GB, GB + GB // 2)]


def test_more_memory_than_this_machine_has_is_refused() -> None:
    """More memory than this machine has is refused; a byte is not."""
    with pytest.raises(NotEnoughMemory, match=r"sending 1125899\.91 GB needs"):
        require_memory(1 << 50)
    require_memory(1)
    # A kill is reported as lack of memory only if the kernel has counted such a kill meanwhile.
    kills = OomKills(os.getpid())
    assert "oom_kill" in kills.file.read_text()
    assert kills.text(-signal.SIGKILL) == ""
    assert OomKills(2**22 + 1).text(-signal.SIGKILL) == ""


def test_groups_of_a_controller_are_listed(machine: Machine) -> None:
    """Groups of a controller are listed from the innermost out; some set no limit."""
    machine.has("4:pids:/a/b\n3:memory:/m\n0::/u\n", V1.format(root="/"))
    assert list(control_groups("cpu", proc=machine.proc)) == []
    assert list(control_groups("memory", proc=machine.proc)) == [
        ControlGroup(1, machine.mounted / "m"),
        ControlGroup(1, machine.mounted),
    ]
    machine.group("", memory__limit_in_bytes=(1 << 63) - 4096, memory__usage_in_bytes=1)
    assert machine.limits == []
    machine.has("", "")
    assert machine.limits == []


@pytest.mark.world
def test_groups_of_another_process_are_listed() -> None:
    """A child is in its parent's control groups, and a process that has ended is in none."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        found = list(control_groups("memory", process.pid))
        process.kill()
    assert found == list(control_groups("memory"))
    assert list(control_groups("memory", process.pid)) == []


def test_a_failed_start_names_the_limit() -> None:
    """An error at the start of a process says whether a limit is reached, and which."""
    assert word_lack(errno.ENOENT) == "No such file or directory"
    assert word_lack(errno.ENOMEM) == "no further process can be started: Cannot allocate memory"
    # The limit is named with its figures, if they can be found, and with the remedy.
    found = re.fullmatch(
        r"no further process or thread can be started: (.* is \d+, and \d+ processes and threads "
        r"are there|`ulimit -u` or pids.max of a control group is reached)\. "
        "Raise it, or use fewer workers",
        word_lack(errno.EAGAIN),
    )
    assert found


LACKS = (
    "RuntimeError: can't start new thread",
    "can't start new thread",
    "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 4: Resource temporarily "
    "unavailable",
    "libgomp: Thread creation failed: Resource temporarily unavailable",
    "Resource temporarily unavailable (src/thread.cpp:241)",
    "RuntimeError: Resource temporarily unavailable",
    "Resource temporarily unavailable",
    "rank 1 could not start: it exited with code 1 RuntimeError: Resource temporarily unavailable",
    "  what():  Resource temporarily unavailable",
    "bash: fork: retry: Resource temporarily unavailable",
)
"""Messages of Python, OpenBLAS, libgomp, libzmq, torch and a shell at the limit of processes."""

LACKS_NONE = (
    "hello",
    "BlockingIOError: [Errno 11] Resource temporarily unavailable: 'model.lock'",
    "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    "zmq.error.Again: Resource temporarily unavailable",
    "wandb: Resource temporarily unavailable, trying again",
)


def test_last_lines_of_a_process_show_a_limit() -> None:
    """Last lines show a limit if a thread or process could not start, not if a file is locked."""
    for line in LACKS:
        assert lack_in(["hello", line]) == word_lack(errno.EAGAIN)
    for line in LACKS_NONE:
        assert lack_in([line]) == ""


ASKS = """
import resource, sys
from nbdist.system.limits import raise_file_limit, word_lack_of_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(word_lack_of_files(22) or "enough")
print(word_lack_of_files(1000))
"""


@pytest.mark.world
def test_the_limit_of_open_files_is_raised() -> None:
    """The soft limit of open files is raised; a too big world is refused with the largest size."""
    said = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, check=True)
    raised, few, many = said.stdout.splitlines()
    assert (raised, few) == ("512", "enough")
    assert many == (
        "1000 workers take 20064 open files in one process, and `ulimit -Hn` allows 512. Raise it "
        "before the notebook is started, or use 22 workers at most"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (word_lack_of_files(2) == "") == (hard > 130)
