"""Lays out panels in which each rank with output has a block of its own.

In a finished cell the blocks are tabs.  In a running cell they are below each other, since each new
drawing of the panel would close an opened tab.  With many ranks, a running cell has no such blocks.

In the notebook's process `PanelDisplay` calls these functions.  Pure: no I/O here.
"""

from __future__ import annotations

from collections.abc import Mapping

from nbdist.output.events import Failure
from nbdist.output.layout import (
    LIVE_LINES_OF_ASKING,
    MANY_RANKS,
    items_of,
    lines_in,
    max_block_lines,
    waits_for_input,
)
from nbdist.output.panel import Hidden, Panel, PanelBlock, limit_size
from nbdist.output.transcript import AlikeRanks, Transcript, spread
from nbdist.output.wording import error_text, lines_text

MAX_TABS = 128
_LIVE_LINES = 24


def live_by_rank(shown: Panel, transcript: Transcript, turn: int | None = None) -> Panel:
    """Return the panel of a running cell with a block for each rank that has output.

    The blocks of ranks that wait for input come last.  `turn` is the rank to which the input box
    belongs now; the block of this rank is the very last, next to the box.  With more than
    `MANY_RANKS` ranks, return the panel unchanged.
    """
    if len(transcript.ranks) > MANY_RANKS:
        return shown
    groups = [group for group in transcript.single_groups() if _has_output(group)]
    groups.sort(key=lambda group: (waits_for_input(group), turn in group.ranks))
    each = max(2, _LIVE_LINES // max(1, len(groups)))
    blocks = []
    for group in groups:
        max_lines = LIVE_LINES_OF_ASKING if waits_for_input(group) else each
        items = items_of(group, max_lines, is_live=True, bars=True)
        bars = sum(screen.end - screen.line_count for screen in group.shown.screens)
        earlier = group.line_count + bars - lines_in(items)
        is_first = group.part == "first" and isinstance(group.error, Failure)
        failed = "" if group.error is None or is_first else error_text(group.error)
        blocks.append(PanelBlock(group, (), items, failed, earlier=earlier))
    return limit_size(shown._replace(bars=None, blocks=tuple(blocks), rows=(), more=()))


def final_tabs(shown: Panel, transcript: Transcript, logs: Mapping[int, str], name: str) -> Panel:
    """Return the panel of a finished cell with a tab for each rank that has output.

    The tabs are in rank order; if there are more than `MAX_TABS`, failed ranks are kept first.  The
    tab of the rank that failed first is open, or the first tab if no rank has failed.  A single
    rank has a block instead of a tab.  `logs` has the path of a log file by rank.  `name` is the
    beginning of a name that all tabs of the panel share, and that no other panel should have.
    """
    if not shown.states:  # the panel has only its head line
        return shown
    groups = [group for group in transcript.single_groups() if _has_output(group)]
    if not groups:  # no rank has output yet, and the cell may still run
        return shown
    with_output = {group.ranks[0] for group in groups}
    groups.sort(key=lambda group: not group.has_failed)
    kept = sorted(groups[:MAX_TABS], key=lambda group: group.ranks)
    opened = next((group for group in kept if group.part == "first"), kept[0])
    max_lines = max_block_lines(transcript)
    blocks = [_tab(group, max_lines, logs, shown.pool, is_open=group is opened) for group in kept]
    shown = shown._replace(
        squares=(),
        more_squares=0,
        spread=spread(transcript),
        bars=None,
        blocks=tuple(blocks),
        rows=(),
        folded_blocks=(),
        more=tuple(sorted(group.ranks[0] for group in groups[MAX_TABS:])),
        silent=tuple(rank for rank in transcript.ranks if rank not in with_output),
        tabs=name if len(blocks) > 1 else "",
    )
    return limit_size(shown)


def _tab(
    group: AlikeRanks, limit: int, logs: Mapping[int, str], pool: str, *, is_open: bool
) -> PanelBlock:
    items = items_of(group, limit, bars=True)
    hides = any(isinstance(item, Hidden) for item in items)
    words = [lines_text(group.line_count) if hides else ""]
    words += ["aborted"] if group.shown.state == "aborted" else []
    if isinstance(group.error, Failure):  # each tab shows the traceback of its rank
        group, failed = group._replace(part="first"), ""
    else:
        failed = error_text(group.error) if group.error else ""
    log = logs.get(group.ranks[0])
    return PanelBlock(group, tuple(filter(None, words)), items, failed, log, is_open, pool)


def _has_output(group: AlikeRanks) -> bool:
    output = group.shown
    is_over = output.state in ("failed", "died", "aborted")
    return is_over or not output.is_silent or bool(output.bars)
