"""Tests of `nbdist.wire.child`: a process with a log, whose stdin ends it."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from nbdist.wire.child import Child

pytestmark = pytest.mark.world


def test_its_session_its_end_and_its_log(tmp_path: Path) -> None:
    """It is in nobody's process group, and says when it has ended, how, and what it wrote."""
    program = "import sys; print('x' * 5000); sys.stderr.write('last\\n'); sys.exit(3)"
    child = Child("a", [sys.executable, "-c", program], tmp_path / "log", None)
    assert select.select([child], [], [], 20)[0] == [child]
    assert (child.exit_code(), child.host) == (3, "a")
    assert child.last_lines()[0] in ("last", "x" * 4090)
    assert repr(child) == f"<Child {child.pid} exit code 3>"
    child._end_stdin()
    child.close()


def test_it_is_out_of_reach_of_stop(tmp_path: Path) -> None:
    """Stop signals a whole process group."""
    child = Child("a", [sys.executable, "-c", "input()"], tmp_path / "log", None)
    assert os.getsid(child.pid) == child.pid
    child._end_stdin()
    assert child._ends_in(20)
    child.close()
