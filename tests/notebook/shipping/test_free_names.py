"""Which names a cell reads and binds, from its source."""

from __future__ import annotations

import ast
import builtins

import pytest

from nbdist.notebook.shipping.free_names import (
    Binding,
    arguments_of,
    defaults,
    dotted_names,
    names_bound,
    names_used,
)

USED = {
    # Expressions
    "x + y.z": "x y",
    "f(a, *b, k=c, **d)": "f a b c d",
    "f'{x!r:>{width}} {y.z}'": "x width y",
    "await x": "x",
    "[i * k for i in xs if i < n]": "k xs n",
    "[x for x in x]": "x",
    "{k: v for k, v in d.items()}": "d",
    "[a for b in c for a in b]": "c",
    "lambda x, y=a, *z: x + y + z + b": "a b",
    "x if c else y": "x c y",
    "'x y z'": "",
    # Statements
    "x = 1": "",
    "x = 1\nx": "",
    "x\nx = 1": "x",
    "x = x + 1": "x",
    "x += 1": "x",
    "x.a = 1": "x",
    "x[i] = v": "x i v",
    "x: T = v": "T v",
    "x: int\nx": "x",
    "del x": "x",
    "x = 1\ndel x\nx": "x",
    "import a.b, c as d\na, d": "",
    "from a import b as c\nc": "",
    "a, (b, *c) = v\na, b, c": "v",
    "(y := f(x))\ny": "f x",
    "assert x, y": "x y",
    # What may not have run
    "if c:\n    x = 1\nx": "c x",
    "if c:\n    x = 1\nelse:\n    x = 2\nx": "c",
    "if c:\n    x = 1\nelse:\n    raise E\nx": "c E",
    "for i in xs:\n    y = i\ny, i": "xs y i",
    "for i in xs:\n    if i: break\nelse:\n    y = 1\ny": "xs y",
    "while c:\n    y = 1\ny": "c y",
    "with open_() as f:\n    y = f.x\ny": "open_",
    "with suppress(E):\n    import a\na": "suppress E a",
    "try:\n    import a\nexcept E:\n    a = None\na": "E",
    "try:\n    import a\nexcept E as e:\n    e.x\na": "E a",
    "try:\n    x = 1\nexcept E as e:\n    raise\nx, e": "E e",
    "try:\n    pass\nfinally:\n    x = 1\nx": "",
    "try:\n    a = 1\nfinally:\n    a": "a",
    "a and (b := c)\nb": "a b c",
    "match v:\n    case {'k': a, **rest} if c:\n        a, rest, b\n    case P(x=q): q": "v c b P",
    "match v:\n    case 1:\n        x = 1\n    case _:\n        x = 2\nx": "v",
    "match v:\n    case 1:\n        x = 1\nx": "v x",
    # Functions
    "def f(a: A, b=c, *d, **e) -> R:\n    return a, b, d, e, g": "A R c g",
    "@deco(x)\ndef f(): pass": "deco x",
    "def f():\n    x = 1\n    return x": "",
    "def f():\n    return x\n    x = 1": "",
    "def f():\n    global x\n    x = 1\n    return x": "x",
    "def f():\n    x: T = 1": "",
    "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x += y\n    return g": "y",
    "def f():\n    def g(): return x\n    x = 1\n    return g": "",
    "def f():\n    for i in xs: i\n    import m\n    return m, i": "xs",
    "def f():\n    [q := i for i in xs]\n    return q": "xs",
    "async def f():\n    async with a as b: b\n    async for c in d: c": "a d",
    "def f(): return f()": "",
    "def f(): return g()\ndef g(): return x\nf()": "x",
    "def f(): return g()\nf()\ndef g(): pass": "g",
    "def f(): return k\nk = 1": "",
    "def f(): return k\nf()\nk = 1": "k",
    "@deco\ndef f(): return k\nk = 1": "deco k",
    "g = lambda: k\nk = 1": "k",
    # Classes
    "class A(B, metaclass=M):\n    x: T = y\n    z = x\n    def m(self): return w": "B M T y w",
    "class A:\n    x = 1\n    def m(self): return x": "x",
    "class A:\n    def m(self): return A": "",
    "class A:\n    def m(self): return super().m(q)": "q",
    "class A:\n    x = x": "x",
    "@dataclass\nclass A:\n    x: int = field(k)": "dataclass field k",
    "def f():\n    class A(B):\n        c = d\n        def m(self): return c, e": "B d c e",
    # What IPython makes of magics
    "get_ipython().system('echo {x:.2f} {y.z} $w $$v ${u}')": "x y w u",
    "files = get_ipython().getoutput('ls {folder}')": "folder",
    "get_ipython().run_line_magic('time', 'f(x)')": "f x",
    "get_ipython().run_line_magic('timeit', '-n 10 -r3 f(x)')": "f x",
    "get_ipython().run_line_magic('cd', 'data')": "",
    "get_ipython().run_line_magic('pip', 'install {name}')": "name",
    "get_ipython().run_cell_magic('time', '', 'y = f(x)\\ny')": "f x",
    "get_ipython().run_cell_magic('time', '', '!ls {a}\\nf(x)')": "f x a",
    "get_ipython().run_cell_magic('bash', '', 'x')": "",
    "get_ipython().run_cell_magic('time', '', 'y = 1')\ny": "y",
    "def f():\n    get_ipython().system('echo {x}')": "x",
}


