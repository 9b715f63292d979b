"""Tests of `nbdist.terminal.turn`: several processes of which one works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.errors import UsageError
from nbdist.terminal import turn
from nbdist.terminal.turn import turn_of
from tests.waiting import wait_until

WAIT = "import sys; from nbdist.terminal.turn import turn_of\n"
WAIT += "with turn_of(sys.argv[1]) as turn:\n"
WAIT += "    print(flush=True); sys.exit(turn.outcome(float(sys.argv[2])))"
WORK = "import sys, time; from nbdist.terminal.turn import turn_of\n"
WORK += "with turn_of(sys.argv[1]) as turn: turn.begin(); print(flush=True); time.sleep(60)"


@pytest.fixture
def process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], subprocess.Popen[str]]:
    """Starts a process that takes part; the folder in which they meet is the test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(turn.tempfile, "tempdir", None)

    def start(code: str, key: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, key, "0"], stdout=subprocess.PIPE, text=True
        )

    return start


@pytest.mark.world
def test_who_waits_ends_as_who_works(
    process: Callable[[str, str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Also those that came first; the last leaves nothing behind."""
    key = uuid.uuid4().hex
    waiting = [process(WAIT, key), process(WAIT, key)]
    for each in waiting:
        assert each.stdout is not None
        each.stdout.readline()
        each.stdout.close()
    with turn_of(key) as mine:
        mine.begin()
        folder = tmp_path / f"nbdist-join-{os.geteuid()}"
        assert folder.stat().st_mode & 0o777 == 0o700
        mine.ended(7)
    assert [each.wait(20) for each in waiting] == [7, 7]
    wait_until(lambda: not folder.exists(), "the folder is gone")


@pytest.mark.world
def test_where_who_works_is_killed_the_others_end(
    process: Callable[[str, str], subprocess.Popen[str]],
) -> None:
    """With 1: nobody has said anything."""
    working = process(WORK, "key")
    assert working.stdout is not None
    working.stdout.readline()
    waiting = process(WAIT, "key")
    assert waiting.stdout is not None
    waiting.stdout.readline()
    waiting.stdout.close()
    working.send_signal(signal.SIGKILL)
    assert (working.wait(20), waiting.wait(20)) == (-signal.SIGKILL, 1)
    working.stdout.close()


@pytest.mark.world
def test_what_a_killed_one_has_left_goes_with_the_next(
    process: Callable[[str, str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Whatever their key; where others wait nothing is removed, but for the last of them."""
    killed, waiting = process(WORK, "killed"), process(WAIT, "key")
    for each in (killed, waiting):
        assert each.stdout is not None
        each.stdout.readline()
        each.stdout.close()
    killed.kill()
    killed.wait()
    with turn_of("another"):
        pass
    folder = tmp_path / f"nbdist-join-{os.geteuid()}"
    assert [each.name for each in folder.iterdir()] == ["key"]
    with turn_of("key") as mine:
        mine.begin()
        mine.ended(0)
    assert waiting.wait(20) == 0
    wait_until(lambda: not folder.exists(), "the folder is gone")


def test_where_nobody_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is printed after a while."""
    monkeypatch.setattr(turn.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(turn, "LEADER_TIMEOUT", 0.2)
    with (
        pytest.raises(UsageError, match="no process with local rank 0 connected"),
        turn_of("k") as mine,
    ):
        mine.outcome(0.0)
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_one_has_left_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All processes of it were killed; the same job is started again."""
    monkeypatch.setattr(turn.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(turn, "LEADER_TIMEOUT", 0.2)
    with turn_of("k") as earlier, turn_of("k") as mine:
        earlier.begin()
        earlier.ended(3)
        assert mine.outcome(0.0) == 3
        with pytest.raises(UsageError, match="no process with local rank 0 connected"):
            mine.outcome(time.time() + 1.0)


def test_a_folder_of_others_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another user may have made one of that name, to see or steer what happens."""
    monkeypatch.setattr(turn.tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"nbdist-join-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"nbdist-join-{os.geteuid()}").chmod(0o777)
    with pytest.raises(UsageError, match="is not a folder that only this user"), turn_of("k"):
        pass
