"""The benchmark itself runs; its figures are not tested."""

from __future__ import annotations

import subprocess
import sys

from tests.sources import PACKAGE


def test_the_bench_prints_a_row_with_its_budget():
    """A single run of a row prints a line with its figures and its budget."""
    command = [sys.executable, "-m", "tests.bench", "--wait", "0", "--only", "load", "--runs", "1"]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, "")
    row, magic, _, median, least, most, unit, budget, *_ = done.stdout.splitlines()[-1].split()
    assert (row, magic, unit, budget) == ("load", "%load_ext", "ms", "150")
    assert median == least == most
