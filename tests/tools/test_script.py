"""Tests of exported scripts (`nbdist.tools.export`): their cells, variables and missing names."""

from __future__ import annotations

import ast
import math
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist.config import Patience
from nbdist.notebook.free_names import names_used
from nbdist.notebook.shipping import version_now
from nbdist.output.events import Display, Done, Failure
from nbdist.tools.cell_code import (
    Statements,
    attributes_since,
    cell_code,
    definitions_to_read,
    guard_by_rank,
    literal,
    names_read_at_once,
)
from nbdist.tools.export import EPILOGUE, Composer, ExportedScript
from nbdist.values.payload import Identity
from nbdist.wire.work import CellCode, OpCall, Task, Work
from nbdist.wire.work import Script as ScriptFile
from nbdist.world.name_table import NameTable, Sent
from nbdist.world.sent_objects import Parcel
from nbdist.world.states import Machines
from nbdist.world.task_history import TaskHistory
from nbdist.world.task_run import Members, TaskRun

TRANSFORM = TransformerManager().transform_cell


class Lab:
    """A notebook of two ranks whose cells do not run, but are recorded as tasks that have ended."""

    def __init__(self, **namespace: Any) -> None:
        self.namespace = namespace
        self.past = TaskHistory()
        self.table = NameTable(namespace)
        self.cells: list[str] = []
        self._count = 0

    def ran(
        self,
        work: Work | str,
        *names: str,
        made: str = "",
        ranks: tuple[int, ...] = (0, 1),
        fails: bool = False,
        key: str = "",
        shows: bool = False,
        stops: bool = False,
        needs: dict[str, set[str]] | None = None,
    ) -> None:
        """Record a task that has ended, with these names of the notebook as they are now."""
        self._count += 1
        work = CellCode(work) if isinstance(work, str) else work
        needs = needs or {}
        shipped = {}
        for name in names:
            what = version_now(name, self.table), Identity(self.namespace[name])
            shipped[name] = Sent(*what, frozenset(needs.get(name, ())))
        task = Task("id", ranks, work, execution_count=self._count, key=key)
        members = Members(2, "gloo", Machines.one("here", 2), {}, {}, heals=True)
        parcels = dict.fromkeys(ranks, Parcel(shipped))
        running = TaskRun(task, Patience(), members, parcels)
        running.stop.presses = int(stops)
        for rank in ranks:
            if shows:
                running.receive(rank, Display({}, {}, is_result=True))
            if stops:
                running.receive(rank, Failure("KeyboardInterrupt", "", (), 1))
            if fails:
                running.receive(rank, Failure("ValueError", "bad", (), 1))
            bound = frozenset(made.split())
            running.receive(rank, Done("error" if fails or stops else "ok", 0.1, bound))
        self.past.add(running)

    def script(self, backend: str = "") -> ExportedScript:
        cells = Statements(self.cells)
        script = Composer(self.past, self.table, cells, TRANSFORM).compose(
            Path("train.py"), 2, backend
        )
        ast.parse(script.text)
        return script

    def body(self) -> str:
        """Return the part of the script with its cells."""
        text = self.script().text
        start = text.index("# --- ")
        return text[start:].removesuffix(f"\n\n{EPILOGUE}\n")


# --- the parts of a script --------------------------------------------------------------------


def test_a_script_has_cells_below_their_variables() -> None:
    """Cells are in their order, below the variables that they use, and some are for some ranks."""
    lab = Lab(lr=0.1, words=["a", "b"])
    lab.ran("# %%distributed -n 2\nimport math\nx = math.pi * lr", "lr", made="x")
    lab.ran("# %%rank 1\nprint(words)", "words", ranks=(1,))
    lab.ran("x", shows=True)
    script = lab.script()
    assert script.text == WHOLE
    assert (script.saved, script.cells, script.omitted) == ((), 3, ())
    lab.ran("display(1)\ntrack(loss=1)")
    other = lab.script("mpi").text
    assert 'dist.init_process_group("mpi")' in other
    assert "\ndisplay = print\n" in other
    assert "\ntrack = lambda **_: None\n" in other
    assert "process_group" not in lab.script("none").text


