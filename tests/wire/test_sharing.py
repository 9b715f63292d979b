"""Tests of `nbdist.wire.sharing`: which objects two values share."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.wire.pickling import pickle

SHARED = {
    "a list in both": ("l = []\na, b = [l], {'l': l}", True),
    "one inside the other": ("b = {}\na = [b]", True),
    "equal but not the same": ("a, b = [1], [1]", False),
    "strings and numbers": ("s = 'text' * 9\na, b = [s, 2**70], [s, 2**70]", False),
    "a tuple of constants": ("t = (1, 2)\na, b = [t], [t]", False),
    "a class": ("class A: pass\na, b = A(), A()", False),
    "a class with a list": ("class A:\n    x = []\na, b = A(), A()", False),
    "a class with annotations": (
        "class A:\n    x: int = 1\n    def m(self, y: int) -> int: ...\na, b = A(), A()",
        False,
    ),
    "a function": ("def f(x: int = 1): ...\na, b = [f], [f]", False),
    "a logger": ("import logging\nl = logging.getLogger('x')\na, b = [l], [l]", False),
    "an enum": ("import enum\nclass E(enum.Enum):\n    X = 1\na, b = [E.X], [E.X]", False),
    "an attribute": (
        "class A: pass\nt = A()\nt.x = 1\na, b = A(), A()\na.t = b.t = t",
        True,
    ),
    "a captured variable": (
        "def make():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n"
        "    def get(): return n\n    return up, get\na, b = make()",
        True,
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_what_two_values_share(case: str, notebook: Any) -> None:
    """Only objects that can change, and are not part of a class, count as shared."""
    source, expected = SHARED[case]
    notebook.run(source)
    one, other = (pickle({n: notebook.names[n]}, notebook.names) for n in "ab")
    assert bool(one.shared & other.shared) is expected
