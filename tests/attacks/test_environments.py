"""Files in the notebook's folder, and variables of its environment, do nbdist no harm."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.front_end import Notebook

pytestmark = pytest.mark.shared_world

MODULES = sorted(
    name
    for name in sys.stdlib_module_names
    if not name.startswith("_") and name not in sys.builtin_module_names
)
OTHERS = ("torch", "numpy", "zmq", "cloudpickle", "psutil", "IPython", "tornado", "comm")
"""Other modules that nbdist imports."""

TELLS = """import os
with open(os.path.join(os.path.dirname(__file__), "ran.txt"), "a") as file:
    file.write(__name__ + "\\n")
raise RuntimeError("the user's own file")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file named like each module; a file that is run records its name."""
    folder = tmp_path_factory.mktemp("own")
    for name in (*MODULES, *OTHERS):
        (folder / f"{name}.py").write_text(TELLS)
    (folder / "ran.txt").touch()
    (folder / "mine.py").write_text(
        "import os\nvalue = os.getcwd()\ndef check(worker):\n    pass\n"
    )
    return folder


@pytest.fixture(scope="module")
def beside(folder: Path) -> Iterator[Notebook]:
    """A notebook in that folder, with more entries for the folder in its path than kernels have.

    The notebook changes to the folder itself, because a kernel that starts in the folder fails.
    """
    paths = os.pathsep.join(["", "sub", ".", str(folder)])
    go = f"import os, sys, subprocess; os.chdir({str(folder)!r})"
    logs = {"NBDIST_LOG_DIR": str(folder / "logs")}
    with closing(Notebook(go, f"os.environ['PYTHONPATH'] = {paths!r}", env=logs)) as notebook:
        assert notebook.run("sys.path[:0] = ['', '.', os.getcwd()]").errors == []
        (folder / "ran.txt").write_text("")
        assert notebook.run("%load_ext nbdist").errors == []
        yield notebook


def gathered(notebook: Notebook, source: str) -> Any:
    """Run a distributed cell, and return its variable `x` of each rank."""
    assert notebook.run(f"%%distributed\n{source}").errors == []
    assert notebook.run("%dist_gather x").errors == []
    return notebook.value("x")


def test_files_named_like_modules_are_not_run(beside: Notebook, folder: Path) -> None:
    """nbdist runs no file that is named like a module; cells have the notebook's path."""
    assert beside.run("%%distributed -n 2\npass").errors == []
    assert (folder / "ran.txt").read_text() == ""
    expected = beside.value("sys.path"), str(folder)
    assert gathered(beside, "import sys, mine\nx = sys.path, mine.value") == [expected] * 2


def test_children_of_cells_have_the_notebooks_environment(beside: Notebook) -> None:
    """A process of a cell inherits the notebook's environment; `sys.argv` has no arguments."""
    asked = "import os; print(os.environ['PYTHONPATH'], 'PYTHONSAFEPATH' in os.environ)"
    command = f"subprocess.run([sys.executable, '-c', {asked!r}], capture_output=True, text=True)"
    expected = beside.value(f"({command}.stdout, sys.argv[:1])")
    source = (
        "import argparse, subprocess, sys\nargparse.ArgumentParser().parse_args()\n"
        f"x = {command}.stdout, sys.argv"
    )
    assert gathered(beside, source) == [expected] * 2


def test_spawned_children_find_the_notebooks_modules(
    beside: Notebook, folder: Path, tmp_path: Path
) -> None:
    """Children that a cell spawns find modules of the folder that the notebook has gone to."""
    (tmp_path / "yours.py").write_text("def twice(x):\n    return 2 * x\n")
    go = f"os.chdir({str(tmp_path)!r}); os.environ['PYTHONPATH'] = ':'"
    leave = f"sys.path[:] = [entry for entry in sys.path if entry != {str(folder)!r}]"
    before = "before = [*sys.path], os.environ['PYTHONPATH']"
    assert beside.run(f"{before}\n{go}\n{leave}\n%dist_restart -n 1").errors == []
    source = (
        "import multiprocessing, yours\n"
        "with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "    x = pool.map(yours.twice, [1, 2])\n"
        "del pool"
    )
    assert gathered(beside, source) == [[2, 4]]
    back = f"os.chdir({str(folder)!r}); sys.path[:], os.environ['PYTHONPATH'] = before"
    assert beside.run(back).errors == []


def test_spawned_workers_run_no_file_named_like_a_module(beside: Notebook, folder: Path) -> None:
    """Spawned workers run none of the files, have the notebook's path, and report a crash."""
    assert beside.run("%dist_restart -n 1 --no-fork --on-failure stop").errors == []
    assert (folder / "ran.txt").read_text() == ""
    expected = beside.value("(sys.path, os.environ['PYTHONPATH'])")
    assert gathered(beside, "import sys, os\nx = sys.path, os.environ['PYTHONPATH']") == [expected]
    seen = beside.run("%%distributed\nimport signal; os.kill(os.getpid(), signal.SIGSEGV)").seen
    assert re.search(r"Fatal Python error: Segmentation fault, in\s+Cell In\[\d+\], line 2\n", seen)
    logs = (folder / "logs").rglob("stderr.log")
    assert "Fatal Python error: Segmentation fault, in\n" in "".join(map(Path.read_text, logs))
