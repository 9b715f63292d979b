"""How ranks compare digests beside the training, in the store where their group has met.

Each rank puts its digest there, and the last rank compares them: no rank waits.  With
`--stop-on-difference` all ranks wait for each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from nbdist.output.wording import difference
from nbdist.words import name_ranks
from nbdist.worker.compat import torch as seam

MOST_TIMES = 100_000
"""Comparisons in a cell; the file in which local ranks meet grows by some 300 bytes with each."""

MEET_TIMEOUT, LOOK_EVERY = 600.0, 0.5
"""Seconds that a rank waits for others which have not ended their cell, and between two looks."""


class RanksDiffer(Exception):
    """What is watched differs, as `--stop-on-difference` wants to know at once."""


class Exchange:
    """One rank's side; `when` a comparison takes place is the same text on all ranks."""

    def __init__(self, key: str, ranks: Sequence[int], rank: int, *, waits: bool) -> None:
        self._key, self._ranks, self._rank, self._waits = f"nbdist/{key}", ranks, rank, waits
        self._store: Any = None
        self._left: deque[str] = deque()
        self.times = 0

    def __repr__(self) -> str:
        return f"<Exchange of rank {self._rank} with {self._ranks}, {self.times} times>"

    def compare(self, when: str, digest: str) -> str:
        """Leave a digest; return when ranks have differed first, as far as is known, or ""."""
        if len(self._ranks) < 2:
            return ""
        if self.times >= MOST_TIMES:
            raise RuntimeError(f"only the first {MOST_TIMES:,} comparisons were made")
        self.times += 1
        if self._store is None:
            self._store = seam.default_store()
        key = f"{self._key}/{when}"
        self._store.set(f"{key}/{self._rank}", digest)
        if self._waits:
            return self._compare_together(key, when)
        if self._store.add(key, 1) == len(self._ranks):
            said = self._difference(key, when)
            self._forget(key, *(f"{key}/{rank}" for rank in self._ranks))
            if said:
                self._store.set(f"{self._key}/found", when)
                print(f"watch: {said}", flush=True)  # noqa: T201 (it is shown while the cell runs)
        return self.found()

    def found(self) -> str:
        """Return when they have differed, if the last one to come has seen it; or ""."""
        key = f"{self._key}/found"
        if self._store is None or not self._store.check([key]):
            return ""
        return str(self._store.get(key).decode())

    def end(self) -> None:
        """End the wait of other ranks for this one, whose cell has ended."""
        if self._waits and self._store is not None:
            self._store.set(f"{self._key}/ended", str(self._rank))

    def _compare_together(self, key: str, when: str) -> str:
        """Wait until all ranks are here; RanksDiffer, on all of them, where they differ."""
        until = time.monotonic() + MEET_TIMEOUT
        keys = {f"{key}/{rank}": rank for rank in self._ranks}
        while not self._are_there([*keys]):
            if self._store.check([f"{self._key}/ended"]):
                return ""
            if time.monotonic() > until:
                late = [rank for each, rank in keys.items() if not self._store.check([each])]
                why = f"{name_ranks(late)} did not come to step {when} in {MEET_TIMEOUT:.0f} s"
                raise RanksDiffer(why)
        said = self._difference(key, when)
        # All have read what they left the time before the last.
        self._left.append(f"{key}/{self._rank}")
        if len(self._left) > 2:
            self._forget(self._left.popleft())
        if said:
            self._store.set(f"{self._key}/found", when)
            raise RanksDiffer(f"{said}; `%dist_debug` looks at this step")
        return ""

    def _are_there(self, keys: list[str]) -> bool:
        """Wait a while for them, in a way that ends where a rank has died."""
        try:
            self._store.wait(keys, timedelta(seconds=LOOK_EVERY))
        except DistStoreError:
            return False
        return True

    def _difference(self, key: str, when: str) -> str:
        """Say which ranks differ from the most that agree; "" where all do."""
        keys = {rank: f"{key}/{rank}" for rank in self._ranks}
        if not self._store.check([*keys.values()]):  # to get what is not there would wait for it
            return ""
        said = difference({rank: self._store.get(each) for rank, each in keys.items()})
        return said and f"{said} at step {when}"

    def _forget(self, *keys: str) -> None:
        with suppress(NotImplementedError, RuntimeError):  # etcd's cannot
            for each in keys:
                self._store.delete_key(each)
