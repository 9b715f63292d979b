"""The variables that are sent with a cell: their owners, shared objects, and sizes."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy
import pytest
import torch
import torch.distributed

from nbdist.errors import UsageError, VariableNotSent
from nbdist.notebook.shipping import Plan, Shipment, plan, push
from nbdist.values import scan

ALL = (0, 1)

CASES = {
    "two names": ("n, xs = 4, [5]", "n + xs[0]", 9),
    "a function that uses a function": (
        "k = 2\ndef g(x): return x * k\ndef f(x): return g(x) + 1",
        "f(5)",
        11,
    ),
    "a class that uses a class and a constant": (
        "LIMIT = 3\nclass A:\n    x = 1\n"
        "class B(A):\n    def m(self): return [A, LIMIT, self.x][1:]",
        "B().m()",
        [3, 1],
    ),
    "a function with slices": (
        "def f(x):\n    return (lambda y: y[1:])(x[:-1]), x[::2]",
        "f([1, 2, 3, 4])",
        ([2, 3], [1, 3]),
    ),
    "a class that its base knows": (
        "class Base:\n    kinds = []\n"
        "    def __init_subclass__(cls): Base.kinds.append(cls)\n"
        "class A(Base): pass\nxs = [1]",
        "[kind is A for kind in A.kinds] + xs",
        [True, 1],
    ),
    "a closure": ("def make(n):\n    return lambda x: x + n\nf = make(3)", "f(1)", 4),
    "a submodule": ("import xml.dom.minidom", "xml.dom.minidom.__name__", "xml.dom.minidom"),
    "a decorator": (
        "def twice(f):\n    return lambda x: f(f(x))",
        "@twice\ndef g(x): return x + 1\ng(1)",
        3,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cell_finds_the_names_it_uses(case: str, house: Any) -> None:
    """A cell's names are sent to the workers, with those that its functions and classes need."""
    source, cell, result = CASES[case]
    house.cell(source)
    assert house.distributed(cell) == result
    assert house.names(cell) == set(), "nothing has changed since"


def is_nothing(planned: Plan) -> bool:
    """Return True if a plan sends nothing to ranks, asks them nothing, and has no notice."""
    shipment = planned.shipment()
    assert shipment == Shipment(parcels=shipment.parcels)
    assert not any(parcel.names or parcel.states for parcel in shipment.parcels.values())
    return planned.question is None


def test_names_that_a_cell_does_not_use_are_not_sent(house: Any) -> None:
    """Only used names are sent, and a name of IPython only if the user has bound the name."""
    house.cell("a, b, f = 1, 2, lambda: a")
    assert house.names("b + 1") == {"b"}
    assert is_nothing(plan("x = 1\nprint(x)", house.table, ALL))
    for name in ("In", "_", "_i3", "_12", "__name__"):
        house.notebook.names[name] = [1]
        assert house.names(f"{name}[0]") == set()
    house.notebook.names["open"] = hidden = lambda: None
    assert is_nothing(plan("open('x')", house.table, ALL, {"open": hidden}))
    house.cell("open = 5")
    assert plan("open", house.table, ALL, {"open": hidden}).shipment().names == ("open",)


def test_a_new_definition_is_sent_again(house: Any) -> None:
    """A function used by another one, a class attribute and a submodule are sent after a change."""
    house.cell("def g(): return 1\ndef f(): return g()")
    assert house.distributed("f()") == 1
    house.cell("def g(): return 2")
    assert house.names("f()") == {"g"}
    assert house.distributed("f()") == 2
    house.cell("class A:\n    x = 1\na = A()")
    assert house.distributed("a.x") == 1
    house.cell("A.x = 2")
    assert house.distributed("a.x") == 2
    sys.modules.pop("xml.sax.saxutils", None)
    house.cell("import xml.dom.minidom")
    house.distributed("xml.dom.minidom.__name__")
    house.cell("import xml.sax.saxutils")
    assert house.distributed("xml.sax.saxutils.escape('<')") == "&lt;"
    assert house.names("xml.dom.minidom") == set()
    assert house.distributed("xml.dom.minidom.__name__") == "xml.dom.minidom"


