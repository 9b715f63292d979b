"""Limits the files, lines and untested statements of each folder; the limits are in folders.txt.

The folders of LABORATORY, with which people measure and compare, have no limits.

`python -m tests.folders` prints the files and lines in all, and fails if a folder exceeds its
limits; `--write` lowers the limits to the present numbers, and adds new folders; `--raise` raises
the limits that are exceeded, for a change whose message says why.  `--missed`
runs the tests that start no process, and checks that all pass and the percentage of statements
that none runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "tests" / "folders.txt"
COLUMNS = ("files", "lines", "% missed")
LABORATORY = ("tests/bench", "tests/gpu", "tests/matrix", "tests/standin")

Numbers = dict[str, dict[str, int]]
"""Numbers by folder and by the name of a column."""


def limits() -> Numbers:
    _, *lines = TABLE.read_text().splitlines()
    rows = ((folder, map(int, numbers)) for folder, *numbers in map(str.split, lines))
    return {folder: dict(zip(COLUMNS, numbers, strict=False)) for folder, numbers in rows}


def counted() -> Numbers:
    """Count the files and lines of each folder that has limits."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in (each for top in ("nbdist", "tests") for each in (ROOT / top).rglob("*.py")):
        folder = path.parent.relative_to(ROOT).as_posix()
        if folder.startswith(LABORATORY):
            continue
        files[folder] += 1
        lines[folder] += path.read_text().count("\n")
    return {folder: {"files": files[folder], "lines": lines[folder]} for folder in files}


def measured() -> tuple[Numbers, list[str]]:
    """Return the percentage of statements that no unit test runs, by folder, rounded up.

    Also return a line if a unit test fails: `.ci/run` runs these tests nowhere else.
    """
    missed: Counter[str] = Counter()
    statements: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        os.environ["COVERAGE_FILE"] = f"{place}/data"
        codes = [
            subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT).returncode
            for command in (
                "coverage run -m pytest -q -m unit -n 4",
                "coverage combine -q",
                f"coverage json -q -o {place}/report",
            )
        ]
        report = json.loads(Path(place, "report").read_text())
    for file, found in report["files"].items():
        folder = file.rpartition("/")[0]
        missed[folder] += found["summary"]["missing_lines"]
        statements[folder] += found["summary"]["num_statements"]
    rows = {each: {"% missed": -(-100 * missed[each] // statements[each])} for each in statements}
    return rows, ["a unit test fails"] * any(codes)


def more_than_allowed(now: Numbers) -> list[str]:
    """Return a line for each number above its limit; a percentage may exceed it by 1."""
    allowed, none = limits(), {"files": 0, "lines": 0, "% missed": 100}
    return [
        f"{folder}: {number} {column}, and {limit} in tests/folders.txt"
        for folder, row in now.items()
        for column, number in row.items()
        if number > (limit := {**none, **allowed.get(folder, {})}[column]) + (column == "% missed")
    ]


def write(now: Numbers, choose: Callable[[int, int], int]) -> None:
    """Write the number that `choose` takes of each limit and the present number."""
    before = limits()
    lines = [f"{'# folder':<26}{'files':>6}{'lines':>7}{'% missed':>10}\n"]
    for folder in sorted(set(before) & set(counted()) | set(now)):
        old, new = before.get(folder, {}), now.get(folder, {})
        row = {**new, **old, **{each: choose(old[each], new[each]) for each in old.keys() & new}}
        files, line_count, *missed = (row[each] for each in COLUMNS if each in row)
        lines.append(f"{folder:<26}{files:>6}{line_count:>7}" + "".join(f"{x:>10}" for x in missed))
        lines.append("\n")
    TABLE.write_text("".join(lines))


if __name__ == "__main__":
    numbers, failed = measured() if "--missed" in sys.argv else (counted(), [])
    for top in ("nbdist", "tests"):
        rows = [row for folder, row in counted().items() if folder.partition("/")[0] == top]
        files, lines = (sum(row[each] for row in rows) for each in ("files", "lines"))
        sys.stdout.write(f"{top}: {files} files, {lines:,} lines\n")
    if "--write" in sys.argv:
        write(numbers, min)
    if "--raise" in sys.argv:
        write(numbers, max)
    sys.exit("\n".join([*failed, *more_than_allowed(numbers)]) or 0)
