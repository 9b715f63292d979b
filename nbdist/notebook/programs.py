"""What `%dist_run` does: whose option is whose, and what is to be run."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError
from nbdist.notebook.attempts import Orders, run_attempts
from nbdist.notebook.options import Magic, patience
from nbdist.world.restarts import parse_most
from nbdist.world.scripts import find_script, script_cell

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from nbdist.notebook.desk import Desk
    from nbdist.wire.scripts import Script

NOTHING = (
    "`%dist_run`: exactly one of a script and `-m module`: `%dist_run train.py --lr 0.1`, "
    "`%dist_run -m pkg.mod`, or `%dist_run --no-python hostname`."
)
NO_PYTHON_MODULE = (
    "`%dist_run --no-python -m`: a module needs python. `-m pkg.mod` alone runs a module, "
    "`--no-python` alone an executable."
)


def split_line(magic: Magic, line: str) -> tuple[str, list[str]]:
    """Our options, and the words from the first one on that is none, as a shell has them."""
    try:
        words = shlex.split(line)
    except ValueError as error:  # a quote that is not closed
        raise UsageError(f"`%{magic.__name__}`: {str(error).lower()}.") from None
    parser, index = magic.parser, 0  # type: ignore[attr-defined]
    while index < len(words) and words[index].startswith("-") and words[index] != "--":
        index += 2 if _takes_next(parser, words[index]) else 1
    rest = words[index:]
    return shlex.join(words[:index]), rest[1:] if rest[:1] == ["--"] else rest


def _takes_next(parser: Any, word: str) -> bool:
    """Whether the option's value is the next word; it may be cut short as argparse allows."""
    options = parser._option_string_actions
    names = [word] if word in options else [name for name in options if name.startswith(word)]
    return word.strip("-") != "" and any(options[name].nargs != 0 for name in names[:1])


def script_of(program: Sequence[str], options: argparse.Namespace) -> Script:
    """What is to be run; UsageError where there is no such thing."""
    if not program:
        raise UsageError(NOTHING)
    if options.module and options.no_python:
        raise UsageError(NO_PYTHON_MODULE)
    kind: Any = "module" if options.module else "executable" if options.no_python else "file"
    return find_script(kind, program[0], program[1:], local_rank=options.pass_local_rank)


def run_program(
    desk: Desk, first_line: str, program: Sequence[str], options: argparse.Namespace
) -> None:
    """Run it on the workers, which it starts if there are none, and show it."""
    script = script_of(program, options)
    most = parse_most(options.max_restarts)
    display = desk.display()
    cell = script_cell(desk.prepare(first_line, options.ranks, options, display), script)
    assert desk.world is not None
    orders = Orders(patience(options, desk.world.patience), max_restarts=most)
    run_attempts(desk, cell, lambda: None, display, orders)
