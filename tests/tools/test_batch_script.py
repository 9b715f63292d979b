"""Tests of `nbdist.tools.batch_script`: what stands where, and what is missing."""

from __future__ import annotations

import ast
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as some
from IPython.core.inputtransformer2 import TransformerManager

from nbdist.config import Patience
from nbdist.notebook.shipping.free_names import names_used
from nbdist.notebook.shipping.plan import version_now
from nbdist.output.events import Display, Done, Failure
from nbdist.tools.batch_script import BatchScript, Composer, in_order, title_of
from nbdist.tools.origins import Origins
from nbdist.tools.script_text import Setting
from nbdist.values.identity import Identity
from nbdist.wire.work import Call, Script, Source, Task, Work
from nbdist.world.names import NameTable, Shipped
from nbdist.world.past import Kind, Past, PastTask
from nbdist.world.running import RunningTask
from nbdist.world.sent import Crew
from nbdist.world.states import Machines


class Lab:
    """A notebook of two ranks whose cells are not run, only said to have been."""

    def __init__(self, **namespace: Any) -> None:
        self.namespace = namespace
        self.past = Past()
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
        needs: dict[str, set[str]] | None = None,
    ) -> None:
        """A task that has ended, with these names of the notebook as they are now."""
        self._count += 1
        work = Source(work) if isinstance(work, str) else work
        table, needs = NameTable(self.namespace), needs or {}
        shipped = {
            name: Shipped(
                version_now(name, table),
                Identity(self.namespace[name]),
                frozenset(needs.get(name, ())),
            )
            for name in names
        }
        task = Task("id", ranks, work, execution_count=self._count, key=key)
        crew = Crew(2, "gloo", Machines.one("here", 2), {}, {}, heals=True)
        running = RunningTask(task, Patience(), crew, shipped)
        for rank in ranks:
            if shows:
                running.receive(rank, Display({}, {}, is_result=True))
            if fails:
                running.receive(rank, Failure("ValueError", "bad", (), 1))
            bound = frozenset(made.split())
            running.receive(rank, Done("error" if fails else "ok", 0.1, bound))
        self.past.add(running)

    def script(self, backend: str = "") -> BatchScript:
        table = NameTable(self.namespace)
        script = Composer(
            self.past,
            self.namespace,
            Origins(self.namespace, self.cells),
            TransformerManager().transform_cell,
            lambda name: version_now(name, table),
        ).compose(Setting("train", 2, backend, "a.ipynb"))
        ast.parse(script.text)
        return script

    def body(self) -> str:
        """The script below what every worker has."""
        text = self.script().text
        return text.partition('init_process_group("gloo")\n')[2].strip()


def test_the_whole() -> None:
    """Names that a cell takes stand above, cells in their order, some for some ranks."""
    lab = Lab(lr=0.1, words=["a", "b"])
    lab.ran("# %%distributed -n 2\nimport math\nx = math.pi * lr", "lr", made="x")
    lab.ran("# %%rank 1\nprint(words)", "words", ranks=(1,))
    lab.ran("x", shows=True)
    script = lab.script()
    assert (
        script.text
        == '''\
"""The distributed cells of a.ipynb, written by `%dist_export` of nbdist.

    torchrun --nproc-per-node 2 train.py
"""

import math
import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
else:
    device = torch.device("cpu")
    dist.init_process_group("gloo")

lr = 0.1
words = ["a", "b"]

# --- In [1] ---
x = math.pi * lr

# --- In [2] ---
if rank == 1:
    print(words)

# --- In [3] ---
print(repr(x))

dist.destroy_process_group()
'''
    )
    assert (script.files, script.cells, script.lost) == ((), 3, ())


def test_backends() -> None:
    """The one that was asked for, and none where there was no group."""
    lab = Lab()
    lab.ran("x = 1")
    assert 'dist.init_process_group("mpi")' in lab.script("mpi").text
    assert "local_rank % torch.cuda.device_count()" in lab.script("mpi").text
    assert "dist" not in lab.script("none").text.partition('"""\n\n')[2]


def test_a_value_that_changed_between_cells() -> None:
    """Each cell has what it was sent, also what only its functions use."""
    lab = Lab(lr=0.1)
    lab.cells = ["scale = lambda x: x * lr"]
    exec(lab.cells[0], lab.namespace)
    lab.namespace["scale"].__module__ = "__main__"
    lab.ran("a = scale(1)", "lr", "scale", needs={"scale": {"lr"}})
    lab.namespace["lr"] = 0.01
    lab.ran("b = scale(1)", "lr")
    assert lab.body().split("\n") == [
        "lr = 0.1",
        "scale = lambda x: x * lr",
        "",
        "# --- In [1] ---",
        "a = scale(1)",
        "",
        "# --- In [2] ---",
        "lr = 0.01",
        "b = scale(1)",
        "",
        "dist.destroy_process_group()",
    ]


def test_a_name_that_cells_have_bound_meanwhile() -> None:
    """The notebook's comes right before the cell that it went along with."""
    lab = Lab(x=5)
    lab.ran("x = 1", made="x")
    lab.ran("y = x", made="y")
    lab.ran("", "x")  # pushed
    lab.ran("z = x")
    assert "# --- In [2] ---\ny = x" in lab.body()
    assert "# --- In [4] ---\nx = 5\nz = x" in lab.body()


def test_a_value_that_is_sent_again() -> None:
    """Also where it is the same: a cell has bound the name meanwhile."""
    lab = Lab(x=numpy.ones(3), y=1)
    lab.ran("a = x, y", "x", "y")
    lab.ran("x = y = 0", made="x y")
    lab.ran("b = x, y", "x", "y")
    script = lab.script()
    assert script.text.count('x = np.load(DATA / "x.npy")\n') == 2
    assert 'x = np.load(DATA / "x.npy")\ny = 1\nb = x, y' in script.text
    assert len(script.files) == 1
    assert script.lost == ()