WHOLE = '''\
"""The distributed cells of a notebook, written by `%dist_export` of nbdist.

    torchrun --nproc-per-node 2 train.py
"""

import os
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")
dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")

# --- In [1] ---
lr = 0.1
import math
x = math.pi * lr

# --- In [2] ---
words = ['a', 'b']
if rank == 1:
    print(words)

# --- In [3] ---
print(repr(x))

# A rank that ends while another rank still connects to it would break the start of that rank.
dist.barrier()
dist.destroy_process_group()
'''


def test_a_saved_value_sent_again_is_loaded_again() -> None:
    """A saved value that was sent again is loaded again: cells may have changed the first."""
    lab = Lab(x=np.ones(3), y=1)
    lab.ran("a = x, y", "x", "y")
    lab.ran("x = y = 0", made="x y")
    lab.ran("b = x, y", "x", "y")
    body = lab.body()
    assert "x = NOTEBOOK['x']\ny = 1\na = x, y" in body
    again = 'x = torch.load(VALUES, map_location="cpu", weights_only=False)'
    assert f"{again}['x']\ny = 1\nb = x, y" in body
    assert (lab.script().saved, lab.script().omitted) == (("x",), ())


def test_a_replaced_definition_is_written_again() -> None:
    """A definition that a cell has replaced is written again above the cell that got it again."""
    lab = Lab()
    lab.cells = ["def f(): return 1"]
    exec(lab.cells[0], lab.namespace)
    lab.namespace["f"].__module__ = "__main__"
    lab.ran("a = f()", "f", made="a")
    lab.ran("f = len", made="f")
    lab.ran("b = f()", "f", made="b")
    assert lab.body() == (
        "# --- from the notebook ---\ndef f(): return 1\n\n# --- In [1] ---\na = f()\n\n"
        "# --- In [2] ---\nf = len\n\n# --- In [3] ---\ndef f(): return 1\nb = f()"
    )


def test_classes_of_saved_values_are_defined_first() -> None:
    """Classes of saved values are defined before the file is read, with their base classes."""
    main = types.ModuleType("__main__")
    exec("class Base: pass\nclass Point(Base): pass", vars(main))
    main.Tensor = type("Tensor", (torch.Tensor,), {"__module__": "__main__"})
    lab = Lab(Base=main.Base, Point=main.Point, points=[main.Point(), np.ones(2)])
    lab.cells = ["class Base: pass\n", "class Point(Base): pass"]
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        lab.ran("use(1)")
        lab.ran("use(points)", "points")
        lines = lab.body().split("\n")
        assert definitions_to_read([torch.ones(1).as_subclass(main.Tensor)]) == {"Tensor"}
    finally:
        sys.modules["__main__"] = before
    assert lines[1:3] == ["class Base: pass", "class Point(Base): pass"]
    assert lines[3] == 'VALUES = __file__.removesuffix(".py") + "_values.pt"'
    assert lines[4].startswith("NOTEBOOK = torch.load(VALUES, ")
    assert "points = NOTEBOOK['points']" in lines


def test_imports_stay_where_they_are() -> None:
    """Imports of the notebook are with its definitions; only `__future__` imports go to the top."""
    lab = Lab(np=np, torch_nn=torch.nn)
    lab.cells = ["import numpy as np\nfrom torch import nn as torch_nn"]
    lab.ran("# %%rank 0\nimport json\njson", ranks=(0,))
    lab.ran("import a.b, c as d  # both\nos.environ['X'] = '1'; import late\nnp", "np")
    lab.ran("from math import *\nx = pi, np", "np")
    plain = lab.script().text
    assert lab.body() == (
        "# --- from the notebook ---\nimport numpy as np\n\n"
        "# --- In [1] ---\nif rank == 0:\n    import json\n    json\n\n"
        "# --- In [2] ---\nimport a.b, c as d  # both\nos.environ['X'] = '1'; import late\nnp\n\n"
        "# --- In [3] ---\nfrom math import *\nx = pi, np"
    )
    future = "from __future__ import annotations"
    assert future not in plain
    lab.ran(f"{future}\nclass Node:\n    parent: Node = None")
    lab.ran(f"{future}; y: undefined = 1")
    text = lab.script().text
    assert text.count(f"\n{future}\n") == 1
    assert f'"""\n\n{future}\nimport os\n' in text
    assert text.endswith(
        f"# --- In [4] ---\n# {future}: it stands at the top\n"
        "class Node:\n    parent: Node = None\n\n"
        f"# --- In [5] ---\npass; y: undefined = 1\n\n{EPILOGUE}\n"
    )
    assert lab.script().missing == ()
    compile(text, "train.py", "exec")


