"""Detects whether ranks that wait in collectives can ever go on, and writes texts about waits.

`TaskRun` and `nbdist.world.recovery` use this module in the notebook's process.  No I/O is done.

There are two kinds of deadlock.  In the first, some ranks have finished the task or do not run it,
all others wait in collectives, and nothing moves among them.  In the second, all ranks wait, in
collectives that do not match, or with nothing that moves.  While an unfinished rank computes there
is no deadlock: that rank may still join a collective.

Gloo matches the collectives of a group by their number: the fifth of one rank with the fifth of
the others.  Matched collectives have to be the same operation, on as many elements of one dtype.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from nbdist.config import HANG_TIMEOUT
from nbdist.output.ansi import strip
from nbdist.output.events import Died, Failure, RankError
from nbdist.output.fingerprint import normal
from nbdist.output.wording import fold_ranks
from nbdist.wire.messages import UnresponsiveHosts
from nbdist.wire.places import Begun, RankPosition, Stack
from nbdist.wire.work import Script
from nbdist.words import name_ranks, one_line
from nbdist.world.states import Machines

Who = Callable[[Iterable[int]], str]
"""A function that names ranks, with their machines if the world has several."""

FIRST_LOCATE_DELAY = LOCATE_INTERVAL = 1.0  # seconds from the start, or an answer, to a request
SOON, FAST_SECONDS = 0.1, 2.0  # seconds between requests after `poll_fast`, and for how long
LOCATED_TIMEOUT = 1.0  # seconds to wait for the places of the ranks
LONGEST_CODE = 60  # characters of a line of code in a text
UNCHANGED = 3.0  # seconds without a change before a rank with active gloo threads counts as stuck
ALL_UNCHANGED = 1.0  # seconds without a change before ranks count as stuck if all ranks wait

UNWAKEABLE_ABORTS = 3
"""A rank that still waits in a collective after this many aborts counts as impossible to wake.

