"""What to show of a transcript, decided before anything is drawn.

Pure, runs in the notebook kernel; the HTML and the text of a panel are two drawings of
what this module chooses, so they say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from nbdist.errors import count, format_ranks
from nbdist.wire.outputs import Failure
from nbdist.world.screen import Line, Screen
from nbdist.world.sgr import strip
from nbdist.world.track import FAILED, Gap, Shown, State, Track
from nbdist.world.transcript import Group, Transcript
from nbdist.world.wording import error_text as error_text
from nbdist.world.wording import in_log_only as in_log_only
from nbdist.world.wording import lines_text
from nbdist.world.wording import traceback_text as traceback_text

# Where a rank's full output is: a mapping or a function from the rank.
Logs: TypeAlias = Mapping[int, str] | Callable[[int], "str | None"] | None

MARKS: dict[State, str] = {
    "waiting": "○",
    "running": "●",
    "ok": "✓",
    "failed": "✗",
    "died": "✗",
    "aborted": "∅",
}
MANY_RANKS = 16
_MANY_GROUPS = 16
_LONGEST_VALUE = 100
_MOST_VALUES = 256
_FEWER_LINES_FROM = 64


@dataclass(frozen=True, slots=True)
class Hidden:
    """Lines that are left out here; `in_log_only` if the notebook never had or kept them."""

    lines: int
    in_log_only: bool


Item: TypeAlias = list[Line] | Shown | Hidden


@dataclass(frozen=True, slots=True)
class Silent:
    """Nothing was shown, nothing failed."""


@dataclass(frozen=True, slots=True)
class Values:
    """Each rank has shown one short line and nothing else."""

    rows: tuple[tuple[Group, Line], ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A block for each of `main`, and one that holds `rest`."""

    main: tuple[Group, ...]
    rest: tuple[Group, ...]


def final_layout(transcript: Transcript) -> Silent | Values | Blocks:
    """How a finished cell is laid out."""
    if transcript.is_silent and not transcript.failed:
        return Silent()
    groups = transcript.groups()
    values = [_value(group.track) for group in groups]
    rows = tuple(
        (group, value) for group, value in zip(groups, values, strict=True) if value is not None
    )
    if len(rows) == len(groups) <= _MOST_VALUES:
        return Values(rows)
    if len(groups) <= _MANY_GROUPS:
        return Blocks(tuple(groups), ())
    main = [group for group in groups if _stands_out(group, transcript)]
    rest = [group for group in groups if group not in main]
    return Blocks(tuple(main), tuple(rest))


def _stands_out(group: Group, transcript: Transcript) -> bool:
    is_first = group.ranks[0] == transcript.ranks[0]
    return is_first or len(group.ranks) > 1 or group.track.state in FAILED


def _value(track: Track) -> Line | None:
    """The single short line that is all a rank has shown."""
    if track.state != "ok" or len(track.pieces) != 1:
        return None
    match track.pieces[0]:
        case Screen() as screen if screen.end == 1 and len(screen) == 1:
            line = screen.tail(1)[0]
        case Shown(display=display) as shown if list(display.data) == ["text/plain"]:
            line = Line(shown.plain, stderr=False)
        case _:
            return None
    is_short = len(strip(line.text)) <= _LONGEST_VALUE and "\n" not in line.text
    return line if is_short else None


def lines_shown(transcript: Transcript) -> int:
    """How many lines of a block the final layout shows."""
    return 200 if len(transcript.ranks) < _FEWER_LINES_FROM else 50


def items(track: Track, limit: int) -> list[Item]:
    """All displays of a rank, and its last `limit` lines, with what is left out in its place."""
    found: list[Item] = []
    for piece in reversed(track.pieces):
        match piece:
            case Shown():
                found.append(piece)
            case Gap(lines=lines):
                found.append(Hidden(lines, in_log_only=True))
            case Screen():
                lines_here = piece.tail(min(limit, len(piece)))
                if lines_here:
                    found.append(lines_here)
                if len(piece) > len(lines_here):
                    found.append(Hidden(len(piece) - len(lines_here), in_log_only=False))
                if piece.dropped:
                    found.append(Hidden(piece.dropped, in_log_only=True))
                limit -= len(lines_here)
    return merge(found[::-1])


def merge(parts: list[Item]) -> list[Item]:
    """The same items, neighbours that are hidden counted together."""
    merged: list[Item] = []
    for part in parts:
        if isinstance(part, Hidden) and merged and isinstance(before := merged[-1], Hidden):
            log_only = part.in_log_only and before.in_log_only
            merged[-1] = Hidden(part.lines + before.lines, log_only)
        else:
            merged.append(part)
    return merged


# --- words ------------------------------------------------------------------------------


def seconds_text(seconds: float) -> str:
    """`3.2 s`, `12 min 5 s`, `2 h 7 min`."""
    if seconds < 600:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def ranks_text(transcript: Transcript) -> str:
    """`8 ranks`; `rank 3` where the cell ran on that one alone."""
    ranks = transcript.ranks
    return f"rank {ranks[0]}" if len(ranks) == 1 else count(len(ranks), "rank")


def state_counts(transcript: Transcript) -> list[tuple[State, int]]:
    """How many ranks are in each state that any is in, in the order of `MARKS`."""
    states = transcript.states()
    # Both are marked alike; what happened is said where the rank is shown.
    states["failed"] += states.pop("died", 0)
    return [(state, states[state]) for state in MARKS if states[state]]


def pace(transcript: Transcript) -> str:
    """`slowest rank 3 (3.2 s), fastest rank 0 (1.1 s)`, "" if they hardly differ."""
    timed = [(seconds, track.rank) for track in transcript if (seconds := track.seconds)]
    if len(timed) < 2:
        return ""
    (low, fastest), (high, slowest) = min(timed), max(timed)
    if high - low < max(0.1, 0.1 * high):
        return ""
    return (
        f"slowest rank {slowest} ({seconds_text(high)}), "
        f"fastest rank {fastest} ({seconds_text(low)})"
    )


def sameness(group: Group) -> str:
    """`same`, and what the ranks of the group differ in; "" for a rank of its own."""
    if len(group.ranks) == 1:
        return ""
    return "same" if group.is_exact else "same but for devices, addresses, pids"


def amount(track: Track) -> str:
    """`3 lines`, `1 line, 2 displays`."""
    lines, displays = track.line_count, len(track.displays)
    parts = [lines_text(lines)] if lines else []
    parts += [count(displays, "display")] if displays else []
    return ", ".join(parts)


def failed_with(group: Group, transcript: Transcript) -> str:
    """The group's error in one line, "" where its traceback is shown: that is the first one."""
    error = group.track.error
    if error is None or (group.part == "first" and isinstance(error, Failure)):
        return ""
    cause = transcript.root_cause()
    if group.part == "same" and cause is not None:
        return f"{error_text(error)} (as on rank {cause[0]})"
    return error_text(error)


def where_rest(hidden: Hidden, ranks: tuple[int, ...], logs: Logs) -> str:
    """`… 9,800 lines more: %dist_output -r 3 --all, or logs/rank3.log`."""
    path = log_of(ranks[0], logs)
    if hidden.in_log_only:
        return in_log_only(hidden.lines, path)
    command = f"%dist_output -r {format_ranks(ranks)} --all"
    return f"… {lines_text(hidden.lines)} more: {command}{f', or {path}' if path else ''}"


def log_of(rank: int, logs: Logs) -> str | None:
    """The name of a rank's log file, if it has one."""
    if logs is None:
        return None
    return logs.get(rank) if isinstance(logs, Mapping) else logs(rank)