def test_names_are_above_definitions_that_run_with_them() -> None:
    """Names are above the definitions that run with them; names that no cell made are missing."""
    lab = Lab(size=2, sizes=[1], names=np.ones(3), cfg={}, math=math)
    lab.cells = [
        "import math",
        "sizes = [1]",
        "cfg = {}",
        "def f(a=size, b=sizes, c=names): b, cfg",
    ]
    exec(lab.cells[-1], lab.namespace)
    lab.namespace["f"].__module__ = "__main__"
    # Definitions have a name also if a cell imports or binds the name, too.
    lab.cells.append("def g(x=math.pi): return f(x), late")
    exec(lab.cells[-1], lab.namespace)
    lab.namespace["g"].__module__ = "__main__"
    lab.ran("import math\nf()\ng()\nlate = sizes", "f", "g", "sizes", "cfg", made="late")
    script = lab.script()
    assert lab.body() == (
        "# --- from the notebook ---\nsize = 2\nsizes = [1]\n"
        "def f(a=size, b=sizes, c=names): b, cfg\n"
        "import math\ndef g(x=math.pi): return f(x), late\n"
        'VALUES = __file__.removesuffix(".py") + "_values.pt"\n'
        'NOTEBOOK = torch.load(VALUES, map_location="cpu", weights_only=False)\n\n'
        "# --- In [1] ---\ncfg = {}\nimport math\nf()\ng()\nlate = sizes"
    )
    assert script.missing == ("names",)
    assert script.omitted == (
        "`names`: definitions run with the one that its cell makes, not its value",
        "`names` is used and not there",
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(x: Row = base) -> Rows: return later", {"Row", "base", "Rows"}),
        ("class C:\n    f = lambda self, n=base: later", {"f", "base"}),
        ("@decorated\nasync def f(*rest: Row, key=base): later", {"decorated", "Row", "base"}),
    ],
)
def test_a_definition_reads_defaults_and_annotations_at_once(source: str, names: set[str]) -> None:
    """The script has to bind the names above the definition, but not those in its body."""
    assert names_read_at_once(source) == names


@pytest.mark.parametrize("fails", [True, False])
def test_tasks_that_are_left_out_are_named(*, fails: bool) -> None:
    """A task that is left out is named, with the names that it bound and that later cells lack."""
    lab = Lab(late=1)
    lab.ran("x = 1\nraise ValueError", made="x", fails=fails)
    lab.ran(ScriptFile("file", "prepare.py", ("--all",)), made="data")
    lab.ran(OpCall("snapshot.read"), made="model")
    lab.ran("y = x, data, model, late, nothing, Out[3]", made="y")
    lab.past.gathered["loss"] = None
    lost = "\n".join(lab.script().omitted)
    if fails:
        assert "In [4] uses x, which no cell before it binds" in lost
        assert "In [1] failed (ValueError), which bound x" in lost
    assert ("uses x" in lost) == fails
    for said in (
        "In [4] uses data, which no cell before it binds",
        "`%dist_run prepare.py --all`, which bound data",
        "In [4] uses model, which no cell before it binds",
        "`%dist_restore`, which bound model",
        "`late` as it was sent: the script has it as it is now",
        "`nothing` is used and not there",
        "`Out` is used and not there",
        "what the notebook itself did with loss, which were gathered",
    ):
        assert said in lost
    assert "- `nothing` is used and not there\n" in lab.script().text