Gloo can lose an abort.  If the other end has closed a connection, and gloo's own thread has not
noticed that yet, Pair::signalException skips the messages that could not be written (torch 2.13).
"""

RELEASED_ERROR = "Released"  # `Failure.name` if an abort or another rank ended a collective
CELL_LINE = re.compile(r"Cell In\[\d+\], line (\d+)")

DTYPES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64"},
    **{"Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"},
    **{"ComplexFloat": "complex64", "ComplexDouble": "complex128"},
}
"""Dtypes by their name in C++, if that differs from the name in Python by more than capitals."""


class HangDetector:
    """The last two places of a task's unfinished ranks, and when to locate the ranks again.

    Times are monotonic seconds.
    """

    def __init__(self, started: float, hang_timeout: float = HANG_TIMEOUT) -> None:
        self.places: dict[int, RankPosition] = {}
        self._before: dict[int, RankPosition] = {}
        self._since: dict[int, float] = {}
        self._polls = 0
        self._in_flight = 0
        self._was_soon = False
        self._aborts: dict[int, tuple[RankPosition, int]] = {}
        self._next = started + min(hang_timeout, FIRST_LOCATE_DELAY)
        self._fast_since: float | None = None

    def poll_fast(self, now: float) -> None:
        """Have ranks located often for `FAST_SECONDS` after the first call; ignore later calls."""
        if self._fast_since is None:
            self._fast_since = now
            self._next = min(self._next, now + SOON)

    def restart(self) -> None:
        """Forget how long places have not changed: a rank has finished, so others may go on."""
        self._polls = 0
        self._since.clear()

    def seconds_to_poll(self, now: float) -> float:
        """Return the seconds until the ranks must be located again."""
        return max(0.0, self._next - now)

    def record_request(self, now: float) -> None:
        """Record a request for places; without an answer it is repeated after `LOCATED_TIMEOUT`."""
        self._next = now + LOCATED_TIMEOUT

    def record_places(
        self, places: Mapping[int, RankPosition], now: float, in_flight: int = 0
    ) -> None:
        """Store the places of the unfinished ranks, and choose when to locate them again.

        `in_flight` counts packets of all ranks, also of finished ones, that are not acknowledged.
        """
        self._before, self.places = self.places, dict(places)
        self._in_flight = in_flight
        self._polls += 1
        for rank, place in places.items():
            if rank not in self._since or not _is_same(place, self._before.get(rank)):
                self._since[rank] = now
        is_fast = self._fast_since is not None and now - self._fast_since < FAST_SECONDS
        # If all ranks began to wait a moment ago, locate the ranks once more, soon: that can show
        # already that the ranks are deadlocked.
        all_wait = bool(places) and all(place.operation for place in places.values())
        is_new = all_wait and now - max(self._since.values()) < FAST_SECONDS
        self._was_soon = is_fast or (is_new and not self._was_soon)
        self._next = now + (SOON if self._was_soon else LOCATE_INTERVAL)

    def is_deadlocked(
        self, unfinished: Iterable[int], now: float, unchanged: float = UNCHANGED
    ) -> bool:
        """Return True if all `unfinished` ranks wait in collectives, and nothing moves among them.

        A rank in which gloo's threads seem active counts only if its place has not changed for
        `unchanged` seconds.
        """
        ranks = tuple(unfinished)
        are_idle = self._polls >= 2 and all(self._is_idle(rank, now, unchanged) for rank in ranks)
        # A packet in flight may let a rank go on.  TCP repeats a lost packet for minutes, each time
        # after twice the interval; if TCP gives up, gloo raises.
        return are_idle and not self._in_flight

    def is_dead_end(
        self, ranks: Iterable[int], now: float, *, is_known: bool, runs_ahead: bool = False
    ) -> bool:
        """Return True if all ranks of the world wait for each other for ever.

        `ranks` are all ranks, and with `is_known` their calls are known not to match.  Without
        `is_known`, no place may have changed for `ALL_UNCHANGED` seconds, and no rank may have
        another thread or a GPU that could end its wait.  `runs_ahead` is as in `Members`.
        """
        ranks = tuple(ranks)
        # With nccl no rank is ever seen to be calm, so the time has to decide.
        unchanged = ALL_UNCHANGED if is_known and runs_ahead else math.inf
        if not self.is_deadlocked(ranks, now, unchanged):
            return False
        has_help = any(self.places[rank].has_help for rank in ranks)
        since = max(self._since[rank] for rank in ranks)
        return is_known or (not has_help and now - since >= ALL_UNCHANGED)

    def _is_idle(self, rank: int, now: float, unchanged: float) -> bool:
        place, before = self.places.get(rank), self._before.get(rank)
        if place is None or not place.operation or not _is_same(place, before):
            return False
        assert before is not None
        # A calm place is enough, now or before: gloo's threads wake up at times without a reason.
        is_calm = place.is_calm or before.is_calm
        return is_calm or now - self._since[rank] >= unchanged

    def unwakeable_ranks(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that wait, with idle gloo threads, after `UNWAKEABLE_ABORTS` aborts."""

        def is_one(rank: int) -> bool:
            place, (before, times) = self.places.get(rank), self._aborts.get(rank, (None, 0))
            return bool(
                times >= UNWAKEABLE_ABORTS and place and place.is_calm and _is_same(place, before)
            )

        return tuple(filter(is_one, ranks))

    def record_abort(self, now: float) -> None:
        """Count an abort for the place of each rank, and forget all places.

        The ranks are located again soon, to see which of them still wait.
        """
        before, self._aborts = self._aborts, {}
        for rank, place in self.places.items():
            aborted_place, times = before.get(rank, (place, 0))
            self._aborts[rank] = (place, times + 1 if _is_same(place, aborted_place) else 1)
        self.places, self._before = {}, {}
        self._next = now + 5 * SOON


def _is_same(place: RankPosition, before: RankPosition | None) -> bool:
    facts = attrgetter("operation", "line", "counts", "moved")
    return before is not None and facts(place) == facts(before)


# --- whether collectives match ------------------------------------------------------------


def is_call_mismatch(places: Mapping[int, RankPosition]) -> bool:
    """Return True if a rank waits while ranks have begun different collectives.

    Collectives of the same number in a group are compared.  The rank that waits has not completed
    the first collective that differs.
    """
    begun = _mismatch(places, lambda each: each.name)
    return any(not each.is_done and places[rank].operation for rank, each in begun.items())


