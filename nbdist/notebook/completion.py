"""Completion and inspection in cells of the workers, beside what the notebook's kernel says.

Wrapped around the kernel's own `do_complete` and `do_inspect`, which front ends call from
several threads, or a terminal's completer.  Nothing of what workers have enters the notebook's
namespace.
"""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, get_args

from IPython.core.completer import Completion as IPythonCompletion
from IPython.utils.tokenutil import token_at_cursor

from nbdist.config import OnFailure
from nbdist.errors import NbdistError
from nbdist.notebook.auto_cells import runs_there
from nbdist.notebook.cell_text import (
    CELL_MAGICS,
    MagicLine,
    as_comment,
    cell_magic,
    line_magic,
    root_at,
)
from nbdist.notebook.options import Argument, arguments_of
from nbdist.topology import parse_ranks
from nbdist.wire.control import Candidate, Complete, Completions, Description, Inspect, Question
from nbdist.world.agents import launcher_names
from nbdist.world.snapshot_store import Snapshot, SnapshotStore, root_folder
from nbdist.world.spec import default_log_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from nbdist.notebook.command import Command
    from nbdist.notebook.pool import Pool, Pools


TIMEOUT = 0.9
"""Seconds that the workers have: JupyterLab waits for one."""


KINDS: dict[str, tuple[type, ...]] = {
    "function": (FunctionType, BuiltinFunctionType),
    "class": (type,),
    "module": (ModuleType,),
}


class Completion:
    """Asks one rank of the pool that a cell is for; what none knows the notebook's kernel says."""

    def __init__(self, pools: Pools, commands: Iterable[Command]) -> None:
        self._pools = pools
        self._choices = Choices(pools)
        self._commands = {each.shown_name: each for each in commands}

    def __repr__(self) -> str:
        return f"<Completion for {self._pools}>"

    # --- around the kernel's methods ----------------------------------------------------------

    def complete(self, original: Callable[..., Any], code: str, cursor_pos: int | None) -> Any:
        """Stand around a kernel's `do_complete`."""
        cursor = len(code) if cursor_pos is None else cursor_pos
        found = self.found(code, cursor)
        if found is not None:
            return found.reply()
        return original(plain_text(code, cursor), cursor_pos)

    def completions(
        self, original: Callable[..., Iterator[Any]], text: str, offset: int
    ) -> Iterator[Any]:
        """Stand around the method of this name of a terminal's completer."""
        found = self.found(text, offset)
        if found is None:
            yield from original(plain_text(text, offset), offset)
            return
        for each in found.candidates:
            start, end, kind = found.start, found.end, each.type
            yield IPythonCompletion(start, end, each.text, type=kind, signature=each.signature)

    def found(self, code: str, cursor: int) -> Completions | None:
        """Say what can stand there; None where the notebook is to say it."""
        if (in_line := self.complete_line(code, cursor)) is not None:
            return in_line
        magic = self._magic(code, cursor)
        if magic is None:
            return None
        text = as_comment(code)
        root, is_attribute = root_at(text, cursor)
        if is_attribute and not self._is_theirs(magic, root):
            return None
        theirs = self.ask(magic, Complete(text, cursor))
        if not isinstance(theirs, Completions) or not theirs.candidates:
            return None
        return theirs if is_attribute else self._with_ours(theirs, text, cursor)

    def inspect(
        self,
        original: Callable[..., Any],
        code: str,
        cursor_pos: int,
        detail_level: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Stand around `do_inspect`."""
        magic = self._magic(code, cursor_pos)
        if magic is None:
            return self._described(code, cursor_pos) or original(
                code, cursor_pos, detail_level, *args, **kwargs
            )
        text = as_comment(code)
        root = token_at_cursor(text, cursor_pos).partition(".")[0]
        if root and self._is_theirs(magic, root):
            told = self.ask(magic, Inspect(text, cursor_pos, detail_level))
            if isinstance(told, Description) and told.data:
                plain = f"{told.data.get('text/plain', '').rstrip()}\n{'Rank:':<11}{told.rank}"
                data = {**told.data, "text/plain": plain}
                return {"status": "ok", "found": True, "data": data, "metadata": {}}
        return original(text, cursor_pos, detail_level, *args, **kwargs)

    def is_of_workers(self, code: str, cursor: int) -> bool:
        """Say whether a question there is answered without the notebook's kernel."""
        is_theirs = self._magic(code, cursor) is not None
        return is_theirs or self._line_at(code, cursor)[1] is not None

    def _magic(self, code: str, cursor: int) -> MagicLine | None:
        """Find the magic of a cell that the workers run; of a plain one while auto mode is on."""
        magic, auto = workers_cell(code, cursor), self._pools.auto
        if magic is None and runs_there(self._pools, code):
            return MagicLine(CELL_MAGICS[0], f"--pool {auto.pool}", 0)
        return magic

    def complete_line(self, code: str, cursor: int) -> Completions | None:
        """Say what can stand in the line of a magic of ours; None elsewhere, and for nothing."""
        magic, command = self._line_at(code, cursor)
        if magic is None or command is None:
            return None
        typed = code[magic.start : cursor]
        found = self._choices.complete(magic.name, command.run, typed, magic.pool)
        start, end = found.start + magic.start, found.end + magic.start
        return replace(found, start=start, end=end) if found.candidates else None

    def _described(self, code: str, cursor: int) -> dict[str, Any] | None:
        """Describe the magic in whose line the cursor is, if it is one of ours."""
        lines = code[cursor:].partition("\n")
        _, command = self._line_at(f"{code[:cursor]}{lines[0]} ", cursor + len(lines[0]) + 1)
        if command is None:
            return None
        text = f"{command.shown_name}\n\n{command.run.__doc__}"
        return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}

    def _line_at(self, code: str, cursor: int) -> tuple[MagicLine | None, Command | None]:
        """Find the magic in whose line the cursor is, behind its name, and which of ours it is."""
        magic, escape = cell_magic(code), "%%"
        if magic is None or not magic.start < cursor <= magic.start + len(magic.text):
            magic, escape = line_magic(code, cursor), "%"
        return magic, self._commands.get(f"{escape}{magic.name}") if magic else None

    # --- the workers --------------------------------------------------------------------------

    def ask(self, magic: MagicLine, question: Question) -> Completions | Description | None:
        """Put a question to the workers that the cell is for; None where none answers in time."""
        pool = self._pool(magic)
        world = pool.world if pool else None
        if world is None:
            return None
        try:
            ranks = parse_ranks(magic.ranks or "all", world.size)
        except NbdistError:  # half typed
            ranks = tuple(range(world.size))
        asked = world.session.consult(question, ranks)
        try:
            answer: Any = asked.result(TIMEOUT) if asked else None
        except (FutureTimeoutError, NbdistError):  # the agent may have ended
            return None
        return answer if isinstance(answer, Completions | Description) else None

    def _pool(self, magic: MagicLine) -> Pool | None:
        return self._pools.known(magic.pool)

    def _is_theirs(self, magic: MagicLine, name: str) -> bool:
        """Say whether the cell would find the workers' own value under the name."""
        pool = self._pool(magic)
        if pool is None or pool.world is None:
            return False
        own = pool.world.session.names.ranks_that_own(name)
        return bool(own) or name not in self._pools.shell.user_ns

    def _with_ours(self, theirs: Completions, text: str, cursor: int) -> Completions:
        """Add the names of the notebook, which would go along with the cell."""
        begun, shell = text[theirs.start : cursor], self._pools.shell
        there = {each.text for each in theirs.candidates}
        names = [name for name in [*shell.user_ns] if name.startswith(begun) and begun]
        ours = (
            Candidate(name, kind_of(shell.user_ns.get(name)))
            for name in sorted(names)
            if name not in there and name not in shell.user_ns_hidden
        )
        return replace(theirs, candidates=(*theirs.candidates, *ours))


