"""Scripts, modules and executables on the workers."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError
from nbdist.notebook.cells import attempt_steps, prepare, run_options
from nbdist.notebook.command import Line, command
from nbdist.notebook.commands.cells import send, sending_options
from nbdist.notebook.options import (
    Argument,
    Magic,
    flags_of,
    our_flag,
    ranks_option,
    restarts_option,
    takes_value,
    world_options,
)
from nbdist.world.calling import find_script

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from nbdist.notebook.jobs import Steps
    from nbdist.wire.work import Script

NOTHING = (
    "`%dist_run`: give either a script or `-m module`: `%dist_run train.py --lr 0.1`, "
    "`%dist_run -m pkg.mod`, or `%dist_run --no-python hostname`."
)
NO_PYTHON_MODULE = (
    "`%dist_run --no-python -m`: a module needs python. `-m pkg.mod` alone runs a module, "
    "`--no-python` alone an executable."
)


def split_line(magic: Magic, line: str) -> tuple[str, list[str]]:
    """Divide a line into our options, and the words from the first one on that is none."""
    try:
        words = shlex.split(line)
    except ValueError as error:  # a quote that is not closed
        raise UsageError(f"`%{magic.__name__}`: {str(error).lower()}.") from None
    flags = flags_of(magic)
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "--":
        words[index] = our_flag(words[index], flags)
        index += 2 if _takes_next(flags, words[index]) else 1
    rest = words[index:]
    return shlex.join(words[:index]), rest[1:] if rest[:1] == ["--"] else rest


def _takes_next(flags: Mapping[str, Argument], word: str) -> bool:
    """Say whether an option's value is the next word; it may be cut short as argparse allows."""
    names = [word] if word in flags else [flag for flag in flags if flag.startswith(word)]
    if not names:
        return takes_value(word)
    return word.strip("-") != "" and flags[names[0]].takes_value


def script_of(program: Sequence[str], options: argparse.Namespace) -> Script:
    """Find what is to be run; UsageError where there is no such thing."""
    if not program:
        raise UsageError(NOTHING)
    if options.module and options.no_python:
        raise UsageError(NO_PYTHON_MODULE)
    kind: Any = "module" if options.module else "executable" if options.no_python else "file"
    return find_script(kind, program[0], program[1:], local_rank=options.pass_local_rank)


@command(
    argument("program", nargs="*", help="a script and its arguments"),
    argument("-m", "--module", action="store_true", help="the program is a module: -m pkg.mod"),
    argument("--no-python", action="store_true", help="the program is an executable"),
    argument("--pass-local-rank", action="store_true",
             help="pass --local-rank=N as the first argument"),
    ranks_option,
    restarts_option,
    sending_options,
    world_options,
    split=split_line,
)  # fmt: skip
def dist_run(line: Line) -> None:
    """Run a script on all workers: `%dist_run -n 4 train.py --lr 0.1`.

    It runs as `__main__` in the workers' own namespace, where cells find what it has
    left, and in the notebook's folder.  Options for `%dist_run` come before the script, all else
    is the script's; `{lr}` and `$lr` are the notebook's `lr`.
    """
    send(line, _steps(line))


def _steps(line: Line) -> Steps:
    options = line.options
    script = script_of(line.words, options)
    task, world = prepare(line.pool, script, options.ranks, line.display, options)
    how = run_options(world, options)
    steps = attempt_steps(line.pool, world, task, lambda _: None, line.display, how)
    return (yield from steps)
