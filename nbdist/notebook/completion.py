"""Answers completions and inspections in cells of the workers and in lines of nbdist's magics.

Runs in the notebook's process, in wrappers of the kernel's methods, perhaps on several threads at
once.  Names of the workers are completed without binding them in the notebook.
"""

from __future__ import annotations

import re
import time
from argparse import SUPPRESS
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from typing import Any

from IPython.core.completer import Completion as IPythonCompletion
from IPython.utils.tokenutil import token_at_cursor

from nbdist.errors import NbdistError
from nbdist.notebook.auto_mode import runs_on_ranks
from nbdist.notebook.cell_text import (
    CELL_MAGICS,
    MagicLine,
    as_comment,
    cell_magic,
    magic_at,
    root_at,
)
from nbdist.notebook.command import Command
from nbdist.notebook.options import arguments_of, split_code
from nbdist.notebook.pool import Pools
from nbdist.topology import parse_ranks
from nbdist.wire.control import (
    Candidate,
    Complete,
    Completions,
    Description,
    Inspect,
    TypingQuestion,
)
from nbdist.world.name_table import WORKERS_MODULES, WORKERS_OWN
from nbdist.world.world import World

TIMEOUT = 0.9  # seconds for the workers' answer: JupyterLab waits for one second


class Completion:
    """Answers a front end's requests for completions and inspections in cells of the workers.

    It asks an idle rank.  If no rank answers, it completes names from the notebook's tables.
    """

    def __init__(self, pools: Pools, commands: Iterable[Command]) -> None:
        self._pools = pools
        self._commands = {each.name: each for each in commands}

    # --- wrappers of the kernel's methods -----------------------------------------------------

    def complete(self, original: Callable[..., Any], code: str, cursor_pos: int | None) -> Any:
        """Answer in place of a kernel's `do_complete`, which is `original`.

        Calls `original` for code that nbdist does not complete, as in plain cells (`_answer`).
        """
        cursor = len(code) if cursor_pos is None else cursor_pos
        answer = self._answer(Complete(code, cursor))
        if answer is None:
            return original(self._plain_text(code, cursor), cursor_pos)
        return answer.reply()

    def completions(
        self, original: Callable[..., Iterator[Any]], text: str, offset: int
    ) -> Iterator[Any]:
        """Yield the completions at the position `offset` in `text`, in a terminal.

        Wraps `completions` of IPython's completer (`original`), which still answers for all code
        that nbdist does not complete, such as plain cells.
        """
        answer = self._answer(Complete(text, offset))
        if not isinstance(answer, Completions):
            yield from original(self._plain_text(text, offset), offset)
            return
        for each in answer.candidates:
            start, end, kind = answer.start, answer.end, each.type
            yield IPythonCompletion(start, end, each.text, type=kind, signature=each.signature)

    def inspect(
        self,
        original: Callable[..., Any],
        code: str,
        cursor_pos: int,
        detail_level: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Answer in place of a kernel's `do_inspect`, which is `original`.

        Calls `original` for names that nbdist does not describe, as in plain cells (`_answer`).
        """
        answer = self._answer(Inspect(code, cursor_pos, detail_level))
        if answer is not None:
            return answer.reply()
        text = self._plain_text(code, cursor_pos)
        return original(text, cursor_pos, detail_level, *args, **kwargs)

    # --- answers ------------------------------------------------------------------------------

    def _answer(self, question: TypingQuestion) -> Completions | Description | None:
        """Return the completions or the description that a front end asks for.

        A question about a line of a magic is answered here, and a question about a cell of the
        workers by a rank.  Returns None if IPython must answer, for example in plain cells, without
        workers, and for descriptions and attributes of the notebook's own variables.
        """
        cursor, line = question.cursor, None
        if isinstance(question, Complete):
            line = self._code_in_line(question.code, cursor)
        if line is None and (in_line := self._answer_in_line(question)):
            return in_line
        magic = line[0] if line else self._workers_cell(question)
        if magic is None:
            return None
        text = line[1] if line else as_comment(question.code)
        if isinstance(question, Inspect):
            root, needs_root = token_at_cursor(text, cursor).partition(".")[0], True
        else:
            root, needs_root = root_at(text, cursor)
        world = self._pools.world_of(magic.pool)
        if world is None:
            return None
        is_theirs = root in WORKERS_OWN or bool(world.engine.names.ranks_that_own(root))
        if needs_root and root in self._pools.shell.user_ns and not is_theirs:
            return None
        answer = _ask(world, magic, question._replace(code=text))
        if not needs_root:
            return self._add_names(world, answer, root, text[:cursor])
        if answer or not is_theirs:
            return answer or None
        # The notebook must not answer, as the notebook may have another object under this name.
        return Description({}) if isinstance(question, Inspect) else Completions((), cursor, cursor)

    def _add_names(self, world: World, answer: Any, root: str, text: str) -> Completions | None:
        """Add the notebook's variables that begin with the typed text to a rank's answer.

        `root` is the name that the user is typing, and `text` the code before the cursor.  If no
        rank has answered (`answer` is None), also adds variables that the ranks have, as far as the
        notebook knows them.  Returns None if there are no completions.
        """
        shell = self._pools.shell
        known_names = {**shell.user_ns}.keys() - shell.user_ns_hidden
        if answer is None:
            known_names |= {*world.engine.names.owners(), *WORKERS_OWN, *WORKERS_MODULES}
        completions = answer or Completions((), len(text) - len(root), len(text))
        present, begun = {each.text for each in completions.candidates}, text[completions.start :]
        names = sorted(name for name in known_names - present if root and name.startswith(begun))
        more = (Candidate(name, "instance") for name in names)
        return replace(completions, candidates=(*completions.candidates, *more)) or None

    def _answer_in_line(self, question: TypingQuestion) -> Completions | Description | None:
        """Complete or describe a line that begins with a magic of nbdist.

        Returns None for other lines, and if no option or variable completes the text before the
        cursor.  IPython completes the names of magics.
        """
        magic = magic_at(question.code, question.cursor)
        command = self._commands.get(magic.name) if magic else None
        if magic is None or command is None:
            return None
        if isinstance(question, Inspect):
            text = f"{command.shown_name}\n\n{command.run.__doc__}"
            return Description({"text/plain": text})
        if question.cursor <= magic.start:
            return None
        end = question.cursor
        typed = question.code[magic.start : end]
        candidates, begun = choices(self._pools, command, typed, magic.pool)
        return Completions(candidates, end - len(begun), end) if candidates else None

    def _code_in_line(self, code: str, cursor: int) -> tuple[MagicLine, str] | None:
        """Return the magic of a line such as `%distributed -r 0 x = 1`, and the line's code.

        Blanks replace all text of the cell before the code, so that the cursor keeps its position.
        Returns None for other lines, and if no code is before the cursor.
        """
        magic = magic_at(code, cursor)
        command = self._commands.get(magic.name) if magic else None
        if magic is None or command is None or not command.in_a_line or cursor <= magic.start:
            return None
        if code.startswith("%%", magic.start - len(magic.name) - 2):
            return None
        typed = code[magic.start : cursor].rstrip()
        _, typed_code = split_code(command.run, typed)
        if not typed_code or typed_code == "-":  # `-` is the beginning of an option
            return None
        begin = magic.start + len(typed) - len(typed_code)
        return magic, " " * begin + code[begin:].partition("\n")[0]

    def _plain_text(self, code: str, cursor: int) -> str:
        """Return the code that IPython gets, without the magic that names workers.

        Blanks or a comment replace the magic, so that the cursor keeps its position.
        """
        if line := self._code_in_line(code, cursor):
            return line[1]
        return as_comment(code) if workers_cell(code, cursor) else code

    def _workers_cell(self, question: TypingQuestion) -> MagicLine | None:
        """Return the magic of a cell of the workers if the cursor is below the magic.

        A plain cell that auto mode runs on the workers counts as one with `%%distributed`.  Returns
        None for all other cells, and if the cursor is in the magic's line or above it.
        """
        magic, auto = workers_cell(question.code, question.cursor), self._pools.auto
        if magic is None and runs_on_ranks(self._pools, question.code):
            return MagicLine(CELL_MAGICS[0], f"--pool {auto.pool}", 0)
        return magic


def _ask(
    world: World, magic: MagicLine, question: TypingQuestion
) -> Completions | Description | None:
    """Ask an idle rank for completions or a description, and return its answer.

    First asks an idle rank on which the cell would run.  If none answers, asks another idle rank.
    Returns None if no rank has answered after `TIMEOUT` seconds, or if the agent has ended.
    """
    every = range(world.size)
    try:
        ranks = parse_ranks(magic.ranks or "all", world.size)
    except NbdistError:  # the user is still typing the ranks
        ranks = (*every,)
    until = time.monotonic() + TIMEOUT
    for each in (ranks, {*every}.difference(ranks)):
        future = world.engine.consult(question, each)
        try:
            answer: Any = future.result(until - time.monotonic()) if future else None
        except (FutureTimeoutError, NbdistError):  # no answer in time, or the agent has ended
            return None
        if isinstance(answer, Completions | Description):
            return answer
    return None


def workers_cell(code: str, cursor: int) -> MagicLine | None:
    """Return the cell's `%%distributed` or `%%rank` if the cursor is below that line.

    Returns None for other cells, and if the cursor is in that line or above it.
    """
    magic = cell_magic(code)
    if magic is None or magic.name not in CELL_MAGICS:
        return None
    return magic if cursor > magic.start + len(magic.text) else None


# --- completion of a magic's line -------------------------------------------------------------

NAMES = ("names", "variables")
"""The arguments of magics whose values are names of variables, which can be completed."""

_WORD_SEPARATOR = re.compile(r"[\s,=]+")  # `a,b` and `--as=x` are two words each

Choices = tuple[Candidate, ...]


def choices(pools: Pools, command: Command, text: str, pool: str | None) -> tuple[Choices, str]:
    """Return the candidates for the last word of a command's line, and that word as typed so far.

    `text` is the line from after the command's name to the cursor, and `pool` the pool that the
    line names.  The candidates are options with their help, or names of variables if the command
    takes names and the word does not begin with `-`.  Options and names that the line has already
    are left out.
    """
    *words, begun = _WORD_SEPARATOR.split(text)
    arguments, shell, world = arguments_of(command.run), pools.shell, pools.world_of(pool)
    if begun.startswith("-") or not any(each.dest in NAMES for each in arguments):
        candidates = [
            Candidate(each.option_strings[-1], "option", str(each.help).replace("%%", "%"))
            for each in arguments
            if each.help != SUPPRESS
            and each.option_strings
            and not {*words} & {*each.option_strings}
        ]
    else:
        owners = world.engine.names.owners() if world else {}
        names = [each for each in owners if world and not world.engine.names.import_path(each)]
        if command.name in ("dist_push", "dist_scatter"):
            names = [*{**shell.user_ns}.keys() - shell.user_ns_hidden]
        candidates = [Candidate(each, "instance") for each in sorted(names) if each not in words]
    return tuple(each for each in candidates if each.text.startswith(begun)), begun