def workers_cell(code: str, cursor: int) -> MagicLine | None:
    """Find the magic of a cell that the workers run, where the cursor is below it."""
    magic = cell_magic(code)
    if magic is None or magic.name not in CELL_MAGICS:
        return None
    return magic if cursor > magic.start + len(magic.text) else None


def plain_text(code: str, cursor: int) -> str:
    """Give what IPython is asked about in place of a cell: of the workers' the Python in it."""
    return as_comment(code) if workers_cell(code, cursor) else code


def kind_of(value: object) -> str:
    """Say what jedi would call it."""
    for kind, types in KINDS.items():
        if isinstance(value, types):
            return kind
    return "instance"


# --- what can stand in a magic's line ---------------------------------------------------------


WORDS = {
    "backend": ("gloo", "nccl", "cpu:gloo,cuda:nccl", "none"),
    "on_failure": get_args(OnFailure),
    "n": ("auto", "gpu", "cpu"),
    "state": ("on", "off"),
}
"""Values of options that are words, by what the parser calls the option."""

OF_NOTEBOOK = {"dist_push", "dist_scatter"}
"""Magics that take names of the notebook; all others take the workers'."""

WITH_SNAPSHOTS = {"dist_snapshot", "dist_restore"}
OF_SNAPSHOT = ("name", "remove")

UNSAID = ("auto",)
"""Options that nobody types."""

COMMON = ("n", "size", "ranks", "out", "no_wait", "timeout", "setup", "keep", "targets", "source")
"""Options that are offered first, in this order."""

