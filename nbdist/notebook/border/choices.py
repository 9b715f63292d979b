"""What can stand in a magic's line: its options, their values, names, snapshots.

Pure but for what it looks up in the pools; `completion` asks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from nbdist.config import OnFailure
from nbdist.errors import NbdistError
from nbdist.notebook.border.flags import Argument, arguments_of
from nbdist.wire.questions import Candidate, Completions
from nbdist.world.agents import launcher_names
from nbdist.world.snapshot_store import Snapshot, SnapshotStore, root_folder
from nbdist.world.spec import default_log_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from nbdist.notebook.pool import Pool
    from nbdist.notebook.pools import Pools

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