def test_a_stopped_cell_has_a_comment() -> None:
    """A stopped cell, whose variables ranks keep, is in the script with a comment and a line."""
    lab = Lab()
    lab.ran("model = 1\nwhile True:\n    step = 2", made="model step", stops=True)
    lab.ran("model, step")
    script = lab.script()
    assert (script.cells, script.missing) == (2, ())
    assert lab.body().startswith(
        "# --- In [1] ---\n# This cell was stopped before its end, and the script runs all of it.\n"
        "model = 1\n"
    )
    assert script.omitted == (
        "In [1]: this cell was stopped before its end, and the script runs all of it",
    )


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("for i in range(3):\n    total = i\nprint(total, i)", ()),
        ("if rank:\n    flag = 1\nelse:\n    flag = 2\nflag", ()),
        ("if rank:\n    flag = 1\nflag, [flag for _ in 'a']\ndef f(): return flag", ()),
        ("try:\n    x = 1\nexcept ValueError:\n    pass\nx", ()),
        ("total += 1", ("total",)),
        ("while total:\n    total = 1", ("total",)),
        ("[flag for _ in 'a']\nif rank:\n    flag = 1", ("flag",)),
        ("for i in items:\n    x = i\nx", ("items",)),
    ],
)
def test_names_bound_in_loops_exist_below_them(source: str, missing: tuple[str, ...]) -> None:
    """Names that loops and conditions bind exist below them; names read above are missing."""
    lab = Lab()
    lab.ran(source, made="total flag i x")
    assert lab.script().missing == missing


def test_a_cell_that_ran_again_is_written_once() -> None:
    """A cell that ran again is written once, at its last run; a name that comes late is named."""
    lab = Lab()
    lab.ran("x = 1", key="a", made="x")
    lab.ran("y = x", key="b", made="y")
    lab.ran("x = 1\nz = y", key="a", made="x z")
    script = lab.script()
    assert lab.body() == (
        "# --- In [2] ---\ny = x\n\n# --- In [3], which ran 2 times ---\nx = 1\nz = y"
    )
    assert script.omitted == ("In [2] uses x, which no cell before it binds",)


def test_variables_that_functions_use_are_written_again() -> None:
    """A variable is above each cell with which it was sent, also if only a function reads it."""
    lab = Lab(lr=0.1)
    lab.ran("def step(): return lr\nstep()", "lr", made="step")
    lab.namespace["lr"] = 0.5
    lab.ran("step()", "lr")
    given = "# --- In [2] ---\nlr = 0.5\nstep()"
    assert given in lab.body()
    assert lab.script().omitted == ()


def test_values_that_changed_since_are_named() -> None:
    """A value is written as it is now, and a line says that ranks got another value."""
    lab = Lab(data=[1], gone=[2], lock=threading.Lock())
    lab.ran("x = data, gone, lock", "data", "gone")
    lab.namespace["data"].append(2)
    del lab.namespace["gone"]
    script = lab.script()
    assert "data = [1, 2]" in script.text
    assert "`data` as it was sent: the script has it as it is now" in script.omitted
    assert "`gone` was sent, and is gone from the notebook" in script.omitted
    assert any(each.startswith("`lock` cannot be saved (TypeError: ") for each in script.omitted)
    lab.cells = ["lock = threading.Lock()"]
    assert "lock = threading.Lock()" in lab.script().text


STEPS = some.lists(
    some.one_of(
        some.tuples(some.sampled_from(["n1", "n2"]), some.integers(0, 9)),
        some.tuples(
            some.sampled_from(["w1", "w2", "n1"]),
            some.sampled_from(["n1 + n2", "w1 * 2 + n2", "w1 - w2", "sum(n3) + w2", "f(n1)"]),
        ),
    ),
    max_size=12,
)
"""A number is bound by the notebook, an expression by a cell on the workers."""


