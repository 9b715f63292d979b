"""Lays out the panel of a cell from its transcript; `html` and `text` write the panel.

The notebook's process calls `live_layout` while the cell runs, and `final_layout` at its end.  A
live layout is small, since the whole panel is drawn a few times a second.  In a final layout people
can open the parts that are closed.  Pure: no I/O here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import filterfalse, groupby

from nbdist.output.ansi import strip
from nbdist.output.bars import MAX_BAR_ROWS, bar_table, final_table
from nbdist.output.events import Failure, Skipped
from nbdist.output.fingerprint import cell_line_of
from nbdist.output.html_parts import (
    is_figure,
    is_page_only,
)
from nbdist.output.panel import (
    MARKS,
    TALL_LINES,
    Hidden,
    Panel,
    PanelBlock,
    PanelItem,
    PanelRow,
    limit_size,
    merge_hidden,
)
from nbdist.output.rank_transcript import (
    FAILED,
    DisplayState,
    OutputPiece,
    RankTranscript,
    RichDisplay,
)
from nbdist.output.screen import Screen, ScreenLine
from nbdist.output.transcript import (
    AlikeRanks,
    Transcript,
    fold_shown,
    fold_tail,
    spread,
    unlike_most,
)
from nbdist.output.wording import (
    FIGURE_LATER,
    error_text,
    fold_ranks,
    in_log_only,
    lines_text,
    ranks_text,
    seconds_text,
)
from nbdist.words import count, format_ranks, in_pool, name_ranks

_WITH_WORDS: dict[DisplayState, str] = {"released": "{} released", "stopped": "■ {} stopped"}
MANY_RANKS = 16
_MAX_SQUARES = 128

# Limits and texts of live layouts.
_LIVE_LINES_OF_FAILED, LIVE_LINES_OF_ASKING = 8, 60
_FEW_GROUPS, _CLOCK_FROM = 4, 2.0
_LIVE = "last updated {} · rest: `%dist_output`"

# Limits of final layouts; some of them apply to live layouts too.
_MANY_GROUPS, _MAX_VALUES = 16, 256
_LONGEST_VALUE = 100
_MAX_BLOCK_LINES, _FEWER_LINES, _FEWER_LINES_FROM = 200, 50, 64
_OPEN_LINES = 60
# The states of ranks that have failed, without those that are "released" or "stopped".
_OWN_FAILURES = frozenset[DisplayState](("failed", "died"))
_ALWAYS_OPEN_LINES = 8
"""The most lines of a block that is always open, because it needs little room on the page."""

# The slowest rank is named if it took longer than the fastest by at least this many seconds, and by
# at least this share of its own time.
_SLOWER, _SLOWER_SHARE = 0.5, 0.2


# --- live -------------------------------------------------------------------------------


def live_layout(
    transcript: Transcript,
    now: float,
    waits: str = "",
    usage: str = "",
    clock: str = "",
    turn: int | None = None,
    note: str = "",
    *,
    pool: str = "",
) -> Panel:
    """Lay out a running cell much like its final layout, so that little moves when it ends.

    `waits` is a line that says which ranks wait where, and `usage` says which resources the ranks
    use.  `clock` is the time of day, by which people recognize a panel that is no longer drawn.
    `note` is a line at the end of the panel.  `pool` is "" for the default pool.

    If many ranks differ, only failed ranks and ranks that wait for input have blocks.  All other
    ranks with output are in a table, in which ranks with the same last line share a row.  Ranks
    without room in the panel are only named.  Blocks of ranks that wait for input come last.
    `turn` is the rank to which the input box belongs now; the block of this rank is the last of
    all, so that it is near the box.
    """
    bars = bar_table(transcript)
    groups = [
        group
        for group in transcript.groups(failed_first=True, is_live=True)
        if group.has_failed or not group.shown.is_silent
    ]
    groups.sort(key=lambda group: (waits_for_input(group), turn in group.ranks))
    urgent = [group for group in groups if group.has_failed or waits_for_input(group)]
    others = [group for group in groups if group not in urgent]
    is_many = len(transcript.ranks) > MANY_RANKS and len(groups) > _FEW_GROUPS
    is_loop = _is_loop(transcript)
    has_rows = not any(group.ahead for group in groups)
    values = _value_rows(others, is_loop=is_loop, is_live=True) if has_rows else ()
    in_blocks, rows = (urgent, values) if is_many or values else (groups, ())
    if is_many:
        rows = tuple(PanelRow(tuple(ranks), line) for line, ranks in _by_last_line(others).items())
    rows = (*(PanelRow(ranks, line) for group in in_blocks for ranks, line in group.ahead), *rows)
    asking = [group for group in in_blocks if waits_for_input(group)][-MAX_BAR_ROWS:]
    shown_blocks = [*in_blocks[: min(MAX_BAR_ROWS, len(in_blocks)) - len(asking)], *asking]
    left_out = [group.ranks for group in in_blocks if group not in shown_blocks]
    left_out += [row.ranks for row in rows[MAX_BAR_ROWS:]]
    foot = in_pool(_LIVE.format(clock), pool)
    shown = _base_panel(transcript, now, pool)._replace(
        waits=waits,
        note=note,
        is_live=True,
        now=" · ".join(filter(None, [usage, bars.behind if bars else ""])),
        foot=foot if clock and transcript.elapsed(now) >= _CLOCK_FROM else "",
        bars=bars,
        blocks=_live_blocks(transcript, shown_blocks, is_many=is_many),
        rows=rows[:MAX_BAR_ROWS],
        more=tuple(rank for ranks in left_out for rank in ranks),
    )
    return limit_size(shown)


def waits_for_input(group: AlikeRanks) -> bool:
    """Return True if a rank of the group waits for input."""
    return any(each.input_request is not None for each in group.members)


def _live_blocks(
    transcript: Transcript, groups: Sequence[AlikeRanks], *, is_many: bool
) -> tuple[PanelBlock, ...]:
    """Return a block for each group of a running cell, with the last lines of the group.

    A block of ranks that wait for input has the most lines, so that people see what they are asked.
    If there are too many groups for blocks (`is_many`), the other blocks are of failed ranks and
    have few lines.  Otherwise, a block has a single line if the final layout will close it.
    """
    blocks, room = [], _OPEN_LINES
    for group in groups:
        lines = min(group.line_count, _MAX_BLOCK_LINES)
        is_open = _is_open(group, transcript, lines, room) or waits_for_input(group)
        if is_open:
            room -= lines
        max_lines = _LIVE_LINES_OF_FAILED if is_many else TALL_LINES if is_open else 1
        max_lines = LIVE_LINES_OF_ASKING if waits_for_input(group) else max_lines
        items = items_of(group, max_lines, is_live=True)
        earlier = group.line_count - lines_in(items)
        words = tuple(filter(None, [sameness(group)]))
        failed = _error_line(group, transcript)
        blocks.append(PanelBlock(group, words, items, failed, is_open=is_open, earlier=earlier))
    return tuple(blocks)


def _by_last_line(groups: Iterable[AlikeRanks]) -> dict[ScreenLine, list[int]]:
    by_line: dict[ScreenLine, list[int]] = {}
    for group in groups:
        match group.last:
            case ScreenLine() as line:
                pass
            case RichDisplay() as shown:
                text = FIGURE_LATER if _is_figure(shown) else shown.plain.split("\n")[0]
                line = ScreenLine(text, stderr=False)
            case Skipped(lines=lines):
                line = ScreenLine(in_log_only(lines), stderr=False)
            case None:
                line = ScreenLine("", stderr=False)
        by_line.setdefault(line, []).extend(group.ranks)
    return by_line


# --- final ------------------------------------------------------------------------------


def final_layout(
    transcript: Transcript,
    logs: Mapping[int, str] | None = None,
    note: str = "",
    now: float | None = None,
    *,
    is_on_page: bool = True,
    pool: str = "",
) -> Panel:
    """Lay out a cell that has finished, or a cell that still runs, as it is at the time `now`.

    `logs` has the path of a log file by rank, and `note` is a line at the end of the panel.  `pool`
    is "" for the default pool.  If the panel `is_on_page`, the page itself shows displays that a
    panel cannot embed, below the panel.  Then a block of ranks that have succeeded is left out if
    it would have only displays of this kind.
    """
    logs = logs or {}
    shown = _base_panel(transcript, now, pool)._replace(pace=_pace(transcript), note=note)
    bars = final_table(transcript)
    if transcript.is_silent and transcript.has_succeeded and not bars:
        return shown._replace(states=(), squares=(), more_squares=0)
    with_bars = bars.ranks if bars else ()
    groups = transcript.groups(failed_first=True)
    silent = [group for group in groups if group.shown.is_silent and group.shown.state == "ok"]
    failed = [group for group in groups if group.has_failed]
    others = [group for group in groups if group not in failed and group not in silent]
    folded: list[AlikeRanks] = []
    if rows := _value_rows(others, is_loop=_is_loop(transcript)):
        others = []
    elif len(others) > _MANY_GROUPS:
        kept = {transcript.ranks[0], *unlike_most(others)}
        folded = [each for each in others if each.ranks[0] not in kept and len(each.ranks) == 1]
        others = [group for group in others if group not in folded]
    if is_on_page:
        others, folded = ([*filterfalse(_is_below, part)] for part in (others, folded))
    shown = shown._replace(
        spread=spread(transcript) if len(groups) > 1 else "",  # a single block has all numbers
        bars=bars,
        blocks=_final_blocks(transcript, [*failed, *others], logs, _OPEN_LINES, pool),
        rows=rows,
        folded_blocks=_final_blocks(transcript, folded, logs, 0, pool),
        silent=tuple(sorted({r for group in silent for r in group.ranks}.difference(with_bars))),
    )
    return limit_size(shown)


def layout_without_output(
    transcript: Transcript, note: str = "", now: float | None = None, *, pool: str = ""
) -> Panel:
    """Lay out a cell without its output: its head, the warnings and the note.

    The panel also has the curves if a rank has tracked NaN or infinity.  If the cell still runs,
    `now` is the time until which its seconds are counted.
    """
    shown = _base_panel(transcript, now, pool)
    curves = shown.curves if transcript.curves.has_odd_numbers else None
    return shown._replace(note=note, squares=(), more_squares=0, curves=curves)


def _is_below(group: AlikeRanks) -> bool:
    """Return True if the page shows all outputs of these ranks below the panel.

    That is so if the ranks have succeeded, and have only displays that a panel cannot embed.
    Return False for ranks without outputs.
    """
    if group.shown.state != "ok" or not (pieces := group.shown.visible_pieces):
        return False
    return all(isinstance(each, RichDisplay) and is_page_only(each.display.data) for each in pieces)


def _is_loop(transcript: Transcript) -> bool:
    """Return True if the cell has progress bars and few ranks.

    Such a cell is a loop that prints more and more lines.  A table of short values would have to
    change as soon as a rank has printed a second line, so even the first line is in a block.
    """
    return transcript.has_had_bars and len(transcript.ranks) <= MANY_RANKS


def _value_rows(
    groups: Sequence[AlikeRanks], *, is_loop: bool, is_live: bool = False
) -> tuple[PanelRow, ...]:
    """Return a table with a row for each group, if every group shows only a short value; else ().

    Also return () if there are too many groups.  If the cell is a loop (`is_loop`), a printed line
    does not count as a short value, but a display does.  If the layout is live (`is_live`), ranks
    that still run can have a short value.
    """
    if len(groups) > _MAX_VALUES or (is_loop and any(group.line_count for group in groups)):
        return ()
    rows: list[PanelRow] = []
    for group in groups:
        if (value := _short_value(group, is_live=is_live)) is None:
            return ()
        rows.append(PanelRow(group.ranks, value, sameness(group)))
    return tuple(rows)


def _short_value(group: AlikeRanks, *, is_live: bool) -> ScreenLine | None:
    """Return the line of a group whose whole output is one short line; None for all other groups.

    A display with only text counts as a line.  The ranks must have succeeded.  In a live layout
    (`is_live`) they may also still run.
    """
    is_well = group.shown.state == "ok" or (is_live and group.shown.state == "running")
    if not is_well or len(group.shown.visible_pieces) != 1 or group.shown.rows > 1:
        return None
    match group.last:
        case ScreenLine() as line:
            pass
        case RichDisplay(is_text=True) as shown:
            line = ScreenLine(shown.plain, stderr=False)
        case _:
            return None
    is_short = len(strip(line.text)) <= _LONGEST_VALUE and "\n" not in line.text
    return line if is_short else None


def max_block_lines(transcript: Transcript) -> int:
    """Return how many lines a block of a finished cell may have; with many ranks they are fewer."""
    return _MAX_BLOCK_LINES if len(transcript.ranks) < _FEWER_LINES_FROM else _FEWER_LINES


def _final_blocks(
    transcript: Transcript,
    groups: Iterable[AlikeRanks],
    logs: Mapping[int, str],
    room: int,
    pool: str,
) -> tuple[PanelBlock, ...]:
    """Return the blocks of a finished cell.

    The block of the first rank, blocks of failed ranks and short blocks are open.  Any other block
    is open if the open blocks before it have left room for its lines, of `room` lines in all.  If
    not all output of a block is visible at once, its title says how much output there is.
    """
    blocks = []
    max_lines = max_block_lines(transcript)
    for group in groups:
        items = items_of(group, max_lines)
        lines = sum(len(item) for item in items if isinstance(item, list))
        is_open = _is_open(group, transcript, lines, room)
        room -= lines if is_open else 0
        # If a block has more than `TALL_LINES` lines, people may see the first only by scrolling.
        hides = not is_open or lines > TALL_LINES or any(isinstance(i, Hidden) for i in items)
        words = [
            _failed_first_text(group, transcript),
            sameness(group),
            _output_size(group.shown) if hides else "",
            "aborted" if group.shown.state == "aborted" else "",
        ]
        failed, log = _error_line(group, transcript), logs.get(group.ranks[0])
        about = tuple(filter(None, words))
        blocks.append(PanelBlock(group, about, items, failed, log, is_open, pool))
    return tuple(blocks)


def _failed_first_text(group: AlikeRanks, transcript: Transcript) -> str:
    """Return `failed first` for the group whose error was the first in the cell.

    Return "" for other groups, and if no rank outside of the group has failed, since the text would
    say nothing.  Also return "" if the error cannot have caused the failures of other ranks: if the
    cell was ended by closed connections or by the agent, or if Stop came before the error.
    """
    others = [each for each in transcript if each.state in FAILED and each.rank not in group.ranks]
    error = group.shown.error
    if (
        group.part != "first"
        or not others
        or error is None
        or group.shown.display_state not in _OWN_FAILURES
    ):
        return ""
    was_ended = error.connections if isinstance(error, Failure) else error.why
    stopped = [each.error for each in others if each.display_state == "stopped"]
    if was_ended or any(each and each.time_ns < error.time_ns for each in stopped):
        return ""
    return "failed first" if len(group.ranks) == 1 else f"rank {group.shown.rank} failed first"


def _pace(transcript: Transcript) -> str:
    """Return `slowest rank 3 (3.2 s), fastest rank 0 (1.1 s)`; "" if ranks took similar times.

    Also return "" if the cell did not succeed on all ranks: the time until a failure says nothing
    about the speed of a rank.
    """
    timed = {each.rank: each.seconds for each in transcript if each.seconds is not None}
    if len(timed) < max(2, len(transcript.ranks)) or not transcript.has_succeeded:
        return ""
    low, high = min(timed.values()), max(timed.values())
    if high - low < max(_SLOWER, _SLOWER_SHARE * high):
        return ""
    shown = fold_ranks({rank: seconds_text(seconds) for rank, seconds in timed.items()})
    slow, fast = ((name_ranks(shown[text]), text) for text in map(seconds_text, (high, low)))
    return f"slowest {slow[0]} ({slow[1]}), fastest {fast[0]} ({fast[1]})"


def _output_size(output: RankTranscript) -> str:
    """Return how much output a rank has, as text: `3 lines`, or `1 line, 2 displays`."""
    lines, displays = output.line_count, len(output.displays)
    parts = [lines_text(lines)] if lines else []
    parts += [count(displays, "display")] if displays else []
    return ", ".join(parts)


# --- parts of both ----------------------------------------------------------------------


def _is_open(group: AlikeRanks, transcript: Transcript, lines: int, room: int) -> bool:
    """Return True if the block of a group is open.

    The block of the first rank and the blocks of failed ranks are always open.  Another block is
    open if it has few lines, or if its lines fit in `room`.
    """
    is_first = group.ranks[0] == transcript.ranks[0]
    return is_first or group.has_failed or lines <= max(room, _ALWAYS_OPEN_LINES)


def items_of(
    group: AlikeRanks, limit: int, *, is_live: bool = False, bars: bool = False
) -> tuple[PanelItem, ...]:
    """Return the displays and the last `limit` lines of a group, in the order of the output.

    For a finished cell, all displays are returned, and a `Hidden` item stands for lines that are
    left out.  For a running cell (`is_live`), each display counts as a line, and what exceeds the
    limit is left out, except for the newest figure.  A remark replaces each older figure that is
    within the limit.

    With `bars`, rows of progress bars count as lines; the group must be a single rank.
    """
    items: list[PanelItem] = []
    has_figure = False
    all_pieces = [(piece,) for piece in group.shown.pieces] if bars else group.pieces
    for pieces in reversed(all_pieces):
        is_newest_figure = not has_figure and _is_figure(pieces[0])
        if is_live and limit <= 0 and not is_newest_figure:
            continue
        has_figure |= is_newest_figure
        match pieces[0]:
            case RichDisplay():
                is_old = is_live and _is_figure(pieces[0]) and not is_newest_figure
                shown = fold_shown([piece for piece in pieces if isinstance(piece, RichDisplay)])
                items.append(FIGURE_LATER if is_old else shown)
                limit -= is_live
            case Skipped(lines=lines):
                items.append(Hidden(lines, in_log_only=True))
                limit -= is_live
            case Screen() as piece:
                dropped = piece.dropped if bars else piece.dropped_lines
                kept = piece.end - dropped if bars else len(piece)
                if rows := piece.tail(limit, bars=True) if bars else fold_tail(pieces, limit):
                    items.append(rows)
                if not is_live and kept > len(rows):
                    items.append(Hidden(kept - len(rows), in_log_only=False))
                if not is_live and dropped:
                    items.append(Hidden(dropped, in_log_only=True))
                limit -= len(rows)
    return tuple(merge_hidden(items[::-1]))


def lines_in(items: Iterable[PanelItem]) -> int:
    """Return the number of lines in the items, including lines that `Hidden` items replace."""
    counts = (
        len(item) if isinstance(item, list) else item.lines
        for item in items
        if isinstance(item, list | Hidden)
    )
    return sum(counts)


def _is_figure(piece: OutputPiece) -> bool:
    return isinstance(piece, RichDisplay) and is_figure(piece.display.data)


def sameness(group: AlikeRanks) -> str:
    """Return the words on how alike the ranks of a group are, such as `same`; "" for one rank."""
    return group.likeness if len(group.ranks) > 1 else ""


def state_counts(transcript: Transcript) -> tuple[tuple[DisplayState, str], ...]:
    """Return each state that ranks have, with their number as text: `✗ 1`, `3 released`."""
    counts = transcript.count_display_states()
    # Failed and died ranks have the same mark, so they are counted together.  The block of a rank
    # says which of the two has happened.
    counts["failed"] += counts.pop("died", 0)
    return tuple(
        (state, _WITH_WORDS.get(state, f"{MARKS[state]} {{}}").format(counts[state]))
        for state in MARKS
        if counts[state]
    )


def _base_panel(transcript: Transcript, now: float | None, pool: str) -> Panel:
    """Return a panel with only the parts that are about all ranks, and no blocks.

    If there are more than `MANY_RANKS` ranks, each rank has a coloured square.  If there are more
    than `_MAX_SQUARES`, consecutive ranks in the same state share a square.  The seconds of a cell
    that still runs are counted until `now`.  `pool` is "" for the default pool.
    """
    squares = [(str(each.rank), each.display_state) for each in transcript]
    if len(squares) <= MANY_RANKS:
        squares = []
    elif len(squares) > _MAX_SQUARES:
        runs = groupby(transcript, key=lambda each: each.display_state)
        squares = [(format_ranks(each.rank for each in run), state) for state, run in runs]
    return Panel(
        " · ".join(filter(None, [pool and f"pool {pool}", ranks_text(transcript.ranks)])),
        seconds_text(transcript.elapsed(now)),
        state_counts(transcript),
        squares=tuple(squares[:_MAX_SQUARES]),
        more_squares=max(0, len(squares) - _MAX_SQUARES),
        curves=transcript.curves if transcript.curves.by_name else None,
        warnings=tuple(transcript.warnings),
        pool=pool,
    )


def _error_line(group: AlikeRanks, transcript: Transcript) -> str:
    """Return a group's error as a line; "" if there is none.

    Also return "" if the error is the first exception of the cell, since its block has a traceback.
    """
    error = group.error
    if error is None or (group.part == "first" and isinstance(error, Failure)):
        return ""
    text = error_text(error)
    if group.part == "same" and (cause := transcript.root_cause()) is not None:
        is_equal = text == error_text(cause[1])
        if is_equal or isinstance(error, Failure):
            return f"{text} ({'as' if is_equal else 'in the same place as'} on rank {cause[0]})"
    # To an error without a message, such as a KeyboardInterrupt, add the line of the cell that led
    # to the error.
    if isinstance(error, Failure) and not error.message and (line := cell_line_of(error)):
        return f"{text} (cell line {line})"
    return text