def verdict(places: Mapping[int, RankPosition]) -> str:
    """Return a sentence that says why ranks wait for each other for ever.

    Write `rank 1 is in barrier (line 2), rank 0 in all_reduce (line 3): these calls do not ...`.
    """
    if not is_call_mismatch(places):
        return differing(places) or f"{_places_text(places)}: all ranks wait for each other"
    begun = _mismatch(places, lambda each: each.name)
    text = f"{_places_text(places)}: these calls do not match and would wait forever"
    if any(each.is_done or places[rank].operation != each.name for rank, each in begun.items()):
        text += f"; the first that differ: {_by_ranks_text(begun, lambda each: each.name)}"
    return text


def differing(places: Mapping[int, RankPosition]) -> str:
    """Describe the first collective that differs between ranks, if only in sizes or dtypes; or "".

    Write `all_reduce (line 2), sizes differ: rank 0 [2], rank 1 [3]`, and which results are wrong.
    """
    begun = _mismatch(places, _tensors)
    if not begun or len({each.name for each in begun.values()}) > 1:
        return ""
    name = next(iter(begun.values())).name
    spots = {_spot(place) for place in places.values() if place.operation == name}
    line = spots.pop().removeprefix(name) if len(spots) == 1 else ""
    if len({each.dtypes for each in begun.values()}) == 1:
        differ = f"sizes differ: {_by_ranks_text(begun, lambda each: each.sizes)}"
    elif len({each.sizes for each in begun.values()}) == 1:
        differ = f"dtypes differ: {_by_ranks_text(begun, _dtypes)}"
    else:
        differ = f"sizes and dtypes differ: {_by_ranks_text(begun, _tensors_text)}"
    text = f"{name}{line}, {differ}"
    if done := [rank for rank, each in begun.items() if each.is_done]:
        # An `all_` collective has no root; in others, the unknown root's result may be right.
        verb = "is" if name.startswith("all_") else "may be"
        text += f"; the result on {name_ranks(done)} {verb} wrong"
    return text


def why_aborted(
    aborted: Mapping[int, RankPosition],
    all_places: Mapping[int, RankPosition],
    ran: Collection[int],
    failed: Collection[int],
    world_size: int,
) -> str:
    """Say why the collectives of some ranks were aborted.

    `aborted` has the places of these ranks, and `all_places` the places of all ranks at that time.
    `ran` are the ranks of the task, and `failed` those that failed or have not finished.
    """
    finished = set(ran) - set(failed)
    if len(aborted) == world_size or is_call_mismatch(all_places):
        also = f"; {name_ranks(finished)} finished the cell" if finished else ""
        return verdict(all_places) + also
    if difference := differing(all_places):
        return difference
    if finished:
        return f"{waits_text(aborted)}; {name_ranks(finished)} finished the cell without it"
    outside = set(range(world_size)) - set(ran)
    if not outside:
        return waits_text(aborted)
    verb = "does" if len(outside) == 1 else "do"
    return f"{waits_text(aborted)}; {name_ranks(outside)} {verb} not run this cell"


def why_died(rank: int, died: Died, survivors: Mapping[int, RankPosition]) -> str:
    """Say that gloo ended a rank because a received tensor was too large; "" for other deaths.

    The places of the `survivors` may show the collective and the sizes.
    """
    if not died.received_too_much:
        return ""
    text = f"Rank {rank} received more than its tensor holds: sizes or dtypes differ between ranks"
    last = {other: place.begun[-1] for other, place in survivors.items() if place.begun}
    begun = _mismatch(survivors, _tensors) or last
    if begun and len({(each.name, each.number) for each in begun.values()}) == 1:
        text += f" in {next(iter(begun.values())).name} ({_by_ranks_text(begun, _tensors_text)})"
    return f"{text}. With `--debug` that is found before."


def _mismatch(
    places: Mapping[int, RankPosition], kind: Callable[[Begun], Hashable]
) -> Mapping[int, Begun]:
    """Return by rank the first collective for which `kind` returns different values.

    Collectives of the same number in a group are compared.  The result is empty if none differ.
    """
    begun: defaultdict[tuple[int, str], dict[int, Begun]] = defaultdict(dict)
    for rank, place in places.items():
        for each in place.begun:
            begun[each.number, each.group][rank] = each
    differ = (key for key in sorted(begun) if len({kind(each) for each in begun[key].values()}) > 1)
    return begun[first] if (first := next(differ, None)) is not None else {}


def _tensors(each: Begun) -> Hashable:
    return each.name, each.elements, each.dtypes


