"""Tests of `nbdist.terminal.console`: the command `nbdist` as people type it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nbdist import __version__
from nbdist.terminal.console import main
from nbdist.world.world import World
from tests.waiting import SOON
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(1) as started:
        yield started


def nbdist(*words: str) -> subprocess.CompletedProcess[str]:
    """Run it as a command of its own."""
    command = [sys.executable, "-m", "nbdist.terminal", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=SOON)


def test_status(world: World) -> None:
    """A table of each world, with processor time, while a cell runs."""
    running = world.submit(world.task("while True: pass"))
    try:
        shown = nbdist("status")
    finally:
        world.interrupt()
        for _ in world.follow(running):
            pass
    assert shown.stderr == ""
    assert shown.returncode == 0
    # Whoever else works here may have worlds too.
    lines = shown.stdout.splitlines()
    (at,) = (i for i, line in enumerate(lines) if f" {world.pids[0]} " in line)
    title, headings, row = lines[at - 2 : at + 1]
    assert title.startswith("1 worker · gloo · ")
    assert headings.split()[:4] == ["rank", "state", "pid", "device"]
    assert "busy " in row
    assert " % " in row
    assert "line 1: while True: pass" in row


def test_top_ends_by_itself_where_it_is_told_to(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """After so many looks."""
    assert main(["top", "-n", "1", "-d", "0.5"]) == 0
    assert str(world.pids[0]) in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["stop"], ["top", "-d", "0"], ["top", "-d", "x"]])
def test_what_is_no_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused with a line of help, as any command does."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: nbdist" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["top -d 0.5", "status"])
def test_a_reader_that_has_enough(world: World, words: str) -> None:
    """`nbdist top | head -1` ends, and says nothing of it."""
    command = f"{sys.executable} -m nbdist.terminal {words} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=SOON
    )
    assert (done.returncode, done.stderr) == (0, "")
    # Of whichever world comes first here.
    assert re.fullmatch(
        r".* workers? .*· gloo · .*notebook pid \d+.*\n|no workers yet .*\n", done.stdout
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Which nbdist it belongs to."""
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"nbdist {__version__}{os.linesep}"
