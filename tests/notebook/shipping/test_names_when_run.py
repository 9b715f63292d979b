"""Programs made by chance, and run: each name that is read while it is unbound was foreseen."""

from __future__ import annotations

import builtins
import contextlib
import random
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from nbdist.notebook.free_names import names_used

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
    """Write some statements; those that are nested are indented by a space."""

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
            return re.sub("( ?)@(.)", lambda found: deeper(found[1], made[found[2]]()), template)

        return fill(chance.choice(NESTED if is_nested else PLAIN))

    return "\n".join(statement() for _ in range(chance.randint(1, 4)))


def deeper(space: str, text: str) -> str:
    """Indent a block once more where a space stands before it; leave expressions as they are."""
    return textwrap.indent(text, space) if text.startswith(" ") else space + text


class Oops(Exception):
    """What programs raise."""


class Globals(dict[str, Any]):
    """The globals of a program, which note the names that it reads and that are not there."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.missing: set[str] = set()
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
        self.missing.add(name)
        return None

    def call(self, function: Any) -> None:
        """Call a function, or make an instance and call its method; not too often."""
        self._calls += 1
        if self._calls < 30 and callable(function):
            with contextlib.suppress(NameError):
                self.call(getattr(function(), "method", None))

    def _risky(self) -> None:
        if self._chance.random() < 0.3:
            raise Oops

    def _called(self, function: Any) -> Any:
        # Its own name is not bound yet: to call itself so early would be an error.
        known = {*self.missing}
        with contextlib.suppress(Oops):
            self.call(function)
        self.missing -= {function.__name__} - known
        return function


def names_missing(code: Any, seed: int) -> set[str]:
    """Run a program, and after it its functions; find what was read and was not bound."""
    found = Globals(random.Random(seed))
    with contextlib.suppress(Oops, NameError):
        exec(code, found)
        for name in {*FUNCTIONS}.intersection(found):
            found.call(found[name])
    return found.missing


@pytest.mark.parametrize("seed", range(8))
def test_no_name_is_missed(seed: int) -> None:
    """Whatever way a program takes, what it reads unbound is among the names that it uses."""
    chance, runs = random.Random(seed), 0
    for _ in range(60):
        source = program(chance)
        try:
            code = compile(source, "<program>", "exec")
        except SyntaxError:  # `global` after a use, or two patterns for one name
            continue
        runs += 1
        missing = set().union(*(names_missing(code, each) for each in range(20)))
        assert missing <= names_used(source), source
    assert runs > 20
