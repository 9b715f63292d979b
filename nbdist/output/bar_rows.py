"""Keeps the progress bars on the screen of one rank, by the rows in which they were drawn.

`Screen` in the notebook's process owns a `BarRows`, and reports what the rank's program writes in
rows with bars.  Pure: no I/O here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nbdist.output.fingerprint import Bar, end_of_bar, is_cut, read_row

_MAX_BARS = 1000


class BarRows:
    """The bars of a screen, in rows that are numbered from the first row ever written."""

    def __init__(self) -> None:
        self.by_row: dict[int, Bar] = {}  # a row that is being written now is left out
        # By row: the length of a bar that tqdm has cut right after a space.  The stored text of the
        # row may be shorter, since it may have lost the space at its end.
        self.cut_widths: dict[int, int] = {}
        self.forgotten = 0  # how many bars `drop_above` has removed from `by_row`
        self.has_been_drawn = False  # stays True after a program has erased its bars
        # Bars that text has replaced in their rows, and that were not drawn or erased since; also
        # the bars of `set_removed`.  A key is a bar's name and total, or a number from
        # `set_removed`; a value is the bar's row, the bar, and its length (0 from `set_removed`).
        self._removed: dict[object, tuple[int, Bar, int]] = {}
        # By row, three facts about the first bar that was drawn in the row: its name and total, its
        # progress when it began, and the row from which it has moved to this row, or -1.  A bar
        # moves if a program prints text in the bar's row and draws the bar again below the text.
        self._first_drawn: dict[int, tuple[tuple[str, str], float, int]] = {}
        # Rows of `by_row` whose bars a program has erased by writing to other rows (`drop_lowest`).
        self._erased_rows = set[int]()

    def list_bars(
        self, at_cursor: tuple[int, Bar] | None, is_ended: Callable[[int], bool]
    ) -> list[tuple[int, Bar]]:
        """Return a pair (row, bar) for each bar that was not erased, the topmost first.

        If a program has printed a line of text over a bar, and has drawn the bar again below the
        line, the bar has only one pair, with its last row.  `at_cursor` has the row of the cursor
        and the bar in this row; it is None if the row has no bar.  `is_ended(row)` returns True if
        a program has ended the row with a newline, or if the screen has dropped the row.
        """
        in_rows = {row: bar for row, bar in self.by_row.items() if row not in self._erased_rows}
        if at_cursor:
            in_rows[at_cursor[0]] = at_cursor[1]
        removed = ((row, bar) for row, bar, _ in self._removed.values())
        rows = sorted([*removed, *in_rows.items()], key=lambda each: each[0])
        later: dict[tuple[str, str], tuple[int, Bar]] = {}
        kept = []
        for row, bar in reversed(rows):
            redrawn = later.get(key := (bar.name, bar.total))
            if (
                redrawn is None
                or not bar.is_before(redrawn[1])
                or self._is_over(row, bar, redrawn[0], is_ended)
            ):
                kept.append((row, bar))
            later[key] = row, bar
        return kept[::-1]

    def _is_over(self, row: int, bar: Bar, later: int, is_ended: Callable[[int], bool]) -> bool:
        """Return True if `bar` is over, because row `later` has a new bar of equal name and total.

        The bar in row `later` is new if it began with less progress than `bar` has, and has not
        moved there from row `row`.  If it is not new, it counts as `bar` itself, drawn again below
        a line of text, and the result is False.

        The result is also False as long as `bar` is in row `row` and no newline has ended this row
        (`is_ended`), since the program may draw `bar` there again.
        """
        if self.by_row.get(row) == bar and not is_ended(row):
            return False
        key, position, moved_from = self._first_drawn.get(later, (None, 0.0, -1))
        return key == (bar.name, bar.total) and moved_from != row and position < bar.position

    def put(self, row: int, bar: Bar | None) -> None:
        """Record the bar that is drawn in a row; None records that the row has no bar."""
        if bar is None:
            self.by_row.pop(row, None)
            return
        self.by_row[row] = bar
        self.has_been_drawn = True
        self.drop_removed(bar)

    def pop_row(self, row: int) -> int:
        """Forget the bar of a row that a program begins to write; return the length of a cut bar.

        The caller needs the length of a bar that tqdm has cut right after a space, because the
        stored text of the row has lost this space.  For all other rows, return 0.
        """
        self.by_row.pop(row, None)
        self._erased_rows.discard(row)
        return self.cut_widths.pop(row, 0)

    def set_removed(self, bars: Iterable[Bar], row: int) -> None:
        """Record the bars of several screens from which this screen was made (`Screen.joined`).

        The bars have no rows in the joined screen.  They are recorded as bars that text has
        replaced in row `row`, so that `list_bars` returns them.
        """
        self._removed = {number: (row, bar, 0) for number, bar in enumerate(bars)}
        self.has_been_drawn = bool(self._removed)

    def record_removed(self, row: int, bar: Bar, width: int, end: int) -> None:
        """Record that text replaces a bar of `width` characters in row `row`.

        Do nothing if the program has already drawn the bar again, in a row below `row` and before
        row `end`: then the bar is still on the screen.
        """
        below = map(self.by_row.get, range(row + 1, end))
        key = bar.name, bar.total
        if any(each and (each.name, each.total) == key and bar.is_before(each) for each in below):
            return
        self._removed[key] = row, bar, width
        if len(self._removed) > _MAX_BARS:
            del self._removed[next(iter(self._removed))]

    def drop_removed(self, bar: Bar) -> None:
        """Forget a bar that text has replaced, because a program now draws or erases the bar."""
        self._removed.pop((bar.name, bar.total), None)

    def drop_lowest(self, width: int, first: int, width_of: Callable[[int], int]) -> None:
        """Count the lowest bar of `width` characters as erased, since a program tried to erase it.

        To erase a nested bar, tqdm writes as many spaces as the bar has characters.  If the program
        has printed lines of text, the bar is further down than tqdm assumes, and tqdm writes the
        spaces to a row without a bar.  So the bar is found by its length.

        Only bars in row `first` or below, and bars that text has replaced, are searched.  If none
        has this length, do nothing.  `width_of(row)` returns the number of characters of a row.
        """
        candidates: list[tuple[int, object]] = [
            (row, key) for key, (row, _, bar_width) in self._removed.items() if bar_width == width
        ]
        rows = (row for row in self.by_row if row >= first and row not in self._erased_rows)
        candidates += [(row, row) for row in rows if width_of(row) == width]
        _, key = max(candidates, key=lambda each: each[0], default=(0, None))
        if isinstance(key, int):
            self._erased_rows.add(key)
        else:
            self._removed.pop(key, None)

    def parse(
        self, row: int, plain: str, before: int, *, has_older: bool
    ) -> tuple[Bar | None, int, int]:
        """Parse the text drawn in a row: a bar, and perhaps other text behind the bar.

        Return the bar, the bar's length, and the index at which the other text begins.  Without
        other text, both numbers are 0.  If the row has no bar, return (None, 0, 0).  Also return
        (None, 0, 0) for most rows with only a bar, since parsing is slow and callers need the bar
        only in a few cases.

        `plain` is the text drawn last, and `before` is the length of the text that was drawn
        earlier in the same row.  `has_older` is True if characters of an older, longer drawing
        follow `plain` in the row.
        """
        end, is_first = end_of_bar(plain), row not in self._first_drawn
        is_cut_longer = not end and len(plain) > before and is_cut(plain)
        if not (end or is_first or is_cut_longer or has_older):
            return None, 0, 0  # nearly all drawings end here, without the slow `read_row`
        bar = read_row(plain[: end or None], is_edited=False)
        if bar is None:
            return None, 0, 0
        key = bar.name, bar.total
        if is_first:
            self._record_first_drawn(row, key, bar.position)
        before = before or (self._removed[key][2] if key in self._removed else 0)
        # tqdm mostly cuts all drawings of a bar to the same length, so text beyond this length
        # counts as other text.
        has_more = is_cut_longer and 0 < before < len(plain.rstrip(" "))
        if has_more and (cut := read_row(plain[:before], is_edited=False)):
            bar, end = cut, before
        # Spaces up to the length of the previous drawing are no text: tqdm erases a longer bar by
        # such spaces.
        is_erased = end and not plain[end:before].strip(" ")
        return bar, end, max(end, before) if is_erased else end

    def _record_first_drawn(self, row: int, key: tuple[str, str], position: float) -> None:
        """Record the first bar of row `row`, and the progress with which this bar began.

        `key` is the bar's name and total, and `position` is its progress now.  If text has replaced
        the bar in an earlier row, and the bar goes on in row `row`, record the progress with which
        the bar began in the earlier row.
        """
        self.has_been_drawn = True
        moved_from = -1
        if key in self._removed:
            other, removed, _ = self._removed[key]
            first_key, first_position, _ = self._first_drawn.get(other, (None, 0.0, -1))
            if first_key == key and position >= removed.position:
                position, moved_from = first_position, other
        self._first_drawn[row] = key, position, moved_from

    def drop_below(self, row: int) -> None:
        """Drop the bars in all rows below this row, because a program has erased those rows."""
        for below in [each for each in self.by_row if each > row]:
            del self.by_row[below]

    def drop_above(self, first: int) -> None:
        """Forget how bars began in rows above row `first`, since the screen has dropped these rows.

        The bars of dropped rows are kept.  If there are more than `_MAX_BARS` bars in all rows, the
        topmost bars of dropped rows are forgotten too, and counted in `forgotten`.
        """
        for row in [row for row in self._first_drawn if row < first]:
            del self._first_drawn[row]
        self._erased_rows -= {row for row in self._erased_rows if row not in self.by_row}
        rows_above = sorted(row for row in self.by_row if row < first)
        for row in rows_above[: max(0, len(self.by_row) - _MAX_BARS)]:
            del self.by_row[row]
            self.forgotten += 1
