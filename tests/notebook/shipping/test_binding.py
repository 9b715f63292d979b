"""What statements bind in their own scope, in whatever order."""

from __future__ import annotations

import ast

import pytest

from nbdist.notebook.shipping.binding import Binding, arguments_of, defaults


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