def _dtypes(each: Begun) -> str:
    return " ".join(DTYPES.get(name, name.lower()) for name in each.dtypes.split())


def _tensors_text(each: Begun) -> str:
    return f"{_dtypes(each)} {each.sizes}".strip()


def _by_ranks_text(begun: Mapping[int, Begun], text: Callable[[Begun], str]) -> str:
    """Write `rank 0 [2], ranks 1-3 [3]`."""
    texts = {rank: text(each) for rank, each in begun.items()}
    return ", ".join(f"{name_ranks(ranks)} {value}" for value, ranks in fold_ranks(texts).items())


def _places_text(places: Mapping[int, RankPosition]) -> str:
    """Write `ranks 1-2 are in barrier (line 2), rank 0 in all_reduce (line 3)`."""
    texts = {rank: _spot(place) for rank, place in places.items() if place.operation}
    parts = sorted(fold_ranks(texts).items(), key=lambda part: places[part[1][0]].line)
    verb = "is" if len(parts[0][1]) == 1 else "are"
    first, *others = (f"{name_ranks(ranks)} {{}}in {spot}" for spot, ranks in parts)
    return ", ".join([first.format(f"{verb} "), *(each.format("") for each in others)])


def _spot(place: RankPosition) -> str:
    line = f"{place.file} line {place.line}".strip() if place.line else place.file
    return f"{place.operation} ({line})" if line else place.operation


# --- texts --------------------------------------------------------------------------------


def waits_text(places: Mapping[int, RankPosition], source: str = "") -> str:
    """Write `ranks 0-2 wait in all_reduce, line 6 · rank 3 is in line 5: time.sleep(600)`."""
    groups = fold_ranks({rank: _activity(place, source) for rank, place in places.items()})
    return " · ".join(
        f"{name_ranks(ranks)} {_with_verb(ranks, doing)}" for doing, ranks in groups.items()
    )


def silent_text(silent: UnresponsiveHosts) -> str:
    """Write `hosta does not respond and counts as lost after 10 s`; "" for no machine."""
    if not silent.hosts:
        return ""
    many = len(silent.hosts) > 1
    does = "do not respond and count" if many else "does not respond and counts"
    return f"{' and '.join(silent.hosts)} {does} as lost after {silent.timeout:g} s"


def stalled_text(places: Mapping[int, RankPosition], machines: Machines) -> str:
    """Write `the network between hosta and hostb is stalled`; "" if no network is.

    An address is replaced by a machine's name if a rank there has reported it as its own.
    """
    pairs = {rank: place.stalled for rank, place in places.items() if place.stalled}
    names = {address: machines.name(rank) for rank, each in pairs.items() for address, _ in each}
    hosts = {names.get(end, end) for each in pairs.values() for pair in each for end in pair}
    return f"the network between {' and '.join(sorted(hosts))} is stalled" if hosts else ""


def released_text(places: Mapping[int, RankPosition]) -> str:
    """Write `ranks 0-2 were waiting in all_reduce (line 6) and were released`."""
    groups = fold_ranks({rank: _spot(place) for rank, place in places.items()})
    waited = (f"{name_ranks(each)} {_was(each)} waiting in {spot}" for spot, each in groups.items())
    return f"{', '.join(waited)} and {_was(places)} released"


