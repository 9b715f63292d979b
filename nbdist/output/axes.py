"""The axes of a picture of curves: places of numbers on an axis, its ticks, and their labels.

`nbdist.output.chart` draws the picture.  Pure: no I/O here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from nbdist.output.html_parts import dim

MAX_AXIS_TICKS, MAX_STEP_TICKS = 6, 5
"""The most ticks of an axis; the axis of steps has fewer, since its labels are side by side."""

DECADE = 10.0
"""The ratio of highest to lowest number from which an axis of positive numbers is logarithmic.

The axis of steps is never logarithmic.
"""

LABEL_WIDTH = 7  # the width of a character of a label, in pixels, rounded up
_LEAST_LABEL = 7  # the labels beside a picture have room for at least this many characters

_FACTORS = ((1, 2, 5), (1, 3), (1,))  # a logarithmic axis uses one tuple, times powers of ten
# An axis that is not logarithmic has no ticks if its ends differ by at most `10**-_MOST_DIGITS`
# times its number furthest from 0.
_MOST_DIGITS = 7


class Axis(NamedTuple):
    """The lowest and highest number on an axis, whether it is logarithmic, and its limit of ticks.

    An axis of whole numbers has its ticks at whole numbers.
    """

    low: float
    high: float
    is_log: bool = False
    max_ticks: int = MAX_AXIS_TICKS
    is_whole: bool = False

    def share(self, value: float) -> float:
        """Return a number's place on the axis, from 0 at `low` to 1 at `high`.

        A number outside of the axis has the place of the nearer end.
        """
        value = min(max(value, self.low), self.high)
        if self.high == self.low:
            return 0.0
        if self.is_log:
            # Take no logarithm of a quotient, since the quotient could be too large for a float.
            low, high = math.log(self.low), math.log(self.high)
            return min(1.0, max(0.0, (math.log(value) - low) / (high - low)))
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The ticks as numbers with labels, in rising order.

        An axis has no ticks if two labels would be equal, or if there would be only one tick.
        """
        marks = self._powers() if self.is_log else self._multiples()
        is_readable = len({text for _, text in marks}) == len(marks) >= 2
        return marks if is_readable else []

    def _multiples(self) -> list[tuple[float, str]]:
        """Return ticks at multiples of 1, 2 or 5 times a power of ten; [] if the ends are close."""
        span, largest = self.high - self.low, max(abs(self.low), abs(self.high))
        if not span > largest * 10.0**-_MOST_DIGITS or largest < 1e-300:
            return []
        power = math.floor(math.log10(span)) - 1
        for unit in (factor * 10.0**power for factor in (1, 2, 5, 10, 20, 50)):
            first, last = math.ceil(self.low / unit - 1e-9), math.floor(self.high / unit + 1e-9)
            if last - first < self.max_ticks and not (self.is_whole and unit < 1):
                break
        marks = (number * unit for number in range(first, last + 1))
        # A rounding error may put the first or the last tick beyond the end of the axis.
        return [(min(max(mark, self.low), self.high), label(mark, unit)) for mark in marks]

    def _powers(self) -> list[tuple[float, str]]:
        """Return ticks at powers of ten and, if there is room, at multiples of the powers too."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        powers = range(max(first, -307), min(last, 307) + 1)
        for factors in _FACTORS:
            marks = [(f * 10.0**power, 10.0**power) for power in powers for f in factors]
            inside = [(mark, unit) for mark, unit in marks if self.low <= mark <= self.high]
            if len(inside) <= self.max_ticks:
                break
        every = math.ceil(len(inside) / self.max_ticks)
        return [(mark, label(mark, unit)) for mark, unit in inside[::every]]


def label(value: float, unit: float) -> str:
    """Return a number as text, with enough digits to tell apart two ticks at a distance of `unit`.

    Examples are `0.05`, `12,000` and `2e-6`.  Commas separate thousands.  A number from 1e7 on, or
    with more than four decimals, has an exponent.
    """
    if abs(value) < unit / 1e6:
        return "0"
    decimals = max(0, -math.floor(math.log10(unit) + 1e-9))
    if decimals <= 4 and abs(value) < 1e7:
        return f"{value:,.{decimals}f}"
    digits = max(0, math.floor(math.log10(abs(value))) - math.floor(math.log10(unit) + 1e-9))
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}"


def with_axes(image: str, down: Axis, across: Axis, edge: float) -> str:
    """Return HTML of a picture, with the labels of `down` left of it, and those of `across` below.

    `image` is the HTML of the picture.  The picture has a margin above the highest number and below
    the lowest number; `edge` is the height of each margin as a share of the picture's height.  The
    labels stay beside their places in the picture if the picture shrinks on a narrow page.
    """
    beside = [(edge + (1 - down.share(at)) * (1 - 2 * edge), text) for at, text in down.ticks[::-1]]
    below = [(across.share(at), text) for at, text in across.ticks]
    # The column of labels has a least width, so that pictures side by side have mostly equal
    # widths.
    width = LABEL_WIDTH * max(_LEAST_LABEL, *(len(text) for _, text in beside), 0) + 6
    column = f"flex:0 0 {width}px;box-sizing:border-box;font-size:11px"
    rows = _spread(beside, "height:0;line-height:0;text-align:right")
    columns = _spread(below, "flex:0 0 0;width:0;display:flex;justify-content:center")
    return (
        f'<div style="display:flex;padding:7px 0 5px">'
        f'<div style="{column};padding:0 6px 0 0;display:flex;flex-direction:column">{rows}</div>'
        f'<div style="flex:0 1 auto;min-width:0;line-height:0">{image}</div></div>'
        f'<div style="display:flex;white-space:nowrap;font-size:11px">'
        f'<div style="{column};padding:0 14px 0 0;text-align:right">{dim("step")}</div>'
        f"{columns}</div>"
    )


def _spread(places: Sequence[tuple[float, str]], style: str) -> str:
    """Return HTML that places labels along a row or a column.

    `places` has a pair for each label: its place from 0, the start, to 1, the end, and its text.
    Empty elements between the labels keep the distances.  `style` must give labels no length in the
    direction of the row or column, since the length of a label would shift the labels behind it.
    """
    ends = [0.0, *(share for share, _ in places), 1.0]
    spaces = [
        f'<div style="flex:{max(0.0, after - before):.4f} 1 0"></div>'
        for before, after in pairwise(ends)
    ]
    labels = [f'<div style="{style}">{dim(text)}</div>' for _, text in places]
    pairs = zip(spaces, [*labels, ""], strict=True)
    return "".join(space + text for space, text in pairs)
