"""What goes with a cell: which names, what belongs together, how big it is."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from nbdist.errors import VariableNotSent
from nbdist.notebook.shipping import plan
from nbdist.values.shared_memory import to_end

ALL = (0, 1)

# --- what is shipped --------------------------------------------------------------------

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
    "an instance": ("k = 7\nclass A:\n    def m(self): return k\na = A()", "a.m()", 7),
    "a closure": ("def make(n):\n    return lambda x: x + n\nf = make(3)", "f(1)", 4),
    "a lambda in a dict": ("k = 2\nd = {'f': lambda x: x * k}", "d['f'](4)", 8),
    "mutual recursion": (
        "def f(n): return n == 0 or g(n - 1)\ndef g(n): return n != 0 and f(n - 1)",
        "f(6)",
        True,
    ),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\np = P(1)",
        "p == P(1), repr(P(2))",
        (True, "P(x=2)"),
    ),
    "a module under another name": ("import os.path as p", "p.join('a', 'b')", "a/b"),
    "a submodule": ("import xml.dom.minidom", "xml.dom.minidom.__name__", "xml.dom.minidom"),
    "from a module": ("from math import pi, sqrt", "sqrt(4) < pi", True),
    "a memory format": (
        "import torch\nformat = torch.channels_last",
        "import torch\ntorch.zeros(1, 2, 3, 3).to(memory_format=format).stride()",
        (18, 1, 6, 2),
    ),
    "a parameter with its gradient": (
        "import torch\nw = torch.nn.Parameter(torch.ones(2))\n(w * 3).sum().backward()",
        "w.grad.tolist()",
        [3.0, 3.0],
    ),
    "a decorator": (
        "def twice(f):\n    return lambda x: f(f(x))",
        "@twice\ndef g(x): return x + 1\ng(1)",
        3,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cell_finds_what_it_uses(case: str, house: Any) -> None:
    """Names that a cell uses are on the workers, with what they use in turn."""
    source, cell, result = CASES[case]
    house.cell(source)
    assert house.distributed(cell) == result
    assert house.names(cell) == set(), "nothing has changed since"


def test_nothing_goes_that_is_not_used(house: Any) -> None:
    """Nor what is IPython's, as long as the user has not bound it."""
    house.cell("a, b, f = 1, 2, lambda: a")
    assert house.names("b + 1") == {"b"}
    assert plan("x = 1\nprint(x)", house.table, ALL) is None
    for name in ("In", "Out", "_", "__", "_i", "_i3", "_12", "__name__", "_dh"):
        house.notebook.names[name] = [1]
        assert house.names(f"{name}[0]") == set()
    house.notebook.names["open"] = hidden = lambda: None
    assert plan("open('x')", house.table, ALL, {"open": hidden}) is None
    house.cell("open = 5")
    shipment = plan("open", house.table, ALL, {"open": hidden})
    assert shipment
    assert shipment.names == ("open",)


# --- what changed -----------------------------------------------------------------------


def test_what_was_defined_again_goes_again(house: Any) -> None:
    """Also through another function only; class attributes; what a module's name leads to."""
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


# --- shared objects ---------------------------------------------------------------------


def test_a_shared_object_is_shipped_again_with_all_its_names(house: Any) -> None:
    """What shares objects with what changed goes along, but not what the workers have bound."""
    house.cell("params = [1]\nmodel, opt = {'p': params}, [params]")
    house.distributed("model, opt")
    house.cell("opt.append('state')")
    assert house.distributed("len(opt)") == 2
    assert house.distributed("opt[0] is model['p']") is True
    assert house.notices == ["sent `model` again: shares objects with `opt`"]
    house.cell("opt = [model['p']]")  # made after `model` was sent
    assert house.distributed("opt[0] is model['p']") is True
    house.distributed("model = 'workers'")
    house.cell("opt.append(3)")
    house.distributed("opt")
    assert house.distributed("model") == "workers"


def test_names_between_others(house: Any) -> None:
    """What is between goes along; nothing that workers made of others is lost."""
    house.cell("x, y = [1], [2]\na, b, c = [x], [x, y], [y]")
    house.distributed("a, b, c")
    house.cell("a.append(3)")
    assert house.names("a") == {"a", "b", "c"}
    house.cell("class A:\n    limits: list = []\na, b, c = A(), A(), [1]\na.x = b.x = 1")
    house.distributed("b.x = 'trained'\na.x, c")
    house.cell("a.x = 2\nc.append(2)")
    assert house.names("a, c") == {"a", "c"}
    assert house.distributed("a.x, b.x, c") == (2, "trained", [1, 2])


