"""Tests of `nbdist.notebook.assigning`: a value that is bound, and one that would be shown."""

from __future__ import annotations

import ast

import pytest

from nbdist.notebook.assigning import is_used


@pytest.mark.parametrize(
    ("code", "used"),
    [
        ("x = f()", True),
        ("x, y = f(), 1", True),
        ("print(f())", True),
        ("def g(): return f()\nx = g()", True),
        ("x = f() if f else 0", True),
        ("f()", False),
        ("f(); x = 1", False),
        ("for i in '1':\n    f()", False),
    ],
)
@pytest.mark.parametrize("mode", ["exec", "single"])
def test_what_becomes_of_a_value(code: str, used: bool, mode: str) -> None:  # noqa: FBT001
    """Also through calls of ours and IPython's; `single` is how the last line of a cell runs."""
    seen: list[bool] = []
    ours = {"__name__": "nbdist.notebook.command", "seen": seen, "is_used": is_used}
    exec("def f():\n    seen.append(is_used())\n    return seen and None", ours)
    body = ast.parse(code).body
    tree = ast.Interactive(body) if mode == "single" else ast.Module(body, [])
    exec(compile(tree, "cell", mode), {"__name__": "__main__", "f": ours["f"], "print": repr})
    assert seen == [used]
