"""What ranks of a running task wait for your input, and which of them is next; pure.

In the order of the ranks, one after the other: what is typed is for one rank, as its prompt
says, since programs that ask differ in what they have to be told, and a debugger always does.
Who has been answered comes again first if it asks again soon, so that a conversation with the
debugger of one rank, or two questions of one cell, are not torn apart.
"""

from __future__ import annotations

from collections.abc import Collection

from nbdist.errors import UsageError
from nbdist.output.events import InputRequest
from nbdist.topology import parse_ranks
from nbdist.words import name_ranks

SETTLE_SECONDS = 0.1
"""Seconds that a rank is given to ask before one that comes after it."""

STAY_SECONDS = 0.3
"""Seconds that the one who was answered last is given to ask again before others."""

NOBODY = (
    "input() and breakpoint() need JupyterLab or a terminal; this run has neither (nbclient, "
    "papermill). Set a variable instead of calling input()."
)

TO_RANKS = "-r"


class Prompts:
    """Those at which ranks of a task wait, one a rank; times are monotonic seconds."""

    def __init__(self) -> None:
        self._open: dict[int, InputRequest] = {}
        self._changed = 0.0
        self._last: int | None = None
        self._answered = float("-inf")
        self._seconds = 0.0

    def __repr__(self) -> str:
        return f"<Prompts of {name_ranks(self.ranks) if self._open else 'no rank'}>"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who asks."""
        return tuple(sorted(self._open))

    def __getitem__(self, rank: int) -> InputRequest:
        return self._open[rank]

    def seconds(self, now: float) -> float:
        """Count those in which any rank has waited for somebody to type."""
        return self._seconds + (now - self._changed if self._open else 0.0)

    def receive(self, rank: int, request: InputRequest, now: float) -> None:
        """Take in what a rank asks; what it asked before it has given up."""
        self._count(now)
        self._open[rank] = request

    def drop(self, rank: int, now: float) -> None:
        """Forget what it asks: it has ended, or somebody has answered."""
        self._count(now)
        self._open.pop(rank, None)

    def answered(self, rank: int, now: float) -> None:
        """Note that it has been answered."""
        self.drop(rank, now)
        self._last, self._answered = rank, now

    def next(self, now: float, unfinished: Collection[int]) -> int | None:
        """Choose the rank that is to be answered now; None where one that is due may come yet."""
        if not self._open:
            return None
        if self._last in self._open:
            return self._last
        may_come = self._last in unfinished and now - self._answered < STAY_SECONDS
        others = set(unfinished) - self._open.keys() - {self._last}
        may_come |= bool(others) and now - self._changed < SETTLE_SECONDS
        return None if may_come else min(self._open)

    def _count(self, now: float) -> None:
        self._seconds = self.seconds(now)
        self._changed = now

    # --- what is typed --------------------------------------------------------------------

    def prompt(self, rank: int) -> str:
        """Write what stands before the input box: `[rank 3] ipdb> `."""
        return f"[rank {rank}] {self._open[rank].prompt}"

    def answers(self, rank: int, typed: str, size: int) -> dict[int, str]:
        """Say which ranks get what of a line that was typed for this one.

        `-r all c`, in a debugger, is for all those that wait in one now; UsageError for ranks
        that there are not.
        """
        words = typed.split(maxsplit=2)
        if not self._open[rank].by_debugger or len(words) < 2 or words[0] != TO_RANKS:
            return {rank: typed}
        chosen = parse_ranks(words[1], size)
        waiting = [each for each in chosen if each in self._open and self._open[each].by_debugger]
        if not waiting:
            raise UsageError(f"`{typed}`: none of these ranks is in the debugger.")
        return dict.fromkeys(waiting, words[2] if len(words) > 2 else "")

    @property
    def text(self) -> str:
        """`rank 3 waits for your input`; how to answer several at once; "" where none does.

        Said in the head of a cell that runs.
        """
        ranks = self.ranks
        if not ranks:
            return ""
        debugged = [rank for rank in ranks if self._open[rank].by_debugger]
        what = "is in the debugger" if len(debugged) == len(ranks) else "waits for your input"
        if len(ranks) == 1:
            return f"{name_ranks(ranks)} {what}"
        what = what.replace("is in", "are in").replace("waits", "wait") + ", one at a time"
        also = " · `-r all c` goes to all of them" if len(debugged) == len(ranks) else ""
        return f"{name_ranks(ranks)} {what}{also}"
