"""Tests of `nbdist.node.limits`: this machine's limits, and those of processes that have fewer."""

from __future__ import annotations

import errno
import re
import resource
import subprocess
import sys

import pytest

from nbdist.node.limits import lack_in, word_lack, word_lack_of_files


def test_a_program_that_cannot_be_run() -> None:
    """It is no limit that is in the way."""
    assert word_lack(errno.ENOENT) == "No such file or directory"
    assert word_lack(errno.ENOMEM) == "no further process can be started: Cannot allocate memory"


def test_no_further_process() -> None:
    """The limit is named with its figures, where it can be found, and what to do."""
    found = re.fullmatch(
        r"no further process or thread can be started: (.* is \d+, and \d+ processes and threads "
        r"are there|`ulimit -u` or pids.max of a control group is reached)\. "
        "Raise it, or use fewer workers",
        word_lack(errno.EAGAIN),
    )
    assert found


@pytest.mark.parametrize("line", ["RuntimeError: can't start new thread", "fork: pthread_create"])
def test_last_lines_that_tell_of_a_limit(line: str) -> None:
    """They are worded as the limit; others are not."""
    assert lack_in(["hello", line]) == word_lack(errno.EAGAIN)
    assert lack_in(["hello"]) == ""


ASKS = """
import resource, sys
from nbdist.node.limits import raise_file_limit, word_lack_of_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
raise_file_limit()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(word_lack_of_files(22) or "enough")
print(word_lack_of_files(1000))
"""


@pytest.mark.world
def test_open_files() -> None:
    """The soft limit is raised; a world that is too big is refused, with the size that is not."""
    said = subprocess.run([sys.executable, "-c", ASKS], capture_output=True, text=True, check=True)
    raised, few, many = said.stdout.splitlines()
    assert (raised, few) == ("512", "enough")
    assert many == (
        "1000 workers take 20064 open files in one process, and `ulimit -Hn` allows 512. Raise it "
        "before the notebook is started, or use 22 workers at most"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (word_lack_of_files(2) == "") == (hard > 130)
