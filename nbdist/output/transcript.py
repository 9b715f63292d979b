"""What one cell has said so far on every rank.

No I/O and no clock: `receive` takes outputs as they come, with the time, and `groups` says
which ranks are shown together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from nbdist.output.events import Failure, Output, RankError
from nbdist.output.folding import Group, fold_errors, group_of
from nbdist.output.rank_transcript import (
    ENDED,
    FAILED,
    SHOWN_AT_MOST,
    Look,
    RankTranscript,
    State,
)
from nbdist.words import format_ranks

SHOWN_OF_ALL, SHOWN_AT_LEAST = 256 << 20, 4 << 20
"""Characters of displays that are kept of all ranks together, and of each in any case."""

MOST_ROWS = 16
"""As many lines and displays are shown for each rank in full where ranks differ in them."""


class Transcript:
    """One cell on some ranks: what each has said, what is alike, and what failed first."""

    def __init__(self, ranks: Iterable[int], keep_lines: int = 10_000) -> None:
        self.ranks = tuple(sorted(ranks))
        of_each = SHOWN_OF_ALL // max(1, len(self.ranks))
        shown = min(SHOWN_AT_MOST, max(SHOWN_AT_LEAST, of_each))
        self.by_rank = {rank: RankTranscript(rank, keep_lines, shown) for rank in self.ranks}
        self.started: float | None = None

    def __repr__(self) -> str:
        states = ", ".join(f"{number} {state}" for state, number in self.states().items())
        return f"<Transcript ranks {format_ranks(self.ranks)}: {states}>"

    def __iter__(self) -> Iterator[RankTranscript]:
        return iter(self.by_rank.values())

    def __getitem__(self, rank: int) -> RankTranscript:
        return self.by_rank[rank]

    # --- writing ------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Count the time from now on: all ranks have been given the cell."""
        self.started = now
        for each in self:
            each.begin(now)

    def receive(self, rank: int, output: Output, now: float) -> None:
        """Take in what a rank has said; `now` is monotonic time in seconds."""
        if self.started is None:
            self.started = now
        self.by_rank[rank].receive(output, now)

    # --- reading ------------------------------------------------------------------------

    def states(self) -> Counter[State]:
        """Count the ranks in each state."""
        return Counter(each.state for each in self)

    def looks(self) -> Counter[Look]:
        """Do the same, as it is shown."""
        return Counter(each.look for each in self)

    @property
    def is_finished(self) -> bool:
        return all(each.state in ENDED and each.finished is not None for each in self)

    @property
    def is_silent(self) -> bool:
        return all(each.is_silent for each in self)

    def elapsed(self, now: float | None = None) -> float:
        """Count seconds from the start until the last rank has finished, or `now`."""
        if self.started is None:
            return 0.0
        ends = [each.finished for each in self if each.finished is not None]
        if self.is_finished or now is None:
            now = max(ends, default=self.started)
        return max(0.0, now - self.started)

    def groups(self, *, failed_first: bool = False) -> list[Group]:
        """Group alike ranks, in the order of their first ranks; failed ones first if asked.

        Where all that differs is a few rows, only those together whose output is the same, but
        for progress bars, of which each rank has a row.
        """
        members = self._members(exactly=True)
        if sum(each[0].rows for each in members) > MOST_ROWS:
            members = self._members(exactly=False)
        cause = self.root_cause()
        first = cause[0] if cause else None
        alike = set(self.alike_error(first)) if first is not None else set()
        groups = [group_of(each, first, alike) for each in members]
        if failed_first:
            groups.sort(key=lambda group: (not group.has_failed, group.part != "first"))
        return groups

    def _members(self, *, exactly: bool) -> list[list[RankTranscript]]:
        members: list[list[RankTranscript]] = []
        known: dict[object, list[RankTranscript]] = {}
        for each in self:
            body = each.body.but_bars if exactly else each.body.alike
            keys = [(body, each.state in FAILED, key) for key in each.error_keys]
            group = next((known[key] for key in keys if key in known), None)
            if group is None:
                members.append(group := [])
            group.append(each)
            for key in keys:
                known.setdefault(key, group)
        return members

    # --- failures -----------------------------------------------------------------------

    @property
    def failed(self) -> tuple[int, ...]:
        """The ranks on which the cell failed, or whose process ended."""
        return tuple(each.rank for each in self if each.state in FAILED)

    @property
    def errors(self) -> dict[int, RankError]:
        """What ended the cell on each failed rank, as far as it is known."""
        return {each.rank: error for each in self if (error := each.error) is not None}

    def root_cause(self) -> tuple[int, RankError] | None:
        """Find the earliest failure that follows from no other, and its rank; None for none."""
        return min(
            self.errors.items(), key=lambda item: (follows(item[1]), item[1].time_ns), default=None
        )

    def alike_error(self, rank: int) -> tuple[int, ...]:
        """Find the ranks that failed with an error like that of `rank`, itself included."""
        keys = set(self.by_rank[rank].error_keys)
        return tuple(
            other
            for other in self.errors
            if other == rank or not keys.isdisjoint(self.by_rank[other].error_keys)
        )

    def folded_error(self, ranks: Iterable[int]) -> RankError | None:
        """Make one of these ranks' errors, with sets where they differ; None if that cannot be."""
        return fold_errors([error for rank in ranks if (error := self.by_rank[rank].error)])


def follows(error: RankError) -> bool:
    """Say whether it is only what another rank's failure, or Stop, has led to."""
    return isinstance(error, Failure) and (
        error.connections == "ended" or error.name == "KeyboardInterrupt"
    )