def _was(ranks: Collection[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def shorten_error(
    failure: Failure,
    aborted: RankPosition | None,
    script: Script | None,
    errors: Iterable[RankError],
) -> Failure:
    """Shorten torch's error about connections that an abort, or another rank, has closed.

    After an abort in the place `aborted`: `Released: waited in all_reduce (cell line 7)`.
    Without `aborted` the line comes from the traceback, and the reason from the ranks' `errors`.
    """
    if aborted is not None:
        file, number, wait = aborted.file or "cell", aborted.line, f"in {aborted.operation}"
    else:
        text, wait = strip("\n".join(failure.traceback)), f"for a rank that {_peer_end(errors)}"
        file, matches = "cell", CELL_LINE.findall(text)[:1]
        if script is not None:
            file = os.path.basename(script.file)
            matches = re.findall(rf"File {re.escape(script.file)}:(\d+)", text)[-1:]
        number = int(matches[0]) if matches else 0
    wait = f"waited {wait}" + (f" ({file} line {number})" if number else "")
    return Failure(
        RELEASED_ERROR, wait, (f"{RELEASED_ERROR}: {wait}",), failure.time_ns, connections="ended"
    )


def _peer_end(errors: Iterable[RankError]) -> str:
    causes = [each for each in errors if isinstance(each, Died) or each.connections != "ended"]
    if not causes:  # for example if a rank has destroyed its process group
        return "had closed its connection"
    if any(isinstance(each, Died) for each in causes):
        return "died"
    timed_out = any(
        isinstance(each, Failure) and each.connections == "timed out" for each in causes
    )
    return "had timed out" if timed_out else "had failed"


def _activity(place: RankPosition, source: str = "") -> str:
    """Write `wait in all_reduce, line 6`, `in line 5: sleep(600)`, `in train.py line 5: ...`."""
    line = f"line {place.line}" if place.line else "no line of the cell"
    if place.file:
        line = f"{place.file} {line}" if place.line else place.file
    if place.is_stopped:
        return "stopped by a signal"
    if place.holds_gil:
        where = f", {line}" if place.line or place.file else ""
        return f"busy in C code that holds the GIL{where}"
    if place.operation:
        return f"wait in {place.operation}, {line}"
    if place.asks:
        return f"wait for your input, {line}"
    if place.is_cleaning_up:
        return f"cleaning up after Stop, {line}"
    lines = source.splitlines()[max(0, place.line - 1) : place.line]
    lines = [place.code] if place.code else lines
    return f"in {line}" + "".join(f": {one_line(text, LONGEST_CODE)}" for text in lines)


def doing_of(ranks: Sequence[int], place: RankPosition, code: str) -> str:
    """Write the activity of ranks in the same place: `waits in all_reduce, line 6`.

    `code` is the source text of the line in `place`.
    """
    doing = _activity(place, "\n" * (place.line - 1) + code)
    return _with_verb(ranks, doing).removeprefix("is ").removeprefix("are ")


class Alike(NamedTuple):
    """Ranks whose stacks are equal except for addresses and process ids.

    `doing` says what the ranks do, `first` is the first rank's stack, and `lines` show its calls.
    """

    ranks: tuple[int, ...]
    doing: str
    lines: list[str]
    first: Stack

    def named(self, who: Who) -> str:
        """Write `ranks 0-2 same`, or `rank 3` for a single rank."""
        return who(self.ranks) + (" same" if len(self.ranks) > 1 else "")


def group_stacks(stacks: Iterable[Stack]) -> list[Alike]:
    """Put together the ranks whose stacks are equal except for addresses and process ids."""
    same: dict[str, list[Stack]] = {}
    for stack in sorted(stacks, key=attrgetter("rank")):
        text = "\n".join([_title(stack, (stack.rank,)), *_calls(stack)])
        same.setdefault(normal(text.replace(str(stack.pid), "<pid>")), []).append(stack)
    groups = ((tuple(each.rank for each in group), group[0]) for group in same.values())
    return [Alike(ranks, _title(first, ranks), _calls(first), first) for ranks, first in groups]


def stacks_text(groups: Iterable[Alike], who: Who = name_ranks) -> list[str]:
    """Write the calls of alike ranks, below `── ranks 0-2 same · wait in all_reduce, line 7 ──`."""
    headed = ([f"── {each.named(who)} · {each.doing} ──", *each.lines] for each in groups)
    return [*chain.from_iterable(headed)]


def _title(stack: Stack, ranks: tuple[int, ...]) -> str:
    """Write the activity of a stack's ranks, `wait in all_reduce, line 7`, or the state, `idle`."""
    if stack.state == "busy" or stack.place.is_stopped or stack.place.holds_gil:
        code = stack.frames[0].code if stack.frames and stack.frames[0].is_cell else ""
        return doing_of(ranks, stack.place, code)
    return stack.state


def _calls(stack: Stack) -> list[str]:
    lines = [line for frame in stack.frames for line in frame.lines]
    if stack.place.is_stopped:
        lines.append(f"  `kill -CONT {stack.pid}` resumes it")
    return [*lines, *([f"  {stack.problem}"] if stack.problem else [])]


def _with_verb(ranks: Sequence[int], doing: str) -> str:
    if doing.startswith("wait"):
        return doing.replace("wait", "waits", 1) if len(ranks) == 1 else doing
    return f"{'is' if len(ranks) == 1 else 'are'} {doing}"