RANKS = ("ranks", "rank", "source", "from_rank")
LISTS = ("ranks", "keep")
NAMES = ("names", "name", "variables", "keep")


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a line ends: which argument's value is `begun` there, or which options could be.

    `before` are the values that it has been given.
    """

    wanted: Argument | None
    options: tuple[Argument, ...] = ()
    begun: str = ""
    before: tuple[str, ...] = ()


class Choices:
    """Knows the values for the magics of a notebook with these pools."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def __repr__(self) -> str:
        return f"<Choices of {self._pools}>"

    def complete(
        self, name: str, magic: Callable[..., object], text: str, pool: str | None
    ) -> Completions:
        """Say what can stand at the end of a line that goes on with `text` after its magic.

        Places are counted from the beginning of `text`.
        """
        spot = spot_in(arguments_of(magic), text)
        candidates = [
            Candidate(flag, "option", each.help)
            for each in sorted(spot.options, key=_place)
            for flag in each.flags[-1:]
            if flag.startswith(spot.begun)
        ]
        if spot.wanted is not None:
            values = self._values(name, spot.wanted, self._pools.known(pool))
            kind = "instance" if spot.wanted.dest in NAMES else "value"
            begun = (value for value in values if value.startswith(spot.begun))
            candidates = [Candidate(value, kind) for value in begun if value not in spot.before]
        return Completions(tuple(candidates), len(text) - len(spot.begun), len(text))

    def _values(self, name: str, wanted: Argument, pool: Pool | None) -> Iterable[str]:
        """List the values of an option or argument, as far as they are known."""
        dest = wanted.dest
        if dest == "pool":
            return [each.name for each in self._pools]
        if dest == "launcher":
            return launcher_names()
        if dest in RANKS:
            size = pool.world.size if pool and pool.world and pool.has_workers else 0
            return ["all"] * (dest == "ranks") + [*map(str, range(size))]
        if dest in OF_SNAPSHOT and name in WITH_SNAPSHOTS:
            return snapshots(pool)
        if dest not in NAMES or (wanted.flags and dest != "keep"):
            return WORDS.get(dest, ())
        if name in OF_NOTEBOOK:
            shell = self._pools.shell
            return sorted(each for each in [*shell.user_ns] if each not in shell.user_ns_hidden)
        if name == "dist_restore":
            return sorted({each for taken in stored(pool) for each in taken.names})
        return theirs(pool)


def _place(option: Argument) -> int:
    return COMMON.index(option.dest) if option.dest in COMMON else len(COMMON)


def spot_in(arguments: Sequence[Argument], text: str) -> Spot:
    """Find out what the last word of a line is, as far as it has been typed."""
    words = text.split()
    begun = words.pop() if text and not text[-1].isspace() else ""
    flags = {flag: each for each in arguments for flag in each.flags}
    flag, sign, value = begun.partition("=")
    if sign and flag in flags:
        return _spot_of_value(flags[flag], value)
    if words and words[-1] in flags and flags[words[-1]].takes_value:
        return _spot_of_value(flags[words[-1]], begun)
    said = {flags[word].dest for word in words if word in flags}
    options = tuple(each for each in arguments if each.flags and each.dest not in (*said, *UNSAID))
    if begun.startswith("-"):
        return Spot(None, options, begun)
    values = [*_without_options(words, flags)]
    wanted = _positional([each for each in arguments if not each.flags], len(values))
    if wanted is None:
        return Spot(None, options if not begun else (), begun)
    return _spot_of_value(wanted, begun, values)


def _without_options(words: Sequence[str], flags: Mapping[str, Argument]) -> Iterator[str]:
    """Yield the words that belong to no option."""
    is_value = False
    for word in words:
        if word in flags:
            is_value = flags[word].takes_value
        elif is_value or word.startswith("-"):
            is_value = False
        else:
            yield word


def _positional(arguments: Sequence[Argument], number: int) -> Argument | None:
    """Find the argument that the next word is for, after so many."""
    if number < len(arguments):
        return arguments[number]
    return arguments[-1] if arguments and arguments[-1].takes_many else None


def _spot_of_value(wanted: Argument, begun: str, values: Sequence[str] = ()) -> Spot:
    """Tell the value that is being typed, of a list with commas perhaps, from those before it."""
    if wanted.dest not in LISTS:
        return Spot(wanted, begun=begun, before=tuple(values))
    *before, last = begun.split(",")
    return Spot(wanted, begun=last, before=(*values, *before))


def theirs(pool: Pool | None) -> list[str]:
    """List the names that the workers have and that are no imports."""
    if pool is None or pool.world is None or not pool.has_workers:
        return []
    names = pool.world.session.names
    return sorted(name for name in names.owners() if not names.whence(name))


def stored(pool: Pool | None) -> list[Snapshot]:
    """List the snapshots that there are, the newest first."""
    try:
        store = pool.snapshot_store if pool else SnapshotStore(root_folder(default_log_dir()))
        return store.all()
    except (NbdistError, OSError):  # the command itself will say why
        return []


def snapshots(pool: Pool | None) -> list[str]:
    """List their names."""
    return [*dict.fromkeys(each.name for each in stored(pool))]
