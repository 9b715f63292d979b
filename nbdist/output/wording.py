"""Functions that write phrases for panels and messages: times, errors, counts, tracebacks.

The notebook's process, the command `nbdist` and workers call these functions.  Pure: no I/O here.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain, groupby, zip_longest
from typing import NamedTuple, TypeVar

from nbdist.output.ansi import strip
from nbdist.output.events import Failure, RankError
from nbdist.words import count, name_ranks, one_line

FIGURE_LATER = "figure, shown at the end"

_CODES_PER_CHARACTER = 8

_Said = TypeVar("_Said", bound=Hashable)


def fold_ranks(values: Mapping[int, _Said]) -> dict[_Said, list[int]]:
    """Return the ranks of each value, in rising order; the value of the lowest rank comes first."""
    ranks_by_value: dict[_Said, list[int]] = {}
    for rank in sorted(values):
        ranks_by_value.setdefault(values[rank], []).append(rank)
    return ranks_by_value


def difference(values: Mapping[int, Hashable]) -> str:
    """Return `rank 2 differs from ranks 0-1,3` or `ranks 0-3 all differ`; "" if all are equal."""
    first, *others = sorted(fold_ranks(values).values(), key=lambda ranks: (-len(ranks), ranks))
    ranks = sorted(chain.from_iterable(others))
    if not ranks:
        return ""
    if len(first) == 1 and len(ranks) > 1:
        return f"{name_ranks(values)} all differ"
    verb, too = "differs" if len(ranks) == 1 else "differ", " and from each other"
    return f"{name_ranks(ranks)} {verb} from {name_ranks(first)}{too if len(others) > 1 else ''}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Return the number of ranks as `8 ranks`, or the name of a single rank as `rank 3`."""
    ranks = tuple(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else count(len(ranks), "rank")


def seconds_text(seconds: float) -> str:
    """Return a duration as `3.2 s`, `12 min 5 s` or `2 h 7 min`."""
    return f"{seconds:.1f} s" if seconds < 600 else whole_seconds_text(seconds)


def whole_seconds_text(seconds: float) -> str:
    """Return a duration as `3 s`, `12 min 5 s` or `2 h 7 min`."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    return f"{minutes // 60} h {minutes % 60} min"


def error_text(error: RankError) -> str:
    """Return an error as a line: `ValueError: bad shard`, `the process exited with code 3`."""
    if isinstance(error, Failure):
        line = one_line(strip(error.message))
        return f"{error.name}: {line}" if line else error.name
    if error.exit_code == -signal.SIGKILL and not error.why:
        return "killed (SIGKILL), often by the system for using too much memory"
    return f"the process {error.end}"


def traceback_text(failure: Failure) -> str:
    """Return the traceback, with its colours if it has any, and below it the lines of `account`.

    If there is no traceback, return the error in one line instead.
    """
    traceback = "\n".join(failure.traceback).strip("\n") or error_text(failure)
    return "\n".join([traceback, *failure.account])


def body_text(error: RankError, shown: Iterable[str] = ()) -> str:
    """Return the traceback of an exception, or the last lines of a process that has died.

    If the last lines are not known, use the lines `shown` instead.  The line `its last lines:` is
    above them.  Without any lines, return `it had printed nothing`.
    """
    if isinstance(error, Failure):
        return traceback_text(error)
    lines = [*error.last_lines] or [*shown]
    return "\n".join(["its last lines:", *lines]) if lines else "it had printed nothing"


def in_log_only(lines: int, path: str | None = None) -> str:
    """Return a line such as `… 1,200 lines only in the log: logs/rank3.log`.

    Without a `path` the line does not name the log file.
    """
    return f"… {lines_text(lines)} only in the log{f': {path}' if path else ''}"


def left_out_text(displays: int) -> str:
    """Return a line on dropped displays: `… 12 displays left out; the newest are kept`."""
    return f"… {count(displays, 'display')} left out; the newest are kept"


def lines_text(number: int) -> str:
    """Return a number of lines as `1 line` or `1,200 lines`."""
    return f"{number:,} {'line' if number == 1 else 'lines'}"


def clip(text: str, width: int) -> str:
    """Return a text, cut to `width` characters if it is longer, with a remark on what was cut.

    A text with colour codes loses the codes if it is cut.
    """
    if len(text) <= width:
        return text
    if "\x1b" not in text:
        return f"{text[:width]} … {len(text) - width:,} more characters"
    # Colour codes take no width, but a text of very many codes must be cut too.
    start = text[: _CODES_PER_CHARACTER * width]
    plain = strip(start).partition("\x1b")[0]
    if len(start) == len(text) and len(plain) <= width:
        return text
    return f"{plain[:width]} … more characters"


# --- tracebacks in parts ----------------------------------------------------------------------

_FRAME = re.compile(
    r"(?:Cell |Input )?In ?\[|File |<ipython-input|(?:/|~/|\.\.?/)\S+(?::\d+)?,? in "
    r"|\[\.\.\. skipping"
)
_NEXT_ERROR = re.compile(r"During handling of the above|The above exception was the direct")
_PACKAGES = r"(?:site|dist)-packages/"
_LIBRARY = re.compile(
    rf"(?:{_PACKAGES}|lib/python\d[\d.]*/(?!{_PACKAGES})|<frozen )(?P<name>[\w-]+)"
)
_ARROW = re.compile(r"-+> ?\d*")
_HEADER = re.compile(
    r"-{75}((?:\x1b\[[\d;]*m)*\n[^\n]*?) {9}(?=Traceback \(most recent call last\))"
)
"""Matches the first rows of IPython's traceback: 75 dashes, and the error's name before spaces."""

_MIN_FOLDED = 3
_MAX_LIBRARIES = 3


class TracebackPart(NamedTuple):
    """Some rows of a traceback; if `folded` is not "", this line is shown instead of the rows."""

    rows: tuple[str, ...]
    folded: str = ""

    @property
    def visible_rows(self) -> tuple[str, ...]:
        """The rows that are seen before somebody opens a folded part."""
        return (self.folded,) if self.folded else self.rows


def split_traceback(text: str) -> list[TracebackPart]:
    """Split a traceback into parts; three or more library calls in a row are one folded part.

    The last call before an error is never folded, since the call raised the error.
    """
    frames = [*_frames(text.split("\n"))]
    kinds = []
    for frame, after in zip_longest(frames, frames[1:]):
        is_last = after is None or _NEXT_ERROR.match(strip(after[0]))
        head = "" if is_last else strip(frame[0])
        match = _LIBRARY.search(head) if _FRAME.match(head) else None
        kinds.append(match["name"] if match else "")  # "" for the user's code, and for a last call
    parts = []
    for in_library, run in groupby(zip(frames, kinds, strict=True), key=lambda pair: bool(pair[1])):
        pairs = [*run]
        rows = tuple(row for frame, _ in pairs for row in frame)
        folded = ""
        if in_library and len(pairs) >= _MIN_FOLDED:
            some = [*dict.fromkeys(kind for _, kind in pairs)]
            some[_MAX_LIBRARIES:] = ["…"] * (len(some) > _MAX_LIBRARIES)
            folded = f"… {count(len(pairs), 'call')} in {', '.join(some)}"
        parts.append(TracebackPart(rows, folded))
    return parts


def _frames(rows: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows before the first call, if any, then the rows of each call.

    Rows from `During handling of the above` on, before the next call, are yielded by themselves.
    """
    frame: list[str] = []
    for row in rows:
        plain = strip(row)
        if frame and (_FRAME.match(plain) or _NEXT_ERROR.match(plain)):
            yield frame
            frame = []
        frame.append(row)
    yield frame


def shorten_traceback(text: str, max_rows: int, width: int = 2000) -> list[TracebackPart]:
    """Split a traceback into parts, with about `max_rows` visible rows of about `width` characters.

    If more rows would be visible, some are dropped, and a row `… 26 lines …` says how many.  The
    first row and the last rows are kept.  The first call is mostly in the cell, so the first row of
    this call, and its row with the arrow, are kept too.
    """
    # On a narrow page IPython's first rows, of 75 characters, would take two rows each.
    parts = split_traceback(_HEADER.sub(rf"{'-' * 66}\1", text))
    parts = [
        TracebackPart(tuple(clip(row, width) for row in part.rows), part.folded) for part in parts
    ]
    rows = [row for part in parts for row in part.visible_rows]
    if len(rows) <= max_rows + 1:
        return parts
    call = next((frame for frame in _frames(rows) if _FRAME.match(strip(frame[0]))), [])
    arrows = [row for row in call if _ARROW.match(strip(row))]
    last = rows[-max_rows:]
    first = [row for row in dict.fromkeys([rows[0], *call[:1], *arrows[:1]]) if row not in last]
    hidden = len(rows) - len(first) - len(last)
    return [TracebackPart((*first, f"… {hidden} lines …", *last))]


def traceback_rows(text: str, lines: int) -> list[str]:
    """Return about `lines` rows of a traceback: those that `shorten_traceback` leaves visible."""
    return [row for part in shorten_traceback(text, lines) for row in part.visible_rows]
