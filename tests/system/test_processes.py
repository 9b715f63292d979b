"""Tests of `nbdist.system.processes`: interpreters of ours, and a process with a log.

No interpreter looks for modules in the notebook's folder; the end of its stdin ends a process.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.system.processes import MODULE, Child, agent_command, safe_environ, safe_path
from tests.waiting import SOON

ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("path", "safe"),
    [
        ("", ""),
        ("/lib:/other", "/lib:/other"),
        ("/lib::relative:.:/work", "/lib"),
        ("/work/..//work/", ""),
        (f"{ROOT}:/lib", f"{ROOT}:/lib"),
    ],
)
def test_entries_of_pythonpath(path: str, safe: str) -> None:
    """Empty and relative ones go, and the folder itself however it is written."""
    assert safe_path({"PYTHONPATH": path}, "/work") == safe


def test_the_folder_that_nbdist_is_in_stays() -> None:
    """Also where the notebook is there: else there would be no nbdist."""
    assert safe_path({"PYTHONPATH": ROOT}, ROOT) == ROOT


def test_environment_without_a_safe_entry() -> None:
    """An empty PYTHONPATH would be the working directory."""
    assert safe_environ({"A": "1", "PYTHONPATH": ":."}, "/work") == {"A": "1"}
    assert safe_environ({"PYTHONPATH": "/lib"}, "/work") == {"PYTHONPATH": "/lib"}


@pytest.mark.world
def test_a_module_in_the_folder_is_not_imported(tmp_path: Path) -> None:
    """`random.py` there is the user's."""
    (tmp_path / "random.py").write_text("raise SystemExit('the one of the user')")
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "which.py").write_text("import random; print(random.__file__)")
    environ = {**os.environ, "PYTHONPATH": f".::{tmp_path}:{tmp_path / 'probe'}"}
    done = subprocess.run(
        [sys.executable, *MODULE, "which"],
        cwd=tmp_path,
        env=safe_environ(environ, str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.startswith(str(tmp_path))


def test_the_command_of_an_agent() -> None:
    """With the number of its node where that is known."""
    assert agent_command("/venv/python", 3)[-2:] == ["--node", "3"]
    assert agent_command("") == [sys.executable, "-P", "-m", "nbdist.agent", "--ticket"]


@pytest.mark.world
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


@pytest.mark.world
def test_it_is_out_of_reach_of_stop(tmp_path: Path) -> None:
    """Stop signals a whole process group."""
    child = Child("a", [sys.executable, "-c", "input()"], tmp_path / "log", None)
    assert os.getsid(child.pid) == child.pid
    child._end_stdin()
    assert child._ends_in(20)
    child.close()
