"""Which collectives this worker has begun and not ended, by torch's Flight Recorder.

Its counters take 0.05 ms to read, but know nothing of generations: a backend that was
connected anew counts from one again, and keeps what it last completed until it completes
another.  Its entries show all, and take a hundred times as long.  (With torch 2.7 to 2.10
it has nothing of gloo's.)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from nbdist.wire.views import Begun, Collective
from nbdist.worker.compat import torch as seam

MOST_BEGUN = 64
"""Collectives of a task that are reported: ranks that do not meet are rarely further apart."""

UNEVEN = {"all_to_all", "all_to_all_single"}
"""Collectives in which each rank may have as much as it likes; the second is nccl2's."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many collectives a backend has begun, and how many of these seem not to have ended.

    Some may have: when two end at once, the number of the earlier one can be written last.
    """

    begun: int = 0
    unfinished: int = 0


class Recording:
    """What gloo's backends have done since the groups were last formed."""

    def __init__(self) -> None:
        self._first = 0
        self._before: Mapping[str, Mapping[str, str]] = {}
        self._last: tuple[dict[str, int], dict[str, Any] | None] = {}, None
        self._seen: tuple[object, tuple[Begun, ...]] | None = None

    def __repr__(self) -> str:
        return f"<Recording from {self._first}>"

    def start_over(self) -> None:
        """Forget what has begun so far: the groups are being formed anew.

        Flight Recorder keeps the numbers, and never takes what failed for completed (2.13).
        """
        self._seen = None
        self._before = seam.recorded_groups()
        self._first = next((e["record_id"] + 1 for e in seam.recorded_collectives()), 0)

    def counts(self) -> dict[str, Counts]:
        """Count for each backend in use, by its number."""
        found, unknown = {}, set()
        for number, status in seam.recorded_groups().items():
            before = self._before.get(number)
            if before is None or (seam.RENEWS_GLOO and _has_moved_on(status, before)):
                found[number] = _counted(status)
            elif seam.RENEWS_GLOO:
                unknown.add(number)
        return found | self._by_entries(unknown)

    def waited_for(self, counts: Mapping[str, Counts]) -> str:
        """Name the collective that was begun last, of those that have not ended; "" for none."""
        if not any(each.unfinished for each in counts.values()):
            return ""  # asking for all entries takes a thousand times as long
        return next((operation_of(entry) for entry in self._entries() if not entry["retired"]), "")

    def begun(self, counts: Mapping[str, Counts], since_ns: int) -> tuple[Begun, ...]:
        """Give the last collectives since then, the oldest first."""
        if self._seen is None or self._seen[0] != (counts, since_ns):
            of_cell = takewhile(lambda e: e["time_created_ns"] >= since_ns, self._entries())
            found = [begun_of(entry) for entry in islice(of_cell, MOST_BEGUN)]
            self._seen = (dict(counts), since_ns), tuple(found[::-1])
        return self._seen[1]

    def last(self) -> Collective | None:
        """Give the one that was begun last; None if there was none.

        Costs 8 ms where Flight Recorder is full, unless no other has begun since.
        """
        counts = self.counts()
        begun = {number: each.begun for number, each in counts.items()}
        if begun != self._last[0]:
            self._last = begun, next(self._entries(), None)
        entry = self._last[1]
        if entry is None or str(entry["pg_id"]) not in counts:
            return None
        of, number = counts[str(entry["pg_id"])], int(entry["collective_seq_id"])
        newest = next(self._entries(), entry) if number > of.begun - of.unfinished else entry
        is_done = newest is entry or bool(newest["retired"])
        return Collective(operation_of(entry), number, is_done, entry["time_created_ns"])

    def _entries(self) -> Iterator[dict[str, Any]]:
        """Read those of this generation, from the newest back."""
        for entry in seam.recorded_collectives():
            if entry["record_id"] < self._first:
                return
            yield entry

    def _by_entries(self, numbers: Collection[str]) -> dict[str, Counts]:
        """Count for those of these backends that have begun anything."""
        begun: Counter[str] = Counter()
        unfinished: Counter[str] = Counter()
        for entry in self._entries() if numbers else ():
            if (number := str(entry["pg_id"])) in numbers:
                begun[number] += 1
                unfinished[number] += not entry["retired"]
        return {number: Counts(begun[number], unfinished[number]) for number in begun}


def _has_moved_on(status: Mapping[str, str], before: Mapping[str, str]) -> bool:
    """Say whether the backend, connected anew, has completed something: its counters hold again."""
    done = "last_completed_collective"
    return status[done] != before[done] and _counted(status).unfinished >= 0


def _counted(status: Mapping[str, str]) -> Counts:
    """Count from counters; -1 stands for none completed."""
    begun = int(status["last_enqueued_collective"])
    return Counts(begun, begun - max(0, int(status["last_completed_collective"])))


def operation_of(entry: Mapping[str, Any]) -> str:
    """Name the collective without its backend, `all_reduce`; without the other rank, `recv`."""
    return re.sub(r"^\w+:| .*", "", entry["profiling_name"])


def begun_of(entry: Mapping[str, Any]) -> Begun:
    """Say what others have to know of it."""
    name = operation_of(entry)
    # What the root of a scatter has is its own affair, as is where a gather ends.
    side = "output" if name == "scatter" else "input"
    sizes = [] if _is_uneven(name, entry) else entry[f"{side}_sizes"]
    return Begun(
        group=entry["process_group"][0],
        number=entry["collective_seq_id"],
        name=name,
        sizes=" ".join(map(str, sizes)),
        dtypes=" ".join(dict.fromkeys(entry[f"{side}_dtypes"])),
        elements=" ".join(str(math.prod(size)) for size in sizes),
        is_done=bool(entry["retired"]),
    )


def _is_uneven(name: str, entry: Mapping[str, Any]) -> bool:
    """Say whether ranks may differ in it: nccl gathers also what is not of one size."""
    gathers = name == "all_gather" and len({*map(tuple, entry["output_sizes"])}) > 1
    return gathers or name in UNEVEN
