"""Tests of `nbdist.values.definitions`: functions, classes, and their cells' sources."""

from __future__ import annotations

import enum
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import pytest

from nbdist.values import class_ids, definitions
from nbdist.values.definitions import CellSource, cell_source
from nbdist.values.pickling import pickle, unpickle

Ship = Callable[..., frozenset[str]]

FUNCTIONS = {
    "plain": ("def f(x): return x + 1", {"f(1)": 2}),
    "defaults": ("def f(x, y=2, *, z=3): return x + y + z", {"f(1)": 6, "f(1, 1, z=1)": 3}),
    "recursive closure": (
        "def make():\n    def g(n): return n and 1 + g(n - 1)\n    return g\nf = make()",
        {"f(7)": 7},
    ),
    "closures over one variable": (
        "def make():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n"
        "    def get(): return n\n    return up, get\nf = make()",
        {"up, get = f\nup(); up()\nget()": 2},
    ),
    "closure with an empty cell": (
        "def make():\n    def g(): return late\n    if 0: late = 1\n    return g\nf = make()",
        {"f.__closure__[0] != 1": True},
    ),
    "lru_cache": (
        "import functools\n@functools.lru_cache(maxsize=7, typed=True)\ndef f(x): return x + 1",
        {"f(1), f.cache_info().maxsize, f.__name__": (2, 7, "f")},
    ),
    "wraps": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def inner(*a):\n"
        "        return g(*a) * 2\n    return inner\n@twice\ndef f(x):\n    'doc'\n    return x",
        {"f(4), f.__name__, f.__doc__, f.__wrapped__(4)": (8, "f", "doc", 4)},
    ),
    "singledispatch": (
        "import functools\nclass B: pass\n@functools.singledispatch\ndef f(x): return 'any'\n"
        "@f.register\ndef _(x: int): return 'int'\n@f.register(B)\ndef of_a(x): return 'A'\n"
        "f.more = 1\nf(1)",
        {
            "f('x'), f(1), f(True), f(B()), f.__name__, f.more": (
                *("any", "int", "int", "A", "f", 1),
            ),
            "@f.register\ndef g(x: str): return 'str'\nf('x'), str in f.registry": ("str", True),
        },
    ),
    "singledispatch that leads to itself": (
        "import functools\ndef make():\n    @functools.singledispatch\n    def g(x): return x\n"
        "    @g.register\n    def _(x: list): return [g(each) for each in x]\n"
        "    @g.register\n    def _(x: int): return -x\n    return g\nf = make()",
        {"f([1, ['x', 2]])": [-1, ["x", -2]]},
    ),
    "singledispatchmethod": (
        "import functools\nclass B:\n    @functools.singledispatchmethod\n"
        "    def m(self, x): return 'any'\n    @m.register\n    def _(self, x: int): return 'int'",
        {"B().m(1), B().m('x')": ("int", "any")},
    ),
    "attributes": ("def f(): return f.count\nf.count = 3", {"f()": 3}),
    "annotations": ("def f(x: int) -> str: ...", {"f.__annotations__": {"x": int, "return": str}}),
    "kept names": (
        "def f(): ...\nf.__qualname__ = 'A.f'",
        {"f.__module__, f.__qualname__": ("__main__", "A.f")},
    ),
}


def test_functions_use_the_receivers_names(notebook: Any, worker: Any, ship: Ship) -> None:
    """A function that reads `model` gets the worker's value, and a value that is bound later."""
    notebook.run("model = list(range(100_000))\ndef f(): return model\nholder = {'f': [f]}")
    pickled = pickle(notebook.names["holder"], notebook.names)
    assert sum(memoryview(frame).nbytes for frame in pickled.frames) < 3000
    assert pickled.needs == ship("f") == {"model"}
    for value in ("worker", "new"):
        worker.run(f"model = {value!r}")
        assert worker.run("f()") == value
    assert worker.run("f.__globals__ is __import__('sys').modules['__main__'].__dict__")
    # `global` in a shipped function means the worker's namespace.
    notebook.run("count = 5\ndef f():\n    global count\n    count += 1")
    ship("f")
    worker.run("count = 10\nf()")
    assert worker.run("count") == 11
    assert notebook.names["count"] == 5
    # The wrapper of an imported decorator keeps the globals of the decorator's module.
    notebook.run("import contextlib\n@contextlib.contextmanager\ndef f(): yield")
    rebuilt = unpickle(pickle(notebook.names["f"], notebook.names).frames)
    assert rebuilt.__globals__ is sys.modules["contextlib"].__dict__


