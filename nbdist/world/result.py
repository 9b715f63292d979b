"""What became of a cell on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.wire.messages import Cell
from nbdist.wire.outputs import Died, Failure
from nbdist.world.transcript import Transcript


@dataclass(frozen=True)
class CellResult:
    """`values` has what each rank brought back (None where nothing was asked for).

    Ranks that failed are in `errors` instead.
    """

    cell: Cell
    transcript: Transcript
    seconds: float
    errors: Mapping[int, Failure | Died]
    values: Mapping[int, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no rank failed."""
        return not self.errors

    def rank(self, number: int) -> Any:
        """The value of one rank; KeyError when it failed or did not run the cell."""
        return self.values[number]

    def __iter__(self) -> Iterator[Any]:
        """The values in rank order."""
        return iter(self.values.values())

    def __len__(self) -> int:
        return len(self.values)