@given(STEPS)
def test_the_script_leads_to_the_same_values(steps: list[tuple[str, int | str]]) -> None:
    """A script leads to the workers' values, in whatever order notebook and cells bound names."""
    lab = Lab(n1=1, n2=2, n3=[3])
    lab.cells = ["def f(x):\n    return x + n2"]
    exec(lab.cells[0], lab.namespace)
    lab.namespace["f"].__module__ = "__main__"
    workers: dict[str, Any] = {"w1": 10, "w2": 20}
    lab.ran("w1, w2 = 10, 20", made="w1 w2")
    owned = {"w1", "w2"}
    for name, value in steps:
        if isinstance(value, int):
            lab.namespace[name] = value
            owned.discard(name)
            continue
        used = names_used(f"{value}, n2" if "f(" in value else value)
        sent = sorted((used - owned) & lab.namespace.keys())
        workers |= {each: lab.namespace[each] for each in sent}
        exec(lab.cells[0], workers)  # here `f` looks up names in the workers
        exec(f"{name} = {value}", workers)
        lab.ran(f"{name} = {value}", *sent, made=name, needs={"f": {"n2"}})
        owned.add(name)
    there: dict[str, Any] = {}
    exec(lab.body(), there)
    assert (there["w1"], there["w2"]) == (workers["w1"], workers["w2"]), lab.body()


# --- cells as plain Python --------------------------------------------------------------------


def code(source: str, **options: Any) -> str:
    return cell_code(source, TRANSFORM, **options)[0]


def test_only_lines_of_cell_magics_are_removed() -> None:
    """Only lines of cell magics are removed; comments, quotes and empty lines stay as typed."""
    body = "# why\nx = {'a':1}   # here\n\n\ny = 'ä' + '''\n  b'''"
    for line in ("# %%distributed -n 4 -r 0", "%%rank 0\n%%time", "%%capture out"):
        assert code(f"{line}\n{body}") == body


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("x", "print(repr(x))"),
        ("a = 1\nf(\n    a\n)  # last", "a = 1\nprint(repr(f(\n    a\n)))  # last"),
        ("x = 1", "x = 1"),
        ("'ä', x", "print(repr(('ä', x)))"),
        ("(1), (2)", "print(repr(((1), (2))))"),
        ("x;", "print(repr(x));"),
    ],
)
def test_a_shown_last_value_is_printed(source: str, told: str) -> None:
    """The last value is printed if the notebook showed it; else the code does not change."""
    assert code(source) == source
    assert code(source, shows_value=True) == told
    ast.parse(told)


NONE, ITSELF = "has no counterpart in a script", "the script calls it itself"
RUN = "import subprocess\n"


@pytest.mark.parametrize(
    ("source", "text", "lost"),
    [
        ("%time x = f()", "x = f()", []),
        ("%cd data", "os.chdir(os.path.expanduser('data'))", []),
        ("%env KEY=some value", "os.environ['KEY'] = 'some value'", []),
        ("%set_env KEY 1", "os.environ['KEY'] = '1'", []),
        ("!ls", f"{RUN}subprocess.run('ls', shell=True, check=False)", []),
        ("y = !echo {rank} $n $HOME",
         f"{RUN}y = subprocess.run(f'echo {{rank}} {{n}} $HOME', shell=True, check=False, "
         "capture_output=True, text=True).stdout.splitlines()", []),
        ("%%bash\nls\npwd\n",
         f"{RUN}subprocess.run([\"bash\", \"-c\", 'ls\\npwd\\n'], check=True)", []),
        ("%%writefile a.txt\nx\n", "import pathlib\npathlib.Path('a.txt').write_text('x\\n')", []),
        ("get_ipython().kernel", "get_ipython().kernel", []),
        # Alone such lines become comments; inside a block `pass` keeps the block whole.
        ("x?", f"# %pinfo x: {NONE}", [f"`%pinfo x`: {NONE}"]),
        ("if x:\n    %who\n    y = 1", f"if x:\n    pass  # %who: {NONE}\n    y = 1",
         [f"`%who`: {NONE}"]),
        ("match y:\n    case 1:\n        !ls $n",
         f"{RUN}match y:\n    case 1:\n        subprocess.run(f'ls {{n}}', "
         "shell=True, check=False)",
         []),
        ("%%html\n<b>\n", f"# %%html: {NONE}; the code under it is left out",
         [f"`%%html`: {NONE}; the code under it is left out"]),
        ("!ls {a b} {c}", "# !ls {a b} {c}: what is filled in cannot be written in a script",
         ["`!ls {a b} {c}`: what is filled in cannot be written in a script"]),
        ("get_ipython().ask(1)", "# get_ipython().ask(1): there is no IPython in a script",
         ["`get_ipython().ask(1)`: there is no IPython in a script"]),
        ("x = = 1", "# it cannot be read as Python:\n# x = = 1", ["it cannot be read as Python"]),
        # The script itself makes and destroys the group.
        ("dist.init_process_group(); x = 1", "pass; x = 1",
         [f"`dist.init_process_group()`: {ITSELF}"]),
        ("def end():\n    dist.destroy_process_group()",
         f"def end():\n    pass  # dist.destroy_process_group(): {ITSELF}",
         [f"`dist.destroy_process_group()`: {ITSELF}"]),
    ],
)  # fmt: skip
def test_magics_become_python_or_comments(source: str, text: str, lost: list[str]) -> None:
    """Code for IPython becomes Python that does the same, or a comment that says why not."""
    assert cell_code(source, TRANSFORM, {"n"}) == (text, lost)


