"""Classes, functions and closures are objects like others: each side's changes stay."""

from __future__ import annotations

import pytest

from tests.objects.programs import (
    Run,
    Step,
    gives,
    here,
    hinting,
    holds,
    is_plain,
    ranks,
    run_in_one_process,
    table,
)

pytestmark = pytest.mark.shared_world

CASES: dict[str, list[Step]] = {
    "attributes of a class that each side changes": [
        here("class CFG: lr = .1; epochs = 3; best = None"),
        ranks("CFG.lr = .5; CFG.best = rank"),
        here("CFG.epochs = 5"),
        gives("CFG.lr, CFG.epochs, CFG.best", (0.5, 5, 0), (0.5, 5, 1)),
        here("CFG.epochs = 6; CFG.new = 1"),
        gives("CFG.lr, CFG.epochs, CFG.best, CFG.new", (0.5, 6, 0, 1), (0.5, 6, 1, 1)),
    ],
    "an instance of a class that the ranks have changed": [
        here("class CFG: lr = .1\nc = CFG()"),
        ranks("CFG.lr = .5; CFG.seen = [rank]"),
        gives("c.lr, type(c) is CFG, c.seen", (0.5, True, [0]), (0.5, True, [1])),
        here("d = CFG(); d.lr = 1"),
        gives("d.lr, type(d) is CFG, d.seen is CFG.seen", (1, True, True)),
    ],
    "a class attribute that the notebook changes": [
        here("class CFG: lr = .1\nc = CFG()"),
        ranks("kept = CFG, c; mine = CFG()"),
        here("CFG.lr = .7; CFG.names = ['a']"),
        gives("mine.lr, c.lr, kept[0] is CFG, mine.names", (0.7, 0.7, True, ["a"])),
        here("CFG.names.append('b'); del CFG.lr"),
        gives("mine.names, hasattr(CFG, 'lr')", (["a", "b"], False)),
    ],
    "a counter in a class": [
        here("class Counted:\n    n = 0\n    def __init__(self): Counted.n += 1\na = Counted()"),
        ranks("b = Counted(); c = Counted()"),
        here("d = {'a': a}"),
        gives("Counted.n, type(d['a']) is Counted, type(b) is Counted", (3, True, True)),
    ],
    "a cache of a class": [
        here(
            "class Net(torch.nn.Module):\n    cache = {}\n"
            "    def forward(self, x): self.cache[len(self.cache)] = float(x); return x\nm = Net()"
        ),
        ranks("m(torch.ones(1)); m(torch.ones(1))"),
        here("n = Net()"),
        ranks("n(torch.ones(1))"),
        gives("len(Net.cache), n.cache is m.cache", (3, True)),
    ],
    "a registry of classes": [
        here(
            "REGISTRY = {}\ndef register(cls): REGISTRY[cls.__name__] = cls; return cls\n"
            "@register\nclass A: pass"
        ),
        ranks("@register\nclass Mine: pass\nprint(sorted(REGISTRY))"),
        holds("REGISTRY['A'] is A and REGISTRY['Mine'] is Mine"),
        gives("sorted(REGISTRY)", ["A", "Mine"]),
        here("a = A()"),
        holds("type(a) is REGISTRY['A']"),
    ],
    "a registry that the notebook goes on filling": [
        here(
            "REGISTRY = {}\ndef register(cls): REGISTRY[cls.__name__] = cls; return cls\n"
            "@register\nclass A: pass"
        ),
        ranks("kept = REGISTRY"),
        here("@register\nclass B(A): pass"),
        gives("sorted(kept), kept['B'] is B, B.__bases__[0] is A", (["A", "B"], True, True)),
    ],
    "__init_subclass__": [
        here(
            "class Base:\n    kinds = []\n    def __init_subclass__(cls, **kw):\n"
            "        super().__init_subclass__(**kw); Base.kinds.append(cls.__name__)\n"
            "class A(Base): pass"
        ),
        gives("Base.kinds, A.__mro__[1] is Base, A.kinds is Base.kinds", (["A"], True, True)),
        ranks("class Mine(Base): pass"),
        gives("Base.kinds", ["A", "Mine"]),
        here("a = A()"),
        gives("a.kinds", ["A", "Mine"]),
    ],
    "metaclasses": [
        here(
            "class Meta(type):\n    made = []\n    def __new__(m, name, bases, ns):\n"
            "        c = super().__new__(m, name, bases, ns); Meta.made.append(name); return c\n"
            "class A(metaclass=Meta): x = 1"
        ),
        gives("type(A) is Meta, Meta.made", (True, ["A"])),
        ranks("class B(A): pass"),
        gives("Meta.made, B.x, type(B) is Meta", (["A", "B"], 1, True)),
        here("A.x = 2"),
        gives("B.x, Meta.made", (2, ["A", "B"])),
    ],
    "singletons": [
        here(
            "class One:\n    _one = None\n    def __new__(cls):\n"
            "        if cls._one is None: cls._one = super().__new__(cls)\n"
            "        return cls._one\n"
            "o = One(); o.l = [1]"
        ),
        ranks("o.l.append(2)"),
        gives("One() is o, One().l, One._one is o", (True, [1, 2], True)),
        here("p = One()"),
        gives("p is o, p.l", (True, [1, 2])),
    ],
    "a singleton that is made on the ranks": [
        here(
            "class One:\n    _one = None\n    def __new__(cls):\n"
            "        if cls._one is None: cls._one = super().__new__(cls)\n        return cls._one"
        ),
        ranks("o = One(); o.x = rank"),
        here("x = [One]"),
        gives("x[0]() is o, o.x", (True, 0), (True, 1)),
    ],
    "a class that is defined again, with old instances": [
        here("class A:\n    def f(self): return 'old'\na = A(); l = [a]"),
        ranks("kept = a; print(a.f())"),
        here("class A:\n    def f(self): return 'new'\nb = A()"),
        gives(
            "kept.f(), a.f(), b.f(), type(a) is A, type(b) is A, type(a).__name__",
            ("old", "old", "new", False, True, "A"),
        ),
        holds("l[0] is kept is a"),
    ],
    "super()": [
        here(
            "class A:\n    def f(self): return ['A']\nclass B(A):\n"
            "    def f(self): return [*super().f(), 'B']\nb = B()"
        ),
        gives("b.f()", ["A", "B"]),
        here("class C(B):\n    def f(self): return [*super().f(), 'C']\nc = C()"),
        gives(
            "c.f(), isinstance(c, A), isinstance(b, B), C.__bases__[0] is B",
            (["A", "B", "C"], True, True, True),
        ),
        here("def g(self): return ['changed']\nA.f = g"),
        gives("c.f(), b.f()", (["changed", "B", "C"], ["changed", "B"])),
    ],
    "a method that the notebook replaces": [
        here("class A:\n    def f(self): return 1\na = A()"),
        ranks("kept = a, A"),
        here("A.f = lambda self: 2"),
        gives("kept[0].f(), kept[1] is A", (2, True)),
    ],
    "a method that the ranks replace": [
        here("class A:\n    n = 0\n    def f(self): return 1\na = A()"),
        ranks("A.f = lambda self: 5"),
        here("A.n = 3; b = A()"),
        gives("a.f(), b.f(), b.n", (5, 5, 3)),
    ],
    "abstract classes, generics and protocols": [
        here(
            "from typing import Generic, TypeVar, Protocol\nT = TypeVar('T')\n"
            "class A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n"
            "class G(Generic[T]):\n    def __init__(self, x: T): self.x = x\n"
            "class B(A):\n    def f(self): return 1\ng = G[int](3)"
        ),
        gives("B().f(), g.x, isinstance(g, G)", (1, 3, True)),
        here("h = [B(), G('x')]"),
        gives("isinstance(h[0], A), type(h[1]) is G is type(g)", (True, True)),
    ],
    "two functions of one name": [
        here("def f(): return 1\ng = f\ndef f(): return 2"),
        gives("f(), g(), f is g", (2, 1, False)),
        here("h = [f, g]"),
        gives("h[0] is f, h[1] is g", (True, True)),
    ],
    "attributes of a function": [
        here("def f(): f.calls += 1; return f.calls\nf.calls = 0"),
        gives("f(), f()", (1, 2)),
        here("g = [f]"),
        gives("g[0] is f, g[0](), f.calls", (True, 3, 3)),
    ],
    "attributes of a function that each side sets": [
        here("def f(): pass\nf.a = 1"),
        ranks("f.r = rank"),
        here("h = {'f': f}"),
        gives("h['f'].r, h['f'].a", (0, 1), (1, 1)),
        here("def g(): return f"),
        gives("g() is f, g().r", (True, 0), (True, 1)),
    ],
    "a default argument that collects": [
        here("def f(x, seen=[]): seen.append(x); return seen"),
        gives("f(1)", [1]),
        gives("f(rank)", [1, 0], [1, 1]),
        here("g = [f]; defaults = f.__defaults__"),
        gives(
            "g[0] is f, defaults[0] is f.__defaults__[0], g[0](2)",
            (True, True, [1, 0, 2]),
            (True, True, [1, 1, 2]),
        ),
    ],
    "a default that the notebook fills": [
        here("def f(x, seen=[]): seen.append(x); return seen"),
        ranks("kept = f"),
        here("f(5)"),
        gives("kept.__defaults__[0], kept is f", ([5], True)),
    ],
    "a default that is a variable too": [
        here("l = [0]\ndef f(l=l): return l"),
        ranks("l.append(1)"),
        gives("f() is l, f()", (True, [0, 1])),
        here("def g(*, k=l): return k"),
        holds("g() is l is f()"),
    ],
    "a default that the notebook replaces": [
        here("def f(x=1): return x"),
        ranks("kept = f"),
        here("f.__defaults__ = (2,)"),
        gives("kept(), kept is f", (2, True)),
    ],
    "closures that share a cell": [
        here(
            "def make():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n"
            "        return n\n"
            "    def get(): return n\n    return up, get\nup, get = make()"
        ),
        ranks("up(); up()"),
        gives("get()", 2),
        here("both = [up, get]"),
        gives("both[0](), both[1](), both[0] is up", (3, 3, True)),
    ],
    "closures that share a network": [
        here(
            "def make():\n    model = net(); opt = sgd(model)\n"
            "    def step(): return train(model, opt)\n"
            "    def evaluate(): return round(loss_of(model).item(), 3)\n"
            "    return step, evaluate, model\n"
            "step, evaluate, model = make()"
        ),
        gives("step()", 0.605),
        gives("evaluate()", 0.605),
        gives("round(loss_of(model).item(), 3), step(), evaluate()", (0.605, 0.004, 0.004)),
    ],
    "a cell that the notebook counts up": [
        here(
            "def make():\n    n, l = 0, []\n    def up():\n        nonlocal n\n"
            "        n += 1; l.append(n)\n        return n\n"
            "    return up, lambda: (n, l)\nup, get = make()"
        ),
        ranks("kept = get; print(get())"),
        here("up()"),
        gives("kept(), get is kept", ((1, [1]), True)),
    ],
    "each of two closures is changed by its side": [
        here(
            "def make():\n    l = []\n    def add(x): l.append(x); return l\n"
            "    return add\na, b = make(), make()"
        ),
        ranks("a(rank); print(b)"),
        here("b(5)"),
        gives(
            "a.__closure__[0].cell_contents, b.__closure__[0].cell_contents", ([0], [5]), ([1], [5])
        ),
    ],
    "lru_cache": [
        here("calls = []\n@functools.lru_cache\ndef f(x): calls.append(x); return [x]"),
        ranks("f(1); f(1)"),
        gives("calls, f(1) is f(1)", ([1], True)),
        here("g = [f]"),
        gives("g[0] is f, g[0](1) is f(1), calls", (True, True, [1])),
    ],
    "partial": [
        here("l = []\ndef add(l, x): l.append(x); return l\np = functools.partial(add, l)"),
        ranks("p(1)"),
        gives("l, p.args[0] is l, p.func is add", ([1], True, True)),
        here("q = functools.partial(add, l, 7)"),
        gives("q(), q.args[0] is l", ([1, 7], True)),
    ],
    "bound methods": [
        here(
            "class A:\n    def __init__(self): self.l = []\n"
            "    def f(self, x): self.l.append(x); return self.l\na = A(); f = a.f"
        ),
        ranks("f(1)"),
        gives("a.l, f.__self__ is a, f == a.f", ([1], True, True)),
        here("g = [a.f, A.f]; h = a.l.append"),
        ranks("g[0](2); g[1](a, 3); h(4)"),
        gives("a.l, g[0].__self__ is a, g[1] is A.f", ([1, 2, 3, 4], True, True)),
    ],
    "decorators": [
        here(
            "def timed(f):\n    @functools.wraps(f)\n    def inner(*a):\n"
            "        inner.calls += 1\n        return f(*a)\n"
            "    inner.calls = 0\n    return inner\n@timed\ndef g(x): return x + 1"
        ),
        gives("g(1), g(2), g.calls", (2, 3, 2)),
        here("@timed\ndef h(x): return g(x)"),
        gives("h(1), g.calls, h.calls, g.__wrapped__(1)", (2, 3, 1, 2)),
    ],
    "a function that refers to itself and to another": [
        here(
            "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n > 0 and even(n - 1)\n"
            "def make():\n    def fact(n): return 1 if n < 2 else n * fact(n - 1)\n"
            "    return fact\nfact = make()"
        ),
        gives("even(4), odd(3), fact(5)", (True, True, 120)),
        here("l = [fact, even]"),
        gives(
            "l[0] is fact, l[1] is even, fact.__closure__[0].cell_contents is fact",
            (True, True, True),
        ),
    ],
    "a cycle through a class and a function": [
        here(
            "class Node:\n    made = []\n"
            "    def __init__(self): self.kind = Node; Node.made.append(self)\n"
            "def build(): return Node()\n"
            "Node.build = staticmethod(build); build.kind = Node\nn = build()"
        ),
        ranks("m = Node.build()"),
        gives(
            "len(Node.made), Node.made[0] is n, m.kind is Node is build.kind, Node.build is build",
            (2, True, True, True),
        ),
        here("k = [n, build, Node]"),
        gives("k[0] is n, k[1] is build, k[2] is Node, len(Node.made)", (True, True, True, 2)),
    ],
    "a function of the notebook that uses the ranks' name": [
        here("model = 'notebook'\ndef f(): return model"),
        ranks("model = 'ranks'"),
        gives("f()", "ranks"),
        here("g = f"),
        gives("g(), g is f", ("ranks", True)),
    ],
    "a global that a function fills": [
        here("hist = []\ndef log(x): hist.append(x)"),
        ranks("log(rank)"),
        gives("hist", [0], [1]),
        here("def both(x): log(x); log(x)"),
        ranks("both(5)"),
        gives("hist", [0, 5, 5], [1, 5, 5]),
    ],
    "a global that a function assigns": [
        here("n = 0\ndef up():\n    global n\n    n += 1\n    return n"),
        gives("up(), up(), n", (1, 2, 2)),
        here("k = [up]"),
        gives("k[0](), n", (3, 3)),
    ],
    "a function that is defined again": [
        here("def f(): return 1\ndef g(): return f()"),
        ranks("kept = f; print(g())"),
        here("def f(): return 2"),
        gives("g(), f(), kept()", (2, 2, 1)),
    ],
    "a comprehension in a class body": [
        here(
            "names = ['a', 'b']\nclass C:\n    names = [n for n in names]\n"
            "    def f(self): return names"
        ),
        gives("C.names, C().f()", (["a", "b"], ["a", "b"])),
    ],
    "a lock that the cell makes": [
        here("import threading\nlock = threading.Lock()\ndef work():\n    with lock: return 1"),
        ranks("lock = threading.Lock()\nprint(work())"),
        gives("work()", 1),
    ],
    "generators of the ranks and functions that make them": [
        here("def count(l):\n    for i in range(3): l.append(i); yield i\nl = []"),
        ranks("g = count(l); next(g)"),
        here("m = [l]"),
        gives("m[0], next(g), l is m[0]", ([0, 1], 1, True)),
    ],
    "singledispatch of the ranks": [
        ranks(
            "@functools.singledispatch\ndef f(x): return 'any'\n@f.register\n"
            "def _(x: int): return 'int'"
        ),
        here("n = 1"),
        gives("f(n), f('x')", ("int", "any")),
    ],
    "dataclass methods and field defaults": [
        here(
            "@dataclass\nclass D:\n    tags: list = field(default_factory=list)\n    total = 0\n"
            "    def add(self, x): self.tags.append(x); D.total += 1; return self\nd = D().add(1)"
        ),
        ranks("d.add(2); e = D().add(3)"),
        gives(
            "d.tags, e.tags, D.total, type(e) is type(d), e == D([3])", ([1, 2], [3], 3, True, True)
        ),
        here("f = D([d])"),
        gives("f.tags[0] is d, D.total", (True, 3)),
    ],
    "types that are made at run time": [
        here("T = type('T', (), {'l': []}); t = T(); M = types.ModuleType('made'); M.x = [1]"),
        ranks("t.l.append(1)"),
        gives("T.l, type(t) is T", ([1], True)),
        here("u = T()"),
        gives("u.l is T.l, type(u) is type(t)", (True, True)),
    ],
    "nested classes and classes in functions": [
        here(
            "class Outer:\n    class Inner:\n        n = 0\n"
            "    def make(self): return Outer.Inner()\n"
            "def local():\n    class L:\n        l = []\n    return L\n"
            "L = local(); o = Outer(); i = o.make(); x = L()"
        ),
        ranks("Outer.Inner.n = 5; x.l.append(1)"),
        gives("i.n, type(i) is Outer.Inner, L.l, type(x) is L", (5, True, [1], True)),
        here("y, j = L(), o.make()"),
        gives("y.l, j.n, type(y) is type(x)", ([1], 5, True)),
    ],
    "operators, itemgetters and builtins": [
        here("import operator\nf, g, h = operator.itemgetter(0), len, [].append; l = [f, g]"),
        ranks("h(1)"),
        gives("l[0]([5]), l[1] is len, l[0] is f", (5, True, True)),
    ],
}

