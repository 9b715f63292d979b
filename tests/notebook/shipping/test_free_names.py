"""The names that a cell reads and binds, found in its source, and checked by random programs."""

from __future__ import annotations

import builtins
import contextlib
import random
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from nbdist.notebook.free_names import (
    bound_before,
    code_in_magic,
    dotted_names,
    names_bound,
    names_in_commands,
    names_used,
)

USED = {
    # Expressions
    "x + y.z": "x y",
    "f'{x!r:>{width}} {y.z}'": "x width y",
    "[i * k for i in xs if i < n]": "k xs n",
    "lambda x, y=a, *z: x + y + z + b": "a b",
    # Statements
    "x += 1": "x",
    "import a.b, c as d\na, d": "",
    "x\nx = 1": "x",
    "x[i] = v": "x i v",
    "x: T = v": "T v",
    "del x": "x",
    "x = 1\ndel x\nx": "x",
    "a, (b, *c) = v\na, b, c": "v",
    # Code that may not have run
    "if c:\n    x = 1\nx": "c x",
    "with open_() as f:\n    y = f.x\ny": "open_",
    "try:\n    import a\nexcept E:\n    a = None\na": "E",
    "match v:\n    case 1:\n        x = 1\n    case _:\n        x = 2\nx": "v",
    "if c:\n    x = 1\nelse:\n    raise E\nx": "c E",
    "for i in xs:\n    y = i\ny, i": "xs y i",
    "for i in xs:\n    if i: break\nelse:\n    y = 1\ny": "xs y",
    "with open_() as f:\n    if f: x = 1\nx": "open_ x",
    "with suppress(E):\n    import a\na": "suppress E a",
    "with f():\n    raise E\nx": "f E x",
    "while 1:\n    x = 1\n    if x: break\nx": "",
    "if c:\n    del x\nx": "c x",
    "try:\n    x = 1\nexcept E as e:\n    raise\nx, e": "E e",
    "try:\n    pass\nfinally:\n    x = 1\nx": "",
    "a and (b := c)\nb": "a b c",
    "match v:\n    case {'k': a, **rest} if c:\n        a, rest, b\n    case P(x=q): q": "v c b P",
    # Functions
    "def f():\n    return x\n    x = 1": "",
    "def f():\n    [q := i for i in xs]\n    return q": "xs",
    "def f(): return k\nf()\nk = 1": "k",
    "if c:\n    def f(): return a\n    f()\na = 1": "c a",
    "def f(a: A, b=c, *d, **e) -> R:\n    return a, b, d, e, g": "A R c g",
    "def f():\n    global x\n    x = 1\n    return x": "x",
    "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x += y\n    return g": "y",
    "def f():\n    for i in xs: i\n    import m\n    return m, i": "xs",
    "async def f():\n    async with a as b: b\n    async for c in d: c": "a d",
    "def f(): return g()\ndef g(): return x\nf()": "x",
    "def f(): return g()\nf()\ndef g(): pass": "g",
    "@deco\ndef f(): return k\nk = 1": "deco k",
    "for k in xs:\n    y = k\n    def f(): return y": "xs",
    "try: a\nexcept E as e:\n    def f(): return e": "a E e",
    "g = lambda: k\nk = 1": "k",
    # Classes
    "class A:\n    x = 1\n    def m(self): return x": "x",
    "class A:\n    def m(self): return A": "",
    "class A(B, metaclass=M):\n    x: T = y\n    z = x\n    def m(self): return w": "B M T y w",
    "@dataclass\nclass A:\n    x: int = field(k)": "dataclass field k",
    "def f():\n    class A(B):\n        c = d\n        def m(self): return c, e": "B d c e",
    "class A: items = [x for x in items]": "items",
    "class A:\n    a = 1\n    n = [a for _ in range(2)]": "a",
    "class A:\n    a = [1]\n    n = [a for i in a if b]\n    b = 2": "a b",
    "class A:\n    a = 1\n    g, h = (a for _ in 'x'), lambda: b\n    b = 2": "a b",
    "class A:\n    a = 1\n    class B:\n        b = a": "a",
    "class A:\n    global a\n    a = 1\n    n = [a for _ in 'x']": "",
    # Magics as IPython transforms them
    "get_ipython().system('echo {x:.2f} {y.z} $w $$v ${u}')": "x y w u",
    "get_ipython().run_line_magic('timeit', '-n 10 -r3 f(x)')": "f x",
    "get_ipython().run_line_magic('pip', 'install {name}')": "name",
    "get_ipython().run_cell_magic('time', '', 'y = f(x)\\ny')": "f x",
    "get_ipython().run_cell_magic('time', '', '!ls {a}\\nf(x)')": "f x a",
}
if sys.version_info >= (3, 12):
    USED |= {
        "def f[T: B](x: T, y: A = d) -> R: return k\nk = 1": "A d R B",
        "class A[T](B):\n    x = y\n    def m(self): return A, k\nk = 1": "B y",
        "type X = list[K]\nK = 1": "",
    }


