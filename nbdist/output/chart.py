"""Curves as one small picture for a panel: a PNG made here, and words in HTML around it.  Pure.

The picture has no words: those beside it take the page's own colours, light or dark, and its own
are seen on both.  It has twice as many pixels as it is wide, so that lines look smooth.
"""

from __future__ import annotations

import struct
import time
import zlib
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence

from nbdist.output.bands import (
    Bands,
    bands_of,
    headline,
    more_text,
    number_text,
    remarks,
    shown_name,
    step_text,
)
from nbdist.output.curves import Curve, Curves
from nbdist.output.events import Display
from nbdist.output.wording import AMBER, bold, coloured, dim, embed, line, size
from nbdist.words import count

WIDTH, HEIGHT = 480, 140  # of a picture, in pixels of a page
SCALE = 2

REDRAW, SHARE = 0.5, 20
"""Seconds between two pictures of a running cell, and how many times what one takes."""

MOST_PICTURES, MOST_BYTES, MOST_LIVE_BYTES = 6, 300_000, 40_000
MOST_FAR, MOST_RUNS_DRAWN = 4, 3

CLEAR, GRID, EXTREMES, BAND, EARLIER, MIDDLE, ODD, *FAR = range(7 + MOST_FAR)
PALETTE = {
    CLEAR: (0, 0, 0, 0),
    GRID: (134, 142, 150, 70),
    EXTREMES: (47, 127, 230, 35),
    BAND: (47, 127, 230, 75),
    EARLIER: (134, 142, 150, 170),
    MIDDLE: (47, 127, 230, 255),
    ODD: (212, 58, 58, 255),
    **dict(
        zip(
            FAR,
            ((230, 119, 0, 255), (190, 75, 219, 255), (12, 166, 120, 255), (247, 103, 7, 255)),
            strict=True,
        )
    ),
}
"""Colours by what they are for: red, green, blue, and how little of the page is seen through."""

LARGEST = 8e307  # of numbers that are drawn: how far two are apart is a number too

Values = Sequence[float | None]

_TILES = "display:flex;flex-wrap:wrap;column-gap:14px;align-items:flex-end;margin:4px 0"
_TILE = f"flex:1 1 40%;max-width:{WIDTH}px;min-width:240px;box-sizing:border-box;margin:2px 0"


def curves_html(curves: Curves, names: Sequence[str] = (), *, is_live: bool = False) -> str:
    """Write the curves of some names, by default all; of a running cell it may be an older one."""
    begun = time.monotonic()
    drawn_at, version, html = curves.drawn
    if is_live and (version == curves.version or begun < drawn_at):
        return html
    chosen = [*names] or [*curves.by_name]
    tiles, left = [], MOST_LIVE_BYTES if is_live else MOST_BYTES
    for name in chosen[:MOST_PICTURES]:
        tiles.append(tile := _tile(name, curves.by_name[name], left))
        left -= size(tile)
    more = [f"{count(len(chosen) - MOST_PICTURES, 'more name')}: `%dist_plot NAME` shows one"]
    notes = [*(more if len(chosen) > MOST_PICTURES else ()), more_text(curves)]
    html = (
        f'<div style="{_TILES}">{"".join(tiles)}</div>{line(dim(" · ".join(filter(None, notes))))}'
    )
    now = time.monotonic()
    curves.drawn = max(begun + REDRAW, now + SHARE * (now - begun)), curves.version, html
    return html


def _tile(name: str, curve: Curve, most: int) -> str:
    """Write the numbers of one name, and its picture if that has at most `most` bytes."""
    bands = bands_of(curve.last)
    title, rest = shown_name(name), headline(name, curve.last, bands)
    head = line(bold(title) + dim(rest.removeprefix(title)))
    colours = [f"#{bytes(PALETTE[each][:3]).hex()}" for each in FAR[: len(bands.far)]]
    for number, text in enumerate(remarks(bands)):
        head += line(coloured(text, colours[number] if number < len(colours) else AMBER))
    if not bands.has_numbers or len(bands.steps) == 1:
        return f'<div style="{_TILE}">{head}</div>'
    runs = [bands_of(run) for run in [*curve.runs.values()][-1 - MOST_RUNS_DRAWN : -1]]
    low, high = limits([bands, *runs])
    begin = min(each.steps[0] for each in (bands, *runs))
    end = max(each.steps[-1] for each in (bands, *runs))
    image = b64encode(picture(bands, runs, (begin, end), (low, high))).decode()
    shown = embed(Display({"image/png": image}, {"image/png": {"width": WIDTH, "height": HEIGHT}}))
    if shown is None or size(shown) > most:
        return f'<div style="{_TILE}">{head}</div>'
    earlier = f" · {count(len(runs), 'earlier run')} in grey" if runs else ""
    steps = f"steps {step_text(begin)} to {step_text(end)}{earlier}"
    foot = f"{number_text(low)} · {steps}"
    return (
        f'<div style="{_TILE}">{head}{line(dim(number_text(high)))}{shown}{line(dim(foot))}</div>'
    )