BOTH: dict[str, list[Step]] = {
    "the same attribute of a class": [
        here("class CFG: lr = .1; epochs = 3"),
        ranks("CFG.lr = .5"),
        here("CFG.lr = .3; CFG.epochs = 4"),
        hinting(gives("CFG.lr", 0.5), "CFG", "%dist_push CFG", "%dist_gather CFG"),
    ],
    "a class that is defined again": [
        here("class CFG: lr = .1"),
        ranks("CFG.lr = .5"),
        here("class CFG: lr = .2"),
        hinting(gives("CFG.lr", 0.2)),
    ],
    "both fill a default": [
        here("def f(x, seen=[]): seen.append(x); return seen"),
        ranks("f(rank)"),
        here("f(5)"),
        hinting(gives("f.__defaults__[0]", [0], [1]), "f", "%dist_push f"),
    ],
    "both count a cell up": [
        here(
            "def make():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n"
            "        return n\n    return up\nup = make()"
        ),
        ranks("up(); up()"),
        here("up()"),
        hinting(gives("up()", 3), "up", "%dist_push up"),
    ],
    "the same attribute of a function": [
        here("def f(): pass\nf.n = 0"),
        ranks("f.n = 1"),
        here("f.n = 7"),
        hinting(gives("f.n", 1), "%dist_push f"),
    ],
    "a list in a class": [
        here("class A: l = []"),
        ranks("A.l.append(rank)"),
        here("A.l.append(5); A.n = 1"),
        hinting(gives("A.l, A.n", ([0], 1), ([1], 1)), "A", "%dist_push"),
    ],
}

