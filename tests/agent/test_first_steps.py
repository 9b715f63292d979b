"""Tests of `nbdist.agent.first_steps`: how the process of an agent, or of a head, begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import SOON

pytestmark = pytest.mark.own_agent

BEGIN = """
import os, resource, sys
from pathlib import Path
above = os.getpid()
if files := int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
else:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from nbdist.agent.first_steps import begin
heavy = {"asyncio", "zmq", "psutil", "torch"} & sys.modules.keys()
guard, fork_server = begin(Path(sys.argv[1]), None, fork_server=False)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(heavy, guard.pid == above == os.getppid(), soft == hard, fork_server)
"""


def begun(runtime: Path, files: int) -> subprocess.CompletedProcess[str]:
    """A process that begins with so many open files at most, 0 for as many as there may be."""
    return subprocess.run(
        [sys.executable, "-P", "-c", BEGIN, str(runtime), str(files)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SOON,
    )


def test_below_a_guard(runtime: Path) -> None:
    """With all open files that there may be, and nothing imported that takes long."""
    ended = begun(runtime, 0)
    assert (ended.stdout, ended.stderr) == ("set() True True None\n", "")


def test_no_room_for_it(runtime: Path) -> None:
    """One line says why."""
    ended = begun(runtime, 4)
    assert ended.returncode == 1
    assert ended.stderr == "nbdist: no further process can be started: Too many open files\n"
