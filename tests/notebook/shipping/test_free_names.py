"""Which names a cell reads and binds, from its source."""

from __future__ import annotations

import builtins
import sys

import pytest

from nbdist.notebook.free_names import (
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
    # What may not have run
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
    # What IPython makes of magics
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
def test_names_used(source: str) -> None:
    """Names that are read before they are certainly bound, and no others."""
    found = names_used(source) - {"get_ipython"} - set(dir(builtins))
    assert found == set(USED[source].split())


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
def test_names_bound(source: str) -> None:
    """Names that a cell may bind at global level, wherever in it."""
    assert names_bound(source) == set(BOUND[source].split())


def test_what_is_no_code() -> None:
    """Source that does not parse is a SyntaxError; an empty cell has no names; chains are whole."""
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
def test_what_a_magic_would_run(method: str, texts: list[str], code: list[str]) -> None:
    """Statements, and what braces and dollars would fill in; nothing of other languages."""
    assert code_in_magic(method, texts) == code


def test_names_that_commands_fill_in() -> None:
    """Those of a cell's own commands, in order; not those of its functions, nor the shell's own."""
    source = "get_ipython().system('echo {b} $a; for i in 1; do echo $i; done')\n"
    in_function = "def f():\n    get_ipython().system('{c}')\n"
    in_class = "class A:\n    get_ipython().run_line_magic('cd', '{d}')\n"
    assert names_in_commands(in_function + source + in_class) == ["b", "a", "d"]
