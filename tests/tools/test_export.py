"""Tests of `nbdist.tools.export`: its scripts run under torchrun, without nbdist."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

from nbdist.tools.export import group_of
from nbdist.world.world import World
from tests.notebook.front_end import Notebook, lasting

pytestmark = pytest.mark.shared_world

RUN_TIMEOUT = 200


kernel = lasting("%load_ext nbdist", "%cd -q {folder}")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has all packages but nbdist."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    [packages] = home.glob("lib/python*/site-packages")
    for entry in filter(lambda each: each.endswith("site-packages"), sys.path):
        for each in os.scandir(entry):
            is_ours = each.name.startswith(("nbdist", "_editable", "_nbdist"))
            if not (is_ours or each.name.endswith(".pth") or (packages / each.name).exists()):
                (packages / each.name).symlink_to(each.path)
    # A thread of gloo needs the GIL to release its last collective.  If Python ends meanwhile,
    # torch 2.13 aborts: 6 of 32 runs of ten lines without nbdist did, and 0 of 24 with this sleep.
    (packages / "sitecustomize.py").write_text(
        "import atexit, time\natexit.register(time.sleep, 0.2)\n"
    )
    python = home / "bin" / "python"
    without = subprocess.run(
        [python, "-c", "import nbdist"], cwd=home, capture_output=True, text=True,
        env=plain_environ(), timeout=RUN_TIMEOUT, check=False,
    )  # fmt: skip
    assert without.stderr.strip().endswith("ModuleNotFoundError: No module named 'nbdist'")
    return python


def plain_environ() -> dict[str, str]:
    """Return this process's environment without variables of Python, which lead to packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def torchrun(python: Path, script: Path, ranks: int) -> str:
    """Run a script with torchrun; return the ranks' output, read from a file for each rank."""
    logs = Path(tempfile.mkdtemp(dir=script.parent))
    run = [python, "-m", "torch.distributed.run", f"--log-dir={logs}", "--redirects=1"]
    done = subprocess.run(
        [*run, f"--nproc-per-node={ranks}", script], stdin=subprocess.DEVNULL,
        cwd=script.parent, env=plain_environ(), capture_output=True,
        text=True, timeout=RUN_TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return "".join(file.read_text() for file in sorted(logs.rglob("stdout.log")))


PLAIN = """\
from dataclasses import dataclass
import numpy as np
import torch
import torch.nn as nn
lr = 0.5
sizes = [3, 4]
@dataclass
class Point:
    x: float
def scaled(x):
    return x * lr * total(sizes)
total = lambda xs: sum(xs)
async def thrice(x):
    return 3 * x
points = [Point(1.0), Point(2.0)]
net = torch.nn.Linear(2, 2)
weights = [net.weight]
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
"""

CELLS = (
    "%%distributed -n 2\n%%time\nstep = scaled(2) + points[1].x\nprint('step', step)",
    "%%rank 1\nonly = f'''one\n  two {rank}'''\nprint(only)",
    "%%distributed\nasync def twice(x):\n    return 2 * x\n"
    "four = await twice(2)\nfour + rank + await thrice(0)",
    "%%distributed\nnet(torch.ones(2)).sum().backward()\nfloat(weights[0].grad.sum())",
    # The first use of `nn` needs no submodule, the second needs `nn.parallel`.
    "%%distributed\nlayers = Layers()",
    "%%distributed\nmodel = nn.parallel.DistributedDataParallel(Layers())",
    "%%distributed\nbroken = 1\nraise ValueError",
    "%%distributed\n%matplotlib inline\nhome = !echo at $step {rank}\nprint(home)",
)
AFTER = "%%distributed\nprint('scaled', scaled(1))"


def test_a_script_prints_what_the_notebook_printed(kernel: Notebook, elsewhere: Path) -> None:
    """A script with magics, await, classes and shared objects prints the notebook's output again.

    The script runs under torchrun, in an environment without nbdist.
    """
    kernel.run("%dist_restart -n 2")
    kernel.run(PLAIN)
    shown = [kernel.run(source) for source in CELLS]
    kernel.run("lr = 0.25\n%dist_gather four\nprint(sum(four))")
    shown.append(kernel.run(AFTER))
    said = kernel.run("%dist_export other.py").text
    assert [bool(each.errors) for each in shown] == [False] * 6 + [True] + [False] * 2
    assert "failed (ValueError), which bound broken" in said
    assert "did with four, which were gathered" in said
    assert "uses" not in said
    assert "as it was sent" not in said
    assert "other.py · 8 cells · 3 variables in other_values.pt" in said
    script = kernel.folder / "other.py"
    assert "nbdist" not in script.read_text().partition('"""\n\nimport ')[2]
    told = torchrun(elsewhere, script, 2).splitlines()
    for line in ("step 9.0", "  two 1", "4", "5", "['at 9.0 0']", "['at 9.0 1']", "scaled 1.75"):
        assert line in told, told
        assert any(line in each.panel["text/plain"] for each in shown), line


STOPPED = """%%distributed
import os
kept = rank + 40
print('kept', kept, flush=True)
while 'RUNS' not in os.environ:
    pass
"""


def test_a_stopped_cell_is_exported_and_runs(
    kernel: Notebook, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped cell is in the script; a name that only a failed cell bound is reported first."""
    kernel.run("%dist_restart -n 2")
    assert kernel.run(STOPPED, meanwhile=kernel.stop_at("kept")).errors
    kernel.run("%%distributed\ndist.barrier()\nprint('again', kept)")
    said = kernel.run("%dist_export stopped.py").text
    assert said.startswith("stopped.py · 2 cells · `torchrun")
    assert "was stopped" in said
    monkeypatch.setenv("RUNS", "1")
    told = torchrun(elsewhere, kernel.folder / "stopped.py", 2).splitlines()
    assert told.count("again 41") == told.count("kept 41") == 1
    kernel.run("%%distributed\nbroken = 1\nraise ValueError")
    kernel.run("%%distributed\nprint(broken)")
    first, second, *_ = kernel.run("%dist_export --force stopped.py").text.splitlines()
    assert first == "stopped.py ends in a NameError until you add broken, which it uses and lacks"
    assert second == "stopped.py · 3 cells"


DEFINITIONS = """\
from __future__ import annotations
from dataclasses import dataclass
known, words = {}, []
def known_as(name):
    def keep(function):
        known[name] = function
        words.append(name)
        return function
    return keep
@known_as("first")
def first(x):
    first.calls += 1
    return sorted(known), words, x + first.bias
first.calls, first.bias = 0, 5
class Base:
    plugins = []
    rate = 0.1
    def __init_subclass__(cls):
        Base.plugins.append(cls.__name__)
class Second(Base): pass
class Another(Base): pass
Base.rate = 0.7
def described():
    return Base.plugins, Base.rate
@dataclass
class Node:
    value: int
    parent: Node | None = None
tree = [Node(2, Node(1))]
class Hub:
    found = {}
    def old(self): pass
Hub.found["k"] = Node
class App:
    def __init__(self):
        self.routes = []
    def route(self, function):
        self.routes.append(function.__name__)
        return function
app = App()
@app.route
def home():
    return app.routes
import torch
net = torch.nn.Linear(1, 1)
def make(net):
    def is_net(other, default=net):
        return other is net is default
    return is_net
is_net = make(net)
def is_default(other=net):
    return is_net(other), other is net
"""

USES = (
    "%%distributed\nprint(first(3), first.calls)\nprint(described(), Another.plugins)",
    "%%distributed\nprint(tree[0].parent.value, Node(4).value, known['first'] is first)",
    "%%distributed\nprint(home(), len(is_default()))",
    "%%distributed\nfrom __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass Own:\n    parent: Own | None = None\nprint(Own())",
)


def test_a_script_registers_what_definitions_register(kernel: Notebook, elsewhere: Path) -> None:
    """Definitions register themselves in the script, too; lines name values that are missing."""
    kernel.run("%dist_restart -n 1")
    kernel.run(DEFINITIONS)
    shown = [kernel.run(source).text for source in USES]
    shown.append(kernel.run("%%distributed\ndist.barrier()\nprint(len(Hub.found))").text)
    said = kernel.run("%dist_export registered.py").text
    assert said.splitlines()[1:] == [
        "not carried over:",
        "  `app`: definitions run with the one that its cell makes, not its value",
        "  `net`: definitions run with the one that its cell makes, not its value",
        "  Hub.found, as set since the definition of `Hub`",
    ]
    told = torchrun(elsewhere, kernel.folder / "registered.py", 1).splitlines()
    lines = [line for text in shown for line in text.splitlines()[1:]]
    expected = [line for line in lines if not line.startswith("──")]
    assert told == [*expected[:-1], "0"]


def test_a_script_has_the_backend_of_its_world() -> None:
    """A script has the backend of its world, and names environment variables without values."""
    assert group_of(World(3, log_dir="")) == ("", ())
    asked = group_of(World(2, backend="gloo", env={"TOKEN": "secret"}))
    assert asked == ("gloo", ("the environment of the workers: TOKEN",))
    assert group_of(World(2, backend="none")) == ("none", ())


def test_each_mistake_of_an_export_is_an_error(kernel: Notebook) -> None:
    """Each mistake is explained by an error, and existing files stay unless `--force` is given."""
    kernel.run("%dist_restart -n 2")
    assert "`%dist_export train.py`" in kernel.run("%dist_export").error
    assert "ends in .py" in kernel.run("%dist_export train").error
    assert "there is no folder nowhere" in kernel.run("%dist_export nowhere/x.py").error
    folder = kernel.folder
    (folder / "mine.py").write_text("mine")
    assert (
        "`%dist_export --force mine.py` overwrites it" in kernel.run("%dist_export mine.py").error
    )
    assert (folder / "mine.py").read_text() == "mine"
    assert "no `%%distributed` cell has succeeded" in kernel.run("%dist_export new.py").error
    kernel.run("%%distributed\nx = 1")
    assert kernel.run("%dist_export --force mine.py").errors == []
    assert "x = 1" in (folder / "mine.py").read_text()
    kernel.run("import numpy\nmany = numpy.ones(3)")
    kernel.run("%%distributed\ny = many")
    (folder / "blocked_values.pt").mkdir()
    error = kernel.run("%dist_export --force blocked.py").error
    assert error.endswith("blocked_values.pt already exists.")
    kernel.run("import os\nreplace, os.replace = os.replace, lambda *_: open('/nosuch/x')")
    assert "No such file" in kernel.run("%dist_export lost.py").error
    kernel.run("os.replace = replace")
    assert not [
        each for each in folder.iterdir() if each.name.startswith((".", "blocked.py", "lost"))
    ]
    kernel.run("%dist_shutdown")
    assert "needs workers" in kernel.run("%dist_export new.py").error