def limits(found: Iterable[Bands]) -> tuple[float, float]:
    """Choose the lowest and highest number that is drawn: of bands, and of ranks near them."""
    found = [*found]
    low = min(each for bands in found for each in bands.low if each is not None)
    high = max(each for bands in found for each in bands.high if each is not None)
    room = (high - low) or abs(high) / 10 or 1.0
    for bands in found:
        for far in bands.far:
            numbers = [each for each in bands.means[far.rank] if each is not None]
            low = max(min(low, *numbers), low - room)
            high = min(max(high, *numbers), high + room)
    if high == low:
        low, high = low - room / 2, high + room / 2
    return max(low, -LARGEST), min(high, LARGEST)


def picture(
    bands: Bands,
    earlier: Sequence[Bands],
    steps: tuple[float, float],
    numbers: tuple[float, float],
) -> bytes:
    """Draw a run, and earlier ones as lines, between these steps and numbers."""
    canvas = Canvas(WIDTH * SCALE, HEIGHT * SCALE, steps, numbers)
    canvas.grid()
    for each in earlier:
        canvas.curve(each.steps, each.medians, EARLIER, SCALE)
    canvas.band(bands.steps, bands.bottom, bands.top, EXTREMES)
    canvas.band(bands.steps, bands.low, bands.high, BAND)
    canvas.curve(bands.steps, bands.medians, MIDDLE, 2 * SCALE)
    for colour, far in zip(FAR, bands.far, strict=False):
        canvas.curve(bands.steps, bands.means[far.rank], colour, 2 * SCALE)
    for step in bands.odd.values():
        canvas.mark(step)
    return canvas.png()


class Canvas:
    """Pixels by the number of their colour; `steps` and `numbers` are what its edges stand for."""

    def __init__(
        self, width: int, height: int, steps: tuple[float, float], numbers: tuple[float, float]
    ) -> None:
        self._width, self._height = width, height
        self._pixels = bytearray(width * height)
        self._steps, self._numbers = steps, numbers

    def grid(self) -> None:
        """Draw the lines of quarters."""
        for part in range(5):
            row = min(self._height - 1, part * self._height // 4)
            begin = row * self._width
            self._pixels[begin : begin + self._width] = bytes([GRID]) * self._width

    def band(self, steps: Sequence[float], low: Values, high: Values, colour: int) -> None:
        """Fill what is between two curves."""
        tops = dict(self._points(steps, high))
        for column, bottom in self._points(steps, low):
            if column in tops:
                self._fill(column, tops[column], bottom + 1, colour)

    def curve(self, steps: Sequence[float], values: Values, colour: int, width: int) -> None:
        """Draw a line of this width; a gap where there is no number."""
        before: tuple[int, float] | None = None
        for column, at in self._points(steps, values):
            last = before[1] if before is not None and before[0] == column - 1 else at
            top, bottom = min(last, at), max(last, at)
            self._fill(column, top - width / 2, bottom + width / 2, colour)
            before = column, at

    def mark(self, step: float) -> None:
        """Mark a step at the lower edge."""
        begin, end = self._steps
        middle = round((step - begin) / ((end - begin) or 1.0) * (self._width - 1))
        for column in range(middle - 2 * SCALE, middle + 2 * SCALE):
            if 0 <= column < self._width:
                self._fill(column, self._height - 8 * SCALE, self._height, ODD)

    def _points(self, steps: Sequence[float], values: Values) -> Iterator[tuple[int, float]]:
        """Yield each column that a curve goes through, and where."""
        (begin, end), (low, high) = self._steps, self._numbers
        across = (self._width - 1) / ((end - begin) or 1.0)
        room = self._height - 4 * SCALE
        last: tuple[int, float] | None = None
        for step, value in zip(steps, values, strict=True):
            if value is None:
                last = None
                continue
            # What is outside is drawn at the edge.
            share = min(1.0, max(0.0, (high - value) / (high - low)))
            column, at = round((step - begin) * across), 2 * SCALE + share * room
            if last is None:
                yield column, at
            else:
                width = column - last[0]
                for number in range(1, width + 1):
                    yield last[0] + number, last[1] + (at - last[1]) * number / width
            last = column, at

    def _fill(self, column: int, top: float, bottom: float, colour: int) -> None:
        first, last = max(0, round(top)), min(self._height, max(round(bottom), round(top) + 1))
        begin, end = first * self._width + column, last * self._width
        self._pixels[begin : end : self._width] = bytes([colour]) * (last - first)

    def png(self) -> bytes:
        """Write it as a PNG with a palette."""
        width = self._width
        rows = b"".join(
            b"\0" + self._pixels[begin : begin + width]
            for begin in range(0, len(self._pixels), width)
        )
        colours = [PALETTE[number] for number in range(len(PALETTE))]
        parts = (
            (b"IHDR", struct.pack(">IIBBBBB", width, self._height, 8, 3, 0, 0, 0)),
            (b"PLTE", bytes(part for colour in colours for part in colour[:3])),
            (b"tRNS", bytes(colour[3] for colour in colours)),
            (b"IDAT", zlib.compress(rows, 6)),
            (b"IEND", b""),
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in parts
        )
