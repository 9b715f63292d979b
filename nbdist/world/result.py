"""What became of a task on every rank."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nbdist.errors import UsageError
from nbdist.output.events import RankError
from nbdist.output.transcript import Transcript
from nbdist.wire.task import Task
from nbdist.words import name_ranks

R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class CellResult(Generic[R_co]):
    """`values` has what each rank brought back (None where nothing was asked for).

    Ranks that failed are in `errors` instead; `hosts` has the machine of each rank, and its
    number there.
    """

    task: Task
    transcript: Transcript
    seconds: float
    errors: Mapping[int, RankError]
    values: Mapping[int, R_co] = field(default_factory=dict)
    hosts: Mapping[int, tuple[str, int]] = field(default_factory=dict)

    def __repr__(self) -> str:
        failed = f"failed on {name_ranks(self.errors)}" if self.errors else "ok"
        return f"<CellResult of {name_ranks(self.task.ranks)}, {self.seconds:.1f} s, {failed}>"

    @property
    def ok(self) -> bool:
        """Whether no rank failed."""
        return not self.errors

    def rank(self, number: int) -> R_co:
        """Return the value of one rank; KeyError when it failed or did not run the cell."""
        return self.values[number]

    def index(self, hostname: str, local_rank: int) -> R_co:
        """Return the value of the rank that is this machine's number `local_rank`.

        `"localhost"` is this machine too.  UsageError where there is no such rank.
        """
        wanted = socket.gethostname() if hostname == "localhost" else hostname
        for rank, value in self.values.items():
            if self.hosts.get(rank) == (wanted, local_rank):
                return value
        there = ", ".join(f"{host} {number}" for host, number in self.hosts.values())
        raise UsageError(f"No result of local rank {local_rank} on {hostname}; there are {there}.")

    def __iter__(self) -> Iterator[R_co]:
        """Return the values in rank order."""
        return iter(self.values.values())

    def __len__(self) -> int:
        return len(self.values)