def test_functions_of_ranks_get_changed_variables(house: Any) -> None:
    """Variables that a function on the ranks uses are sent again after a change, with any cell."""
    house.cell(
        "k, cfg, big = 1, {'lr': 1}, list(range(40000))\ndef g(): return k\nb, unused = 1, 1"
    )
    source = "def f(): return g(), cfg['lr'], big[0], h()\nh = lambda: b\nf()"
    assert house.distributed(source) == (1, 1, 0, 1)
    assert house.names("f()") == set()
    house.cell("k = 2\ncfg['lr'] = 3\nunused, b = 5, 4")
    assert house.names("pass") == {"k", "b"}
    assert house.changes("pass") == {"cfg"}
    assert house.distributed("f()") == (2, 3, 0, 4)
    house.cell("big[0] = 1\nbig = [*big]")
    assert house.distributed("f()") == (2, 3, 1, 4)
    house.distributed("k = 'theirs'")
    house.cell("import threading\nb = threading.Lock()")
    assert house.distributed("f()") == ("theirs", 3, 1, 4)
    assert house.names("pass") == set()
    note = "functions on the ranks use the older one that they have"
    assert house.notices == [f"`b` cannot be sent: {note}"]


def test_functions_of_ranks_use_names_bound_by_the_notebook(house: Any) -> None:
    """After the notebook binds a name of the ranks, functions of ranks use the notebook's value."""
    house.distributed("b = [1]\ndef add(x): b.append(x); return [*b]")
    house.cell("b = [3]")
    assert house.names("b = [5]\nadd(6)") == set(), "the cell binds it"
    assert house.distributed("add(27)") == [3, 27]
    assert house.names("add(28)") == set()
    house.distributed("b = 4\ndef read(): return b")
    house.cell("b = 5")
    assert house.distributed("read()", ranks=(0,)) == 5
    assert house.names("read()", ranks=(0,)) == set()
    assert house.names("read()") == {"b"}, "the other rank has its own yet"
    house.distributed("b = 6")
    house.cell("b = 7")
    assert house.names("1") == set(), "the cell calls no function"
    assert house.distributed("found = read()\nb = 8\nfound") == 7
    house.cell("b = [0] * 10_000")
    assert house.distributed("read()") == 8
    house.cell("import threading\nb = threading.Lock()")
    assert house.distributed("read()") == 8
    note = "functions on the ranks use the older one that they have"
    big = f"`b`: {note}; `%dist_push b` sends it"
    assert house.notices[-2:] == [big, f"`b` cannot be sent: {note}"]
    house.cell("b = {'lock': threading.Lock(), 'k': 1}")
    assert house.distributed("read()") == 8
    house.cell("del b['lock']")
    assert house.distributed("read()") == {"k": 1}, "it can be sent now"
    house.distributed("b = 9\nit = iter([1, 2, 3])")
    house.cell("import torch; b = torch.nn.Linear(200, 200)")
    assert house.names("v = next(it)\nb = [v]\nread()") == set(), "the cell binds it"
    assert house.distributed("read()") == 9
    house.cell("b = torch.eye(2).to_sparse()")
    assert house.distributed("read().is_sparse")
    house.distributed("device = 1\ndef where(): return device\nwhere()")
    house.cell("device = 2")
    number = len(house.notices)
    assert house.names("where()") == set()
    assert len(house.notices) == number


def test_new_views_show_memory_that_ranks_changed(house: Any) -> None:
    """New views of a tensor are sent before ranks rebind its name, and show the ranks' changes."""
    house.cell("import numpy as np, torch\nd, a = torch.zeros(4), np.zeros(4)")
    house.distributed("d.add_(20)\na[:] = 1")
    house.cell("k, v, other, none = d[:2], a[::2], torch.zeros(3), torch.zeros(0)")
    house.cell("kept = []\ntorch.func.grad(lambda x: kept.append(x) or x)(torch.tensor(1.0))")
    house.cell("leaked = kept.pop()")
    house.distributed("d = a = 5")
    assert house.distributed("k.tolist(), v.tolist()") == ([20.0, 20.0], [1.0, 1.0])
    assert house.notices == []


