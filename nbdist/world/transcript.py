"""What one cell has said so far on every rank.

No I/O and no clock: `receive` takes outputs as they come, with the time, and whoever
draws asks for `groups`.  Runs in the notebook kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from nbdist.errors import format_ranks
from nbdist.wire.outputs import CONNECTION_LOST, Died, Failure, Output
from nbdist.world.track import ENDED, FAILED, State, Track

FREED = "Freed"
"""`Failure.name` of a rank whose collective was broken open."""

TIMED_OUT = re.compile(r"gloo/transport/.* Timed out waiting|timeout caused pair closure")
"""What gloo says where a collective took too long: it closes the connections, for ever."""

# What a group's error has to do with the first one of the cell.
Part = Literal["none", "first", "same", "other"]


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks whose output and error are the same; `track` is the first one's.

    Where `is_exact` is false they differ in addresses, device numbers or process ids.
    `part` says whether they failed: among them the "first" rank of all, with the "same"
    error as that, or with an "other" one.
    """

    ranks: tuple[int, ...]
    track: Track
    is_exact: bool
    part: Part


class Transcript:
    """One cell on some ranks: their tracks, what is equal among them, and what failed first.

    `version` counts the changes: whoever has drawn a version need not draw it again.
    """

    def __init__(self, ranks: Iterable[int], keep_lines: int = 10_000) -> None:
        self.ranks = tuple(sorted(ranks))
        self.tracks = {rank: Track(rank, keep_lines) for rank in self.ranks}
        self.started: float | None = None
        self.version = 0

    def __repr__(self) -> str:
        states = ", ".join(f"{number} {state}" for state, number in self.states().items())
        return f"<Transcript ranks {format_ranks(self.ranks)}: {states}>"

    def __iter__(self) -> Iterator[Track]:
        return iter(self.tracks.values())

    def __getitem__(self, rank: int) -> Track:
        return self.tracks[rank]

    # --- writing ------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """All ranks have been given the cell; the time counts from now on."""
        self.started = now
        for track in self:
            track.begin(now)
        self.version += 1

    def receive(self, rank: int, output: Output, now: float) -> None:
        """Take in what a rank has said; `now` is monotonic time in seconds."""
        if self.started is None:
            self.started = now
        track = self.tracks[rank]
        before = track.version
        track.receive(output, now)
        self.version += track.version != before

    # --- reading ------------------------------------------------------------------------

    def states(self) -> Counter[State]:
        """How many ranks are in each state."""
        return Counter(track.state for track in self)

    @property
    def is_finished(self) -> bool:
        return all(track.state in ENDED and track.finished is not None for track in self)

    @property
    def is_silent(self) -> bool:
        return all(track.is_silent for track in self)

    def elapsed(self, now: float | None = None) -> float:
        """Seconds since the start, until the last rank has finished or `now`."""
        if self.started is None:
            return 0.0
        ends = [track.finished for track in self if track.finished is not None]
        if self.is_finished or now is None:
            now = max(ends, default=self.started)
        return max(0.0, now - self.started)

    def groups(self, *, failed_first: bool = False) -> list[Group]:
        """Equal ranks together, in the order of their first ranks; failed ones first if asked."""
        members: list[list[Track]] = []
        known: dict[object, list[Track]] = {}
        for track in self:
            keys = [(track.body.alike, track.state in FAILED, key) for key in track.error_keys]
            group = next((known[key] for key in keys if key in known), None)
            if group is None:
                members.append(group := [])
            group.append(track)
            for key in keys:
                known.setdefault(key, group)
        cause = self.root_cause()
        first = cause[0] if cause else None
        same = set(self.same_error(first)) if first is not None else set()
        groups = [_group(tracks, first, same) for tracks in members]
        if failed_first:
            groups.sort(key=lambda group: group.track.state not in FAILED)
        return groups

    # --- failures -----------------------------------------------------------------------

    @property
    def failed(self) -> tuple[int, ...]:
        """The ranks on which the cell failed, or whose process ended."""
        return tuple(track.rank for track in self if track.state in FAILED)

    @property
    def errors(self) -> dict[int, Failure | Died]:
        """What ended the cell on each failed rank, as far as it is known."""
        return {track.rank: error for track in self if (error := track.error) is not None}

    def root_cause(self) -> tuple[int, Failure | Died] | None:
        """The earliest failure that follows from no other, and its rank; None for no failure."""
        return min(
            self.errors.items(), key=lambda item: (follows(item[1]), item[1].time_ns), default=None
        )

    def same_error(self, rank: int) -> tuple[int, ...]:
        """The ranks that failed with the same error as `rank`, itself included."""
        keys = set(self.tracks[rank].error_keys)
        return tuple(
            other
            for other in self.errors
            if other == rank or not keys.isdisjoint(self.tracks[other].error_keys)
        )


def follows(error: Failure | Died) -> bool:
    """Whether it is only what another rank's failure, or Stop, has led to."""
    if not isinstance(error, Failure):
        return False
    said = error.name in (FREED, "KeyboardInterrupt")
    return said or CONNECTION_LOST.search(error.message) is not None


def _group(tracks: list[Track], first: int | None, same: set[int]) -> Group:
    ranks = tuple(track.rank for track in tracks)
    part: Part = "none"
    if tracks[0].state in FAILED:
        part = "first" if first in ranks else "same" if ranks[0] in same else "other"
    return Group(ranks, tracks[0], len({track.body.exact for track in tracks}) == 1, part)
