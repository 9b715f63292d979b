"""Tests of `nbdist.worker.warm_jedi`: what the fork server does for workers' first completion."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
limit = sys.getrecursionlimit()
from nbdist.worker import warm_jedi
print("jedi.inference" in sys.modules, sys.getrecursionlimit() == limit, warm_jedi.warm_up() > 100)
"""


def test_what_is_imported() -> None:
    """What jedi works with is there; the limit of recursion is what it was."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    assert ran.stdout.split() == [b"True"] * 3
