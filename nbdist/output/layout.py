"""What a cell's panel shows, decided once from its transcript; `html` and `text` write it.

Live and final are two layouts: a live one is bounded and drawn anew as a whole a few times a
second, a final one has everything of interest and can be opened and closed.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from nbdist.output.ansi import strip
from nbdist.output.bars import BarTable, bar_table
from nbdist.output.events import Failure
from nbdist.output.folding import Group, Likeness, fold_shown, fold_tail
from nbdist.output.rank_transcript import Gap, RankTranscript, Shown, State
from nbdist.output.screen import Line, Screen
from nbdist.output.transcript import Transcript
from nbdist.output.wording import (
    error_text,
    in_log_only,
    lines_text,
    ranks_text,
    seconds_text,
)
from nbdist.words import count, format_ranks

# Where a rank's full output is: a mapping or a function from the rank.
Logs: TypeAlias = Mapping[int, str] | Callable[[int], "str | None"] | None

MARKS: dict[State, str] = {
    "waiting": "○",
    "running": "●",
    "ok": "✓",
    "failed": "✗",
    "died": "✗",
    "aborted": "∅",
}
MANY_RANKS = 16
_MOST_SQUARES = 128
_LIKENESS: dict[Likeness, str] = {
    "same": "same",
    "places": "same but for {…}",
    "line": "stopped in the same line",
}

# Of final layouts.
_MANY_GROUPS = 16
_LONGEST_VALUE = 100
_MOST_VALUES = 256
_MOST_LINES, _FEWER_LINES, _FEWER_LINES_FROM = 200, 50, 64
_OPEN_LINES = 60

# Of live ones.
_LIVE_LINES, _LIVE_LINES_OF_FAILED = 24, 8
_FEW_GROUPS = 4
_LIVE_LINES_OF_ASKING = 60
_MOST_ROWS = _MOST_BLOCKS = 16
_CLOCK_FROM, _FOOT_FROM = 2.0, 10.0
_RELOADED = (
    "a page that has been reloaded stands still here: `%dist_output` once the cell has ended"
)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Lines that are left out here; `in_log_only` if the notebook never had or kept them."""

    lines: int
    in_log_only: bool


Item: TypeAlias = list[Line] | Shown | Hidden


@dataclass(frozen=True, slots=True)
class Block:
    """What is shown of ranks that are alike, below a title.

    `words` are said of them in the title; `failed` is their error in one line, "" where it
    has a traceback here that says it.
    """

    group: Group
    words: tuple[str, ...]
    items: tuple[Item, ...]
    failed: str
    log: str | None = None
    is_open: bool = True

    def where_rest(self, hidden: Hidden) -> str:
        """Say `… 9,800 lines more: %dist_output -r 3 --all, or logs/rank3.log`."""
        if hidden.in_log_only:
            return in_log_only(hidden.lines, self.log)
        command = f"%dist_output -r {format_ranks(self.group.ranks)} --all"
        path = f", or {self.log}" if self.log else ""
        return f"… {lines_text(hidden.lines)} more: {command}{path}"


