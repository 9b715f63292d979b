"""Outputs of all ranks as one stream of lines, for terminals, scripts and logs.

Pure; a notebook's plain mode prints what comes out here, and so does a world in a script.
Each line says its ranks, `[0-3] text`; the same line of several ranks within a moment comes
once.  Of a line that is written over, as progress bars are, only its last state is a line.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from nbdist.output.events import (
    Clear,
    Died,
    Display,
    Done,
    Failure,
    InputRequest,
    Output,
    Skipped,
    Text,
    Typed,
    Update,
    plain_of,
)
from nbdist.output.screen import Screen
from nbdist.output.wording import error_text, in_log_only, left_out_text
from nbdist.words import format_ranks

MERGE_SECONDS = 0.1
# A rank that is this many lines behind another is not waited for.
_LOOK_AHEAD = 50
# Text goes into a screen in pieces, so that no line is dropped before it was taken out.
_SLICE = 64_000
_KEEP = 64_000


@dataclass(slots=True)
class _Rank:
    """What one rank has printed: a terminal, and the lines that have left it."""

    screen: Screen = field(default_factory=lambda: Screen(_KEEP))
    taken: int = 0
    queue: deque[tuple[float, str]] = field(default_factory=deque)
    waiting: Counter[str] = field(default_factory=Counter)  # The texts in the queue.

    def push(self, text: str, now: float) -> None:
        self.queue.append((now, text))
        self.waiting[text] += 1

    def pop(self) -> str:
        _, text = self.queue.popleft()
        self.waiting[text] -= 1
        if not self.waiting[text]:
            del self.waiting[text]
        return text


class PlainLines:
    """Takes outputs with their times, and yields lines in the order in which to print them.

    Call `due` about every `merge_seconds`, and `finish` at the end.  Times are
    monotonic seconds.
    """

    def __init__(self, ranks: Iterable[int], merge_seconds: float = MERGE_SECONDS) -> None:
        self._ranks = {rank: _Rank() for rank in sorted(ranks)}
        self._merge = merge_seconds

    def __repr__(self) -> str:
        waiting = sum(len(rank.queue) for rank in self._ranks.values())
        return f"<PlainLines ranks {format_ranks(self._ranks)}, {waiting} lines waiting>"

    def receive(self, rank: int, output: Output, now: float) -> Iterator[str]:
        """Take in an output; yields the lines that need not wait for other ranks."""
        self._take(self._ranks[rank], output, now)
        yield from self._emit(now)

    def due(self, now: float) -> Iterator[str]:
        """Yield the lines that have waited long enough for other ranks to say the same."""
        yield from self._emit(now)

    def flush(self) -> Iterator[str]:
        """Yield the lines that are complete, without waiting for other ranks."""
        yield from self._emit(float("inf"))

    def finish(self, now: float) -> Iterator[str]:
        """Yield all that is left, lines without an end included."""
        for rank in self._ranks.values():
            self._end_screen(rank, now)
        yield from self._emit(float("inf"))

    # --- in -----------------------------------------------------------------------------

    def _take(self, rank: _Rank, output: Output, now: float) -> None:
        match output:
            case Text(stream=stream, text=text):
                self._write(rank, stream, text, now)
            case Display(data=data) | Update(data=data):
                self._say(rank, plain_of(data), now)
            case Skipped(lines=lines, displays=displays):
                if displays:
                    self._say(rank, left_out_text(displays), now)
                if lines:
                    self._say(rank, in_log_only(lines), now)
            case Failure() | Died():
                self._say(rank, f"✗ {error_text(output)}", now)
            case Done() | InputRequest():
                self._end_screen(rank, now)
            case Typed():
                pass  # The terminal has shown it as it was typed.
            case Clear():
                pass  # What has been printed stays printed.

    def _write(self, rank: _Rank, stream: str, text: str, now: float) -> None:
        for start in range(0, len(text), _SLICE):
            rank.screen.write(stream, text[start : start + _SLICE])
            cursor = rank.screen.cursor
            # Nested progress bars go back up to lines that were complete before.
            rank.taken = min(rank.taken, rank.screen.changed_from)
            rank.screen.changed_from = cursor
            self._take_lines(rank, cursor, now)

    def _take_lines(self, rank: _Rank, stop: int, now: float) -> None:
        for line in rank.screen.lines(rank.taken, stop):
            rank.push(line.text, now)
        rank.taken = max(rank.taken, stop)

    def _say(self, rank: _Rank, text: str, now: float) -> None:
        """Add lines that are not printed text: they begin on a line of their own."""
        self._end_screen(rank, now)
        for line in text.split("\n"):
            rank.push(line, now)

    def _end_screen(self, rank: _Rank, now: float) -> None:
        self._take_lines(rank, rank.screen.end, now)
        rank.screen, rank.taken = Screen(_KEEP), 0

    # --- out ----------------------------------------------------------------------------

    def _emit(self, now: float) -> Iterator[str]:
        """Yield the lines that are due: those that all ranks agree on, and those that waited."""
        while True:
            heads = [(rank.queue[0], number) for number, rank in self._ranks.items() if rank.queue]
            if not heads:
                return
            (since, text), _ = min(heads)
            agree = len(heads) == len(self._ranks) and all(head[1] == text for head, _ in heads)
            if not agree and now - since < self._merge:
                return
            yield from self._emit_line(text)

    def _emit_line(self, text: str) -> Iterator[str]:
        """Yield the line, once for all ranks that have it; what those said before comes first."""
        for number, rank in self._ranks.items():
            for _ in range(_before(rank, text)):
                yield f"[{number}] {rank.pop()}"
        same = [
            number
            for number, rank in self._ranks.items()
            if rank.queue and rank.queue[0][1] == text
        ]
        for number in same:
            self._ranks[number].pop()
        yield f"[{format_ranks(same)}] {text}"


def _before(rank: _Rank, text: str) -> int:
    """Count the lines that the rank has said before this one, if it has said it soon after."""
    if text not in rank.waiting:
        return 0
    soon = islice(rank.queue, _LOOK_AHEAD)
    return next((number for number, (_, line) in enumerate(soon) if line == text), 0)