REFUSED: dict[str, list[Step]] = {
    "generators": [
        here("g = (i for i in range(3)); d = {'g': g}; n = 1"),
        ranks("print(next(d['g']))", fails=r"`d`.*generator"),
        gives("n", 1),
    ],
    "a lock in an instance": [
        here("class C:\n    pass\nc = C(); c.f = __import__('threading').Lock()"),
        ranks("c", fails=r"`c`.*c\.f"),
    ],
    "an exception whose pickling fails": [
        here("class E(Exception):\n    def __reduce__(self): raise StopIteration('no')\ne = [E()]"),
        ranks("print(e)", fails="`e`"),
    ],
    "a value that cannot be rebuilt": [
        here(
            "class B:\n    def __setstate__(self, s): raise ValueError('broken')\n"
            "    def __getstate__(self): return {'x': 1}\nbroken = B(); fine = [1]"
        ),
        ranks("print(broken)", fails="`broken`"),
        gives("fine", [1]),
    ],
}


@table(CASES | BOTH | REFUSED)
def test_definitions_are_as_in_a_plain_kernel(program: Run, name: str) -> None:
    """Values and identities on the ranks are those of one plain kernel; nothing is overwritten."""
    program((CASES | BOTH | REFUSED)[name])


@pytest.mark.unit
@table(CASES)
def test_values_are_those_of_a_plain_kernel(name: str) -> None:
    """A program gives equal values if one process runs it, without a notebook."""
    assert is_plain(CASES[name])
    run_in_one_process(CASES[name])