@pytest.mark.parametrize("source", USED)
def test_names_used_are_names_read_before_bound(source: str) -> None:
    """`names_used` returns the names that a cell may read before binding, and no others."""
    names = names_used(source) - {"get_ipython"} - set(dir(builtins))
    assert names == set(USED[source].split())


BOUND_BEFORE = {
    # The cell binds a name that a function of the notebook needs.
    "lock = Lock()\nwork()": {"Lock": "", "work": "lock"},
    "work()\nlock = 1": {"work": ""},
    "work()\nlock = 1\nwork()": {"work": ""},
    "if c:\n    lock = 1\nwork()": {"c": "", "work": ""},
    "if c:\n    a = b = 1\nelse:\n    b = d = 1\nwork()": {"c": "", "work": "b"},
    "a = 1\nfor b in xs: work(b)\nelse:\n    work(a)": {"xs": "a", "work": "a"},
    "a = b = 1\ndel a\nwork()": {"work": "b"},
    "try:\n    a = make()\nexcept E:\n    work()": {"make": "", "E": "", "work": ""},
    "with open_() as f:\n    work(f)": {"open_": "", "work": "f"},
    "import a\nclass A(work()):\n    b = k\n    c = k": {"work": "a", "k": "a"},
    "class A:\n    global a\n    a = 1\n    b = work()": {"work": "a"},
    # After the cell has bound a name, a read of the name does not read the notebook's value.
    "a = 1\nwork()\nwork = 1\ndel a\nwork": {"work": "a"},
    # Names that a function of the cell reads when it may be called.
    "a = 1\ndef f(): return work()\nb = 2\nf()\nc = 3": {"work": "a b f"},
    "a = 1\ndef f(): return work()\nb = 2": {"work": "a b f"},
    "a = 1\ndef f(): return work()\ng(f)\nb = 2": {"g": "a f", "work": "a f"},
    "def f(): return work()\ndef g(): return f()\na = 1\ng()": {"work": "a f g"},
    "a = 1\ndef f(): return work()\nf()\ndel a": {"work": "f"},
    "a = 1\n@d\ndef f(): return work()\nb = 2": {"d": "a", "work": "a"},
    "def f():\n    global a\n    del a\na = b = 1\nf()\nwork()": {"work": "b f"},
    "def f(): return work()\n@d\ndef f(): return f()\na = 1": {"d": "f", "work": "f"},
    "f = lambda: work()\na = 1\nf()": {"work": ""},
    # In magics
    "a = 1\nget_ipython().run_cell_magic('time', '', 'b = 1\\nwork()')": {"work": "a b"},
    "get_ipython().run_line_magic('time', 'work()')\na = 1": {"work": ""},
}


@pytest.mark.parametrize("source", BOUND_BEFORE)
def test_bound_before_has_names_bound_at_every_read(source: str) -> None:
    """`bound_before` maps each used name to the names that are bound at all reads of it."""
    bound_names = {name: before for name, before in bound_before(source).items() if name in USERS}
    assert bound_names.keys() == names_used(source) & USERS
    assert bound_names == {name: {*before.split()} for name, before in BOUND_BEFORE[source].items()}


USERS = frozenset(["work", "c", "d", "g", "k", "xs", "E", "Lock", "make", "open_"])

