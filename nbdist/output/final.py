"""What the panel of a finished cell shows; the layout of a running one is `layout`'s.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nbdist.output.ansi import strip
from nbdist.output.bars import MOST_ROWS, BarTable, RankBars
from nbdist.output.fingerprint import read_bar
from nbdist.output.layout import (
    Block,
    Hidden,
    Item,
    Logs,
    Panel,
    Row,
    failed_with,
    merged,
    said_words,
    sameness,
    spread,
    squares_of,
    state_counts,
    unlike_most,
)
from nbdist.output.rank_transcript import Gap, RankTranscript, Shown
from nbdist.output.screen import Line, Screen
from nbdist.output.transcript import Group, Transcript, fold_shown, fold_tail
from nbdist.output.wording import lines_text, ranks_text, seconds_text
from nbdist.words import count

_MANY_GROUPS = 16
_LONGEST_VALUE, _LONGEST_BAR = 100, 240
_MOST_VALUES = 256
_MOST_LINES, _FEWER_LINES, _FEWER_LINES_FROM = 200, 50, 64
_OPEN_LINES = 60
_SHORT = 8
"""Lines that are open wherever they are: so few cost nothing, and may be those that are odd."""

# Seconds, and a part of the slowest rank's, by which ranks differ such that it matters.
_SLOWER, _SLOWER_SHARE = 0.5, 0.2


def final_layout(
    transcript: Transcript, logs: Logs = None, note: str = "", now: float | None = None
) -> Panel:
    """Lay out a finished cell, failed ranks first.

    `logs` gives the name of a rank's log file; `note` is a line at the end.  One that has been
    broken off has lasted until `now`.
    """
    ranks, seconds = ranks_text(transcript.ranks), seconds_text(transcript.elapsed(now))
    if transcript.is_silent and not transcript.failed:
        return Panel(ranks, seconds, pace=_pace(transcript), note=note)
    groups = transcript.groups(failed_first=True)
    silent = [group for group in groups if group.shown.is_silent and group.state == "ok"]
    failed = [group for group in groups if group.has_failed]
    others = [group for group in groups if group not in failed and group not in silent]
    rows = _values(others)
    main, rest = ([], []) if rows else _parted(others, transcript.ranks[0])
    return Panel(
        ranks,
        seconds,
        state_counts(transcript),
        _pace(transcript),
        *squares_of(transcript),
        note=note,
        spread=spread(transcript),
        bars=_bars(rows),
        blocks=_final_blocks(transcript, [*failed, *main], logs, _OPEN_LINES),
        rows=rows,
        rest=_final_blocks(transcript, rest, logs, 0),
        silent=tuple(sorted(rank for group in silent for rank in group.ranks)),
    )


def _values(groups: Sequence[Group]) -> tuple[Row, ...]:
    """Make a row for each group where every rank has shown one short line and nothing else."""
    if len(groups) > _MOST_VALUES:
        return ()
    found = [(group, value) for group in groups if (value := _value(group)) is not None]
    rows = [row for group, value in found for row in _rows(group, value)]
    return tuple(rows) if len(found) == len(groups) and len(rows) <= _MOST_VALUES else ()


def _rows(group: Group, value: Line) -> list[Row]:
    """Make one row of the group, or one for each rank where what differs is a progress bar."""
    bars = [(each.rank, bar) for each in group.members if (bar := _bar(each))]
    if not bars or len({bar.text for _, bar in bars}) == 1:
        return [Row(group.ranks, value, sameness(group))]
    return [Row((rank,), bar) for rank, bar in bars]


def _bar(said: RankTranscript) -> Line | None:
    """Give a rank's last line, if it is a progress bar."""
    match said.tail(1):
        case [Line() as line] if read_bar(line.text):
            return line
    return None


def _value(group: Group) -> Line | None:
    """Find the single short line that is all a rank has shown."""
    if group.state != "ok" or len(group.shown.said) != 1:
        return None
    match group.shown.said[0], group.tail(1):
        case Screen() as screen, [Line() as line] if screen.end == 1:
            line = bar if (bar := _bar(group.shown)) else line
        case _, [Shown(display=display) as shown] if list(display.data) == ["text/plain"]:
            line = Line(shown.plain, stderr=False)
        case _:
            return None
    longest = _LONGEST_BAR if read_bar(line.text) else _LONGEST_VALUE
    is_short = len(strip(line.text)) <= longest and "\n" not in line.text
    return line if is_short else None


def _bars(rows: Sequence[Row]) -> BarTable | None:
    """Make a table where each row is the last state of a rank's progress bar."""
    found = [(row.ranks, read_bar(row.line.text)) for row in rows]
    bars = [RankBars(rank, bar) for ranks, bar in found if bar for rank in ranks]
    if not bars or len(bars) > MOST_ROWS or not all(bar for _, bar in found):
        return None
    bars.sort(key=lambda each: each.rank)
    return BarTable(tuple(each.rank for each in bars), tuple(bars))


def _parted(groups: list[Group], first: int) -> tuple[list[Group], list[Group]]:
    """Part the groups with a block each from those that stand back where they are too many."""
    if len(groups) <= _MANY_GROUPS:
        return groups, []
    unlike = unlike_most(groups)
    stands_out = [
        group.ranks[0] == first or len(group.ranks) > 1 or group.ranks[0] in unlike
        for group in groups
    ]
    pairs = [*zip(groups, stands_out, strict=True)]
    return [group for group, main in pairs if main], [group for group, main in pairs if not main]


def _final_blocks(
    transcript: Transcript, groups: Iterable[Group], logs: Logs, room: int
) -> tuple[Block, ...]:
    """Make blocks: the first, the failed, short ones and those with `room` lines are open."""
    blocks = []
    most = _MOST_LINES if len(transcript.ranks) < _FEWER_LINES_FROM else _FEWER_LINES
    for group in groups:
        items = items_of(group, most)
        lines = sum(len(item) for item in items if isinstance(item, list))
        is_first = group.ranks[0] == transcript.ranks[0]
        is_open = is_first or group.has_failed or lines <= max(room, _SHORT)
        room -= lines if is_open else 0
        first = group.part == "first" and len(transcript.failed) > len(group.ranks)
        words = [
            "failed first" if first else "",
            sameness(group),
            _amount(group.shown),
            "aborted" if group.state == "aborted" else "",
        ]
        log = _log_of(group.ranks[0], logs)
        failed = failed_with(group, transcript)
        blocks.append(Block(group, said_words(words), tuple(items), failed, log, is_open))
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
                lines_here = fold_tail(pieces, group.named, min(limit, len(piece)))
                if lines_here:
                    found.append([row for rows in lines_here for row in rows])
                if len(piece) > len(lines_here):
                    found.append(Hidden(len(piece) - len(lines_here), in_log_only=False))
                if piece.dropped:
                    found.append(Hidden(piece.dropped, in_log_only=True))
                limit -= len(lines_here)
    return merged(found[::-1])


def _pace(transcript: Transcript) -> str:
    """Say `slowest rank 3 (3.2 s), fastest rank 0 (1.1 s)`, "" where it does not matter."""
    timed = [
        (seconds, each.rank)
        for each in transcript
        if each.state == "ok" and (seconds := each.seconds)
    ]
    if len(timed) < 2:
        return ""
    (low, fastest), (high, slowest) = min(timed), max(timed)
    if high - low < max(_SLOWER, _SLOWER_SHARE * high):
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


def _log_of(rank: int, logs: Logs) -> str | None:
    """Give the name of a rank's log file, if it has one."""
    if logs is None:
        return None
    return logs.get(rank) if isinstance(logs, Mapping) else logs(rank)