def test_an_unsendable_variable_leaves_the_others_linked(house: Any) -> None:
    """If a variable cannot be sent, the others keep their counterparts, also under a new name."""
    house.cell("own = 1")
    assert house.distributed("def f(): return own\nf()") == 1
    house.cell("import threading\nown, model = threading.Lock(), [1]")
    house.distributed("ref = model")
    house.cell("model.append(2)\nother = (model, threading.Lock())")
    assert house.distributed("ref, model, ref is model, f()") == ([1, 2], [1, 2], True, 1)


def test_names_that_share_an_object_share_it_on_ranks(house: Any) -> None:
    """Names that share an object share it on the ranks too, even if sent or changed separately."""
    house.cell("params = [1]\nmodel, opt = {'p': params}, [params]")
    house.distributed("kept = model\nopt")
    house.cell("opt.append('state')")
    assert house.changes("opt") == {"opt"}
    assert house.distributed("len(opt)") == 2
    assert house.distributed("opt[0] is model['p'] is kept['p']") is True
    house.cell("opt = [model['p']]")  # made after `model` was sent
    assert house.names("opt") == {"opt"}
    assert house.distributed("opt[0] is model['p'] is kept['p']") is True
    house.distributed("model = 'workers'")
    house.cell("opt.append(3)")
    house.distributed("opt")
    assert house.distributed("model") == "workers"
    house.cell("params.append(2)")
    assert house.distributed("opt[0], kept['p'], opt[0] is kept['p']") == ([1, 2], [1, 2], True)
    assert house.notices == []


def test_only_changes_and_new_names_are_sent(house: Any) -> None:
    """Changed objects and new names of sent objects are sent; changes by the workers stay."""
    house.cell("x, y = [1], [2]\na, b, c = [x], [x, y], [y]")
    house.distributed("a, b, c")
    house.cell("a.append(3)")
    assert (house.names("a"), house.changes("a")) == ({"x", "y"}, {"a"})
    assert house.distributed("a, b[0] is a[0], b[1] is c[0]") == ([[1], 3], True, True)
    house.cell("class A:\n    limits: list = []\na, b, c = A(), A(), [1]\na.x = b.x = 1")
    house.distributed("b.x = 'trained'\na.x, c")
    house.cell("a.x = 2\nc.append(2)")
    assert (house.names("a, c"), house.changes("a, c")) == ({"A"}, {"a", "c"})
    assert house.distributed("a.x, b.x, c") == (2, "trained", [1, 2])
    house.cell("A.limits.append(1)")
    assert house.distributed("a.limits is A.limits is b.limits, b.limits, b.x") == (
        True,
        [1],
        "trained",
    )
    assert house.notices == []


def test_big_values_are_announced(house: Any) -> None:
    """Before a big value is sent, a line has its size, the number of ranks and the largest part."""
    house.notebook.names["corpus"] = b"x" * 200_000_000
    shipment = house.plan("len(corpus)", (0, 1, 2, 3))
    assert shipment.big == ("corpus (191 MiB) to 4 ranks",)
    house.cell(
        "def make():\n    corpus = bytes(70_000_000)\n"
        "    def batches(): return len(corpus)\n    return batches\nbatches = make()"
    )
    shipment = house.send(plan("batches()", house.table, ALL))
    line = "batches (66.8 MiB, most of it in batches.<closure>.corpus) to 2 ranks"
    assert shipment.big == (line,)
    assert house.distributed("batches()") == 70_000_000