def test_what_a_class_of_the_notebook_takes_from_cells() -> None:
    """It stands below the cell that makes its base."""
    lab = Lab(Net=type("Net", (), {"__module__": "__main__"}))
    lab.cells = ["class Net(Base):\n    pass"]
    lab.ran("class Base:\n    pass", made="Base")
    lab.ran("net = Net()", "Net")
    assert lab.body().split("\n")[-8:] == [
        "# --- In [2] ---",
        "class Net(Base):",
        "    pass",
        "",
        "",
        "net = Net()",
        "",
        "dist.destroy_process_group()",
    ]


def test_imports_that_cannot_stand_above() -> None:
    """Of some ranks, of a name that means something else before, or after a setting."""
    lab = Lab()
    lab.ran("# %%rank 0\nimport json\njson", ranks=(0,))
    lab.ran("os2 = 1")
    lab.ran("import os as os2")
    lab.ran("from math import *\nx = pi")
    text = lab.body()
    assert "if rank == 0:\n    import json\n\n    json" in text
    assert "# --- In [3] ---\nimport os as os2" in text
    early = Lab()
    early.ran("import os\nos.environ['X'] = '1'")
    early.ran("import json")
    assert "# --- In [2] ---\nimport json" in early.body()


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_left_out_is_named(*, fails: bool) -> None:
    """With what it had bound, and with the names that are missing for it."""
    lab = Lab(late=1)
    lab.ran("x = 1\nraise ValueError", made="x", fails=fails)
    lab.ran(Script("file", "prepare.py", ("--all",)), made="data")
    lab.ran(Call("snapshot.read"), made="model")
    lab.ran("y = x, data, model, late, nothing, Out[3]", made="y")
    lab.past.gathered["loss"] = None
    lost = "\n".join(lab.script().lost)
    if fails:
        assert "`x` is used and not there: In [1] failed" in lost
        assert "In [1] failed (ValueError), which bound x" in lost
    assert ("`x`" in lost) == fails
    for said in (
        "`data` is used and not there: `%dist_run prepare.py --all` bound it",
        "`%dist_run prepare.py --all`, which bound data",
        "`model` is used and not there: `%dist_restore` bound it",
        "`%dist_restore`, which bound model",
        "when `late` was sent: the script has it as it is",
        "`nothing` is used and not there: no cell binds it",
        "`Out` is used and not there: it is IPython's",
        "what the notebook itself did with loss, which were gathered",
    ):
        assert said in lost
    assert "- `nothing` is used and not there: no cell binds it\n" in lab.script().text


def test_cells_that_ran_again_out_of_order() -> None:
    """Counted once; what only a later one binds is told."""
    lab = Lab()
    lab.ran("x = 1", key="a", made="x")
    lab.ran("y = x", key="b", made="y")
    lab.ran("x = 1\nz = y", key="a", made="x z")
    script = lab.script()
    assert "# --- In [3], which ran 2 times ---\nx = 1\nz = y" in script.text
    assert script.text.index("In [3]") < script.text.index("y = x")
    assert script.lost == ("In [3] uses y, which a later cell binds",)


def test_what_has_changed_since() -> None:
    """A value is written as it is; that it was another one is said."""
    lab = Lab(data=[1], gone=[2], lock=object())
    lab.ran("x = data, gone", "data", "gone")
    lab.namespace["data"].append(2)
    del lab.namespace["gone"]
    script = lab.script()
    assert "data = [1, 2]" in script.text
    assert "`data` has changed since it was sent: the script has it as it is" in script.lost
    assert "`gone` was sent to the workers and is gone from the notebook" in script.lost


def test_display() -> None:
    """It prints where there is no notebook."""
    lab = Lab()
    lab.ran("display(1)")
    assert "\n\n\ndef display(*values):\n" in lab.script().text
    assert lab.script().lost == ()


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
    """Whatever the notebook and its cells have bound, in whatever order, also the same names."""
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
        exec(lab.cells[0], workers)  # where it is, it looks up names in the workers
        exec(f"{name} = {value}", workers)
        lab.ran(f"{name} = {value}", *sent, made=name, needs={"f": {"n2"}})
        owned.add(name)
    text = lab.script().text.partition('init_process_group("gloo")\n')[2]
    there: dict[str, Any] = {}
    exec(text.replace("dist.destroy_process_group()", ""), there)
    assert (there["w1"], there["w2"]) == (workers["w1"], workers["w2"]), text


def task(first: int, last: int = 0, runs: int = 1, kind: Kind = "cell", text: str = "") -> PastTask:
    last = last or first
    return PastTask(
        kind=kind, text=text, number=last + 10, ranks=(0,), on_all=True, status="ok",
        made=frozenset(), shows_value=False, draws=False, first=first, last=last, runs=runs,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("again", "between", "order"),
    [
        ("train()", "evaluate()", [2, 1]),
        ("model = Net()", "train(model)", [1, 2]),
        ("y = x", "x = 1", [2, 1]),
    ],
)
def test_a_cell_that_ran_again(again: str, between: str, order: list[int]) -> None:
    """Where it ran last, but before what has used what it binds."""
    found = in_order([task(1, 3, 2), task(2)], {1: again, 2: between})
    assert [each.first for each in found] == order


def test_titles() -> None:
    """For code and for people."""
    assert title_of(task(1)) == "cell 11"
    assert title_of(task(1), shown=True) == "In [11]"
    assert title_of(task(1, kind="script", text="a.py --x")) == "`%dist_run a.py --x`"
    assert title_of(task(1, kind="call", text="snapshot.read")) == "`%dist_restore`"