NEEDS = {
    "def f(): return a(b.c)": {"a", "b"},
    "def f():\n    def g(): return a\n    return g": {"a"},
    "def f(): return [a for x in b if c]": {"a", "b", "c"},
    "def f():\n    class A(b):\n        x = a\n        y = x\n    return A": {"a", "b"},
    "def f():\n    class A:\n        a = 1\n        n = [a for _ in range(2)]": {"a"},
    "def f():\n    class A:\n        a = 1\n        del a\n        x = a": {"a"},
    "def f():\n    class A:\n        if b: a = 1\n        x = a": {"a", "b"},
    "def f():\n  class A:\n    try: a = b()\n    except c: pass\n    x = a": {"a", "b", "c"},
    "class f:\n    def m(self): return a\n    @property\n    def p(self): return b\n"
    "    @staticmethod\n    def s(): return c": {"a", "b", "c"},
    "class A:\n    def m(self): return a\nf = A()": {"a"},
    "def make(g):\n    return lambda: g()\ndef g(): return a\nf = make(g)": {"a"},
    "def f():\n    global a\n    a = 1": set(),
    "def f(): return f()": {"f"},
}


@pytest.mark.parametrize("source", NEEDS)
def test_needs_are_the_names_that_are_looked_up(source: str, notebook: Any) -> None:
    """The needs of a pickle are the names that functions read, wherever the functions are."""
    notebook.run("a, b, c = 1, object, 3")
    notebook.run(source)
    pickled = pickle(notebook.names["f"], notebook.names)
    assert {name for name in pickled.needs if name in notebook.names} == NEEDS[source]


CLASSES = {
    "methods and super": (
        "class A:\n    def m(self): return 1\nclass B(A):\n    def m(self): return super().m() + 1",
        {"B().m()": 2},
    ),
    "dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass B:\n    x: int\n"
        "    y: list = dataclasses.field(default_factory=list)",
        {"str(dataclasses.replace(B(1), x=2))": "B(x=2, y=[])", "B(1) == B(1, [])": True},
    ),
    "dataclass to inherit from": (
        "import dataclasses\n@dataclasses.dataclass\nclass B:\n    x: int\n    y: int = 2",
        {"@dataclasses.dataclass\nclass C(B):\n    z: int = 3\nstr(C(1))": "C(x=1, y=2, z=3)"},
    ),
    "enum": (
        "import enum\nclass B(enum.Enum):\n    RED = 1\n"
        "    def low(self): return self.name.lower()",
        {"B.RED.low(), B(1) is B.RED": ("red", True)},
    ),
    "NamedTuple": (
        "from typing import NamedTuple\nclass B(NamedTuple):\n    x: int\n    y: int = 2",
        {"str((B(1).y, B(1)._replace(x=5)))": "(2, B(x=5, y=2))"},
    ),
    "Generic": (
        "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass B(Generic[T]):\n"
        "    def get(self, x: T) -> T: return x",
        {"B[int]().get(3)": 3},
    ),
    "slots": ("class B:\n    __slots__ = ('x',)\n    def __init__(self): self.x = 6", {"B().x": 6}),
    "metaclass": (
        "class M(type):\n    def hello(cls): return cls.__name__\nclass B(metaclass=M): pass",
        {"B.hello()": "B"},
    ),
    "base that counts its subclasses by its name": (
        "class A:\n    count, kinds = 0, []\n    def __init_subclass__(cls, tag=None, **more):\n"
        "        super().__init_subclass__(**more)\n        A.count += 1\n"
        "        A.kinds.append(cls)\n        cls.tag = (A.count, tag)\n"
        "class C(A): pass\nclass B(C, tag='t'): pass",
        {"B.tag, B.count, len(B.kinds), B.kinds[1] is B": ((2, "t"), 2, 2, True)},
    ),
    "base that needs a keyword": (
        "class A:\n    def __init_subclass__(cls, *, tag):\n        cls.tag = tag\n"
        "class B(A, tag='t'): pass",
        {"B.tag": "t", "class C(B, tag='c'): pass\nC.tag": "c"},
    ),
    "base with a registry of the notebook": (
        "kinds = []\nclass A:\n    def __init_subclass__(cls): kinds.append(cls)\nclass B(A): pass",
        {"[kind is B for kind in kinds]": [True]},
    ),
    "metaclass that counts": (
        "import abc\nclass M(abc.ABCMeta):\n    count = 0\n    def __new__(kind, *args, **more):\n"
        "        M.count += 1\n        return super().__new__(kind, *args)\n"
        "    def __init__(cls, *args, tag='x'): cls.tag = tag\n"
        "class A(metaclass=M):\n    @abc.abstractmethod\n    def m(self): ...\n"
        "class B(A, tag='t'):\n    def m(self): return 1",
        {"type(B).count, B.tag, B().m(), len(B.__mro__[1].__abstractmethods__)": (2, "t", 1, 1)},
    ),
    "enum whose members have attributes": (
        "import enum\nclass B(enum.Enum):\n    RED = 1, 'r'\n"
        "    def __init__(self, number, letter): self.letter = letter",
        {"B.RED.letter, B((1, 'r')) is B.RED": ("r", True)},
    ),
    "annotations of a class": ("class B:\n    x: int", {"B.__annotations__": {"x": int}}),
    "nested": ("class B:\n    class C:\n        x = 7", {"B.C.x, B.C.__qualname__": (7, "B.C")}),
}