BOUND = {
    "x = y.z = v[0] = 1": "x",
    "a, (b, *c) = v": "a b c",
    "x.a = 1\ny[0] = 2\nf(z)": "",
    "[y := i for i in xs]": "y",
    "for i, j in xs: k = 1": "i j k",
    "import a.b, c.d as e\nfrom f import g, h as i\nfrom j import *": "a e g i",
    "def f():\n    global g\n    g = 1\n    def h():\n        global i\n        i = 2": "f g i",
    "try:\n    pass\nexcept E as e:\n    x = 1": "e x",
    "match v:\n    case {'k': a, **rest}: b = 1\n    case [c, *d] as e: pass": "a rest b c d e",
    "del x": "x",
    "def f(x=(y := 1)):\n    global g\n    g = 1": "f y g",
    "lambda x: (y := x)": "",
    "'text'\nx: int": "",
    "get_ipython().run_line_magic('time', 'x = f()')": "x",
    "get_ipython().run_cell_magic('time', '', 'x = 1\\ndef g(): y = 1')": "x g",
}


@pytest.mark.parametrize("source", BOUND)
def test_names_bound_are_all_global_names_a_cell_may_bind(source: str) -> None:
    """`names_bound` returns the names that any part of a cell may bind at global level."""
    assert names_bound(source) == set(BOUND[source].split())


def test_source_without_code_has_no_names() -> None:
    """An empty cell has no names; invalid source raises SyntaxError; `a.b.c` includes `a.b`."""
    assert dotted_names("a.b.c(d.e, f().g)") == {("a", "b", "c"), ("a", "b"), ("d", "e")}
    for names in (names_used, names_bound):
        assert names("") == names("# only a comment") == set()
        with pytest.raises(SyntaxError):
            names("x = = 1")
    for call in ("shell.run_line_magic('time', 'x')", "f('{x}')"):  # only IPython runs strings
        assert names_used(call) == {call.partition("(")[0].partition(".")[0]}


@pytest.mark.parametrize(
    ("method", "texts", "code"),
    [
        ("run_line_magic", ["time", "x = f(y)"], ["x = f(y)"]),
        ("run_line_magic", ["timeit", "-n 10 -q f(y)"], ["f(y)"]),
        ("run_cell_magic", ["time", "", "a\n%matplotlib inline\nb"], ["a\n\nb"]),
        ("run_cell_magic", ["bash", "", "echo $x"], ["f'{x}'"]),
        ("run_cell_magic", ["distributed", "", "theirs = 1"], []),
        ("run_line_magic", ["cd", "{folder}"], ["f'{folder}'"]),
        ("run_line_magic", ["time", "return x"], []),
        ("system", ["ls {a:>3} ${b} $$PID"], ["f'{a:>3}'", "f'{b}'", "f'{b}'"]),
        ("ask_exit", ["f(x)"], []),
    ],
)
def test_code_in_magic_finds_the_python(method: str, texts: list[str], code: list[str]) -> None:
    """Statements and filled-in expressions of a magic are found, but no code of other languages."""
    assert code_in_magic(method, texts) == code


def test_names_in_commands_are_those_of_the_cell_itself() -> None:
    """Names in a cell's commands are found in order, but not those of functions or of the shell."""
    source = "get_ipython().system('echo {b} $a; for i in 1; do echo $i; done')\n"
    in_function = "def f():\n    get_ipython().system('{c}')\n"
    in_class = "class A:\n    get_ipython().run_line_magic('cd', '{d}')\n"
    assert names_in_commands(in_function + source + in_class) == ["b", "a", "d"]


# --- random programs: each name that they read unbound is in `names_used` ---------------------


NAMES, FUNCTIONS = "abcdef", "pqr"
PLAIN = (
    *("@n = 1", "@n = @e", "@n = [@n]", "@e", "import math as @n", "risky()", "raise Oops"),
    "if '@n' in globals(): del @n",
)
NESTED = (
    *("if maybe():\n@b", "if maybe():\n@b\nelse:\n@b", "while maybe():\n@b"),
    "for @n in some():\n@b\n if maybe(): break\nelse:\n@b",
    "try:\n@b\nexcept Oops as @n:\n@b\nfinally:\n@b",
    "try:\n@b\nexcept Oops:\n@b\nelse:\n@b",
    *("with manager() as @n:\n@b", "with suppress(Oops):\n@b"),
    "match some():\n case [@n, *_] if maybe():\n @b",
    *("def @f(z=@e):\n@b", "def @f():\n global @n\n@b", "@@called\ndef @f():\n@b"),
    "class @f:\n@b\n def method(self):\n @b",
)
EXPRESSIONS = (
    *("@a", "(@a if maybe() else @a)", "[@a for @a in some()]", "(maybe() and (@n := @a))"),
    *("(lambda @a: @a)(1)", "call(@f)", "call(@f)", "[@e, @e]"),
)


