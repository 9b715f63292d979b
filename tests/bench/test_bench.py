"""The benchmark itself runs; what it measures is nobody's promise."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.sources import PACKAGE


def test_it_prints_a_row_with_its_budget(tmp_path):
    """One run of one row: a line with its figures, and the same figures as JSON."""
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.bench", "--wait", "0", "--only", "load", "--runs", "1"]
    done = subprocess.run(
        [*command, "--json", str(file)],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("load      %load_ext nbdist ")
    (figure,) = json.loads(file.read_text())["figures"]
    assert (figure["unit"], figure["budget"], len(figure["values"])) == ("ms", 150, 1)
