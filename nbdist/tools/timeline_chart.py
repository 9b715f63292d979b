"""Draws the timeline of a cell, a row per rank, as a picture for pages and as text for terminals.

Each row is divided into slices of equal length, which show for what share of the slice the rank
computed, communicated and waited; in text, only for what share it computed.
`nbdist.tools.timeline` calls this file in the notebook's process.  Pure: no I/O here.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from math import ceil
from typing import NamedTuple

from nbdist.notebook.display import CommandOutput
from nbdist.output.html_parts import AMBER, BLUE, GREY, RED, coloured, dim, line, panel, table
from nbdist.tools.timeline_data import Timeline, TimelineRow, TimeSlice, least_awaited, slices_of

TEXT_SLICES, PICTURE_SLICES = 60, 240
"""The number of slices of a row in a text, where each slice is a character, and in a picture."""

MAX_TICKS, AXIS_SHARE = 6, 0.92
"""The most ticks on the axis of time, and the share of the axis in which ticks may begin.

The rest of the axis is left for the text of the last tick.
"""


def chart(timeline: Timeline, rows: Sequence[TimelineRow]) -> CommandOutput:
    """Draw these rows of the timeline above an axis of time, a legend, and the longest waits."""
    periods = [period.text(timeline.seconds) for period in awaited_periods(timeline)]
    text = "\n".join([*_text_rows(timeline, rows), *periods])
    html = panel(_picture_rows(timeline, rows), *(line(escape(each)) for each in periods))
    return CommandOutput(html, text)


def short_seconds(seconds: float, whole: float) -> str:
    """Return seconds as `0.99 s`, or as `45 ms` if `whole` is below a second.

    `whole` is the time of the cell, the same for all texts of a column, so they have one unit.
    """
    if whole < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if whole >= 100 else f"{seconds:.2f} s"


def ticks(whole: float) -> list[float]:
    """Return the moments to mark on an axis from 0 to `whole` seconds, such as 0, 2, 4 and 6."""
    if whole <= 0:
        return [0.0]
    sizes = (digit * 10.0**exponent for exponent in range(-9, 12) for digit in (1, 2, 5))
    step = next(size for size in sizes if whole <= size * MAX_TICKS)
    return [number * step for number in range(MAX_TICKS + 1) if number * step <= AXIS_SHARE * whole]


def tick_text(seconds: float, whole: float) -> str:
    """Return a moment on the axis as `2 s`, or as `200 ms` if `whole` is below a second."""
    return f"{seconds * 1000:,.10g} ms" if whole < 1 else f"{seconds:,.10g} s"


# --- when others waited for a rank --------------------------------------------------------------

MIN_CAUSED, MAX_GAP = 0.1, 1
"""A slice belongs to a period of waiting if others wait in at least `MIN_CAUSED` of the slice.

