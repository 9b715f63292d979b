"""Tests of `%dist_log` in a real kernel."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from nbdist.agent.worker_output import WorkerLog
from nbdist.notebook.commands.inspect import last_lines
from nbdist.wire import views as logs
from nbdist.wire.views import BLOCK, LONGEST, PAGE, GetLogs, LogTail, read_logs
from tests.notebook.front_end import Notebook, lasting

pytestmark = pytest.mark.shared_world

kernel = lasting("%load_ext nbdist", NBDIST_LOG_DIR="{folder}")


def test_lines_of_the_ranks(kernel: Notebook) -> None:
    """Lines come with their ranks, equal ones once; options choose which; the files are named."""
    run = kernel.folder / "run"
    assert kernel.run("%%distributed -n 2 --name run\npass").errors == []
    assert kernel.run("%dist_restart").errors == []
    kernel.run(
        "%%distributed\nimport sys\nfor i in range(9): print('step', i)\n"
        "print('\\x1b[31mwarned\\x1b[0m', rank, file=sys.stderr)"
    )
    lines = kernel.run("%dist_log --tail 2").text.splitlines()
    attempt = max(run.iterdir(), key=lambda each: each.stat().st_mtime)
    assert lines == [
        "── ranks 0-1 (same) ──", "step 7", "step 8",
        "── rank 0 · stderr ──", "warned 0", "── rank 1 · stderr ──", "warned 1",
        f"files: {attempt}/[0-1]/[stdout,stderr].log",
    ]  # fmt: skip
    found = kernel.run("%dist_log -r 1 --grep 'step [35]|warn' --stdout").text.splitlines()
    assert found[:-1] == ["── rank 1 ──", "step 3", "step 5"]
    found = kernel.run("%dist_log -r 0 --stderr").text.splitlines()
    assert found[:-1] == ["── rank 0 · stderr ──", "warned 0"]
    assert kernel.run("%dist_log --grep nowhere").text.startswith("no lines with nowhere\nfiles")
    # Each start has files of its own, also where another world takes the run's name.
    last = int(attempt.name.removeprefix("attempt_"))
    assert kernel.run("%dist_restart --backend none --name run").errors == []
    assert kernel.run("%dist_log").text.startswith("no lines")
    assert "step 8" in kernel.run(f"%dist_log --attempt {last}").text
    error = kernel.run("%dist_log --attempt 99").error
    there = sorted(int(each.name[8:]) for each in run.glob("attempt_*"))
    assert f"`--attempt 99`: there are {there[0]}-{there[-1]}, the last is now." in error


@pytest.fixture(params=[PAGE, 1000])
def _pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is read at once, or a thousand bytes at a time."""
    monkeypatch.setattr(logs, "PAGE", request.param)


def lines_of(folder: Path, most: int, pattern: str | None = None) -> list[str]:
    """What is read of a rank's file."""
    ask = partial(read_logs, {3: folder})
    get = GetLogs((3,), ("stdout",), most)
    (tail,) = ask(get)
    return [*last_lines(tail, get, ask, None if pattern is None else re.compile(pattern))]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("a", ["a"]),
        ("\na\n\n", ["", "a", ""]),
        ("0%\r50%\r100%\nend\r\n", ["100%", "end"]),
        ("\x1b[31mred\x1b[0m é\n", ["red é"]),
    ],
)
def test_last_lines(tmp_path: Path, text: str, lines: list[str]) -> None:
    """Lines as they were seen, whatever the end of the file."""
    (tmp_path / "stdout.log").write_text(text, newline="")
    assert lines_of(tmp_path, 9) == lines
    assert lines_of(tmp_path, 1) == lines[-1:]


@pytest.mark.usefixtures("_pages")
def test_last_lines_of_a_big_file(tmp_path: Path) -> None:
    """Lines that lie across blocks and pages are whole; endless ones are cut."""
    file = tmp_path / "stdout.log"
    numbers = [f"line {number} " + "x" * (number % 97) for number in range(9000)]
    file.write_text("\n".join(numbers) + "\n")
    assert file.stat().st_size > 3 * BLOCK
    assert lines_of(tmp_path, 10_000) == numbers
    assert lines_of(tmp_path, 2) == numbers[-2:]
    found = [line for line in numbers if re.search(r"line [789]00 ", line)]
    assert lines_of(tmp_path, 3, r"line \d00 ") == found
    assert lines_of(tmp_path, 3, "line 7 ") == ["line 7 " + "x" * 7]
    file.write_text("first\n" + "y" * 5 * BLOCK + "end\nz")
    first, long, short = lines_of(tmp_path, 9)
    assert (first, short) == ("first", "z")
    assert LONGEST <= len(long) <= LONGEST + BLOCK
    assert long.endswith("end")
    assert lines_of(tmp_path / "nowhere", 9) == []


@pytest.mark.usefixtures("_pages")
def test_lines_that_were_moved(tmp_path: Path) -> None:
    """What the file before has comes first, without the line that points to it."""
    log = WorkerLog(tmp_path, limit=4000)
    numbers = [f"line {number}" for number in range(300)]
    for line in numbers:
        log.write("stdout", f"{line}\n")
    log.close()
    assert (tmp_path / "stdout.log.1").exists()
    assert lines_of(tmp_path, 250) == numbers[50:]
    assert lines_of(tmp_path, 5, "line 7.$") == numbers[75:80]


def test_how_much_is_read_at_once(tmp_path: Path) -> None:
    """A part, however many lines are asked for; none of ranks and attempts without files."""
    (tmp_path / "stdout.log").write_text(f"{'x' * 1000}\n" * 3000)
    ask = partial(read_logs, {3: tmp_path, 4: None})
    here, none = ask(GetLogs((3, 4, 5), ("stdout",), 5000))
    assert PAGE < sum(map(len, here.lines)) < PAGE + 2000
    assert none == LogTail(4, "stdout")
    (other,) = ask(GetLogs((3,), ("stdout",), 50, attempt=7))
    assert (other.lines, other.start) == ((), 0)
