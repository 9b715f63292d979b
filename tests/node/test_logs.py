"""Tests of `nbdist.node.logs`: the files of a rank, and what happens where there is no room."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from nbdist.node.logs import RUNS_KEPT, RankLog, drop_old_runs


def test_streams_have_files_of_their_own(tmp_path: Path):
    """Text is readable after a flush, each stream in its file, and appended to what was there."""
    for part in ("first\n", "second\n"):
        log = RankLog(tmp_path / "a" / "0")
        log.write("stdout", part)
        log.write("stderr", f"err {part}")
        log.flush()
        assert (tmp_path / "a/0/stdout.log").read_text().endswith(part)
        log.close()
    assert (tmp_path / "a/0/stdout.log").read_text() == "first\nsecond\n"
    assert (tmp_path / "a/0/stderr.log").read_text() == "err first\nerr second\n"


def test_any_text_can_be_written(tmp_path: Path):
    """Lone surrogates and colours are kept as they are."""
    log = RankLog(tmp_path)
    log.write("stdout", "é\udc80\x1b[31m")
    log.close()
    assert (tmp_path / "stdout.log").read_bytes() == b"\xc3\xa9\xed\xb2\x80\x1b[31m"


def test_no_folder_no_files():
    """Without a folder nothing is written, and nothing fails."""
    log = RankLog(None)
    log.write("stdout", "x")
    log.flush()
    log.close()
    assert log.folder is None


@pytest.mark.parametrize("size", [1, 100_000])
def test_full_disk_ends_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
):
    """A full disk gives one warning; what follows is dropped in silence."""
    (tmp_path / "stdout.log").symlink_to("/dev/full")
    log = RankLog(tmp_path)
    with caplog.at_level(logging.WARNING, "nbdist.node"):
        for _ in range(3):
            log.write("stdout", "x" * size)
            log.write("stderr", "y")
            log.flush()
        log.close()
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert str(tmp_path) in caplog.text
    assert log.folder is None


def test_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A folder that cannot be made is one warning too."""
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "nbdist.node"):
        log = RankLog(tmp_path / "file" / "0")
        log.write("stdout", "x")
        log.close()
    assert len(caplog.records) == 1
    assert log.folder is None


def test_old_runs_are_dropped(tmp_path: Path):
    """The newest runs are kept; files that are no runs are left alone."""
    for number in range(RUNS_KEPT + 5):
        run = tmp_path / f"run{number}" / "attempt_0" / "0"
        run.mkdir(parents=True)
        (run / "stdout.log").write_text("x")
        os.utime(tmp_path / f"run{number}", (number, number))
    (tmp_path / "notes.txt").write_text("mine")
    drop_old_runs(tmp_path)
    expected = {f"run{number}" for number in range(5, RUNS_KEPT + 5)} | {"notes.txt"}
    assert {entry.name for entry in tmp_path.iterdir()} == expected
    drop_old_runs(tmp_path / "nowhere")
