"""The benchmark itself runs; what it measures is nobody's promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    """Run it as the README says, without waiting for a quiet machine."""
    command = [sys.executable, "-m", "tests.bench", "--wait", "0", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


def test_it_prints_a_row_with_its_budget(tmp_path):
    """One run of one row: a line with its figures, and the same figures as JSON."""
    file = tmp_path / "figures.json"
    done = bench("--only", "load", "--runs", "1", "--json", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    row = done.stdout.splitlines()[-1]
    assert row.startswith("load      %load_ext nbdist ")
    (figure,) = json.loads(file.read_text())["figures"]
    assert (figure["unit"], figure["budget"], len(figure["values"])) == ("ms", 150, 1)


def test_an_unknown_row_is_told():
    """The rows that there are, are named."""
    done = bench("--only", "speed")
    assert done.returncode == 2
    assert "no row speed; rows: load, start" in done.stderr
