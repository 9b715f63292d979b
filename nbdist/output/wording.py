"""What is said of ranks, times, errors and hidden lines, wherever they are shown.  Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import TypeVar

from nbdist.output.ansi import strip
from nbdist.output.events import Died, Failure, RankError
from nbdist.words import count, name_ranks, one_line

_CODES_PER_CHARACTER = 8

_Said = TypeVar("_Said", bound=Hashable)


def fold_ranks(said: Mapping[int, _Said]) -> dict[_Said, list[int]]:
    """Group ranks of which the same is to be said, as they come."""
    found: dict[_Said, list[int]] = {}
    for rank in sorted(said):
        found.setdefault(said[rank], []).append(rank)
    return found


def more_ranks(ranks: Collection[int]) -> str:
    """Say `and 16 more: ranks 48-63`."""
    return f"and {len(ranks)} more: {name_ranks(ranks)}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Say `8 ranks`; `rank 3` where the cell ran on that one alone."""
    ranks = tuple(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else count(len(ranks), "rank")


def seconds_text(seconds: float) -> str:
    """Say `3.2 s`, `12 min 5 s`, `2 h 7 min`."""
    if seconds < 600:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def error_text(error: RankError) -> str:
    """Say the error in one line: `ValueError: bad shard`, `the process exited with code 3`."""
    match error:
        case Failure(name=name, message=message):
            line = one_line(strip(message))
            return f"{name}: {line}" if line else name
        case Died() as died:
            if died.exit_code == -signal.SIGKILL and not died.why:
                return "killed (SIGKILL), often by the system for using too much memory"
            return f"the process {died.end}"


def traceback_text(failure: Failure) -> str:
    """Give the traceback as IPython prints it, colours and all, and the account below it."""
    traceback = "\n".join(failure.traceback).strip("\n") or error_text(failure)
    return "\n".join([traceback, *failure.account])


def in_log_only(lines: int, path: str | None = None) -> str:
    """Say `… 1,200 lines only in the log: logs/rank3.log`."""
    return f"… {lines_text(lines)} only in the log{f': {path}' if path else ''}"


def left_out_text(displays: int) -> str:
    """Say `… 12 displays left out; the newest are kept`."""
    return f"… {count(displays, 'display')} left out; the newest are kept"


def lines_text(number: int) -> str:
    """Say `1 line`, `1,200 lines`."""
    return f"{number:,} {'line' if number == 1 else 'lines'}"


def clip(text: str, width: int) -> str:
    """Keep as much of the text as fits in `width` characters, and say how many follow."""
    if len(text) <= width:
        return text
    if "\x1b" not in text:
        return f"{text[:width]} … {len(text) - width:,} more characters"
    # Colour codes take no room, but neither they nor the search for them may go on for ever.
    start = text[: _CODES_PER_CHARACTER * width]
    plain = strip(start).partition("\x1b")[0]
    if len(start) == len(text) and len(plain) <= width:
        return text
    return f"{plain[:width]} … more characters"