BIG = """
import numpy as np, torch
array = np.zeros(9_000_000)
class Data: pass
held = Data()
held.tensor, inside = torch.zeros(18_000_000), {"raw": bytearray(72_000_000)}
def uses(array=np.zeros(9_000_000)): return array
"""

CHANGES = {
    "array": "array[7_777_777] = 1",
    "held": "held.tensor.data[17_777_777] = 1",
    "inside": "inside['raw'][67_777_777] = 1",
    "uses": "uses()[7_777_777] = 1",
}


def test_a_changed_element_of_a_big_value_is_sent(house: Any) -> None:
    """A change of a single element is noticed in any big value; other values are not sent."""
    house.cell(BIG)
    house.distributed("array, held, inside, uses\nNone")
    for name, change in CHANGES.items():
        assert house.changes(", ".join(CHANGES)) == set()
        house.cell(change)
        assert house.changes(", ".join(CHANGES)) == {name}
        house.distributed(name + "\nNone")
    assert house.names(", ".join(CHANGES)) == set()
    assert house.distributed("float(array.sum() + held.tensor.sum())") == 2
    assert house.distributed("inside['raw'][67_777_777], float(uses().sum())") == (1, 1)
    assert not any("unchanged" in notice for notice in house.notices)


def test_large_memory_is_compared_by_samples(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change in huge memory may be missed, but each of very many items of a list is compared."""
    monkeypatch.setattr(scan, "QUICK_BYTES", 1 << 20)
    monkeypatch.setattr(scan, "WHOLE_LIMIT", 1 << 20)
    house.cell("import numpy as np\nbig = np.zeros(1_000_000)\nmany = [*range(1_000_000)]")
    house.distributed("len(big) + len(many)")
    house.cell("big[777] = 1; many[777] = 1")
    for _ in range(2):
        assert house.distributed("float(big[777]), many[777]") == (0, 1)
    house.cell("big += 1; many.append(1)")
    assert house.changes("big, many") == {"big", "many"}
    assert house.distributed("float(big[777]), len(many)") == (2, 1_000_001)
    house.cell("big = np.zeros(1_000_000)")
    assert house.names("big") == {"big"}


def test_the_table_keeps_nothing_big_alive(house: Any) -> None:
    """An array that the user deletes in the notebook is freed."""
    house.notebook.names["big"] = array = numpy.zeros(1_000_000)
    reference = weakref.ref(array)
    house.distributed("big.sum() and None")
    del array, house.notebook.names["big"]
    assert reference() is None


def test_a_value_that_cannot_be_pickled_stops_the_cell(house: Any) -> None:
    """The cell fails before any variable is sent, also if only a function needs the value."""
    house.cell(
        "import threading\nn = 1\nclass L: pass\nloader = L()\nloader.lock = threading.Lock()"
    )
    with pytest.raises(VariableNotSent, match=r"`loader`: `loader\.lock` \(thread lock\)"):
        plan("n, loader", house.table, ALL)
    assert house.table.owners() == {}
    house.cell("import threading\nlock = threading.Lock()\ndef f():\n    with lock: return 1")
    with pytest.raises(VariableNotSent, match="`lock`"):
        plan("f()", house.table, ALL)
    assert house.distributed("lock = __import__('threading').Lock()\nlock.locked()") is False
    assert house.distributed("f()") == 1


def test_binding_a_name_makes_it_the_notebooks_again(house: Any) -> None:
    """A name belongs to the notebook again after a cell has bound it, also to an equal object."""
    house.cell("n = 4")
    house.distributed("n = 5")
    house.cell("n = 4")
    assert house.distributed("n") == 4
    house.cell("xs = [1]")
    house.distributed("xs = [2]")
    house.notebook.run("xs = [3]")
    assert house.distributed("xs") == [3]
    house.cell("class Net: pass\nmodel = Net()")
    house.distributed("model.weight = 1\nmodel = model")
    house.distributed("model = Net()")
    house.cell("if False: model = Net()")
    assert house.names("model") == set()
    # A change that workers make in place stays until the notebook binds the name again.
    house.cell("ys = [1]")
    house.distributed("ys.append(2)")
    assert house.distributed("ys") == [1, 2]
    house.cell("ys = [1]")
    assert house.distributed("ys") == [1]


def test_functions_use_the_workers_own_names(house: Any) -> None:
    """Functions use names that only ranks have or have bound; a push sends the notebook's."""
    house.cell("model = 'notebook'\ndef f(): return model, only_there")
    house.distributed("model = 'workers'")
    assert house.distributed("only_there = 1\nf()") == ("workers", 1)
    house.cell("k = 1\ndef f(): return k\nn = 1")
    house.distributed("n = 2")
    house.send(push(["n", "f"], house.table, ALL))
    assert house.distributed("n, f()") == (1, 1)
    assert house.names("n") == set()


def test_names_that_each_worker_owns_are_never_sent(house: Any) -> None:
    """`rank`, `dist` and the like stay the worker's, as a notice says once; push is refused."""
    house.notebook.names.update(torch=torch, dist=torch.distributed)
    assert house.names("torch.zeros(1), dist.get_rank()") == set()
    house.cell("rank = 99\nimport torch.distributions as dist\ndef f(): return rank, dist")
    assert house.distributed("rank, dist = 1, 'group'\nf()") == (1, "group")
    house.distributed("rank, dist")
    house.cell("device = 'cpu'\ntorch = dist = 5")
    assert house.names("rank, device, dist, torch") == set()
    house.distributed("device = 'cuda:0'\ntorch = dist = 6\ndevice, dist, torch")
    was_ignored = "was ignored: each worker has"
    assert house.notices == [
        f"Your notebook's `dist` {was_ignored} torch.distributed",
        f"Your notebook's `rank` {was_ignored} its own",
    ]
    for name in ("rank", "dist", "torch", "device", "world_size", "local_rank"):
        with pytest.raises(UsageError, match=f"`%dist_push`: each worker has its own `{name}`"):
            push([name], house.table, ALL)


def test_ranks_that_lack_a_variable_get_it(house: Any) -> None:
    """A rank gets a variable that it lacks, or a notice is shown if another rank has bound it."""
    house.cell("n = 1")
    house.distributed("n", ranks=(0,))
    assert house.names("n", ranks=(0,)) == set()
    assert house.names("n") == {"n"}
    house.distributed("n", ranks=(1,))
    assert house.names("n") == set()
    house.cell("x = 1")
    house.distributed("x = 2", ranks=(0,))
    assert house.distributed("x") == 2
    house.cell("y = 1")
    house.distributed("y")
    house.distributed("y = 2", ranks=(0,))  # as in `if rank == 0: ...`
    assert house.distributed("y") == 2
    house.cell("z = 1")
    house.distributed("z")
    house.cell("z = 2")
    house.distributed("z = 3", ranks=(0,))
    house.distributed("z")
    assert house.notices == [
        "`x` exists on rank 0 but not on rank 1: `%dist_sync x --from 0`",
        "`z` is rank 0's own, rank 1 has an older one: `%dist_sync z --from 0 -r 1`",
    ]


def test_a_change_deep_inside_replaces_the_objects_around_it(house: Any) -> None:
    """A change deep inside replaces all objects around it that cannot be changed in place."""
    house.cell(
        "class Link:\n"
        "    def __init__(self, number, following):\n"
        "        self.number, self.following = number, following\n"
        "    def __reduce__(self):\n"
        "        return Link, (self.number, self.following)\n"
        "    def numbers(self):\n"
        "        return [self.number, *(self.following.numbers() if self.following else ())]\n"
        "chain = first = Link(0, None)\n"
        "for number in range(1, 12):\n"
        "    chain = Link(number, chain)\n"
    )
    before = [*range(11, -1, -1)]
    assert house.distributed("chain.numbers()") == before
    house.cell("first.number = 100")
    assert house.distributed("chain.numbers()") == [*before[:-1], 100]