@dataclass(frozen=True, slots=True)
class Row:
    """Some ranks, and the one line that is shown of them."""

    ranks: tuple[int, ...]
    line: Line
    sameness: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A cell's output: who, how long and how; blocks, then rows, then what stands back.

    `squares` is a numbered square for each rank or run of ranks where there are many; the
    ranks of `more` have no block and those of `more_rows` no row; `rest` are blocks behind one
    line; `bars` come after the blocks of failed ranks; `now` is what ranks use at the moment, and
    `foot` a last line.  A panel without states says all in one dim line.
    """

    ranks: str
    seconds: str
    states: tuple[tuple[State, int], ...] = ()
    pace: str = ""
    squares: tuple[tuple[str, State], ...] = ()
    more_squares: int = 0
    now: str = ""
    foot: str = ""
    note: str = ""
    is_live: bool = False
    bars: BarTable | None = None
    blocks: tuple[Block, ...] = ()
    more: tuple[int, ...] = ()
    rows: tuple[Row, ...] = ()
    more_rows: tuple[int, ...] = ()
    rest: tuple[Block, ...] = ()


# --- final ------------------------------------------------------------------------------


def final_layout(transcript: Transcript, logs: Logs = None, note: str = "") -> Panel:
    """Lay out a finished cell.

    `logs` gives the name of a rank's log file; `note` is a line at the end.
    """
    seconds = seconds_text(transcript.elapsed())
    if transcript.is_silent and not transcript.failed:
        return Panel(ranks_text(transcript.ranks), seconds, pace=_pace(transcript), note=note)
    groups = transcript.groups()
    rows = _values(groups)
    main, rest = ([], []) if rows else _parted(groups, transcript.ranks[0])
    return Panel(
        ranks_text(transcript.ranks),
        seconds,
        _state_counts(transcript),
        _pace(transcript),
        *_squares(transcript),
        note=note,
        blocks=_final_blocks(transcript, main, logs, _OPEN_LINES),
        rows=rows,
        rest=_final_blocks(transcript, rest, logs, 0),
    )


def _values(groups: Sequence[Group]) -> tuple[Row, ...]:
    """Make a row for each group where every rank has shown one short line and nothing else."""
    if len(groups) > _MOST_VALUES:
        return ()
    found = [(group, value) for group in groups if (value := _value(group)) is not None]
    rows = (Row(group.ranks, value, sameness(group)) for group, value in found)
    return tuple(rows) if len(found) == len(groups) else ()


def _value(group: Group) -> Line | None:
    """Find the single short line that is all a rank has shown."""
    if group.state != "ok" or len(group.shown.said) != 1:
        return None
    match group.shown.said[0], group.tail(1):
        case Screen() as screen, [Line() as line] if screen.end == 1:
            pass
        case _, [Shown(display=display) as shown] if list(display.data) == ["text/plain"]:
            line = Line(shown.plain, stderr=False)
        case _:
            return None
    is_short = len(strip(line.text)) <= _LONGEST_VALUE and "\n" not in line.text
    return line if is_short else None


def _parted(groups: list[Group], first: int) -> tuple[list[Group], list[Group]]:
    """Part the groups with a block each from those that stand back where they are too many."""
    if len(groups) <= _MANY_GROUPS:
        return groups, []
    stands_out = [
        group.ranks[0] == first or len(group.ranks) > 1 or group.has_failed for group in groups
    ]
    pairs = [*zip(groups, stands_out, strict=True)]
    return [group for group, main in pairs if main], [group for group, main in pairs if not main]


def _final_blocks(
    transcript: Transcript, groups: Iterable[Group], logs: Logs, room: int
) -> tuple[Block, ...]:
    """Make blocks: the first, the failed and those with `room` lines together are open."""
    blocks = []
    most = _MOST_LINES if len(transcript.ranks) < _FEWER_LINES_FROM else _FEWER_LINES
    for group in groups:
        items = items_of(group, most)
        lines = sum(len(item) for item in items if isinstance(item, list))
        is_first = group.ranks[0] == transcript.ranks[0]
        is_open = is_first or group.has_failed or lines <= room
        room -= lines if is_open else 0
        first = group.part == "first" and len(transcript.failed) > len(group.ranks)
        words = [
            "first" if first else "",
            sameness(group),
            _amount(group.shown),
            "aborted" if group.state == "aborted" else "",
        ]
        log = _log_of(group.ranks[0], logs)
        failed = _failed_with(group, transcript)
        blocks.append(Block(group, _said(words), tuple(items), failed, log, is_open))
    return tuple(blocks)


def items_of(group: Group, limit: int) -> list[Item]:
    """Take all displays and the last `limit` lines; what is left out is counted in its place."""
    found: list[Item] = []
    for pieces in reversed(group.pieces):
        match pieces[0]:
            case Shown():
                found.append(fold_shown([piece for piece in pieces if isinstance(piece, Shown)]))
            case Gap(lines=lines):
                found.append(Hidden(lines, in_log_only=True))
            case Screen() as piece:
                lines_here = fold_tail(pieces, min(limit, len(piece)))
                if lines_here:
                    found.append(lines_here)
                if len(piece) > len(lines_here):
                    found.append(Hidden(len(piece) - len(lines_here), in_log_only=False))
                if piece.dropped:
                    found.append(Hidden(piece.dropped, in_log_only=True))
                limit -= len(lines_here)
    return merged(found[::-1])


def merged(items: Iterable[Item]) -> list[Item]:
    """Count hidden neighbours together, and keep all other items."""
    found: list[Item] = []
    for item in items:
        if isinstance(item, Hidden) and found and isinstance(before := found[-1], Hidden):
            log_only = item.in_log_only and before.in_log_only
            found[-1] = Hidden(item.lines + before.lines, log_only)
        else:
            found.append(item)
    return found


# --- live -------------------------------------------------------------------------------


def live_layout(
    transcript: Transcript, now: float, note: str = "", usage: str = "", clock: str = ""
) -> Panel:
    """Lay out a running cell; `note` is a line such as which ranks wait where.

    `usage` is what ranks use at the moment, and `clock` the time of day: after a reload the page
    shows this layout for ever.

    Ranks that are at a progress bar are in one table.  Of many ranks that differ only the failed,
    and those that wait for somebody to type, have blocks, the others a row for each distinct
    last line.  Who waits so stands last: what is typed goes below.
    """
    bars = bar_table(transcript)
    groups = [
        group
        for group in transcript.groups(failed_first=True)
        if group.has_failed or not (group.shown.is_silent or (bars and bars.has(group.ranks)))
    ]
    groups.sort(key=_asks)
    in_blocks, lines, rows = groups, _LIVE_LINES, {}
    if len(transcript.ranks) > MANY_RANKS and len(groups) > _FEW_GROUPS:
        in_blocks = [group for group in groups if group.has_failed or _asks(group)]
        lines, rest = _LIVE_LINES_OF_FAILED, [each for each in groups if each not in in_blocks]
        rows = _by_last_line(rest)
    each = max(2, lines // max(1, len(in_blocks)))
    as_of = f"as of {clock}" if clock and transcript.elapsed(now) >= _CLOCK_FROM else ""
    shown = [*rows.items(), *(bars.beside if bars else ())]
    return Panel(
        ranks_text(transcript.ranks),
        seconds_text(transcript.elapsed(now)),
        _state_counts(transcript),
        "",
        *_squares(transcript),
        note=note,
        is_live=True,
        now=" · ".join(filter(None, [usage, bars.behind if bars else "", as_of])),
        foot=_RELOADED if transcript.elapsed(now) >= _FOOT_FROM and clock else "",
        bars=bars,
        blocks=tuple(_live_block(transcript, group, each) for group in in_blocks[:_MOST_BLOCKS]),
        more=tuple(rank for group in in_blocks[_MOST_BLOCKS:] for rank in group.ranks),
        rows=tuple(Row(tuple(ranks), line) for line, ranks in shown[:_MOST_ROWS]),
        more_rows=tuple(rank for _, ranks in shown[_MOST_ROWS:] for rank in ranks),
    )


def _asks(group: Group) -> bool:
    return any(each.asks is not None for each in group.members)


def _live_block(transcript: Transcript, group: Group, limit: int) -> Block:
    tail = group.tail(_LIVE_LINES_OF_ASKING if _asks(group) else limit)
    known = sum(item.lines if isinstance(item, Gap) else isinstance(item, Line) for item in tail)
    earlier = group.shown.line_count - known
    words = [sameness(group), f"… {earlier:,} earlier" if earlier > 0 else ""]
    return Block(group, _said(words), tuple(_items(tail)), _failed_with(group, transcript))


def _items(tail: Iterable[Line | Shown | Gap]) -> Iterable[Item]:
    for kind, run in groupby(tail, key=type):
        if kind is Line:
            yield [item for item in run if isinstance(item, Line)]
            continue
        for item in run:
            if isinstance(item, Shown):
                yield item
            elif isinstance(item, Gap):
                yield Hidden(item.lines, in_log_only=True)


def _by_last_line(groups: Iterable[Group]) -> dict[Line, list[int]]:
    found: dict[Line, list[int]] = {}
    for group in groups:
        match group.tail(1):
            case [Line() as line]:
                pass
            case [Shown() as shown]:
                line = Line(shown.plain.split("\n")[0], stderr=False)
            case [Gap(lines=lines)]:
                line = Line(in_log_only(lines), stderr=False)
            case _:
                line = Line("", stderr=False)
        found.setdefault(line, []).extend(group.ranks)
    return found


# --- words ------------------------------------------------------------------------------


def sameness(group: Group) -> str:
    """Say `same`, and what the ranks of the group differ in; "" for a rank of its own."""
    return _LIKENESS[group.likeness] if len(group.ranks) > 1 else ""


def _said(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(filter(None, words))


def _state_counts(transcript: Transcript) -> tuple[tuple[State, int], ...]:
    """Count the ranks in each state that any is in, in the order of `MARKS`."""
    states = transcript.states()
    # Both are marked alike; what happened is said where the rank is shown.
    states["failed"] += states.pop("died", 0)
    return tuple((state, states[state]) for state in MARKS if states[state])


def _squares(transcript: Transcript) -> tuple[tuple[tuple[str, State], ...], int]:
    """Make one for each of many ranks, or for runs of ranks where those would be too many."""
    states = [(each.rank, each.state) for each in transcript]
    if len(states) <= MANY_RANKS:
        return (), 0
    squares = [(str(rank), state) for rank, state in states]
    if len(states) > _MOST_SQUARES:
        runs = groupby(states, key=lambda item: item[1])
        squares = [(format_ranks(rank for rank, _ in run), state) for state, run in runs]
    return tuple(squares[:_MOST_SQUARES]), max(0, len(squares) - _MOST_SQUARES)


def _pace(transcript: Transcript) -> str:
    """Say `slowest rank 3 (3.2 s), fastest rank 0 (1.1 s)`, "" if they hardly differ."""
    timed = [(seconds, each.rank) for each in transcript if (seconds := each.seconds)]
    if len(timed) < 2:
        return ""
    (low, fastest), (high, slowest) = min(timed), max(timed)
    if high - low < max(0.1, 0.1 * high):
        return ""
    return (
        f"slowest rank {slowest} ({seconds_text(high)}), "
        f"fastest rank {fastest} ({seconds_text(low)})"
    )


def _amount(said: RankTranscript) -> str:
    """Say `3 lines`, `1 line, 2 displays`."""
    lines, displays = said.line_count, len(said.displays)
    parts = [lines_text(lines)] if lines else []
    parts += [count(displays, "display")] if displays else []
    return ", ".join(parts)


def _failed_with(group: Group, transcript: Transcript) -> str:
    """Say the group's error in one line, "" where its traceback is shown: it is the first."""
    error = group.error
    if error is None or (group.part == "first" and isinstance(error, Failure)):
        return ""
    said = error_text(error)
    if group.part == "same" and (cause := transcript.root_cause()) is not None:
        same = "as" if said == error_text(cause[1]) else "in the same place as"
        return f"{said} ({same} on rank {cause[0]})"
    return said


def _log_of(rank: int, logs: Logs) -> str | None:
    """Give the name of a rank's log file, if it has one."""
    if logs is None:
        return None
    return logs.get(rank) if isinstance(logs, Mapping) else logs(rank)
