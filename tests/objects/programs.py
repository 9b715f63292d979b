"""Programs whose steps run in a notebook or on its ranks, and the values that they must give."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest

from tests.notebook.front_end import Notebook, Outcome

Run = Callable[[Sequence["Step"]], None]
"""Runs a program, and raises AssertionError at the first step with a wrong result."""

HINT = re.compile(r"%dist_push|replaces|were not sent|was not sent")
"""Matches lines on objects that both sides have changed, or that the notebook has replaced."""

PRELUDE = """
import sys, types, random, weakref, collections, dataclasses, enum, functools, abc, itertools
from collections import OrderedDict, ChainMap, Counter, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from tests.objects.nets import loss_of, net, sgd, train
"""

FORGET = """
def _forget():
    names = get_ipython().user_ns
    for name in [*names]:
        if name not in _kept:
            del names[name]
    get_ipython().displayhook.flush()
_kept = {*globals(), "_kept"}
"""

FREEZE = "import gc; gc.collect(); gc.freeze(); del gc"
"""Leaves all that exists out of later collections, of which `flush` makes one."""

_ON_RANKS = '__import__("tests.objects.names", fromlist=["names"])'
KEEP_ON_RANKS = f"%%distributed\n{_ON_RANKS}.keep(get_ipython().user_ns)"
FORGET_ON_RANKS = f"""%%distributed
assert world_size == 2 and {_ON_RANKS}.forget(get_ipython().user_ns)"""
"""Fails on a worker that a program has started, and if it has changed a name of all workers."""

BEGIN = ("%load_ext nbdist", "%dist_init -n 2", KEEP_ON_RANKS, FORGET, PRELUDE, FREEZE)
"""The first cells of a notebook for programs."""


@dataclass(frozen=True)
class Step:
    """A cell of a program: its side, the texts that it shows, and the values of its last line."""

    source: str
    is_here: bool = True
    options: str = ""
    shows: tuple[str, ...] = ()
    fails: str = ""
    values: tuple[Any, ...] | None = None
    may_hint: bool = False


def here(source: str, *shows: str, fails: str = "") -> Step:
    """Return a step that runs a cell in the notebook; the shown text must match all patterns."""
    return Step(source, shows=shows, fails=fails)


def ranks(source: str, *shows: str, options: str = "", fails: str = "") -> Step:
    """Return a step that runs a cell on the ranks; the shown text must match all patterns."""
    return Step(source, is_here=False, options=options, shows=shows, fails=fails)


def gives(expression: str, *values: Any) -> Step:
    """Return a step that evaluates an expression on the ranks, with one value for all or each."""
    return Step(expression, is_here=False, values=values)


def holds(expression: str) -> Step:
    """Return a step that evaluates an expression on the ranks; it must be true on all of them."""
    return gives(expression, *[True])


def gives_here(expression: str, value: Any) -> Step:
    """Return a step that evaluates an expression in the notebook, with the value it must have."""
    return Step(expression, values=(value,))


def holds_here(expression: str) -> Step:
    """Return a step that evaluates an expression in the notebook, which must be true."""
    return gives_here(expression, *[True])


def hinting(step: Step, *shows: str) -> Step:
    """Return the step, which may show lines on conflicts; the shown text must match `shows` too."""
    return replace(step, shows=(*step.shows, *shows), may_hint=True)


def begin(notebook: Notebook, *, are_new: bool = False) -> None:
    """Give the notebook and its two workers only the names of the prelude.

    The workers are those of the program before, unless `are_new`.
    """
    notebook.run("%dist_auto off")
    if notebook.run("_forget()").errors:
        assert notebook.run(FORGET).errors == []
    if are_new or notebook.run(FORGET_ON_RANKS).errors:
        restarted = notebook.run("%dist_restart -n 2")
        assert restarted.errors == [], restarted.seen
        assert notebook.run(KEEP_ON_RANKS).errors == []
    assert notebook.run(PRELUDE).errors == []


def run(notebook: Notebook, steps: Iterable[Step]) -> None:
    """Run each step of a program in the notebook or on the ranks, and check its result."""
    for number, step in enumerate(steps):
        outcome = _run(notebook, step)
        text = outcome.seen
        where = f"step {number}, {'notebook' if step.is_here else 'ranks'}: {step.source}\n{text}"
        if step.fails:
            assert re.search(step.fails, text), f"does not fail with {step.fails!r}: {where}"
            assert outcome.errors, where
            continue
        assert outcome.errors == [], where
        for pattern in step.shows:
            assert re.search(pattern, text), f"does not show {pattern!r}: {where}"
        if not (step.shows or step.may_hint):
            found = HINT.search(text)
            assert found is None, f"shows a line that is not true: {where}"
        if step.values is not None:
            seen = notebook.value("seen")
            wanted = [*step.values] * (len(seen) if len(step.values) == 1 else 1)
            assert seen == wanted, where


def _run(notebook: Notebook, step: Step) -> Outcome:
    if step.values is None:
        head = "" if step.is_here else f"%%distributed {step.options}\n"
        return notebook.run(head + step.source)
    if step.is_here:
        return notebook.run(f"seen = [({step.source})]")
    outcome = notebook.run(f"%%distributed -o seen\n{step.source}")
    if not outcome.errors:
        notebook.run("seen = [seen[rank] for rank in sorted(dict(seen.items()))]")
    return outcome


def on_ranks(steps: Iterable[Step]) -> list[Step]:
    """Return the program with all steps on the ranks, each of which then is a plain kernel."""
    return [replace(each, is_here=False) for each in steps]


def is_plain(steps: Iterable[Step]) -> bool:
    """Return True if the program means the same when all its steps run on the ranks."""
    return not any(
        each.shows
        or each.fails
        or each.may_hint
        or each.options
        or re.search("^%", each.source, re.MULTILINE)
        or (each.is_here and each.values is not None)
        for each in steps
    )


def run_in_one_process(steps: Iterable[Step]) -> None:
    """Run a plain program as each rank in this process, without a notebook, and check its values.

    This proves that the expected values of a table of programs are those of a plain kernel.
    """
    steps = [*steps]
    for rank in range(2):
        module = ModuleType("plain_kernel")
        names = vars(module)
        names["rank"] = rank
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setitem(sys.modules, module.__name__, module)  # pickle looks for classes there
            warnings.simplefilter("ignore")
            exec(PRELUDE, names)
            for number, step in enumerate(steps):
                body = ast.parse(step.source).body
                asked = body.pop() if step.values is not None else ast.parse("None").body[0]
                assert isinstance(asked, ast.Expr)
                exec(compile(ast.Module(body, []), "<step>", "exec"), names)
                seen = eval(compile(ast.Expression(asked.value), "<step>", "eval"), names)
                if step.values is not None:
                    wanted = step.values[rank % len(step.values)]
                    assert seen == wanted, f"step {number} on rank {rank}: {step.source}"


def table(cases: Mapping[str, Sequence[Step]]) -> Any:
    """Parametrize a test by the programs of a table."""
    return pytest.mark.parametrize("name", [pytest.param(each, id=each) for each in cases])