def program(chance: random.Random, depth: int = 0) -> str:
    """Write some random statements; nested statements are indented by a space."""

    def statement() -> str:
        is_nested = depth < 4 and chance.random() < (0.5 if depth else 0.7)
        name, function = chance.choice(NAMES), chance.choice(FUNCTIONS)
        made: dict[str, Callable[[], str]] = {
            "n": lambda: name,
            "f": lambda: function,
            "a": lambda: chance.choice(NAMES),
            "e": lambda: fill(chance.choice(EXPRESSIONS)),
            "b": lambda: textwrap.indent(program(chance, depth + 1), " "),
            "@": lambda: "@",
        }

        def fill(template: str) -> str:
            return re.sub("( ?)@(.)", lambda mark: deeper(mark[1], made[mark[2]]()), template)

        return fill(chance.choice(NESTED if is_nested else PLAIN))

    return "\n".join(statement() for _ in range(chance.randint(1, 4)))


def deeper(space: str, text: str) -> str:
    """Indent a block once more if the template has a space before it; do not change expressions."""
    return textwrap.indent(text, space) if text.startswith(" ") else space + text


class Oops(Exception):
    """The exception that random programs raise."""


class Globals(dict[str, Any]):
    """The globals of a random program, which record each unbound name that the program reads.

    `missing` maps each such name to the names that were bound at all its reads.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.missing: dict[str, frozenset[str]] = {}
        self._calls = 0
        self._chance = chance
        self._helpers = {
            "maybe": lambda: chance.random() < 0.5,
            "some": lambda: [1] * chance.randint(0, 2),
            "risky": self._risky,
            "call": self.call,
            "called": self._called,
            "manager": contextlib.nullcontext,
            "suppress": contextlib.suppress,
            "Oops": Oops,
        }

    def __missing__(self, name: str) -> Any:
        if name in self._helpers:
            return self._helpers[name]
        if name not in (*NAMES, *FUNCTIONS):
            return getattr(builtins, name)
        now = frozenset(self)
        self.missing[name] = self.missing.get(name, now) & now
        return None

    def call(self, function: Any) -> None:
        """Call a function, or make an instance and call its method; at most 29 calls."""
        self._calls += 1
        if self._calls < 30 and callable(function):
            with contextlib.suppress(NameError):
                self.call(getattr(function(), "method", None))

    def _risky(self) -> None:
        if self._chance.random() < 0.3:
            raise Oops

    def _called(self, function: Any) -> Any:
        # The decorated function's name is not bound yet: a read of the name here does not count.
        name = function.__name__
        earlier = self.missing.get(name)
        with contextlib.suppress(Oops):
            self.call(function)
        self.missing.pop(name, None)
        if earlier is not None:
            self.missing[name] = earlier
        return function


def names_missing(code: Any, seed: int) -> dict[str, frozenset[str]]:
    """Run a program, and then its functions; return the names that were read unbound."""
    namespace = Globals(random.Random(seed))
    with contextlib.suppress(Oops, NameError):
        exec(code, namespace)
        for name in {*FUNCTIONS}.intersection(namespace):
            namespace.call(namespace[name])
    return namespace.missing


@pytest.mark.parametrize("seed", range(8))
def test_no_unbound_name_of_a_program_is_missed(seed: int) -> None:
    """On every path of a random program, each name that is read unbound is in `names_used`."""
    chance, runs = random.Random(seed), 0
    for _ in range(60):
        source = program(chance)
        try:
            code = compile(source, "<program>", "exec")
        except SyntaxError:  # `global` after a use, or two patterns for one name
            continue
        runs += 1
        before = bound_before(source)
        for missing in (names_missing(code, each) for each in range(20)):
            assert missing.keys() <= names_used(source), source
            assert all(before[name] <= bound for name, bound in missing.items()), source
    assert runs > 20
