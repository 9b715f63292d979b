"""Writes panels as text/plain, and the output of all ranks as one stream of lines (`PlainLines`).

The notebook's process shows and saves this text beside the HTML of a panel.  In terminals, scripts
and logs that process uses `PlainLines` instead.  Pure: no I/O here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from nbdist.output import events
from nbdist.output.ansi import strip
from nbdist.output.bars import bars_of_rank, bars_text, find_left_bars, left_bar_line
from nbdist.output.curves import Curves
from nbdist.output.fingerprint import Bar
from nbdist.output.layout import sameness
from nbdist.output.panel import MARKS, Hidden, Panel, PanelBlock
from nbdist.output.rank_transcript import RichDisplay, display_state_of
from nbdist.output.screen import Screen
from nbdist.output.transcript import Transcript
from nbdist.output.wording import (
    clip,
    error_text,
    in_log_only,
    left_out_text,
    traceback_rows,
    traceback_text,
)
from nbdist.words import format_ranks, name_ranks

_LIVE_WIDTH = 300
_MAX_ROWS = 200


def panel_text(shown: Panel) -> str:
    """Return a panel as text: its head, the output of ranks, and its notes.

    The output below a header such as `── ranks 0-2 ──` belongs to the ranks in the header.
    """
    before, after = shown.waits or shown.spread, "\n".join(filter(None, [shown.note, shown.foot]))
    head = [head_text(shown), *shown.warnings, *filter(None, [before])]
    return "\n".join([*head, *_body(shown), *filter(None, [after])])


def head_text(shown: Panel) -> str:
    """Return the head line of a panel: `4 ranks · 12.3 s · ✓ 3 · ✗ 1`."""
    states = [text for _, text in shown.states]
    return " · ".join(filter(None, [shown.ranks, shown.seconds, *states, shown.pace, shown.now]))


def curves_lines(curves: Curves, *, is_live: bool = False) -> list[str]:
    """Return the numbers that ranks have tracked as tables, below a header."""
    from nbdist.output.chart import curves_text, live_curves  # late, since few cells track numbers

    text = live_curves(curves)[1] if is_live else curves_text(curves)
    return ["── tracked ──", *text.split("\n")]


def failures_text(shown: Panel, *, colours: bool) -> Iterator[str]:
    """Yield the lines of a cell's errors, each error below a header that names its ranks."""
    by_error: dict[tuple[str, ...], list[PanelBlock]] = {}
    for block in (*shown.blocks, *shown.folded_blocks):
        if block.group.has_failed:
            error = block.group.error
            if block.group.part == "first" and isinstance(error, events.Failure):
                # A panel shows fewer rows, but a terminal shows the traceback only here.
                text = traceback_text(error)
                rows = [*traceback_rows(text if colours else strip(text), _MAX_ROWS)]
            else:
                rows = _error(block)
            by_error.setdefault((block.group.shown.display_state, *rows), []).append(block)
    for (_, *lines), blocks in by_error.items():
        first, *others = blocks
        ranks = sorted(rank for block in blocks for rank in block.group.ranks)
        mark = MARKS[first.group.shown.display_state]
        yield _header(ranks, mark=mark) if others else _block_header(first)
        yield from lines


def whole_text(
    transcript: Transcript, ranks: Iterable[int], logs: Mapping[int, str] | None = None
) -> str:
    """Return all output of some ranks that the notebook has kept, each rank below a header.

    Lines that are not kept are replaced by their number and the rank's path in `logs`, if any.  The
    progress bars of a rank come after its lines and displays, and its error comes last.
    """
    parts: list[str] = []
    for output in map(transcript.__getitem__, ranks):
        log = (logs or {}).get(output.rank)
        parts.append(_header([output.rank]))
        for piece in output.pieces:
            match piece:
                case Screen(dropped_lines=lost):
                    parts += [in_log_only(lost, log)] if lost else []
                    parts += [strip(line.text) for line in piece.tail(len(piece))]
                case events.Skipped(lines=lost):
                    parts.append(in_log_only(lost, log))
                case RichDisplay():
                    parts += _plain(piece)
        parts += bars_text(bars) if (bars := bars_of_rank(output)) else []
        if isinstance(output.error, events.Failure):
            parts += traceback_rows(strip(traceback_text(output.error)), _MAX_ROWS)
        elif output.error is not None:
            parts.append(error_text(output.error))
    return "\n".join(parts)