def test_a_cell_with_await_becomes_a_function() -> None:
    """A cell with `await` becomes an async function that binds global names, run by asyncio."""
    lab = Lab()
    lab.ran("# %%rank 1\nx = await f()\nasync with y as z:\n    pass\nx", ranks=(1,), shows=True)
    lab.ran("async def f():\n    await g()")
    assert lab.body() == (
        "# --- In [1] ---\nif rank == 1:\n    import asyncio\n"
        "    async def cell_1():\n        global x, z\n"
        "        x = await f()\n        async with y as z:\n            pass\n"
        "        print(repr(x))\n\n\n    asyncio.run(cell_1())\n\n"
        "# --- In [2] ---\nasync def f():\n    await g()"
    )
    assert lab.script().omitted == (
        "In [1]: tasks that it leaves running end with its event loop",
        "In [1] uses f, which no cell before it binds",
        "`y` is used and not there",
        "`g` is used and not there",
    )


LINES = some.lists(
    some.sampled_from(
        ["x = '''a", "b'''", 'f"""{1', '}"""', "if 1:", "    y = 1", "(", ")", "# c", "", '"""a"""']
    ),
    max_size=8,
)


@given(LINES)
def test_a_condition_by_rank_keeps_the_code(lines: list[str]) -> None:
    """Any code below a condition for some ranks is the same code as without the condition."""
    assert guard_by_rank("# nothing", [3, 0]) == "if rank in (0, 3):\n    # nothing\n    pass"
    text = "\n".join(lines)
    try:
        plain = ast.parse(text)
    except SyntaxError:
        return
    if plain.body:
        [found] = ast.parse(guard_by_rank(text, [2])).body
        assert isinstance(found, ast.If)
        assert [ast.dump(each) for each in found.body] == [ast.dump(each) for each in plain.body]


# --- code that binds variables of the notebook ------------------------------------------------


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    # Without the database of the history, whose thread would outlive the shell.
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield shell
    InteractiveShell.clear_instance()


def run(shell: InteractiveShell, *cells: str) -> Statements:
    shell.reset(new_session=False)
    for cell in cells:
        shell.run_cell(cell, store_history=True)
    return Statements(shell.history_manager.input_hist_parsed)


@pytest.mark.parametrize(
    ("cell", "name", "found"),
    [
        ("import json as j", "j", "import json as j"),
        ("import os, json", "json", "import json"),
        ("from json import dumps as d", "d", "from json import dumps as d"),
        ("if True:\n    from os import path", "path", "from os import path"),
        ("import xml.dom.minidom\nimport xml.sax", "xml", "import xml.dom.minidom\nimport xml.sax"),
        ("x = __import__('json')", "x", "import json as x"),
        ("json = __import__('json')", "json", "import json"),
        ("x = __import__('json').loads", "x", "from json import loads as x"),
        ("import json\njson = 1", "json", ""),
        ("def f(): pass", "f", ""),
    ],
)
def test_modules_are_imported_as_in_a_cell(
    shell: InteractiveShell, cell: str, name: str, found: str
) -> None:
    """A module is imported as a cell has imported it, or else by the module's own name."""
    assert "\n".join(run(shell, cell).importing(name, shell.user_ns.get(name))) == found