Up to `MAX_GAP` slices in a row with a smaller share do not end the period.
"""

MAX_PERIODS = 3


class AwaitedPeriod(NamedTuple):
    """A period in which other ranks waited for a rank, each for `seconds` seconds on average.

    `begin` and `end` are in seconds from when the first rank began the cell.
    """

    rank: int
    begin: float
    end: float
    seconds: float

    def text(self, whole: float) -> str:
        """Return a text: `others waited 1.32 s for rank 2 between 8.30 s and 9.90 s`."""
        begin, end, seconds = (short_seconds(each, whole) for each in self[1:])
        return f"others waited {seconds} for rank {self.rank} between {begin} and {end}"


def awaited_periods(timeline: Timeline) -> list[AwaitedPeriod]:
    """Return up to `MAX_PERIODS` periods, those with the longest waits, the earliest first.

    Periods with waits that are too short to be named (`least_awaited`) are left out.
    """
    step = timeline.seconds / TEXT_SLICES
    periods = list[AwaitedPeriod]()
    for rank, slices in slices_of(timeline, TEXT_SLICES).items():
        caused = [part.caused * step if part else 0.0 for part in slices]
        numbers = [at for at, each in enumerate(caused) if each >= MIN_CAUSED * step > 0]
        while numbers:
            first = last = numbers.pop(0)
            while numbers and numbers[0] - last <= 1 + MAX_GAP:
                last = numbers.pop(0)
            seconds = sum(caused[first : last + 1])
            periods.append(AwaitedPeriod(rank, first * step, (last + 1) * step, seconds))
    periods = [each for each in periods if each.seconds >= least_awaited(timeline.seconds)]
    longest = sorted(periods, key=lambda each: -each.seconds)[:MAX_PERIODS]
    return sorted(longest, key=lambda each: (each.begin, each.rank))


# --- as text ------------------------------------------------------------------------------------

HEIGHTS = "▁▂▃▄▅▆▇█"
"""The characters for a slice: the higher the character, the more of the slice the rank computed."""

UNRECORDED_MARK = "·"


def text_bar(slices: Iterable[TimeSlice | None]) -> str:
    """Draw slices as characters, whose heights are the shares in which the rank computed.

    A slice without records is `UNRECORDED_MARK`, and a slice that is None is a space.
    """
    return "".join(map(_character, slices)).rstrip()


def _character(part: TimeSlice | None) -> str:
    if part is None:
        return " "
    if not part.is_recorded:
        return UNRECORDED_MARK
    return HEIGHTS[min(len(HEIGHTS) - 1, int(part.computing * len(HEIGHTS)))]


def _text_rows(timeline: Timeline, rows: Sequence[TimelineRow]) -> Iterator[str]:
    slices = slices_of(timeline, TEXT_SLICES)
    bars = {row.rank: text_bar(slices[row.rank]) for row in rows}
    width = max(len(str(rank)) for rank in bars)
    yield from (f"rank {rank:>{width}} {bar}" for rank, bar in bars.items())
    axis = ""
    for seconds in ticks(timeline.seconds):
        at = round(seconds / (timeline.seconds or 1.0) * TEXT_SLICES)
        axis = f"{axis:<{at}}|{tick_text(seconds, timeline.seconds)}"
    yield f"{'':{5 + width}} {axis}"
    marks = [f"{HEIGHTS[-1]} only computing", f"{HEIGHTS[3]} half", f"{HEIGHTS[0]} in collectives"]
    is_missing = any(UNRECORDED_MARK in bar for bar in bars.values())
    yield "  ".join([*marks, *[f"{UNRECORDED_MARK} not recorded"] * is_missing])


# --- as a picture -------------------------------------------------------------------------------

PICTURE_WIDTH, ROW_HEIGHT = 720, 24  # pixels of a page; in a narrow page pictures are narrower

BAR, STRIP_TOP, STRIP = 80, 84, 16
"""The height of the bar, and the top and height of the strip below; a row is 100 high."""

COMMUNICATING, WAITING, UNRECORDED = GREY, AMBER, "rgba(134,142,150,0.25)"

LEAST_CAUSED, CAUSED_SHADES = 0.05, 4
"""The strip is red where other ranks wait for the rank in at least this share of a slice.