if sys.version_info >= (3, 14):  # earlier versions evaluate annotations at once
    FUNCTIONS["annotations of unbound names"] = (
        "def f(x: Unbound, y: int) -> str: return y",
        {"f(1, 2), f.__annotations__": (2, {"x": "Unbound", "y": "int", "return": "str"})},
    )
    CLASSES["annotations of unbound names in a class"] = (
        "class B:\n    x: Unbound\n    def m(self, y: Unbound): return y",
        {
            "B.__annotations__": {"x": "Unbound"},
            "B().m(3), B.m.__annotations__": (3, {"y": "Unbound"}),
        },
    )


@pytest.mark.parametrize("case", FUNCTIONS | CLASSES)
def test_definitions_work_on_the_worker(case: str, notebook: Any, worker: Any, ship: Ship) -> None:
    """A function or class of a cell gives the same values on the worker; its needs are sent too."""
    source, values = (FUNCTIONS | CLASSES)[case]
    notebook.run(source)
    names, waiting = set(), {"f", "B"} & {*notebook.names}
    while waiting:
        names |= waiting
        waiting = ship(*waiting) - names
    worker.run("import dataclasses")
    assert {expression: worker.run(expression) for expression in values} == values


def test_a_class_arrives_once(notebook: Any, worker: Any, ship: Ship) -> None:
    """Later instances have the class that came first, and see attributes set on it later."""
    notebook.run(
        "made = []\nclass Base:\n    def __init_subclass__(cls): made.append(1)\n"
        "class A(Base): x = 1\na, b = A(), A()"
    )
    worker.run("made = []")
    for name in ("Base", "A", "a", "b"):
        ship(name)
    assert worker.run("type(a) is A and type(b) is A and isinstance(b, A)") is True
    # `__init_subclass__` has run in the notebook, and does not run again on the worker.
    assert worker.run("len(made)") == 0
    notebook.run("A.x = 2")
    ship("A")
    assert worker.run("a.x") == 2


