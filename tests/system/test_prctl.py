"""Tests of `nbdist.system.processes`: real processes whose parents end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nbdist.system import processes
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.world

PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
input()
"""

ASKS = """
import os, signal, sys
from nbdist.system.processes import signal_on_parents_end
print(signal_on_parents_end(signal.SIGKILL, os.getppid() + int(sys.argv[1])), flush=True)
input()
"""


def child_of(parent: subprocess.Popen[str]) -> tuple[psutil.Process, str]:
    """The child, and the first line that it has written."""
    assert parent.stdout is not None
    pid, line = parent.stdout.readline().split(maxsplit=1)
    return psutil.Process(int(pid)), line.strip()


def start(*command: str) -> subprocess.Popen[str]:
    """A parent that has started this command."""
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_child_ends_with_its_parent() -> None:
    """The kernel sends the signal as soon as the parent ends."""
    with start(sys.executable, "-c", ASKS, "0") as parent:
        child, said = child_of(parent)
        assert said == "True"
        parent.kill()
    child.wait(SOON)


def test_a_parent_that_has_ended_already() -> None:
    """Whoever asks too late hears so: another process is its parent by then."""
    with start(sys.executable, "-c", ASKS, "1") as parent:
        assert child_of(parent)[1] == "False"


def test_a_wrapper_ends_with_its_parent_and_ignores_stop() -> None:
    """The command itself knows of neither: both settings survive exec."""
    code = "import sys; print('there', flush=True); sys.stdin.read()"
    wrapper = (sys.executable, "-IS", processes.__file__, sys.executable, "-c", code)
    with start(*wrapper) as parent:
        child, said = child_of(parent)
        assert said == "there"
        status = Path(f"/proc/{child.pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        assert ignored >> (signal.SIGINT - 1) & 1
        parent.kill()
    child.wait(SOON)


def test_orphans_are_adopted() -> None:
    """A process whose parent ends becomes a child of the one that adopts."""
    processes.adopt_orphans()
    try:
        with start("sleep", "1000") as parent:
            assert parent.stdin is not None
            wait_until(psutil.Process(parent.pid).children)
            (orphan,) = psutil.Process(parent.pid).children()
            parent.kill()
        assert orphan.ppid() == os.getpid()
        assert orphan.pid in processes.children_of(os.getpid())
        orphan.kill()
        assert os.waitpid(orphan.pid, 0)[1] == signal.SIGKILL
    finally:
        processes.adopt_orphans(adopts=False)