def _body(shown: Panel) -> Iterator[str]:
    failed, others = shown.failed_and_others
    parts = [
        [*_block(block, is_live=shown.is_live)]
        for block in (*failed, *others, *shown.folded_blocks)
    ]
    if shown.curves:
        parts.insert(len(failed), curves_lines(shown.curves, is_live=shown.is_live))
    if shown.bars:
        bars = [clip(row, _LIVE_WIDTH) if shown.is_live else row for row in bars_text(shown.bars)]
        parts.insert(len(failed), [_header(shown.bars.ranks, "bars"), *bars])
    yield from chain.from_iterable(parts)
    for row in shown.rows:  # lines of ranks without a block, or of only some ranks of a block
        yield _header(row.ranks, row.sameness)
        yield strip(row.line.text)
    if shown.silent:
        yield _header(shown.silent, "no output")
    if shown.more:
        yield f"── {shown.more_text} ──"


def _block(block: PanelBlock, *, is_live: bool) -> Iterator[str]:
    yield from (_block_header(block), *block.above)
    for item in block.items:
        match item:
            case Hidden():
                yield block.hidden_text(item)
            case str():
                yield item
            case RichDisplay():
                yield from _plain(item)
            case lines:
                yield from (strip(line.text) for line in lines)
    yield from _error(block, is_live=is_live)


def _plain(shown: RichDisplay) -> list[str]:
    return strip(shown.plain).split("\n")


def _error(block: PanelBlock, *, is_live: bool = False) -> list[str]:
    error = block.group.error
    if is_live and error is not None:
        return [clip(block.failed or error_text(error), _LIVE_WIDTH)]
    if block.group.part != "first" or not isinstance(error, events.Failure):
        return [block.failed] if block.failed else []
    return [strip(row) for part in block.traceback for row in part.visible_rows]


def _block_header(block: PanelBlock) -> str:
    group = block.group
    mark = (
        MARKS[group.shown.display_state]
        if group.has_failed or group.shown.state == "aborted"
        else ""
    )
    return _header(group.ranks, sameness(group), mark)


def _header(ranks: Iterable[int], sameness: str = "", mark: str = "") -> str:
    """Return a header, such as `── ranks 0-4,6-7 (same) ──` or `── rank 5 ✗ ──`.

    `sameness` is the text in parentheses, and `mark` a mark such as the `✗` of a failed rank.
    """
    words = [name_ranks(ranks), f"({sameness})" if sameness else "", mark]
    return f"── {' '.join(filter(None, words))} ──"


# --- outputs of all ranks as one stream of lines, for terminals, scripts and logs -------------

MERGE_SECONDS = 0.1
# A rank's line is merged with an equal line only if the rank has fewer than this many texts queued
# before its line: a longer search would be slow.
_LOOK_AHEAD = 50
# A screen drops old lines, so text is written to it in pieces of this length, and the lines of each
# piece are queued before the next piece is written.
_SLICE_LENGTH = 64_000
_KEEP = 64_000


