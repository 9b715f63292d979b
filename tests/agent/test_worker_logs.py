"""Tests of `nbdist.agent.worker_output`: the files of a rank, and what happens on a full disk."""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

import pytest

from nbdist.agent.worker_output import RUNS_KEPT, RunFolder, WorkerLog, drop_old_runs
from nbdist.wire.views import last_lines


def test_streams_have_files_of_their_own(tmp_path: Path):
    """Text is readable at once, each stream in its file, and appended to what was there."""
    for part in ("first\n", "second\n"):
        log = WorkerLog(tmp_path / "a" / "0")
        log.write("stdout", part)
        log.write("stderr", f"err {part}")
        assert (tmp_path / "a/0/stdout.log").read_text().endswith(part)
        log.close()
    assert (tmp_path / "a/0/stdout.log").read_text() == "first\nsecond\n"
    assert (tmp_path / "a/0/stderr.log").read_text() == "err first\nerr second\n"


def test_any_text_can_be_written(tmp_path: Path):
    """Lone surrogates and colours are kept as they are."""
    log = WorkerLog(tmp_path)
    log.write("stdout", "é\udc80\x1b[31m")
    log.close()
    assert (tmp_path / "stdout.log").read_bytes() == b"\xc3\xa9\xed\xb2\x80\x1b[31m"


def test_no_folder_no_files():
    """Without a folder nothing is written, and nothing fails."""
    log = WorkerLog(None)
    log.write("stdout", "x")
    log.close()
    assert log.folder is None


@pytest.mark.parametrize("size", [1, 100_000])
def test_full_disk_ends_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
):
    """A full disk gives one warning; what follows is dropped in silence."""
    log = WorkerLog(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING, "nbdist.agent"):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
            for _ in range(3):
                log.write("stdout", "x" * size)
                log.write("stderr", "y")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        log.close()
    assert len(caplog.records) == 1
    assert "File too large" in caplog.text
    assert str(tmp_path) in caplog.text
    assert log.folder is None


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path):
    """Nothing is appended to what somebody has linked there."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "stdout.log").symlink_to(tmp_path / "mine")
    WorkerLog(tmp_path).write("stdout", "x")
    assert (tmp_path / "mine").read_text() == "mine"


def test_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A folder that cannot be made is one warning too."""
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "nbdist.agent"):
        log = WorkerLog(tmp_path / "file" / "0")
        log.write("stdout", "x")
        log.close()
    assert len(caplog.records) == 1
    assert log.folder is None


# --- the limit ----------------------------------------------------------------------------


def test_the_newest_lines_are_kept(tmp_path: Path):
    """A stream has about the limit in two files; lines are whole, and can be read over both."""
    log = WorkerLog(tmp_path, 100_000)
    lines = [f"line {number} " + "x" * (number % 97) for number in range(9000)]
    text = "\n".join(lines) + "\n"
    for start in range(0, len(text), 1000):
        log.write("stdout", text[start : start + 1000])
    log.close()
    files = [tmp_path / "stdout.log", tmp_path / "stdout.log.1"]
    assert all(file.stat().st_size < 51_500 for file in files)
    assert (tmp_path / "stderr.log").stat().st_size == 0
    *kept, first = last_lines(files[0], 9999)[0][::-1]
    assert kept == lines[::-1][: len(kept)]
    assert sum(map(len, kept)) > 50_000
    assert first == (
        "[nbdist: what stood before this line was moved to stdout.log.1, in the place of what "
        "had been moved there: NBDIST_LOG_LIMIT allows 0 MiB]"
    )


def test_no_limit_and_endless_lines(tmp_path: Path):
    """With 0 all stays in one file; a line without an end is cut some day."""
    for limit in (0, 1 << 20):
        log = WorkerLog(tmp_path / str(limit), limit)
        for _ in range(40):
            log.write("stdout", "\r" * 100_000)
        log.close()
    assert sorted(os.listdir(tmp_path / "0")) == ["stderr.log", "stdout.log"]
    assert all(file.stat().st_size < 1.8 * (1 << 20) for file in (tmp_path / "1048576").iterdir())


# --- old runs -----------------------------------------------------------------------------


def run_of(root: Path, name: str, age: int = 0) -> RunFolder:
    """A run with a line of one rank in it; the higher its `age`, the older."""
    run = RunFolder(root, name)
    log = WorkerLog(run.new_attempt(0) / "0", 1)
    log.write("stdout", "x\nx\nx\n")
    log.close()
    os.utime(run.path, (10**9 - age, 10**9 - age))
    return run


def test_old_runs_are_dropped(tmp_path: Path):
    """The newest runs are kept, and one that is in use, whatever its age."""
    in_use = run_of(tmp_path, "in use", age=10_000)
    for number in range(RUNS_KEPT + 5):
        name = f"exp{number}/run" if number % 2 else f"run{number}"
        run_of(tmp_path, name, age=100 - number).close()
    drop_old_runs(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "in use",
        *(f"exp{n}" if n % 2 else f"run{n}" for n in range(5, RUNS_KEPT + 5)),
    }
    in_use.close()
    drop_old_runs(tmp_path)
    assert not in_use.path.exists()


def test_nothing_else_is_dropped(tmp_path: Path):
    """The user's folders stay, and runs in which the user keeps something."""
    for name in ("notes", "attempt_0", "run", "data/run"):
        (tmp_path / name / "attempt_0" / "0").mkdir(parents=True)
        (tmp_path / name / "attempt_0" / "0" / "stdout.log").write_text("mine")
    run_of(tmp_path, "run", age=1000).close()  # the user's folder has this name
    used = run_of(tmp_path, "used", age=1000)
    (used.path / "attempt_0" / "model.pt").write_text("mine")
    used.close()
    for name in tmp_path.iterdir():
        os.utime(name, (1, 1))
    for number in range(RUNS_KEPT + 1):
        run_of(tmp_path, f"new{number}", age=number).close()
    before = {*tmp_path.rglob("*")}
    drop_old_runs(tmp_path)
    gone = {path.relative_to(tmp_path).parts[0] for path in before - {*tmp_path.rglob("*")}}
    assert gone == {f"new{RUNS_KEPT}"}
