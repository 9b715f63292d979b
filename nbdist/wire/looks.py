"""What can be seen of a rank from outside, whatever it is doing: its stack, its last collective."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nbdist.wire.messages import Place

RankState = Literal["starting", "idle", "busy", "dead"]

STACK_SIGNAL = signal.SIGRTMAX - 6
"""At this a worker's C code writes its stacks to `RankStart.stack_file`.

Not SIGUSR2, which user code may want for itself.
"""

PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/|^.*/lib/python3\.\d+/(?=[^/]+)")
"""What stands before a library's own path."""


@dataclass(frozen=True, slots=True)
class Collective:
    """`number` counts the collectives of its group."""

    name: str
    number: int
    is_done: bool

    def __str__(self) -> str:
        return f"{self.name} #{self.number}"


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One call; `file` as people know it (`Cell In[5]`), `code` the line's source if known."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def lines(self) -> list[str]:
        """As Python's tracebacks show a call."""
        where = f"  {PACKAGES.sub('', self.file)}, line {self.line}"
        if self.function != "<module>":
            where += f", in {self.function}"
        return [where, f"    {self.code}"] if self.code else [where]

    @property
    def is_cell(self) -> bool:
        """Whether it is in a cell of the notebook."""
        return self.file.startswith("Cell In[")


@dataclass(frozen=True, slots=True)
class Stack:
    """The main thread of one rank: the calls from the cell inwards, the innermost last.

    A rank that is idle has none; where a busy one has none, `problem` says why.
    """

    rank: int
    pid: int
    state: RankState
    place: Place
    frames: tuple[StackFrame, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class GetStacks:
    """Answered by a tuple of `Stack`."""

    ranks: tuple[int, ...]