The longer they wait, the darker is the red, which has `CAUSED_SHADES` shades.
"""

_ROW_NAME = "padding:0 8px 0 0;border:none;text-align:left;white-space:nowrap;vertical-align:top"
_ROW_PICTURE = "padding:0;border:none;text-align:left;width:100%"


def _picture_rows(timeline: Timeline, rows: Sequence[TimelineRow]) -> str:
    slices = slices_of(timeline, PICTURE_SLICES)
    cells = [
        [(_ROW_NAME, dim(f"rank {row.rank}")), (_ROW_PICTURE, _image(row, slices[row.rank]))]
        for row in rows
    ]
    cells.append([(_ROW_NAME, ""), (_ROW_PICTURE, _axis(timeline.seconds))])
    shown = [part for row in rows for part in slices[row.rank] if part is not None]
    drawn = table(cells, f";width:100%;max-width:{PICTURE_WIDTH}px")
    return drawn + line(_legend(shown, is_split=timeline.is_recorded))


def _legend(shown: Sequence[TimeSlice], *, is_split: bool) -> str:
    marks = [("■", BLUE, "computing")]
    marks.append(("■", COMMUNICATING, "communicating" if is_split else "in collectives"))
    if is_split:
        marks.append(("■", WAITING, "waiting for another rank"))
    if any(part.caused >= LEAST_CAUSED for part in shown):
        marks.append(("▂", RED, "others wait for this rank"))
    if not all(part.is_recorded for part in shown):
        marks.append(("■", UNRECORDED, "not recorded"))
    return "&emsp;".join(f"{coloured(mark, colour)} {dim(text)}" for mark, colour, text in marks)


def _axis(whole: float) -> str:
    """Return the axis below the pictures: short lines, each with its moment beside it."""
    moments = ticks(whole)
    marks = ""
    for begin, end in zip(moments, [*moments[1:], whole], strict=True):
        width = 100 * (end - begin) / (whole or 1.0)
        style = f"flex:0 0 {width:.3f}%;box-sizing:border-box;border-left:1px solid {GREY}"
        text = dim(tick_text(begin, whole))
        marks += f'<div style="{style};padding:0 0 0 3px;white-space:nowrap">{text}</div>'
    return f'<div style="display:flex;font-size:11px">{marks}</div>'


def _image(row: TimelineRow, slices: Sequence[TimeSlice | None]) -> str:
    """Return the picture of a row as `<img>`, which a page stretches to the width of the column."""
    words = f"rank {row.rank}: {short_seconds(row.computing, row.seconds)} computing, "
    words += f"{short_seconds(row.in_collectives, row.seconds)} in collectives"
    encoded = b64encode(row_picture(slices).encode()).decode()
    style = f"display:block;width:100%;max-width:100%;height:{ROW_HEIGHT}px;margin:0 0 4px"
    return f'<img src="data:image/svg+xml;base64,{encoded}" alt="{words}" style="{style}">'


def row_picture(slices: Sequence[TimeSlice | None]) -> str:
    """Draw the slices of a rank as SVG: a bar, and a strip below the bar.

    Each slice of the bar is divided, from the bottom up, into the shares of computing,
    communicating and waiting.  The strip shows how much of the slice others waited for this rank.
    """
    shapes = list[str]()
    for start, run in _runs(slices):
        if run[0].is_recorded:
            shapes += [
                _area(start, [1.0] * len(run), WAITING),
                _area(start, [part.computing + part.communicating for part in run], COMMUNICATING),
                _area(start, [part.computing for part in run], BLUE),
            ]
        else:
            shapes.append(_area(start, [1.0] * len(run), UNRECORDED))
    shapes += _strip([part.caused if part else 0.0 for part in slices])
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" preserveAspectRatio="none" '
        f'shape-rendering="crispEdges" viewBox="0 0 {len(slices)} 100" width="{PICTURE_WIDTH}" '
        f'height="{ROW_HEIGHT}">{"".join(shapes)}</svg>'
    )


def _runs(slices: Iterable[TimeSlice | None]) -> Iterator[tuple[int, list[TimeSlice]]]:
    """Yield runs of neighbouring slices, each run with the number of its first slice.

    The slices of a run are all recorded or all unrecorded.  Slices that are None are left out.
    """
    numbered = ((number, part) for number, part in enumerate(slices) if part is not None)
    # `number - at` changes after a gap, in which the rank did not run, so a new run begins there.
    keyed = ((number - at, number, part) for at, (number, part) in enumerate(numbered))
    for _, run in groupby(keyed, key=lambda each: (each[0], each[2].is_recorded)):
        parts = [*run]
        yield parts[0][1], [part for _, _, part in parts]


def _area(start: int, shares: Iterable[float], colour: str) -> str:
    """Return an SVG path that fills a rank's bar from its bottom up to a height for each slice.

    `start` is the number of the first slice.  `shares` has the height in each slice, as a share of
    the bar's height from 0 to 1.
    """
    heights = (round(BAR * share) for share in shares)
    steps = (f"V{BAR - height}h{len([*run])}" for height, run in groupby(heights))
    return f'<path d="M{start} {BAR}{"".join(steps)}V{BAR}z" fill="{colour}"/>'


def _strip(caused: Sequence[float]) -> Iterator[str]:
    """Yield SVG paths that mark the slices in which other ranks waited for this rank.

    `caused` has for each slice how long they waited, as a number from 0 to about 1: the longer, the
    darker is the mark.
    """
    shades = [ceil(min(1.0, each) * CAUSED_SHADES) * (each >= LEAST_CAUSED) for each in caused]
    start = 0
    for shade, run in groupby(shades):
        width = len([*run])
        if shade:
            path = f"M{start} {STRIP_TOP}h{width}v{STRIP}h-{width}z"
            yield f'<path d="{path}" fill="{RED}" fill-opacity="{shade / CAUSED_SHADES:g}"/>'
        start += width
