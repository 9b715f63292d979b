"""What became of a task on every rank."""

from __future__ import annotations

import socket
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from nbdist.errors import NoValue, UsageError
from nbdist.output.events import RankError
from nbdist.output.transcript import Transcript
from nbdist.output.wording import clip
from nbdist.wire.task import Source, Task
from nbdist.words import name_ranks

if TYPE_CHECKING:
    from IPython.lib.pretty import RepresentationPrinter

LONGEST_REPR = 2000
"""Characters of the values in a `repr`."""

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class CellResult(Generic[R_co]):
    """What each rank brought back, None where nothing was asked for: `result[1]`, `items()`.

    A mapping from rank to value, but that iteration gives the values in rank order.  Ranks that
    failed are in `errors` instead; `hosts` has the machine of each rank, and its number there.
    """

    task: Task
    transcript: Transcript
    seconds: float
    errors: Mapping[int, RankError]
    by_rank: Mapping[int, R_co] = field(default_factory=dict)
    hosts: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    def __repr__(self) -> str:
        values = f": {self.by_rank!r}" if self._has_values else ""
        return f"<{self._title}{clip(values, LONGEST_REPR)}>"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:  # noqa: FBT001
        """Show the values, each as a notebook shows it: called by IPython for a last value."""
        printer.text(f"<{self._title}")
        if self._has_values and not cycle:
            printer.text(":")
            printer.break_()
            printer.pretty(self.by_rank)
        printer.text(">")

    @property
    def _title(self) -> str:
        failed = f"failed on {name_ranks(self.errors)}" if self.errors else "ok"
        return f"CellResult of {name_ranks(self.task.ranks)}, {failed}"

    @property
    def _has_values(self) -> bool:
        """Whether values were asked for."""
        task = self.task
        return bool(self.by_rank) and (
            task.keeps or bool(task.fetch) or not isinstance(task.work, Source)
        )

    @property
    def ok(self) -> bool:
        """Whether no rank failed."""
        return not self.errors

    def rank(self, number: int) -> R_co:
        """Return the value of one rank; KeyError when it failed or did not run the cell."""
        return self[number]

    def index(self, hostname: str, local_rank: int) -> R_co:
        """Return the value of the rank that is this machine's number `local_rank`.

        `"localhost"` is this machine too.  UsageError where there is no such rank.
        """
        wanted = socket.gethostname() if hostname == "localhost" else hostname
        for rank, value in self.items():
            if self.hosts.get(rank) == (wanted, local_rank):
                return value
        there = ", ".join(f"{host} {number}" for host, number in self.hosts.values())
        raise UsageError(f"No result of local rank {local_rank} on {hostname}; there are {there}.")

    def __iter__(self) -> Iterator[R_co]:
        """Return the values in rank order."""
        return iter(self.values())

    def __len__(self) -> int:
        return len(self.by_rank)

    def __getitem__(self, rank: int) -> R_co:
        """Do as `rank`."""
        if rank not in self.by_rank:
            raise NoValue(rank, self.by_rank)
        return self.by_rank[rank]

    def keys(self) -> KeysView[int]:
        """Return the ranks that have a value."""
        return self.by_rank.keys()

    def values(self) -> ValuesView[R_co]:
        """Return the values in rank order."""
        return self.by_rank.values()

    def items(self) -> ItemsView[int, R_co]:
        """Return ranks and values."""
        return self.by_rank.items()

    @property
    def stdout(self) -> dict[int, str]:
        """What each rank has written, as a terminal would show it: `result.stdout[1]`."""
        return {track.rank: track.written() for track in self.transcript}

    @property
    def stderr(self) -> dict[int, str]:
        """The same of what it has written to stderr."""
        return {track.rank: track.written(stderr=True) for track in self.transcript}
