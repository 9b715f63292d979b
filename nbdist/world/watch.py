"""When ranks that wait in a collective can never go on; pure.

They cannot where some ranks have finished the cell, all others wait in collectives, and
nothing moves among them: who has finished will not join.  A rank that computes may still
join, so as long as there is one, nobody is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nbdist.errors import name_ranks, one_line
from nbdist.wire.messages import Place

HANG_TIMEOUT = 4.0
"""Seconds into a cell whose ranks are all at work; what is told then is told within 5 s."""

LOOK_EVERY = 1.0
SOON, HURRY_SECONDS = 0.1, 2.0
"""The same once a rank has finished, and for how long: a rank may go on for hours."""

ANSWER_TIMEOUT = 1.0
LONGEST_CODE = 60

UNCHANGED = 3.0
"""Seconds after which nothing moves, though some thread has something to do."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a cell's ranks may wait for one another, and what happens then.

    After `hang_timeout` seconds a running cell says who waits for whom; with `frees`, those
    who wait for what can never come are freed, else that is for Stop.
    """

    hang_timeout: float = HANG_TIMEOUT
    frees: bool = True


class Watch:
    """The last two places of each rank of a cell, and when to look again."""

    def __init__(self, started: float, hang_timeout: float = HANG_TIMEOUT) -> None:
        self.places: dict[int, Place] = {}
        self._before: dict[int, Place] = {}
        self._since: dict[int, float] = {}
        self._looks = 0
        self._next = started + hang_timeout
        self._hurried: float | None = None

    def __repr__(self) -> str:
        return f"<Watch {waits_text(self.places)}>"

    def hurry(self, now: float) -> None:
        """Some ranks have finished, or shall: look soon, and often."""
        if self._hurried is None:
            self._hurried = now
            self._next = min(self._next, now + SOON)

    def finished(self) -> None:
        """A rank has: who waited may have gone on with it since, and its end be on the way."""
        self._looks = 0
        self._since.clear()

    def wait(self, now: float) -> float:
        """Seconds until it is time to look."""
        return max(0.0, self._next - now)

    def asked(self, now: float) -> None:
        """The ranks are being asked: not again before they have answered, or should have."""
        self._next = now + ANSWER_TIMEOUT

    def take(self, places: Mapping[int, Place], now: float) -> None:
        """Take in where ranks are."""
        self._before, self.places = self.places, dict(places)
        self._looks += 1
        for rank, place in places.items():
            if rank not in self._since or not _is_same(place, self._before.get(rank)):
                self._since[rank] = now
        in_a_hurry = self._hurried is not None and now - self._hurried < HURRY_SECONDS
        self._next = now + (SOON if in_a_hurry else LOOK_EVERY)

    def never(self, unfinished: Iterable[int], now: float, unchanged: float = UNCHANGED) -> bool:
        """Whether all of these wait, and can never go on without the others.

        They have rested for `unchanged` seconds, where they cannot be seen to be calm.
        """
        ranks = tuple(unfinished)
        return self._looks >= 2 and all(self._rests(rank, now, unchanged) for rank in ranks)

    def _rests(self, rank: int, now: float, unchanged: float) -> bool:
        place, before = self.places.get(rank), self._before.get(rank)
        if place is None or not place.operation or not _is_same(place, before):
            return False
        assert before is not None
        # One of the two will do: gloo's threads wake up now and then for nothing.
        is_calm = place.is_calm or before.is_calm
        return is_calm or now - self._since[rank] >= unchanged

    def start_over(self, now: float) -> None:
        """They have been freed: look again in a while whether they are free."""
        self.places, self._before = {}, {}
        self._next = now + 5 * SOON


def _is_same(place: Place, before: Place | None) -> bool:
    """Whether a rank has not moved on."""
    return before is not None and (
        (place.operation, place.line, place.counts, place.moved)
        == (before.operation, before.line, before.counts, before.moved)
    )


def waits_text(places: Mapping[int, Place], source: str = "") -> str:
    """`ranks 0-2 wait in all_reduce, line 6 · rank 3 is in line 5: time.sleep(600)`."""
    found: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        found.setdefault(_doing(place, source), []).append(rank)
    return " · ".join(
        f"{name_ranks(ranks)} {_verb(ranks, doing)}" for doing, ranks in found.items()
    )


def waited_text(place: Place) -> str:
    """`all_reduce (cell line 7)`, `all_reduce (train.py line 7)`."""
    line = f" ({place.file or 'cell'} line {place.line})" if place.line else ""
    return f"{place.operation}{line}"


def _doing(place: Place, source: str = "") -> str:
    """`wait in all_reduce, line 6`, `in line 5: time.sleep(600)`, `in train.py line 5: ...`."""
    line = f"line {place.line}" if place.line else "no line of the cell"
    if place.file:
        line = f"{place.file} {line}" if place.line else place.file
    if place.is_stopped:
        return "stopped by a signal"
    if place.is_deaf:
        return "busy in C code that holds the GIL" + (
            f", {line}" if place.line or place.file else ""
        )
    if place.operation:
        return f"wait in {place.operation}, {line}"
    lines = source.splitlines()[max(0, place.line - 1) : place.line]
    lines = [place.code] if place.code else lines
    return f"in {line}" + "".join(f": {one_line(text, LONGEST_CODE)}" for text in lines)


def doing_of(ranks: Sequence[int], place: Place, code: str) -> str:
    """What these ranks do, of whose line the source is known: `waits in all_reduce, line 6`."""
    doing = _doing(place, "\n" * (place.line - 1) + code)
    return _verb(ranks, doing).removeprefix("is ").removeprefix("are ")


def _verb(ranks: Sequence[int], doing: str) -> str:
    if doing.startswith("wait"):
        return doing.replace("wait", "waits", 1) if len(ranks) == 1 else doing
    return f"{'is' if len(ranks) == 1 else 'are'} {doing}"