NET = "class Net(object):\n    def forward(self):\n        return 1"
MAKE = "def make(n):\n    def add(x):\n        return x + n\n    return add\nadd = make(3)"
DOUBLE = "# doubles\n@print\n@str\ndef f(x=k):\n    # why\n    return x * scale"


@pytest.mark.parametrize(
    ("name", "cells", "found"),
    [
        ("f", [f"k = 2\n{DOUBLE}"], DOUBLE),
        ("f", ["def f(): return 2", "1 / 0\ndef f(): return 3"], "def f(): return 2"),
        ("g", ["def f(): pass", "g = f"], "g = f"),
        ("f", ["def f(): pass", "f = print(f)"], "def f(): pass\nf = print(f)"),
        ("Net", [NET, "1 / 0\nclass Net: pass"], NET),
        ("Base", ["class Base: pass"], "class Base: pass"),
        ("add", [MAKE], "add = make(3)"),
        ("n", ["exec('n = 1')"], ""),
    ],
)
def test_code_that_bound_a_name_is_found(
    shell: InteractiveShell, name: str, cells: list[str], found: str
) -> None:
    """The code of a function or class is found with decorators and comment, as it was when made."""
    assert run(shell, *cells).binding(name, shell.user_ns[name]) == found


CHANGED = {
    "def f(): pass\nf.calls = 2\nf.lock = object()": ("f.calls = 2", "f.lock"),
    "class f: a = 1; b = []; c = {}\nf.a = 3; f.b.append(4); f.c['k'] = f.d = len": (
        "f.a = 3 f.b = [4]", "f.c f.d"),
    "class f:\n def g(self): pass\ndef g(self): pass\nf.g = g": ("", "f.g"),
    "class f: a = [len]; b = dict(k=1); c = d = 2; __e = 3; g: int = 4": ("", ""),
    "class f: a: int\nf.a = 1; f.b = len": ("f.a = 1", "f.b"),
    "class f:\n if 1:\n  a = 1\n @property\n def b(self): pass\n def c(self): pass": ("", ""),
    "import enum\nclass f(enum.Enum): A = 1": ("", ""),
    "import typing\nclass f(typing.NamedTuple): a: int = 1": ("", ""),
    "import abc\nclass f(abc.ABC): a = ()": ("", ""),
    "class f:\n a = []\n b = 1\n def __init_subclass__(cls): cls.a.append(1)\n"
    "class g(f): pass\nf.b = 2": ("f.a = [1] f.b = 2", ""),
    "import functools\n@functools.singledispatch\ndef f(x): pass\nf.register(int)(len)": (
        "", "f.registry"),
}  # fmt: skip


@pytest.mark.parametrize("source", CHANGED)
def test_attributes_set_since_a_definition_are_written(source: str) -> None:
    """Small attributes set after a definition are written below it, and others are named."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)
    [text] = [
        ast.get_source_segment(source, each)
        for each in ast.parse(source).body
        if getattr(each, "name", "") == "f"
    ]
    decorators = [line for line in source.split("\n") if line.startswith("@")]
    texts, lost = attributes_since("f", namespace["f"], "\n".join([*decorators, text or ""]))
    assert (" ".join(texts), " ".join(lost)) == CHANGED[source]


VALUES = [
    *(1, 1.5, True, None, "a'b", "'\"\n", b"x", (), (1,), [], {}, {1}, set(), 1j, ...),
    *([{"a": (1, "x" * 70)}, ["y" * 70]], torch.float16, float("-inf")),
]


def test_literals_have_the_value_and_type() -> None:
    """A literal has the value and type of its object; objects that are long or odd have none."""
    for value in VALUES:
        assert repr(eval(literal(value) or "", {"torch": torch})) == repr(value)
    circle: list[object] = []
    circle.append(circle)
    wide: list[object] = [0]
    for _ in range(40):  # whose text would never end
        wide = [wide, wide]
    for each in (circle, wide, object(), sys, "x" * 2000, {1: object()}, [1.0, float("nan")]):
        assert literal(each) is None
