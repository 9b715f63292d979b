"""A cell's output as text/plain: terminals, logs, diffs and screen readers get this.

Runs in the notebook kernel.  Every line belongs to the ranks named in the nearest
header above it.  Colours are left out: saved notebooks are read in diffs.
"""

from __future__ import annotations

from collections.abc import Iterable

from nbdist.errors import format_ranks, name_ranks
from nbdist.notebook.draw.blocks import clip
from nbdist.notebook.draw.summary import (
    MANY_RANKS,
    MARKS,
    Blocks,
    Hidden,
    Logs,
    Silent,
    Values,
    error_text,
    failed_with,
    final_layout,
    in_log_only,
    items,
    lines_shown,
    pace,
    ranks_text,
    sameness,
    seconds_text,
    state_counts,
    traceback_text,
    where_rest,
)
from nbdist.wire.outputs import Failure
from nbdist.world.screen import Line
from nbdist.world.sgr import strip
from nbdist.world.track import FAILED, Gap, Shown
from nbdist.world.transcript import Group, Transcript

MOST_CHARACTERS = 400_000
_WIDTH = 2000
_LIVE_LINES = 24
_LIVE_GROUPS = 16
_LIVE_WIDTH = 300


def live_text(transcript: Transcript, now: float, note: str = "") -> str:
    """The cell so far: a header for each group of equal ranks, and its last lines."""
    parts = [_head(transcript, transcript.elapsed(now)), *([note] if note else [])]
    groups = [group for group in transcript.groups(failed_first=True) if not _is_mute(group)]
    each = max(2, _LIVE_LINES // max(1, len(groups)))
    each = 1 if len(groups) > MANY_RANKS else each
    for group in groups[:_LIVE_GROUPS]:
        parts.append(_header(group))
        for item in group.track.tail(each):
            parts.append(clip("\n".join(_plain(item)), _LIVE_WIDTH))
        if (error := group.track.error) is not None:
            parts.append(clip(error_text(error), _LIVE_WIDTH))
    more = [rank for group in groups[_LIVE_GROUPS:] for rank in group.ranks]
    if more:
        parts.append(f"── and {name_ranks(more)} ──")
    return "\n".join(parts)


def final_text(transcript: Transcript, logs: Logs = None, note: str = "") -> str:
    """The finished cell; what is too much is named where it was left out."""
    layout = final_layout(transcript)
    end = [note] if note else []
    match layout:
        case Silent():
            line = f"{ranks_text(transcript)} · {seconds_text(transcript.elapsed())}"
            return "\n".join([line, *end])
        case Values(rows=rows):
            body = [part for group, line in rows for part in (_header(group), strip(line.text))]
        case Blocks(main=main, rest=rest):
            body = _blocks(transcript, (*main, *rest), logs)
    head = [_head(transcript, transcript.elapsed(), pace(transcript))]
    return "\n".join([*head, *body, *end])


def _blocks(transcript: Transcript, groups: tuple[Group, ...], logs: Logs) -> list[str]:
    left = MOST_CHARACTERS
    parts: list[str] = []
    for done, group in enumerate(groups):
        share = left // (len(groups) - done)
        block = [_header(group), *_output(transcript, group, share, logs)]
        block += _error(transcript, group, share)
        left -= sum(len(part) + 1 for part in block)
        if left < 0:
            ranks = [rank for missing in groups[done:] for rank in missing.ranks]
            parts.append(f"── {name_ranks(ranks)} ──")
            parts.append(f"%dist_output -r {format_ranks(ranks)}")
            break
        parts += block
    return parts


def _output(transcript: Transcript, group: Group, budget: int, logs: Logs) -> list[str]:
    """The group's lines, as many from the end as the budget allows."""
    parts: list[str] = []
    for item in reversed(items(group.track, lines_shown(transcript))):
        if isinstance(item, Hidden):
            parts.append(where_rest(item, group.ranks, logs))
            continue
        rows = _rows(item)
        for number, row in enumerate(reversed(rows)):
            budget -= len(row) + 1
            if budget < 0:
                hidden = Hidden(len(rows) - number, in_log_only=False)
                parts.append(where_rest(hidden, group.ranks, logs))
                break
            parts.append(row)
    return parts[::-1]


def whole_text(transcript: Transcript, ranks: Iterable[int]) -> str:
    """All lines of some ranks that are still kept, each rank under a header of its own."""
    parts: list[str] = []
    for rank in ranks:
        track = transcript[rank]
        parts.append(f"── rank {rank} ──")
        for item in track.tail(track.line_count + len(track.pieces)):
            parts.extend(_plain(item))
    return "\n".join(parts)


def _rows(item: list[Line] | Shown) -> list[str]:
    if isinstance(item, Shown):
        return [clip(row, _WIDTH) for row in _plain(item)]
    return [clip(strip(line.text), _WIDTH) for line in item]


def _plain(item: Line | Shown | Gap) -> list[str]:
    match item:
        case Line(text=text):
            return [strip(text)]
        case Gap(lines=lines):
            return [in_log_only(lines)]
        case Shown() as shown:
            kinds = ", ".join(shown.display.data)
            return strip(shown.plain).split("\n") if shown.plain else [f"<{kinds}>"]


def _error(transcript: Transcript, group: Group, budget: int) -> list[str]:
    error = group.track.error
    if group.part != "first" or not isinstance(error, Failure):
        return list(filter(None, [failed_with(group, transcript)]))
    rows = [clip(row, _WIDTH) for row in strip(traceback_text(error)).split("\n")]
    while len(rows) > 2 and sum(map(len, rows)) > budget // 2:
        del rows[1 : 1 + max(1, len(rows) // 2)]
    return rows


def _head(transcript: Transcript, seconds: float, extra: str = "") -> str:
    states = [f"{MARKS[state]} {number}" for state, number in state_counts(transcript)]
    parts = [ranks_text(transcript), seconds_text(seconds), *states, *([extra] if extra else [])]
    return " · ".join(parts)


def _header(group: Group) -> str:
    """`── ranks 0-4,6-7 (same) ──`, `── rank 5 ✗ ──`."""
    words = [name_ranks(group.ranks)]
    if len(group.ranks) > 1:
        words.append(f"({sameness(group)})")
    if group.track.state in FAILED or group.track.state == "aborted":
        words.append(MARKS[group.track.state])
    return f"── {' '.join(words)} ──"


def _is_mute(group: Group) -> bool:
    return group.track.is_silent and group.track.state not in FAILED
