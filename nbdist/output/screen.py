"""Emulates a terminal without a limit of height: keeps the text that one rank has printed.

Progress bars are kept apart from lines of text, in `BarRows`.  If a program prints text behind or
over a bar, the bar is removed from its row.  A row with only a bar does not count as a line.
In the notebook's process `RankTranscript` and `PlainLines` write to screens.  Pure: no I/O here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from io import StringIO
from itertools import groupby, islice, repeat
from typing import NamedTuple

from nbdist.output.ansi import PLAIN, RESET, SGR, Style, restyle, strip, styled
from nbdist.output.bar_rows import BarRows
from nbdist.output.fingerprint import (
    BAR_SIGNS,
    LONGEST_BAR,
    Bar,
    Digest,
    OutputDigests,
    is_cut,
    read_row,
)

# A row that becomes longer than this is ended as if by a newline, so that a program that prints no
# newline cannot fill the memory.
MAX_LINE_LENGTH = 16_000_000
KEEP_CHARACTERS = 48_000_000
_LONGEST_ESCAPE = 4096
_LONGEST_JUMP = 10_000
# The stored digest leaves out about this many of the newest rows, since they often change, for
# example if they have nested progress bars.  If the cursor moves up to an older row, the digest of
# all kept rows is computed again.
_UNSETTLED = 64

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_TOKEN = re.compile(
    r"(?P<text>[^\x00-\x08\x0a-\x1f\x7f]+)"
    r"|(?P<newline>\n)"
    r"|(?P<back>[\r\b])"
    r"|\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<command>[@-~])"
    r"|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[ -/]+[0-~]"
    r"|\x1b[^\[\]P^_X]"
    r"|."
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]P^_X][^\x07\x1b]*\x1b?|[ -/]*)\Z")
# Flags of a row.  `_STDERR_FLAG`: stderr wrote to the row.  `_EDITED_FLAG`: characters of the row
# were overwritten or erased.  `_DRAWN_FLAG`: the row was written after a carriage return or a
# similar code.  `_ENDED_FLAG`: the stream that wrote last ended the row with a newline; not set in
# rows that `_append` adds as whole lines.
_STDERR_FLAG, _EDITED_FLAG, _DRAWN_FLAG, _ENDED_FLAG = 1, 2, 4, 8


class ScreenLine(NamedTuple):
    """A line, with the colour codes to show it alone; `stderr` is True if stderr wrote to it."""

    text: str
    stderr: bool


class _OpenRow:
    """The row that is being written: its characters, each with its style."""

    __slots__ = ("_characters", "_rendered", "_styles", "width")

    def __init__(self, text: str) -> None:
        self._characters = StringIO()
        self._styles: list[Style] | None = None  # None: all characters are plain
        self._rendered: str | None = None
        self.width = 0
        for part, style in styled(text):
            self.put(self.width, part, style)

    def put(self, column: int, text: str, style: Style) -> None:
        """Write text at `column` over older characters; fill a gap before `column` with spaces."""
        if not text:
            return
        if column > self.width:
            self.put(self.width, " " * (column - self.width), PLAIN)
        self._rendered = None
        if self._styles is None and style != PLAIN:
            self._styles = [PLAIN] * self.width
        self._characters.seek(column)
        self._characters.write(text)
        self.width = max(self.width, column + len(text))
        if self._styles is not None:
            self._styles[column : column + len(text)] = repeat(style, len(text))

    @property
    def plain(self) -> str:
        """The characters without their styles."""
        return self._characters.getvalue()

    def cut_start(self, column: int) -> None:
        """Erase the characters before `column`, and move the rest of the row to the start."""
        text, styles = self.plain[column:], self._styles and self._styles[column:]
        self.cut(0)
        self.put(0, text, PLAIN)
        self._styles = styles

    def cut(self, column: int) -> None:
        """Erase the characters from `column` to the end of the row."""
        if column < self.width:
            self._rendered = None
            self._characters.seek(column)
            self._characters.truncate()
            self.width = column
            if self._styles is not None:
                del self._styles[column:]

    def render(self) -> str:
        """Return the row's text with colour codes, from a cache if the row has not changed."""
        if self._rendered is None:
            text, parts, start = self._characters.getvalue(), [], 0
            for style, run in groupby(self._styles or ()):
                end = start + sum(1 for _ in run)
                codes = style.codes
                parts.append(f"\x1b[{codes}m{text[start:end]}{RESET}" if codes else text[start:end])
                start = end
            self._rendered = "".join(parts) if self._styles else text
        return self._rendered