# --- big values -------------------------------------------------------------------------


def test_big_values_are_announced(house: Any) -> None:
    """With size, ranks and the name that is to blame, before it is sent."""
    house.notebook.names["corpus"] = b"x" * 200_000_000
    shipment = plan("len(corpus)", house.table, (0, 1, 2, 3))
    assert shipment
    assert shipment.big == ("corpus (191 MiB) to 4 ranks",)
    assert shipment.bytes > 200_000_000
    packing = to_end(shipment.packing())
    assert packing.segment
    assert packing.payload.segment == packing.segment.ref
    packing.segment.close()
    house.cell(
        "def make():\n    corpus = bytes(70_000_000)\n"
        "    def batches(): return len(corpus)\n    return batches\nbatches = make()"
    )
    shipment = plan("batches()", house.table, ALL)
    assert shipment
    assert shipment.big == (
        "batches (66.8 MiB, most of it in batches.<closure>.corpus) to 2 ranks",
    )
    house.send(shipment)
    assert house.distributed("batches()") == 70_000_000


BIG = """
import numpy as np, torch
array, tensor = np.zeros(9_000_000), torch.zeros(18_000_000)
class Data: pass
held = Data()
held.tensor, inside = torch.zeros(18_000_000), {"raw": bytearray(72_000_000)}
def uses(array=np.zeros(9_000_000)): return array
"""

CHANGES = {
    "array": "array[7_777_777] = 1",
    "tensor": "tensor.numpy()[17_777_777] = 1",
    "held": "held.tensor.data[17_777_777] = 1",
    "inside": "inside['raw'][67_777_777] = 1",
    "uses": "uses()[7_777_777] = 1",
}


def test_one_element_of_a_big_value(house: Any) -> None:
    """Changed in place it goes again, whatever it is and whatever holds it; others stay."""
    house.cell(BIG)
    house.distributed("array, tensor, held, inside, uses\nNone")
    for name, change in CHANGES.items():
        assert house.names(", ".join(CHANGES)) == set()
        house.cell(change)
        assert house.names(", ".join(CHANGES)) == {name}
        house.distributed(name + "\nNone")
    assert house.distributed("float(array.sum() + tensor.sum() + held.tensor.sum())") == 3
    assert house.distributed("inside['raw'][67_777_777], float(uses().sum())") == (1, 1)
    assert not any("unchanged" in notice for notice in house.notices)


def test_what_is_not_compared_as_a_whole(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above some GB samples are, of very many objects nothing is, and a line says so once."""
    monkeypatch.setattr("nbdist.notebook.shipping.WHOLE_LIMIT", 1 << 20)
    monkeypatch.setattr("nbdist.notebook.shipping.PICKLE_LIMIT", 1 << 20)
    house.cell("import numpy as np\nbig = np.zeros(1_000_000)\nmany = [*range(1_000_000)]")
    house.distributed("len(big) + len(many)")
    assert house.notices == []
    house.cell("big[777] = 1; many[777] = 1")
    for _ in range(2):
        assert house.distributed("float(big[777]), many[777]") == (0, 777)
    assert house.notices == [
        f"`{name}` was taken for unchanged: it is too big to be compared as a whole; "
        f"`%dist_push {name}` sends it"
        for name in ("big", "many")
    ]
    house.cell("big += 1; many.append(1)")
    assert house.names("big, many") == {"big", "many"}
    house.cell("big = np.zeros(1_000_000)")
    assert house.names("big") == {"big"}


def test_the_table_keeps_nothing_big_alive(house: Any) -> None:
    """What the user deletes is freed."""
    import weakref

    numpy = pytest.importorskip("numpy")
    house.notebook.names["big"] = array = numpy.zeros(1_000_000)
    gone = weakref.ref(array)
    house.distributed("big.sum() and None")
    del array, house.notebook.names["big"]
    assert gone() is None


def test_a_value_that_cannot_be_pickled_stops_the_cell(house: Any) -> None:
    """Nothing is sent or recorded then, nor a function that needs it."""
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
