"""The place of a rank: its line of the cell, the collectives that it has begun, its stack.

Workers and agents make these records; the notebook and the terminal's commands show them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

RankState = Literal["starting", "idle", "busy", "dead"]

LOCATED_TIMEOUT = 1.0  # seconds to wait for the places of ranks

PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/|^.*/lib/python3\.\d+/(?=[^/]+)")
"""Matches the beginning of the path of a library's file; this beginning is not shown."""

CALL_FILE = "/nbdist/worker/ops/run.py"
"""The end of the path of the file that calls a function which the notebook has sent to a rank.

In a rank's stack, the user's function comes right after the function `call` of this file."""

CELL_FILE = re.compile(r"/ipykernel_\d+/\d+\.py$")
"""Matches the name of a cell's file, which ipykernel writes only for the front end's debugger."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective that a rank has begun, as the rank's status shows it.

    `number` is the collective's number in its group.  `began_ns` is in nanoseconds since 1970.
    """

    name: str
    number: int
    is_done: bool
    began_ns: int = 0

    def __str__(self) -> str:
        return f"{self.name} #{self.number}"


@dataclass(frozen=True, slots=True)
class Begun:
    """A collective that a rank has begun in its cell, for comparing it with those of other ranks.

    `number` is the collective's number in its `group`.  The other fields describe its tensors, but
    only those that must be alike on all ranks of the group.  For two tensors, `sizes` is a text
    such as `[2] [3, 4]`, and `elements` a text such as `2 12`.  `dtypes` has torch's names of their
    dtypes in C++, such as "Float".
    """

    group: str
    number: int
    name: str
    sizes: str = ""
    dtypes: str = ""
    elements: str = ""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The line of the cell or script that a rank is in, and facts that show if the rank can go on.

    The worker's control thread makes this record; the agent makes it if the worker is stopped or
    does not answer.
    """

    line: int = 0  # in the cell, in a called function or in the script; 0 if none or unknown
    operation: str = ""  # the collective or other call in which the rank waits for others, or ""
    # By group: how many collectives began.  By "nccl": when nccl's newest began, in ns since 1970.
    counts: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0  # bytes that gloo's connections have carried
    in_flight: int = 0  # packets of gloo that the other end has not acknowledged
    # Connections on which packets do not arrive: pairs of addresses, the rank's own one first.
    stalled: tuple[tuple[str, str], ...] = ()
    is_calm: bool = False  # True if no thread of gloo is running; False with nccl
    unfinished: int = 0  # collectives that seem to have begun and not ended
    # C code seems to hold the GIL, so that the control thread cannot answer.  Of the other fields
    # at most `line`, `file`, `is_stopped`, `asks` and `is_debugged` are set then.
    holds_gil: bool = False
    is_stopped: bool = False  # the process is stopped, as by SIGSTOP
    file: str = ""  # the name of the script, "" for a cell
    code: str = ""  # the text of `line` in the script
    begun: tuple[Begun, ...] = ()  # the last collectives, if the rank waits or is idle
    # True if another thread or a GPU, and not only another rank, may end the rank's wait.
    has_help: bool = False
    is_cleaning_up: bool = False  # an `except` or `finally` runs because of Stop
    has_taken_sigint: bool = False  # the task has got a SIGINT, or has a handler of its own for it
    # How many KeyboardInterrupts Python has dropped, because a finalizer or callback raised them.
    dropped_interrupts: int = 0
    asks: bool = False  # the rank waits for a line that the user types
    is_debugged: bool = False  # the rank stands at a breakpoint of the front end's debugger

    @property
    def is_in_code(self) -> bool:
        """Whether the rank may be in the user's code, and not in nbdist's code around that code."""
        spot = self.line or self.file or self.operation
        return bool(spot) or self.holds_gil or self.is_stopped


# --- whether collectives match ----------------------------------------------------------------

# Gloo matches the collectives of a group by their number: the fifth of one rank with the fifth of
# each other rank.  Matched collectives must be the same operation, on equally many elements of the
# same dtype.


def find_mismatch(
    places: Mapping[int, RankPosition], kind: Callable[[Begun], Hashable]
) -> Mapping[int, Begun]:
    """Return, by rank, the first collective for which the ranks differ; empty if they never do.

    Collectives with the same number in the same group are compared.  They differ if `kind` returns
    different values for them, for example their names.
    """
    begun: defaultdict[tuple[int, str], dict[int, Begun]] = defaultdict(dict)
    for rank, place in places.items():
        for each in place.begun:
            begun[each.number, each.group][rank] = each
    differ = (key for key in sorted(begun) if len({kind(each) for each in begun[key].values()}) > 1)
    return begun[first] if (first := next(differ, None)) is not None else {}


def is_call_mismatch(places: Mapping[int, RankPosition]) -> bool:
    """Return True if ranks wait in vain because they have called different operations.

    For example, one rank has called `all_reduce` and another rank `broadcast`, each as its fifth
    collective in the same group.  Returns False if no rank waits in the first collectives that
    differ, because then the ranks may still go on.
    """
    begun = find_mismatch(places, lambda each: each.name)
    return any(not each.is_done and places[rank].operation for rank, each in begun.items())


def is_tensor_mismatch(places: Mapping[int, RankPosition]) -> bool:
    """Return True if ranks have called the same operation with tensors that do not match.

    The tensors differ in their numbers of elements or in their dtypes.  Only the first collective
    that differs between the ranks is examined.
    """
    begun = find_mismatch(places, tensors_of)
    return len({each.name for each in begun.values()}) == 1


def tensors_of(each: Begun) -> Hashable:
    """Return the properties of a collective that must be equal on all ranks that take part."""
    return each.name, each.elements, each.dtypes


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A function call on a rank's stack, with the `line` that runs.

    `file` is a path or `Cell In[5]`; `code` is the source of the line, "" if unknown.
    """

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def lines(self) -> list[str]:
        """Lines that show the call, similar to the lines in Python's tracebacks."""
        where = f"  {PACKAGES.sub('', self.file)}, line {self.line}"
        if self.function != "<module>":
            where += f", in {self.function}"
        return [where, f"    {self.code}"] if self.code else [where]

    @property
    def is_cell(self) -> bool:
        """Whether the call is in a cell of the notebook."""
        return self.file.startswith("Cell In[")


@dataclass(frozen=True, slots=True)
class Stack:
    """The calls of the user's code on the stack of a rank's main thread, the innermost last.

    If there are no calls to show, and `state` and `place` do not show why, `problem` says why.
    """

    rank: int
    pid: int
    state: RankState
    place: RankPosition
    frames: tuple[StackFrame, ...] = ()
    problem: str = ""