class Screen:
    """The lines and progress bars that a terminal would show after the text given to `write`.

    Rows are numbered from the first row ever written.  At most `keep_lines` rows can be read.  A
    reader sets `changed_from` to the row of the cursor; if a program then writes to a row above,
    `changed_from` becomes the topmost of these rows.
    """

    def __init__(self, keep_lines: int = 10_000) -> None:
        self.changed_from = 0
        self._keep = keep_lines
        self._rows = [""]
        self._flags = bytearray(1)
        self._first = 0  # the number of the row _rows[0]; earlier rows were dropped
        self._characters = 0  # the number of characters in all rows except `_open`, roughly
        self._row = 0  # the index of the cursor's row in _rows
        self._column = 0
        self._open: _OpenRow | None = None  # replaces _rows[_row] while a program writes the row
        self._style = PLAIN
        self._pending = {"stdout": "", "stderr": ""}
        self._digest = Digest()  # the digest of the rows before row `_settled`
        self._settled = 0
        self._bars = BarRows()
        self._parsed: tuple[str, Bar | None] = "", None  # cache: a row that is a bar, and this bar
        self._drawn_before = 0  # length of the drawing before the last carriage return in this row
        self._is_redrawing = False  # True after a carriage return or a similar code in this row
        # The column up to which this row was written since the last carriage return or backspace,
        # since the stream changed, or since the cursor came to the row.
        self._drawn_to = 0
        self._last_flag = 0

    @property
    def dropped(self) -> int:
        """The number of rows that can no longer be read; they are the topmost rows."""
        return max(self._first, self.end - self._keep)

    @property
    def cursor(self) -> int:
        """The row in which the next character is written."""
        return self._first + self._row

    @property
    def end(self) -> int:
        """The number of the row after the last row with a line, which may be empty, or with a bar.

        Rows that were erased, and the empty row of the cursor, may follow.
        """
        count = len(self._rows)
        while count - 1 > self._row and not self._is_shown(count - 1):
            count -= 1
        if not self._is_shown(count - 1):
            count -= 1
            while count and self._flags[count - 1] & _EDITED_FLAG and not self._is_shown(count - 1):
                count -= 1
        return self._first + count

    @property
    def is_edited(self) -> bool:
        """Whether the cursor's row had characters that were overwritten or erased, as in a bar."""
        return bool(self._flags[self._row] & _EDITED_FLAG)

    def __len__(self) -> int:
        """Return the number of lines that can be read."""
        return self.line_count - self.dropped_lines

    @property
    def line_count(self) -> int:
        """The number of all lines so far, including lines that can no longer be read."""
        end = self.end
        return end - self._bars.forgotten - sum(row < end for row in self._rows_of_bars())

    @property
    def dropped_lines(self) -> int:
        """The number of lines that can no longer be read."""
        dropped = self.dropped
        bars = sum(row < dropped for row in self._rows_of_bars())
        return max(0, dropped - self._bars.forgotten - bars)

    def lines(
        self, start: int | None = None, stop: int | None = None, *, bars: bool = False
    ) -> Iterator[ScreenLine]:
        """Yield the readable lines from row `start` up to but not including row `stop`.

        With `bars`, rows with progress bars count as lines too.
        """
        first = max(self.dropped, start or 0) - self._first
        last = min(self.end, self.end if stop is None else stop) - self._first
        left_out = () if bars else self._rows_of_bars()
        for row in range(first, last):
            if self._first + row not in left_out:
                yield ScreenLine(self._text(row), bool(self._flags[row] & _STDERR_FLAG))

    def tail(self, count: int, *, bars: bool = False) -> list[ScreenLine]:
        """Return the last `count` lines; with `bars`, rows with progress bars count as lines."""
        lines = list[ScreenLine]()
        left_out = () if bars else self._rows_of_bars()
        row, dropped = self.end, self.dropped
        while len(lines) < count and row > dropped:
            row -= 1
            if row not in left_out:
                index = row - self._first
                lines.append(ScreenLine(self._text(index), bool(self._flags[index] & _STDERR_FLAG)))
        return lines[::-1]

    # --- progress bars ------------------------------------------------------------------

    def bars(self) -> list[tuple[int, Bar]]:
        """Return a pair (row, bar) for each progress bar that was not erased, the topmost first.

        If a program has printed text and has drawn the same bar again below the text, the bar has
        only one pair, with its last row.
        """
        bar = self._bar_at_cursor()
        return self._bars.list_bars((self.cursor, bar) if bar else None, self._is_ended)

    @property
    def has_had_bars(self) -> bool:
        """Whether a program has drawn a progress bar, even if it has erased the bar since."""
        return self._bars.has_been_drawn or self._bar_at_cursor() is not None

    def has_ended(self, row: int, bar: Bar) -> bool:
        """Return True if a program has ended the row of this bar with a newline.

        Also return True if the row is not kept.  Return False if text has replaced the bar in its
        row, since the program may draw the bar again below that text.
        """
        return self._bars.by_row.get(row) == bar and self._is_ended(row)

    def _is_ended(self, row: int) -> bool:
        """Return True if a program has ended a row with a newline, or if the row is not kept."""
        return row < self._first or bool(self._flags[row - self._first] & _ENDED_FLAG)

    def _rows_of_bars(self) -> Collection[int]:
        is_at_bar = self._bar_at_cursor() is not None
        return {*self._bars.by_row, self.cursor} if is_at_bar else self._bars.by_row

    def _bar_at_cursor(self) -> Bar | None:
        """Return the bar in the row of the cursor; None if the row is not a bar."""
        if self._open is None:
            return self._bars.by_row.get(self.cursor)
        if self._open.width > LONGEST_BAR:
            return None
        if (plain := self._open.plain) == self._parsed[0]:
            return self._parsed[1]
        is_drawn = bool(self._flags[self._row] & (_EDITED_FLAG | _DRAWN_FLAG))
        return read_row(plain, is_edited=is_drawn)

    def _remove_bar(self, bar: Bar, width: int) -> None:
        """Record that text replaces the bar of `width` characters in the cursor's row."""
        self._bars.record_removed(self.cursor, bar, width, self._first + len(self._rows))

    def _remove_bar_before_text(self, row: _OpenRow) -> None:
        """If a program has printed text behind a bar, remove the bar, and keep the text in the row.

        If the row has a bar, also erase characters behind the bar that remain from a longer, older
        drawing of the bar.
        """
        plain = row.plain[: self._drawn_to]
        has_older = row.width > len(plain)
        bar, width, end = self._bars.parse(
            self.cursor, plain, self._drawn_before, has_older=has_older
        )
        if bar is None:
            return
        if has_older:
            row.cut(len(plain))
        if not end:
            self._parsed = plain, bar
            return
        self._remove_bar(bar, width)
        row.cut_start(end)
        self._column = max(0, self._column - end)
        self._flags[self._row] = self._last_flag
        self._is_redrawing, self._drawn_to = False, self._column

    @property
    def key(self) -> OutputDigests:
        """The digests by which the lines of this screen are compared with other screens.

        Lines that the screen has dropped count too.  There is one exception: if a program has moved
        the cursor up over many rows, the digests are computed again, from the lines that are still
        kept.
        """
        end = self.end
        self._settle(min(self.cursor, end - _UNSETTLED))
        digest = self._digest.copy()
        digest.add(*self._block(self._settled, end))
        return digest.key

    def _settle(self, row: int) -> None:
        if row > self._settled:
            self._digest.add(*self._block(self._settled, row))
            self._settled = row

    def _block(self, start: int, stop: int) -> tuple[str, bytes]:
        """Return the text of rows `start` to `stop - 1` without colours, a line for each row.

        Also return a byte for each line, which is not 0 if stderr wrote to the line.  Rows with
        progress bars are left out of both.
        """
        first, last = max(start - self._first, 0), stop - self._first
        if last <= first:
            return "", b""
        rows = self._rows[first:last]
        if self._open is not None and first <= self._row < last:
            rows[self._row - first] = self._text(self._row)
        flags = self._flags[first:last].translate(_ORIGINS)
        bars = self._rows_of_bars()
        if bars:
            kept = [row - first for row in range(first, last) if self._first + row not in bars]
            rows, flags = [rows[row] for row in kept], bytearray(flags[row] for row in kept)
            if not rows:
                return "", b""
        return strip("\n".join(rows) + "\n"), bytes(flags)

    def _width_of(self, row: int) -> int:
        return len(self._text(row - self._first))

    def _text(self, row: int) -> str:
        if row != self._row or self._open is None:
            return self._rows[row]
        text = self._open.render()
        return text.rstrip(" ") if self._flags[row] & _EDITED_FLAG else text

    def _is_shown(self, row: int) -> bool:
        if row == self._row and self._open is not None and not self._flags[row] & _EDITED_FLAG:
            return self._open.width > 0
        return bool(self._text(row))

    # --- writing ------------------------------------------------------------------------

    def write(self, stream: str, text: str) -> None:
        """Write the next characters of a stream; they may end inside an escape sequence."""
        if self._pending[stream]:
            text, self._pending[stream] = self._pending[stream] + text, ""
        if "\x1b" in text:
            text = self._keep_unfinished(stream, text)
        if "\r\n" in text:  # shows the same lines as "\n", which `_append` writes much faster
            text = text.replace("\r\n", "\n")
        flag = _STDERR_FLAG if stream == "stderr" else 0
        if flag != self._last_flag:
            self._is_redrawing, self._drawn_to, self._last_flag = False, 0, flag
        if self._is_simple(text):
            self._append(text, flag)
        else:
            self._write_tokens(text, flag)
        if len(self._rows) > 2 * self._keep or self._characters > KEEP_CHARACTERS:
            self._drop(len(self._rows) - 1 - self._keep)
            while self._characters > KEEP_CHARACTERS and self._row:
                self._drop(max(1, self._row // 8))

    def _is_simple(self, text: str) -> bool:
        """Return True if the text only appends lines and colours, and the cursor is at the end."""
        width = self._open.width if self._open else len(self._rows[self._row])
        if self._row != len(self._rows) - 1 or self._column != width:
            return False
        if not _CONTROL.search(text):
            return True
        return "\x1b" in text and not _CONTROL.search(SGR.sub("", text))

    def _append(self, text: str, flag: int) -> None:
        """Append a text whose only codes are colours, while the cursor is at the end of the screen.

        Whole lines are appended at once, which is much faster than `_write_tokens`.
        """
        head, newline, remainder = text.partition("\n")
        self._write_tokens(head, flag)
        if not newline:
            return
        self._newline()
        block, newline, last = remainder.rpartition("\n")
        if newline:
            lines = block.split("\n")
            if "\x1b" in block or self._style != PLAIN:
                lines = [self._coloured(line) for line in lines]
            if any(sign in block for sign in BAR_SIGNS):
                for row, line in enumerate(lines, self._first + len(self._rows) - 1):
                    if bar := read_row(line, is_edited=False):
                        self._bars.put(row, bar)
            self._rows[-1:] = [*lines, ""]
            # Like `_write_tokens`, give an empty line no flag of stderr.
            origins = bytes(flag if strip(line) else 0 for line in lines) if flag else b""
            self._flags[-1:] = (origins or bytes(len(lines))) + b"\0"
            self._row = len(self._rows) - 1
            self._characters += len(block) + 1
        self._write_tokens(last, flag)

    def _coloured(self, line: str) -> str:
        """Return a line with all codes that it needs: the current style, and a reset at its end."""
        before = self._style
        if "\x1b" in line:
            self._style = reduce(restyle, SGR.findall(line), before)
        start = f"\x1b[{before.codes}m" if before != PLAIN else ""
        return f"{start}{line}{RESET if self._style != PLAIN else ''}"

    def _keep_unfinished(self, stream: str, text: str) -> str:
        """Return the text without an incomplete escape sequence at its end.

        The incomplete sequence is kept until `write` is called with the next text of the stream.
        """
        start = text.rfind("\x1b", max(0, len(text) - _LONGEST_ESCAPE))
        if start > 0 and text[start - 1 : start] == "\x1b":
            start -= 1
        if start >= 0 and text[start:] == "\x1b" and start > 0:
            # The last ESC may be half of the "ESC \" that ends a sequence such as `ESC ]0;title`.
            before = text.rfind("\x1b", max(0, start - _LONGEST_ESCAPE), start)
            if before >= 0 and _UNFINISHED.match(text, before):
                start = before
        if start >= 0 and _UNFINISHED.match(text, start):
            self._pending[stream] = text[start:]
            return text[:start]
        return text

    def _write_tokens(self, text: str, flag: int) -> None:
        for token in _TOKEN.finditer(text):
            match token.lastgroup:
                case "text":
                    self._put(token[0], flag)
                case "newline":
                    self._newline()
                case "back":
                    if token[0] == "\r":
                        self._drawn_before = self._drawn_width()
                    self._is_redrawing, self._drawn_to = True, 0
                    self._column = 0 if token[0] == "\r" else max(0, self._column - 1)
                case "command":
                    self._execute(token["command"], token["parameters"])

    def _drawn_width(self) -> int:
        """Return the length of the text last drawn in this row; 0 if the row cannot be a bar."""
        if self._open is None:
            width = len(self._rows[self._row]) if self.cursor in self._bars.by_row else 0
            return max(width, self._bars.cut_widths.get(self.cursor, 0))
        if self._open.width > LONGEST_BAR:
            return 0
        return _width(self._open.plain[: self._drawn_to or None])

    def _put(self, text: str, flag: int) -> None:
        if not text:
            return
        row = self._open_row()
        # A stream may write a row in several pieces.  Only the first piece can replace a bar in the
        # row.
        has_come = not self._drawn_to and not self._is_redrawing
        if row.width and has_come and (bar := self._bar_at_cursor()):
            self._remove_bar(bar, _width(row.plain))
            row.cut(0)
            self._column, self._flags[self._row] = 0, 0
        elif has_come and self._column and not row.plain.strip():
            row.cut(0)  # go to column 0: the cursor came from the end of a bar in another row
            self._column, self._flags[self._row] = 0, 0
        elif text.isspace() and not self._column and self._is_redrawing:
            if bar := self._bar_at_cursor():
                self._bars.drop_removed(bar)
                row.cut(len(text))  # also erase the end of a bar that is longer than `text`
            elif not row.plain.strip():
                first = max(self._first, self.cursor - _UNSETTLED)
                self._bars.drop_lowest(len(text), first, self._width_of)
            self._flags[self._row] |= _EDITED_FLAG
        if self._column < row.width:
            self._flags[self._row] |= _EDITED_FLAG
            if self._column == 0 and len(text) >= row.width:
                self._flags[self._row] &= ~_STDERR_FLAG
        row.put(self._column, text, self._style)
        self._flags[self._row] |= flag | (_DRAWN_FLAG if self._is_redrawing else 0)
        self._column += len(text)
        self._drawn_to = max(self._drawn_to, self._column)
        if self._is_redrawing and row.width <= LONGEST_BAR:
            self._remove_bar_before_text(row)
        if row.width > MAX_LINE_LENGTH:
            self._newline()

    def _newline(self) -> None:
        if self._open is not None and self._drawn_to:
            self._flags[self._row] |= _ENDED_FLAG
        self._move_to(self._row + 1)
        self._column = 0
        if self._row == len(self._rows):
            self._rows.append("")
            self._flags.append(0)

    def _open_row(self) -> _OpenRow:
        self.changed_from = min(self.changed_from, self.cursor)
        if self._open is None:
            width = self._bars.pop_row(self.cursor)  # `_move_to` parses the row again
            self._flags[self._row] &= ~_ENDED_FLAG
            self._open = _OpenRow(self._rows[self._row].ljust(width))
            self._characters -= len(self._rows[self._row])
        return self._open

    def _move_to(self, row: int) -> None:
        if self._first + row < self._settled:
            # The digest already includes rows that may change now.  Nothing can be taken out of a
            # digest, so begin a new digest, of the rows that are kept.
            self._digest, self._settled = Digest(), self._first
        self._is_redrawing, self._drawn_to, self._drawn_before = False, 0, 0
        if self._open is not None:
            self._bars.put(self.cursor, self._bar_at_cursor())
            if self._flags[self._row] & _DRAWN_FLAG and self._open.width <= LONGEST_BAR:
                plain = self._open.plain
                if plain[-1:] == " " and is_cut(plain):  # `_rows` may lose the space at the end
                    self._bars.cut_widths[self.cursor] = len(plain)
            self._rows[self._row] = text = self._text(self._row)
            self._characters += len(text) + 1
            self._open = None
        self._row = row

    def _execute(self, command: str, parameters: str) -> None:
        """Execute the escape sequence `ESC[<parameters><command>`.

        Only colours, and the cursor moves and erasing that progress bars use, have an effect.
        """
        if command == "m":
            if SGR.fullmatch(f"\x1b[{parameters}m"):
                self._style = restyle(self._style, parameters)
            return
        self._is_redrawing = command not in "AB"
        number = int(parameters) if parameters.isdecimal() and len(parameters) < 6 else 0
        count = min(max(1, number), _LONGEST_JUMP)
        match command:
            case "A" | "F":
                self._move_to(max(0, self._row - count))
            case "B" | "E":
                self._move_to(min(len(self._rows) - 1, self._row + count))
            case "C":
                self._column += count
            case "D":
                self._column = max(0, self._column - count)
            case "G":
                self._column = count - 1
            case "K":
                self._erase(number)
            case "J" if number == 0:
                self._erase(0)
                del self._rows[self._row + 1 :], self._flags[self._row + 1 :]
                self._bars.drop_below(self.cursor)
        if command in "EF":
            self._column = 0

    def _erase(self, part: int) -> None:
        """Erase the cursor's row from the cursor on (0), up to the cursor (1), or all of it (2)."""
        row = self._open_row()
        if row.width:
            self._flags[self._row] |= _EDITED_FLAG
        if part == 1:
            row.put(0, " " * min(self._column + 1, row.width), PLAIN)
        else:
            row.cut(self._column if part == 0 else 0)
        if not row.width:
            self._flags[self._row] &= ~_STDERR_FLAG

    @classmethod
    def joined(cls, screens: Sequence[Screen]) -> Screen:
        """Return a new screen with the lines and bars of several screens.

        Text that is written to those screens later does not appear in the new screen.
        """
        new = cls(screens[0]._keep)
        for each in screens:
            new._digest.add_key(each.key)
        lines = [line for each in screens for line in each.lines()]
        bars = [bar for each in screens for _, bar in each.bars()]
        new._rows = [*(line.text for line in lines), ""]
        new._flags = bytearray([*(line.stderr for line in lines), 0])
        new._characters = sum(map(len, new._rows)) + len(lines)
        new._row = len(lines)
        new._settled = sum(each.line_count for each in screens)
        new._first = new._settled - len(lines)
        new._bars.set_removed(bars, new._first)
        return new

    def forget(self, count: int) -> None:
        """Drop the oldest `count` of the rows that can still be read.

        The cursor's row and the rows below it always stay, so fewer rows may be dropped.
        """
        self._drop(self.dropped - self._first + count)

    def _drop(self, count: int) -> None:
        count = min(count, self._row)
        if count > 0:
            self._settle(self._first + count)
            self._characters -= sum(map(len, islice(self._rows, count))) + count
            del self._rows[:count], self._flags[:count]
            self._first += count
            self._row -= count
            self._bars.drop_above(self._first)


def _width(plain: str) -> int:
    """Return the length of a drawn bar without the spaces by which tqdm erases a longer bar.

    A bar that tqdm has cut has no such spaces, so its spaces count.
    """
    ends_with_space = plain[-1:] == " "
    return len(plain.rstrip(" ")) if ends_with_space and not is_cut(plain) else len(plain)


_ORIGINS = bytes(flag & _STDERR_FLAG for flag in range(256))