@pytest.mark.parametrize("source", USED)
def test_names_used(source: str) -> None:
    """Names that are read before they are certainly bound, and no others."""
    found = names_used(source) - {"get_ipython"} - set(dir(builtins))
    assert found == set(USED[source].split())


BOUND = {
    "x = y.z = v[0] = 1": "x",
    "a, (b, *c) = v": "a b c",
    "x += 1": "x",
    "x: int = 1": "x",
    "x.a = 1\ny[0] = 2\nf(z)": "",
    "(x := 1)": "x",
    "[y := i for i in xs]": "y",
    "for i, j in xs: k = 1": "i j k",
    "with a as b, c as (d, e): pass": "b d e",
    "import a.b, c.d as e\nfrom f import g, h as i\nfrom j import *": "a e g i",
    "def f(a):\n    b = 1\n    def c(): d = 1": "f",
    "async def f(): x = 1": "f",
    "def f():\n    global g\n    g = 1\n    def h():\n        global i\n        i = 2": "f g i",
    "def f():\n    global g\n    g": "f",
    "class A:\n    x = 1\n    def m(self): pass": "A",
    "lambda x: x": "",
    "def f(x=(y := 1)): pass": "f y",
    "try:\n    pass\nexcept E as e:\n    x = 1": "e x",
    "if c:\n    x = 1\nelif d:\n    y = 1": "x y",
    "while c: x = 1": "x",
    "match v:\n    case {'k': a, **rest}: b = 1\n    case [c, *d] as e: pass": "a rest b c d e",
    "del x": "x",
    "get_ipython().run_line_magic('time', 'x = f()')": "x",
    "get_ipython().run_cell_magic('time', '', 'x = 1\\ndef g(): y = 1')": "x g",
}


@pytest.mark.parametrize("source", BOUND)
def test_names_bound(source: str) -> None:
    """Names that a cell may bind at global level, wherever in it."""
    assert names_bound(source) == set(BOUND[source].split())


def test_dotted_names() -> None:
    """What is reached through dots, from the name on, and every part of the way."""
    assert dotted_names("a.b.c(d.e, f().g)") == {("a", "b", "c"), ("a", "b"), ("d", "e")}


def test_errors_of_syntax_are_pythons() -> None:
    """Source that does not parse is a SyntaxError."""
    with pytest.raises(SyntaxError):
        names_used("x = = 1")
    with pytest.raises(SyntaxError):
        names_bound("x = = 1")


@pytest.mark.parametrize("source", ["", "# only a comment", "pass"])
def test_a_cell_with_nothing_in_it(source: str) -> None:
    """An empty cell uses and binds nothing."""
    assert names_used(source) == names_bound(source) == dotted_names(source) == set()


# --- what statements bind in their own scope, in whatever order -------------------------------


@pytest.mark.parametrize(
    ("source", "names", "everywhere"),
    [
        ("a, (b, *c) = v", "a b c", "a b c"),
        ("for i in xs: y = i\nelse: z = 1", "i y z", "i y z"),
        ("with f() as g, h() as (i, j): pass", "g i j", "g i j"),
        ("try: pass\nexcept E as e: pass", "e", "e"),
        ("import a.b, c as d\nfrom e import *", "a d", "a d"),
        ("[x for x in (y := xs)]", "y", "y"),
        ("match v:\n case {'k': a, **rest}: pass\n case [b, *c]: pass", "a b c rest", "a b c rest"),
        ("def f(x=(y := 1)):\n    global g\n    g = 1", "f y", "f g y"),
        ("class A:\n    b = 1\n    def m(self):\n        global h\n        h = 1", "A", "A h"),
        ("lambda x: (y := x)", "", ""),
        ("get_ipython().run_line_magic('time', 'x = f(y)')", "x", "x"),
        ("del a", "a", "a"),
    ],
)
def test_what_is_bound(source: str, names: str, everywhere: str) -> None:
    """By each kind of statement; functions bind in the cell only what they declare global."""
    binding = Binding.of(ast.parse(source).body)
    assert binding.names == set(names.split())
    assert binding.all_globals == set(everywhere.split())


def test_local_names_of_a_function() -> None:
    """What is declared global or nonlocal is not its own."""
    (function,) = ast.parse("def f():\n    nonlocal a\n    a = b = 1").body
    assert isinstance(function, ast.FunctionDef)
    assert Binding.of(function.body).local == {"b"}


def test_parameters_of_every_kind() -> None:
    """And the expressions of their defaults."""
    arguments = ast.parse("lambda a, /, b=1, *c, d, e=2, **f: 0", mode="eval").body.args  # type: ignore[attr-defined]
    assert sorted(each.arg for each in arguments_of(arguments)) == [*"abcdef"]
    assert [ast.unparse(each) for each in defaults(arguments)] == ["1", "2"]