def test_a_class_that_comes_home_stays_as_it_is(notebook: Any, worker: Any, ship: Ship) -> None:
    """A worker's copy of the notebook's class does not overwrite the notebook's class."""
    notebook.run("class A:\n    def m(self): return 1\na = A()")
    ship("a")
    method = notebook.names["A"].m
    worker.run("type(a).x = 'changed'")
    (back,) = unpickle(worker.fetch("(a,)"), notebook.names)
    assert type(back) is notebook.names["A"]
    assert notebook.names["A"].m is method
    assert not hasattr(back, "x")
    # A value whose class was defined on a worker works with the notebook's names.
    worker.run("k = 1\nclass W:\n    def m(self): return k\nw = W()")
    notebook.names["k"] = 2
    back = unpickle(worker.fetch("w"), notebook.names)
    assert back.m() == 2
    assert type(unpickle(worker.fetch("W()"), notebook.names)) is type(back)


DEFINED = """
import enum
class A:
    number, kinds = {number}, {{'x', 'y'}}
    class Inner(enum.Enum):
        RED = 1
    @property
    def size(self): return {size}
    def own(self): return super().__init__()
    many, endless = list(range(20_000)), []
    endless.append(endless)
class Unbound:
    @property
    def __class__(self): raise RuntimeError("stands for nothing")
B, Imported, unbound = A, enum.Enum, Unbound()
"""


def test_ranks_classes_of_one_cell_are_one_class(notebook: Any, worker: Any, ship: Ship) -> None:
    """Classes that ranks make of a cell have one id, unless their code or values differ."""
    names = [{"__name__": "__main__"} for _ in range(4)]
    by_class = definitions.by_value._DYNAMIC_CLASS_TRACKER_BY_CLASS
    for each, (number, size) in zip(names, [(1, 2), (1, 2), (3, 2), (1, 4)], strict=True):
        exec(DEFINED.format(number=number, size=size), each)
        class_ids.name_classes(each, "task")
        for kind in (each["A"], each["A"].Inner):  # the ranks are processes of their own
            del definitions.by_value._DYNAMIC_CLASS_TRACKER_BY_ID[by_class[kind]]
    ids = [by_class[each["A"]] for each in names]
    assert (ids[0] == ids[1], len({*ids})) == (True, 3)
    assert by_class[names[0]["A"].Inner] == by_class[names[1]["A"].Inner] not in ids
    assert by_class.get(enum.Enum) is None
    # A class that came from the notebook, or has been named before, keeps its id.
    notebook.run("class A: pass\na = A()")
    kept = by_value_id(notebook.names["A"])
    ship("A")
    worker.run("from nbdist.values import class_ids\nclass_ids.name_classes(globals(), 'another')")
    assert type(unpickle(worker.fetch("A()"), notebook.names)) is notebook.names["A"]
    class_ids.name_classes({**notebook.names, **names[0]}, "another")
    assert (by_value_id(notebook.names["A"]), by_value_id(names[0]["A"])) == (kept, ids[0])


def by_value_id(kind: type) -> str:
    """Return the id by which a receiver recognizes a class."""
    return definitions.by_value._get_or_create_tracker_id(kind)


def test_a_subclass_that_comes_home_has_the_notebooks_base(
    notebook: Any, worker: Any, ship: Ship
) -> None:
    """A worker's subclass of a notebook's class is a subclass of the same class in the notebook.

    Its `__init_subclass__` runs in the notebook, unless the method needs keywords.
    """
    notebook.run(
        "kinds = []\nclass A:\n    def __init_subclass__(cls): kinds.append(cls.__name__)\n"
        "class B:\n    def __init_subclass__(cls, *, tag): cls.tag = tag"
    )
    ship("A", "B", "kinds")
    worker.run("class C(A): pass\nclass D(B, tag='t'): pass")
    first, second = unpickle(worker.fetch("(C(), D())"), notebook.names)
    assert (notebook.names["kinds"], type(second).tag) == (["C"], "t")
    assert isinstance(first, notebook.names["A"])
    assert isinstance(second, notebook.names["B"])
    assert notebook.run("class E(B, tag='e'): pass\nE.tag") == "e"


