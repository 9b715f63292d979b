"""Tests that the examples in the docstrings of `World` and `CellResult` give what they say."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from nbdist.world.result import CellResult
from nbdist.world.split_join import Joining
from nbdist.world.world import World

pytestmark = pytest.mark.own_agent

DOCUMENTED: tuple[Callable[..., object], ...] = (
    World.execute, CellResult, World.run, World.scatter, World.gather, World.status, World.sync,
    World.snapshot, World.clean, World.scale,
)  # fmt: skip
"""Functions with examples, in the order in which the examples run on the same four ranks."""

SETUP = """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The variables that all examples share: a world of four ranks, modules and functions."""
    torch = pytest.importorskip("torch", reason="torch is not installed")

    monkeypatch.chdir(tmp_path)
    functions = {
        "train": lambda model, steps: steps,
        "evaluate": lambda: 0,
        "shard": lambda rank: rank,
    }
    with World(4, log_dir=str(tmp_path / "logs"), show=False) as world:
        world.execute(SETUP)
        yield {"world": world, "torch": torch, "functools": functools, "model": None, **functions}


def example_of(function: Callable[..., object]) -> str:
    """Return the first indented block of a function's docstring, without its indentation."""
    text = inspect.getdoc(function) or ""
    match = re.search(r"\n\n((?: {4}.*\n)+)", text)
    return textwrap.dedent(match[1]) if match else ""


def value_in_comment(line: str) -> str | None:
    """Return the `repr` of the value in a line's comment, 6 in `x[1]  # 6: on rank 1`, or None."""
    for token in tokenize.generate_tokens(io.StringIO(line).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.removeprefix("# ").partition(": ")[0]
            try:
                return repr(ast.literal_eval(text))
            except (SyntaxError, ValueError):  # the comment gives no value
                return None
    return None


def test_examples_give_what_they_say(names: dict[str, Any]) -> None:
    """Each line of each example runs, and has the value that the comment beside it gives."""
    for function in DOCUMENTED:
        lines = example_of(function).splitlines()
        assert lines, function
        for line in lines:
            try:
                code = compile(line, "<example>", "eval")
            except SyntaxError:
                exec(line, names)
                continue
            value, expected = eval(code, names), value_in_comment(line)
            assert expected is None or repr(value) == expected, line


def test_values_are_joined_in_the_documented_shapes(names: dict[str, Any]) -> None:
    """`gather` joins four ranks' values of shape (2, 3) to the shapes that its docstring names."""
    world: World = names["world"]
    world.execute("even = torch.zeros(2, 3)")
    text = inspect.getdoc(World.gather) or ""
    shapes = {"stack": ((4, 2, 3), (2, 4, 3)), "cat": ((8, 3), (2, 12))}
    for how in get_args(Joining):
        for dim, shape in enumerate(shapes[how]):
            assert (how, dim, tuple(world.gather("even", join=how, dim=dim).shape)) == (
                how, dim, shape
            )  # fmt: skip
            assert str(shape) in text