@dataclass(slots=True)
class _Rank:
    """The screen of a rank, and a queue of the rank's complete lines and displays.

    The rank has no screen until it has written text, as most short tasks write none.
    """

    screen: Screen | None = None
    queued_to: int = 0  # lines above this row of the screen are already queued
    bars: list[Bar] = field(default_factory=list)  # the bars of earlier screens (`end_screen`)
    queue: deque[tuple[float, str]] = field(default_factory=deque)
    waiting: Counter[str] = field(default_factory=Counter)  # how often each text is in the queue

    def add(self, output: events.Output, now: float) -> None:
        """Queue the lines that an output completes, or the text of a display or an error."""
        match output:
            case events.Text(stream=stream, text=text):
                screen = self.screen = Screen(_KEEP) if self.screen is None else self.screen
                for start in range(0, len(text), _SLICE_LENGTH):
                    screen.write(stream, text[start : start + _SLICE_LENGTH])
                    # Nested bars move the cursor up.  If a program writes to a row that was already
                    # queued, the lines from this row on are queued again.
                    self.queued_to = min(self.queued_to, screen.changed_from)
                    screen.changed_from = screen.cursor
                    self._queue_lines(screen, screen.cursor, now)
            case events.Display(data=data) | events.DisplayUpdate(data=data):
                self._queue_text(events.plain_of(data), now)
            case events.Skipped(lines=lines, displays=displays):
                if displays:
                    self._queue_text(left_out_text(displays), now)
                if lines:
                    self._queue_text(in_log_only(lines), now)
            case events.Failure() | events.Died():
                self._queue_text(f"{MARKS[display_state_of(output)]} {error_text(output)}", now)
            case events.Done() | events.InputRequest():
                self.end_screen(now)
            case events.Typed() | events.Clear():
                pass  # the terminal itself has shown the typed text, and cannot clear old lines

    def _queue_text(self, text: str, now: float) -> None:
        self.end_screen(now)
        self._queue_texts([text], now)

    def end_screen(self, now: float) -> None:
        """Queue all lines of the screen, also an incomplete last line, and drop the screen."""
        if (screen := self.screen) is not None:
            self._queue_lines(screen, screen.end, now)
            self.bars += [bar for _, bar in screen.bars()]
            self.screen, self.queued_to = None, 0

    def _queue_lines(self, screen: Screen, stop: int, now: float) -> None:
        self._queue_texts((line.text for line in screen.lines(self.queued_to, stop)), now)
        self.queued_to = max(self.queued_to, stop)

    def _queue_texts(self, texts: Iterable[str], now: float) -> None:
        """Queue each text as a whole, so that lines of one text, such as a table, stay together."""
        for text in texts:
            self.queue.append((now, text))
            self.waiting[text] += 1

    def count_before(self, text: str) -> int:
        """Return the number of queued texts before this text.

        Return 0 if the text is not queued, or if `_LOOK_AHEAD` or more texts are before it.
        """
        if text not in self.waiting:
            return 0
        soon = islice(self.queue, _LOOK_AHEAD)
        return next((number for number, (_, each) in enumerate(soon) if each == text), 0)

    def pop(self) -> str:
        """Remove and return the next text of the queue."""
        _, text = self.queue.popleft()
        self.waiting[text] -= 1
        if not self.waiting[text]:
            del self.waiting[text]
        return text


def _with_ranks(ranks: Iterable[int], text: str) -> Iterator[str]:
    """Yield the lines of a text, each after the ranks: `[0-3] epoch 1`."""
    start = f"[{format_ranks(ranks)}] "
    return (f"{start}{line}" for line in text.split("\n"))


class PlainLines:
    """Merges the lines of ranks to one stream, in which each line begins with its ranks.

    Equal lines of several ranks become one line, such as `[0-3] epoch 1`, if they arrive within
    `MERGE_SECONDS`.  Callers must call `due` about every `MERGE_SECONDS`, and `finish` at the end.
    Times are monotonic, in seconds.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = {rank: _Rank() for rank in sorted(ranks)}

    def receive(self, rank: int, output: events.Output, now: float) -> Iterator[str]:
        """Add an output of a rank, and yield the lines that are `due`."""
        self._ranks[rank].add(output, now)
        yield from self.due(now)

    def due(self, now: float) -> Iterator[str]:
        """Yield the lines that all ranks have printed, or that have waited for `MERGE_SECONDS`."""
        while True:
            heads = [(rank.queue[0], number) for number, rank in self._ranks.items() if rank.queue]
            if not heads:
                return
            (since, text), _ = min(heads)
            agree = len(heads) == len(self._ranks) and all(head[1] == text for head, _ in heads)
            if not agree and now - since < MERGE_SECONDS:
                return
            same = []
            for number, rank in self._ranks.items():
                for _ in range(rank.count_before(text)):  # a rank's lines must stay in their order
                    yield from _with_ranks([number], rank.pop())
                if rank.queue and rank.queue[0][1] == text:
                    rank.pop()
                    same.append(number)
            yield from _with_ranks(same, text)

    def flush(self) -> Iterator[str]:
        """Yield all complete lines, without waiting for other ranks."""
        yield from self.due(float("inf"))

    def finish(self, now: float) -> Iterator[str]:
        """Yield all remaining lines, also incomplete lines, then the last states of all bars."""
        for rank in self._ranks.values():
            rank.end_screen(now)
        yield from self.flush()
        bars = {number: rank.bars for number, rank in self._ranks.items()}
        yield from map(left_bar_line, find_left_bars(bars))
        for rank in self._ranks.values():
            rank.bars = []
