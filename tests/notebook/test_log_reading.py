"""Tests of `nbdist.notebook.commands.logs`: the end of a file, here and on another machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbdist.agent.worker_logs import WorkerLog, read_logs
from nbdist.notebook.commands.logs import BLOCK, LONGEST, last_lines, last_lines_there
from nbdist.wire.log_files import LogPiece
from nbdist.wire.messages import GetLogs


def far_lines(
    folder: Path, most: int, pattern: re.Pattern[str] | None = None, first: int = 20
) -> tuple[list[str], int]:
    """What is read of a rank's files through an agent, and how often that was asked."""
    asked: list[GetLogs] = []

    def ask(get: GetLogs) -> tuple[LogPiece, ...]:
        asked.append(get)
        return read_logs({3: folder}, get)

    get = GetLogs((3,), ("stdout",), first)
    (piece,) = read_logs({3: folder}, get)
    return last_lines_there(piece, get, ask, most, pattern), len(asked)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\n\n", ["a", ""]),
        ("\na\nb", ["", "a", "b"]),
        ("0%\r50%\r100%\nend\r\n", ["100%", "end"]),
        ("\x1b[31mred\x1b[0m é\n", ["red é"]),
    ],
)
def test_last_lines(tmp_path: Path, text: str, lines: list[str]) -> None:
    """Lines as they were seen, whatever the end of the file."""
    file = tmp_path / "stdout.log"
    file.write_text(text, newline="")
    assert last_lines(file, 9) == far_lines(tmp_path, 9)[0] == lines
    assert last_lines(file, 1) == lines[-1:]


def test_last_lines_of_a_big_file(tmp_path: Path) -> None:
    """Lines that lie across blocks are whole; endless ones are cut."""
    file = tmp_path / "stdout.log"
    numbers = [f"line {number} " + "x" * (number % 97) for number in range(9000)]
    file.write_text("\n".join(numbers) + "\n")
    assert file.stat().st_size > 3 * BLOCK
    assert last_lines(file, 10_000) == numbers
    assert far_lines(tmp_path, 10_000) == (numbers, 1)
    assert far_lines(tmp_path, 2, first=400) == (numbers[-2:], 0)
    assert last_lines(file, 3, re.compile(r"line \d00 ")) == [
        line for line in numbers if re.search(r"line [789]00 ", line)
    ]
    file.write_text("y" * 5 * BLOCK + "end\nz")
    long, short = last_lines(file, 9)
    assert short == "z"
    assert LONGEST <= len(long) <= LONGEST + BLOCK
    assert long.endswith("end")
    assert last_lines(tmp_path / "nowhere", 9) == far_lines(tmp_path / "nowhere", 9)[0] == []


def test_lines_that_were_moved(tmp_path: Path) -> None:
    """What the file before has comes first, without the line that points to it."""
    log = WorkerLog(tmp_path, limit=4000)
    numbers = [f"line {number}" for number in range(300)]
    for line in numbers:
        log.write("stdout", f"{line}\n")
    log.close()
    assert (tmp_path / "stdout.log.1").exists()
    assert last_lines(tmp_path / "stdout.log", 250) == far_lines(tmp_path, 250)[0] == numbers[50:]
    pattern = re.compile("line 7.$")
    assert far_lines(tmp_path, 5, pattern)[0] == [f"line {number}" for number in range(75, 80)]