SLOTTED = {
    "names": "class B:\n    __slots__ = ('x', 'y')",
    "private": "class B:\n    __slots__ = ('x', '__y')\n"
    "    def set(self): self.__y = 1; return self\nextra = B().set()",
    "inherited": "class A:\n    __slots__ = ('x',)\nclass B(A):\n    __slots__ = ()",
    "dataclass": "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass B:\n    x: int = 0",
    "dataclass to inherit from": "import dataclasses\n@dataclasses.dataclass(slots=True)\n"
    "class A:\n    x: int = 0\n@dataclasses.dataclass(slots=True)\nclass B(A):\n    y: int = 1",
    "weak references": "import dataclasses\n@dataclasses.dataclass(slots=True, weakref_slot=True)\n"
    "class B:\n    x: int = 0",
}


@pytest.mark.parametrize("case", SLOTTED)
def test_instances_keep_their_slots(case: str, notebook: Any, worker: Any, ship: Ship) -> None:
    """An instance keeps its slots on the worker, and later returns with its class and values."""
    notebook.run(f"{SLOTTED[case]}\nb = B()\nobject.__setattr__(b, 'x', 7)")
    ship("b")
    ship("B")
    looks = "(type(b) is B, b.x, hasattr(b, '__dict__'), hasattr(b, '__weakref__'), B.__slots__)"
    assert worker.run(looks) == notebook.run(looks)
    back = unpickle(worker.fetch("b"), notebook.names)
    assert type(back) is notebook.names["B"]
    assert back.x == 7
    # An instance that was made on the worker has its slots in the notebook.
    worker.run("class W:\n    __slots__ = ('__x', '__dict__')\n    def get(self): return self.__x")
    worker.run("w = W(); w._W__x = 1; w.more = 2")
    back = unpickle(worker.fetch("w"), notebook.names)
    assert (back.get(), vars(back)) == (1, {"more": 2})


def test_code_of_another_python_is_refused(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class with code of another Python version is refused: a call would end the process."""
    worker.run("class W:\n    def get(self): pass")
    monkeypatch.setattr(definitions, "PYTHON", (3, 1))
    there = ".".join(map(str, sys.version_info[:2]))
    with pytest.raises(UnpicklingError, match=f"a function of Python {there} cannot be used in 3"):
        unpickle(worker.fetch("W"), {})


def test_the_source_of_a_cell_comes_along(notebook: Any, worker: Any, ship: Ship) -> None:
    """`inspect.getsource` and tracebacks show the cell's lines on the worker."""
    notebook.run("class A:\n    def m(self):\n        return 1 / 0  # here\n")
    ship("A")
    assert worker.run("import inspect\ninspect.getsource(A.m)").endswith("1 / 0  # here\n")
    worker.run(
        "import traceback\ntry:\n    A().m()\nexcept ZeroDivisionError:\n"
        "    text = traceback.format_exc()"
    )
    assert "return 1 / 0  # here" in worker.run("text")
    # The source of a function is not sent if the receiver has its module on disk.
    pickled = pickle(functools.wraps(print)(lambda: None), notebook.names)
    assert b"the_source_of_a_cell_comes_along(" not in bytes(pickled.frames[0])


def test_the_number_of_a_cell_travels_with_its_functions(notebook, monkeypatch):
    """The receiver's IPython knows the cell's number; IPython 7 finds it in the history."""
    from IPython.core.compilerop import CachingCompiler

    source = "def f(): pass\n"
    history = types.SimpleNamespace(input_hist_parsed=["", source, source, "f()"])
    shell = types.SimpleNamespace(compile=object(), history_manager=history)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    name = "/tmp/ipykernel_1/2.py"
    monkeypatch.setitem(linecache.cache, name, (len(source), 1.0, [source], name))
    assert cell_source(name) == CellSource(source, 2)
    shell.compile = CachingCompiler()
    if not hasattr(shell.compile, "_filename_map"):
        pytest.skip("IPython 7 keeps no numbers; workers do (tests/notebook/test_magics.py)")
    filename = shell.compile.cache(source, 7)
    exec(compile(source, filename, "exec"), notebook.names)
    pickled = pickle(notebook.names["f"], notebook.names)
    del shell.compile._filename_map[filename], linecache.cache[filename]
    function = unpickle(pickled.frames, notebook.names)
    assert shell.compile._filename_map[filename] == 7
    assert inspect.getsource(function) == source
