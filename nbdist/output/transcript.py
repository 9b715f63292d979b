"""Collects a cell's output on all ranks, and groups the ranks whose outputs are shown together.

The notebook's process fills a `Transcript` while the cell runs; `nbdist.output.layout` reads it.
Pure: no I/O here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from nbdist.output.ansi import strip
from nbdist.output.curves import Curves
from nbdist.output.events import Died, Done, Failure, Output, RankError, Skipped
from nbdist.output.fingerprint import (
    NUMBER,
    TIME,
    UNITS,
    error_keys,
    may_have_time,
    split_times,
    without_times,
)
from nbdist.output.rank_transcript import (
    FAILED,
    FINAL_STATES,
    SHOWN_AT_MOST,
    DisplayState,
    OutputPiece,
    RankTranscript,
    RichDisplay,
    TranscriptEntry,
)
from nbdist.output.screen import Screen, ScreenLine
from nbdist.output.wording import error_text, fold_ranks
from nbdist.words import name_ranks

SHOWN_OF_ALL, SHOWN_AT_LEAST = 256 << 20, 4 << 20
"""Limits on the characters of displays that are kept, for all ranks together and for each rank.

The ranks share `SHOWN_OF_ALL` equally, but a rank keeps no more than `SHOWN_AT_MOST`, and may
always keep `SHOWN_AT_LEAST`.  So very many ranks may together keep more than `SHOWN_OF_ALL`.
"""

MAX_WARNINGS = 4

MAX_EXACT_ROWS = 16
"""If a cell shows at most this many lines and displays, ranks with different numbers stay apart.

That is not so for a cell with progress bars.  Equal lines and displays of several ranks count once:
see `Transcript.groups`.
"""

MAX_NUMBERED_LINES, MAX_NUMBERED_LINES_OF_ALL = 200, 6_000
"""Ranks whose outputs differ in numbers are merged only if they have at most this many lines.

The limit is `MAX_NUMBERED_LINES` for each rank.  If there are few ranks, it is higher: an equal
share of `MAX_NUMBERED_LINES_OF_ALL`.
"""


class Transcript:
    """The output of a cell on each rank, the groups of alike ranks, and the first failure."""

    def __init__(self, ranks: Iterable[int], keep_lines: int = 10_000) -> None:
        self.ranks = tuple(sorted(ranks))
        of_each = SHOWN_OF_ALL // max(1, len(self.ranks))
        shown = min(SHOWN_AT_MOST, max(SHOWN_AT_LEAST, of_each))
        self.by_rank = {rank: RankTranscript(rank, keep_lines, shown) for rank in self.ranks}
        self.started: float | None = None
        self.curves = Curves()
        self.warnings: list[str] = []

    def __iter__(self) -> Iterator[RankTranscript]:
        return iter(self.by_rank.values())

    def __getitem__(self, rank: int) -> RankTranscript:
        return self.by_rank[rank]

    def start(self, now: float) -> None:
        """Start the clock of the cell, which was sent to all ranks, and mark them as running."""
        self.started = now
        for each in self:
            each.begin(now)

    def receive(self, rank: int, output: Output, now: float) -> None:
        """Add an output of a rank; `now` is monotonic time in seconds."""
        if self.started is None:
            self.started = now
        self.by_rank[rank].receive(output, now)

    def abort(self, now: float) -> None:
        """Mark all unfinished ranks as aborted at `now`, since their workers are gone."""
        for each in self:
            if each.finished is None:
                each.receive(Done("aborted", self.elapsed(now)), now)

    def warn(self, text: str) -> None:
        """Add a warning to the head of the panel, if it is new and the head has room for it.

        The head has room for `MAX_WARNINGS` warnings.
        """
        if text not in self.warnings and len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(text)

    def count_display_states(self) -> Counter[DisplayState]:
        """Return the number of ranks in each state, as a panel names the states."""
        return Counter(each.display_state for each in self)

    @property
    def is_finished(self) -> bool:
        return all(each.state in FINAL_STATES and each.finished is not None for each in self)

    @property
    def has_succeeded(self) -> bool:
        """Whether the cell has ended well on all ranks."""
        return all(each.state == "ok" for each in self)

    @property
    def is_silent(self) -> bool:
        return all(each.is_silent for each in self)

    @property
    def has_had_bars(self) -> bool:
        """Whether `RankTranscript.has_had_bars` is True for any rank."""
        return any(each.has_had_bars for each in self)

    def elapsed(self, now: float | None = None) -> float:
        """Return the seconds from the start of the cell to its end, or to `now` while ranks run.

        If ranks run and `now` is None, return the seconds until the last time that a rank finished.
        """
        if self.started is None:
            return 0.0
        finish_times = [each.finished for each in self if each.finished is not None]
        if self.is_finished or now is None:
            now = max(finish_times, default=self.started)
        return max(0.0, now - self.started)

    def groups(self, *, failed_first: bool = False, is_live: bool = False) -> list[AlikeRanks]:
        """Return the groups of ranks whose output and error are alike.

        In a cell without progress bars, if all groups together have at most `MAX_EXACT_ROWS` lines
        and displays, the outputs in a group differ only in times of day.  Otherwise the outputs in
        a group may also differ in numbers, and the panel shows a set such as `{0.68, 0.67}` instead
        of the number.

        A cell with progress bars is taken for a loop that prints more and more lines.  Its ranks
        are merged in spite of different numbers from the first line on, since otherwise the whole
        panel would change as soon as there are more than `MAX_EXACT_ROWS` lines.

        With `is_live`, ranks that are a few lines ahead of others may stay in a group.  With
        `failed_first`, the groups of failed ranks come first.
        """
        members: list[list[RankTranscript]] = []
        if is_exact := not self.has_had_bars:
            members = self._members(exactly=True)
            is_exact = sum(each[0].rows for each in members) <= MAX_EXACT_ROWS
        max_lines = max(MAX_NUMBERED_LINES, MAX_NUMBERED_LINES_OF_ALL // max(1, len(self.ranks)))
        if not is_exact:
            members = _merge_but_numbers(self._members(exactly=False), max_lines)
        if is_live:
            members = _merge_those_ahead(members, max_lines, is_exact=is_exact)
        groups = self._grouped(members, is_exact=is_exact)
        if failed_first:
            groups.sort(
                key=lambda each: (not each.has_failed, each.part != "first", each.is_consequence)
            )
        return groups

    def single_groups(self) -> list[AlikeRanks]:
        """Return a group of its own for each rank, in the order of the ranks."""
        return self._grouped([[each] for each in self], is_exact=True)

    def _grouped(
        self, members: Iterable[list[RankTranscript]], *, is_exact: bool
    ) -> list[AlikeRanks]:
        cause = self.root_cause()
        first = cause[0] if cause else None
        alike = set(self.alike_error(first)) if first is not None else set()
        return [_group_of(each, first, alike, is_exact=is_exact) for each in members]

    def _members(self, *, exactly: bool) -> list[list[RankTranscript]]:
        members: list[list[RankTranscript]] = []
        by_key: dict[object, list[RankTranscript]] = {}
        for each in self:
            body = each.body.same if exactly else each.body.alike
            alike = _alike_keys(each.error, each.error_keys)
            # Running and successful ranks have the same key: otherwise, whenever a rank finished,
            # its group would split, and a block would appear in the panel.
            end = "failed" if each.state in FAILED else each.state == "aborted"
            keys = [(body, end, key) for key in alike]
            group = next((by_key[key] for key in keys if key in by_key), None)
            if group is None:
                members.append(group := [])
            group.append(each)
            for key in keys:
                by_key.setdefault(key, group)
        return members

    @property
    def failed(self) -> tuple[int, ...]:
        """The ranks on which the cell failed, or whose process ended."""
        return tuple(each.rank for each in self if each.state in FAILED)

    @property
    def done(self) -> dict[int, Done]:
        """The `Done` message of each rank that has sent it."""
        return {each.rank: each.done for each in self if each.done is not None}

    @property
    def deaths(self) -> dict[int, Died]:
        """The deaths of ranks during the cell, by rank."""
        return {each.rank: each.died for each in self if each.died is not None}

    @property
    def killed_by_stop(self) -> tuple[int, ...]:
        """The ranks that were killed because they ignored Stop.

        The tuple is empty if any rank died for another reason.
        """
        deaths = self.deaths
        return tuple(deaths) if all(died.by_stop for died in deaths.values()) else ()

    @property
    def errors(self) -> dict[int, RankError]:
        """The error that ended the cell, for each rank that has one."""
        return {each.rank: error for each in self if (error := each.error) is not None}

    def root_cause(self) -> tuple[int, RankError] | None:
        """Return the rank that failed first, and its error; None if no rank has an error.

        Errors that another rank's failure or Stop has caused (`is_consequence`) are passed over.
        If all errors are of that kind, return the lowest rank and its error.
        """

        def order(item: tuple[int, RankError]) -> tuple[bool, int]:
            is_released = is_consequence(item[1])
            return is_released, item[0] if is_released else item[1].time_ns

        return min(self.errors.items(), key=order, default=None)

    def alike_error(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose errors are like the error of `rank`, including `rank`."""
        keys = {each.rank: _alike_keys(each.error, each.error_keys) for each in self}
        return tuple(
            other
            for other in self.errors
            if other == rank or not keys[rank].isdisjoint(keys[other])
        )


def is_consequence(error: RankError) -> bool:
    """Return True if the error is a consequence of another rank's failure, or of Stop."""
    if not isinstance(error, Failure):
        return False
    return error.connections == "ended" or error.name == "KeyboardInterrupt"


# --- the output of alike ranks as one text, with a set in each place where they differ ---------

# The parts in which texts of alike ranks can differ: numbers and addresses, or also times of day.
_VARYING = re.compile(rf"{NUMBER}|0x[0-9a-fA-F]+|\d+")
_VARYING_AND_TIMES = re.compile(rf"{TIME}|{_VARYING.pattern}")
_MAX_SET_SIZE, _MAX_NUMBERS = 64, 16

ErrorRelation = Literal["none", "first", "same", "other"]
"""How the error of a group is related to the first error of the cell: see `AlikeRanks.part`."""

Likeness = Literal[
    "same",
    "same except for times",
    "same except for {…}",
    "stopped in the same line",
    "stopped",
]
"""How alike the ranks of a group are, in the words of the panel.

`{…}` stands for a set such as `{0.68, 0.67}`, which the panel shows instead of a number, address,
device or process id that differs.  If times of day differ, the panel shows the earliest and the
latest time.
"""


class AlikeRanks(NamedTuple):
    """Ranks whose output and error are alike; `shown` is the member whose state is shown.

    `error` is the error that ended the cell on the ranks, with sets for differing numbers, or None.
    `part` is "first" for the first error of the cell, "same" for errors like the first error,
    "other" for other errors, and "none" if the ranks have not failed.
    """

    members: tuple[RankTranscript, ...]
    shown: RankTranscript
    likeness: Likeness
    error: RankError | None
    part: ErrorRelation

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(each.rank for each in self.members)

    @property
    def has_failed(self) -> bool:
        return self.shown.state in FAILED

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's failure, or Stop, has ended the cell on the ranks of the group."""
        return self.shown.error is not None and is_consequence(self.shown.error)

    @property
    def pieces(self) -> list[tuple[OutputPiece, ...]]:
        """The pieces of output, as tuples with the matching pieces of all members."""
        return [*zip(*(each.visible_pieces for each in self.members), strict=True)]

    @property
    def line_count(self) -> int:
        """The number of lines of the member that has printed the fewest."""
        return min(each.line_count for each in self.members)

    @property
    def ahead(self) -> list[tuple[tuple[int, ...], ScreenLine]]:
        """The lines that only some members have printed so far, each with these members' ranks."""
        common, lines_ahead = self.line_count, []
        for number in range(1, max(each.line_count for each in self.members) - common + 1):
            longer = [each for each in self.members if each.line_count - common >= number]
            entries = [each.tail(each.line_count - common)[number - 1] for each in longer]
            lines = [entry for entry in entries if isinstance(entry, ScreenLine)]
            lines_ahead.append((tuple(each.rank for each in longer), fold_lines(lines)))
        return lines_ahead

    @property
    def displays(self) -> list[RichDisplay]:
        """The displays of the group, each merged from the displays of all members."""
        shown = zip(*(each.displays for each in self.members), strict=True)
        return [*map(fold_shown, shown)]

    @property
    def last(self) -> TranscriptEntry | None:
        """The last line or display that all members have shown; None if they have shown nothing.

        If the last output of the members is a `Skipped`, the `Skipped` of the first is returned.
        """
        common = self.line_count
        tails = (each.tail(1 + each.line_count - common) for each in self.members)
        entries = [tail[0] for tail in tails if tail]
        if lines := [entry for entry in entries if isinstance(entry, ScreenLine)]:
            return fold_lines(lines)
        if shown := [entry for entry in entries if isinstance(entry, RichDisplay)]:
            return fold_shown(shown)
        return entries[0] if entries else None


def _group_of(
    members: Sequence[RankTranscript],
    first: int | None,
    alike: Collection[int],
    *,
    is_exact: bool,
) -> AlikeRanks:
    """Return a group of `members`, with the state and the error that the panel shows for them.

    `first` is the rank that failed first in the cell (`Transcript.root_cause`), or None.  `alike`
    has the ranks whose error is like the error of `first`.  If `is_exact`, the lines that all
    members have printed differ at most in times of day.
    """
    # The group is shown in the state of the member that failed first in the cell.  Without such a
    # member, the group is shown as running as long as any member runs.
    runs = next((each for each in members if each.state not in FINAL_STATES), members[0])
    shown = next((each for each in members if each.rank == first), runs)
    part: ErrorRelation = "none"
    if shown.state in FAILED:
        part = "same" if members[0].rank in alike else "other"
        part = "first" if shown.rank == first else part
    error = fold_errors([error for each in members if (error := each.error)])
    likeness: Likeness = "same except for {…}"
    if error is None and shown.error is not None:
        # Stop has interrupted the members in different places.  The first error key begins with
        # lines of the cell, or with a newline if no line of a cell is known, as in a script.
        has_line = not shown.error_keys[0].startswith("\n")
        likeness, error = "stopped in the same line" if has_line else "stopped", shown.error
    elif len({error_content(each.error) for each in members}) == 1 and (
        is_exact or len({each.body.same for each in members}) == 1
    ):
        likeness = "same except for times" if _differ_in_times(members) else "same"
    return AlikeRanks(tuple(members), shown, likeness, error, part)


def _differ_in_times(members: Sequence[RankTranscript]) -> bool:
    """Return True if these ranks, whose lines are otherwise equal, differ in times of day.

    Compares only the last `MAX_NUMBERED_LINES` lines that all of these ranks have printed.
    """
    common = min(each.line_count for each in members)
    newest = min(common, MAX_NUMBERED_LINES)

    def lines(rank: RankTranscript) -> list[str]:
        entries = rank.tail(newest + rank.line_count - common)[:newest]
        return [entry.text for entry in entries if isinstance(entry, ScreenLine)]

    first, *others = members
    of_first = lines(first)
    return any(map(may_have_time, of_first)) and any(lines(each) != of_first for each in others)


_LONGEST_KNOWN, _LONGEST_WITH_SETS = 400, 2_000
"""Limits on characters: of a line that `_split_numbers` caches, and of a text display with sets.

Ranks are not merged if longer text displays differ in numbers.
"""

_MAX_DIFFERING_NUMBERS, _LAST_COMPARED = 4, 200
"""The most numbers that may differ in a merged line, and how many of the last lines are checked."""


def _merge_but_numbers(
    members: Sequence[list[RankTranscript]], max_lines: int
) -> list[list[RankTranscript]]:
    """Merge groups whose lines differ only in numbers, unless too many differ (`_differs_much`).

    A merged line shows a set such as `{0.68, 0.67}` instead of a number.  Groups with more than
    `max_lines` lines and displays are not merged.
    """
    if len(members) == 1:
        return [*members]
    by_words: dict[object, list[RankTranscript]] = {}
    for each in members:
        by_words.setdefault(_words(each[0], max_lines) or id(each), []).extend(each)
    groups = []
    for together in by_words.values():
        if len(together) == 1:
            groups.append(together)
        elif _differs_much(together):
            groups += [each for each in members if each[0] in together]
        else:
            groups.append(sorted(together, key=lambda each: each.rank))
    return sorted(groups, key=lambda group: group[0].rank)


_Words: TypeAlias = tuple[tuple[object, ...], tuple[tuple[str, bool | bytes], ...]]
"""How a rank has ended, and a pair for each of its lines and displays.

A line is a pair of its text without numbers, and True for stderr or False for stdout.  A short text
display is a pair of its text without numbers, and b"".  Any other display is a pair of "" and its
digest.
"""


def _words(output: RankTranscript, max_lines: int, *, is_exact: bool = False) -> _Words | None:
    """Return how a rank has ended, and its lines and displays without numbers.

    Return None for a rank with dropped lines, with no output, or with more than `max_lines` lines
    and displays.  With `is_exact` the texts keep their numbers, but not times of day.
    """
    count = output.line_count + len(output.displays)
    if not 0 < count <= max_lines:
        return None
    entries = output.tail(count)
    if len(entries) < count or any(isinstance(entry, Skipped) for entry in entries):
        return None
    texts = list[tuple[str, bool | bytes]]()
    for entry in entries:
        text = _text_with_sets(entry)
        words = without_times(text) if is_exact else _split_numbers(text)[0]
        match entry:
            case ScreenLine(stderr=is_stderr):
                texts.append((words, is_stderr))
            case RichDisplay():
                texts.append((words, b"" if text else entry.key.same))
    end = "failed" if output.state in FAILED else output.state == "aborted"
    return (end, output.error_keys[0]), tuple(texts)


def _text_with_sets(entry: TranscriptEntry) -> str:
    """Return the text of a line or a short text display, without colours; "" for other output.

    If numbers in the text differ between ranks, the panel can show sets instead of the numbers.
    """
    match entry:
        case ScreenLine(text=text):
            return strip(text)
        case RichDisplay(is_text=True) if len(plain := entry.plain) <= _LONGEST_WITH_SETS:
            return strip(plain)
    return ""


MAX_LINES_AHEAD = 3  # the most lines that a rank of a live group may be ahead of another rank


def _merge_those_ahead(
    members: Sequence[list[RankTranscript]], max_lines: int, *, is_exact: bool
) -> list[list[RankTranscript]]:
    """Merge each group with a group that has the same output and a few more lines.

    Lines count as the same if they differ only in numbers or, with `is_exact`, only in times of
    day.  Groups with more than `max_lines` lines and displays are not merged.  If there are many
    groups, none are merged.
    """
    if not 1 < len(members) <= MAX_EXACT_ROWS:
        return [*members]
    joined: list[list[RankTranscript]] = []
    extents: list[tuple[int, _Words | None]] = []  # each group's fewest lines and longest output
    for each in sorted(members, key=lambda group: group[0].line_count):
        words = _words(each[0], max_lines, is_exact=is_exact)
        for index, (fewest, longest) in enumerate(extents):
            if longest is None or words is None or not _continues(longest, words):
                continue
            together = [*joined[index], *each]
            is_far = len(words[1]) - fewest > MAX_LINES_AHEAD
            if is_far or (not is_exact and _differs_much(together)):
                continue
            joined[index], extents[index] = together, (fewest, words)
            break
        else:
            joined.append([*each])
            extents.append((each[0].line_count, words))
    groups = [sorted(group, key=lambda each: each.rank) for group in joined]
    return sorted(groups, key=lambda group: group[0].rank)


def _continues(words: _Words, longer: _Words) -> bool:
    """Return True if `longer` is the output `words` with more lines at its end.

    Return False if the ranks have ended in different ways.  Also return False if one of the
    additional entries, or the entry right before them, is a display.
    """
    end, texts = words
    count = len(texts)
    if longer[0] != end or len(longer[1]) <= count or longer[1][:count] != texts:
        return False
    return all(isinstance(about, bool) for _, about in longer[1][count - 1 :])


def _split_numbers(text: str) -> tuple[str, tuple[str, ...]]:
    """Replace each number, address or time in a line by 0; also return the replaced texts."""
    return (_split if len(text) <= _LONGEST_KNOWN else _split.__wrapped__)(text)


@lru_cache(maxsize=1 << 15)
def _split(text: str) -> tuple[str, tuple[str, ...]]:
    places = _places_of(text)
    return places.sub("0", text), tuple(places.findall(text))


def _differs_much(members: Sequence[RankTranscript]) -> bool:
    """Return True if merged lines would have sets of too many ranks, or too many sets in a line."""
    if len(members) > _MAX_NUMBERS:
        return True
    counts = [each.rows for each in members]
    first = max(0, min(counts) - _LAST_COMPARED)
    tails = [each.tail(count - first) for each, count in zip(members, counts, strict=True)]
    for entries in zip(*tails, strict=False):
        texts = [*map(_text_with_sets, entries)]
        if len({*texts}) > 1:
            places = zip(*(_split_numbers(text)[1] for text in texts), strict=True)
            if sum(len({*place}) > 1 for place in places) > _MAX_DIFFERING_NUMBERS:
                return True
    return False


def _places_of(text: str) -> re.Pattern[str]:
    """Return the pattern of the parts of a text that can differ between ranks.

    The pattern that includes times of day is slow, so it is used only if the text may have a time.
    """
    return _VARYING_AND_TIMES if may_have_time(text) else _VARYING


def fold(texts: Sequence[str]) -> str | None:
    """Return one text for the texts of several ranks, such as `loss {0.68, 0.67}`.

    Return None if the texts differ in more than numbers, addresses and times of day.
    """
    first = texts[0]
    if all(text == first for text in texts):
        return first
    for split in (split_times, _split_places):  # times alone are found much faster
        splits = [split(text) for text in texts]
        frame = splits[0][0]
        if all(parts == frame for parts, _ in splits):
            sets = [*map(_set, zip(*(places for _, places in splits), strict=True)), ""]
            return "".join(fixed + differs for fixed, differs in zip(frame, sets, strict=True))
    return None


def _split_places(text: str) -> tuple[list[str], list[str]]:
    """Split a text at its numbers, addresses and times.

    Return the pieces between them, and the numbers, addresses and times themselves.
    """
    places = _places_of(text)
    return places.split(text), places.findall(text)


def fold_lines(lines: Sequence[ScreenLine]) -> ScreenLine:
    """Return one line for the lines of alike ranks, merged by `fold` or else joined by ` | `."""
    first = lines[0]
    text = fold([line.text for line in lines])
    if text is None:
        text = fold_plain([line.text for line in lines])
    return ScreenLine(text, first.stderr)


def fold_plain(texts: Sequence[str]) -> str:
    """Return one text without colours: merged by `fold`, or, if that fails, joined by ` | `."""
    plain = [strip(text) for text in texts]
    folded = fold(plain)
    return " | ".join(dict.fromkeys(plain)) if folded is None else folded


def fold_shown(shown: Sequence[RichDisplay]) -> RichDisplay:
    """Return one display for alike ranks: the first, with the text/plain of all displays merged."""
    first = shown[0]
    if all(other.plain == first.plain for other in shown):
        return first
    data = {**first.display.data, "text/plain": fold_plain([other.plain for other in shown])}
    return first._replace(display=first.display._replace(data=data))


def fold_tail(pieces: Sequence[OutputPiece], count: int) -> list[ScreenLine]:
    """Return the last `count` lines that the screens of all alike ranks have, each line merged.

    If some ranks are a few lines ahead of other ranks, their additional lines are left out.
    """
    screens = [piece for piece in pieces if isinstance(piece, Screen)]
    common = min(screen.line_count for screen in screens)
    tails = []
    for screen in screens:
        ahead = screen.line_count - common
        lines = screen.tail(count + ahead)
        tails.append(reversed(lines[: len(lines) - ahead]))
    # A screen may keep fewer lines than another, so the lines are paired from the last line on.
    return [fold_lines(lines) for lines in zip(*tails, strict=False)][::-1]


def fold_errors(errors: Sequence[RankError]) -> RankError | None:
    """Merge the exceptions of several ranks to one, with sets in place of different numbers.

    Return None if the exceptions differ in more than numbers, addresses and times, or if there are
    no errors.  If the process of any rank has died, return the first error unchanged.
    """
    failures = [error for error in errors if isinstance(error, Failure)]
    if not failures or len(failures) < len(errors):
        return errors[0] if errors else None
    first = failures[0]
    if all(error_content(failure) == error_content(first) for failure in failures):
        return first
    message = fold([failure.message for failure in failures])
    texts = ["\n".join(failure.traceback) for failure in failures]
    if (traceback := fold(texts)) is None:
        traceback = fold([*map(strip, texts)])
    if message is None or traceback is None:
        return None
    return first._replace(message=message, traceback=(traceback,))


def later_errors_text(errors: Mapping[int, RankError], first: int) -> list[str]:
    """Return lines on how other ranks failed: `ranks 1-3: the same`, `rank 4: OSError: 5`.

    `errors` has the errors of all failed ranks, by rank.  `first` is the rank whose error is shown
    above these lines.
    """
    keys_by_rank = {
        rank: _alike_keys(each, error_keys(rank, each)) for rank, each in errors.items()
    }
    alike = {
        rank for rank, keys in keys_by_rank.items() if not keys.isdisjoint(keys_by_rank[first])
    }
    same = {r for r in alike if error_content(errors[r]) == error_content(errors[first])}
    texts = {r: error_text(each) for r, each in errors.items() if r not in same}
    if (folded := fold_errors([errors[r] for r in sorted(alike - same)])) is not None:
        texts |= dict.fromkeys(alike - same, error_text(folded))
    lines = [f"{name_ranks(same - {first})}: the same"] if len(same) > 1 else []
    return lines + [f"{name_ranks(ranks)}: {text}" for text, ranks in fold_ranks(texts).items()]


def error_content(error: RankError | None) -> object:
    """Return the parts of an error that are compared to find equal errors; None for no error."""
    if isinstance(error, Failure):
        return error.name, error.message, "\n".join(error.traceback)
    return error and (error.exit_code, error.why)


def _alike_keys(error: RankError | None, keys: Collection[str]) -> frozenset[str]:
    """Return texts by which errors are compared: two errors are alike if they share a text.

    The deaths of two processes are alike only if their exit codes are equal, and also the reasons
    why the agent killed them (`Died.why`), if it did.
    """
    why = error.why if isinstance(error, Died) else ""
    return frozenset(f"{key} {why}" for key in keys)


def _set(values: tuple[str, ...]) -> str:
    """Return `7` if all values are equal, and a set such as `{7,9}` otherwise.

    For times of day, and for many fractions, write only the lowest and highest: `{0.1 to 0.7}`.
    """
    if all(value == values[0] for value in values):
        return values[0]
    if ":" in values[0]:
        date = values[0][: values[0].find(" ") + 1]
        start = date if all(value.startswith(date) for value in values) else ""
        first, last = (end(values).removeprefix(start) for end in (min, max))
        return f"{start}{{{first} to {last}}}"
    is_address = any(value.startswith("0x") for value in values)
    if any("." in value for value in values) and not is_address:
        if len({*values}) <= _MAX_NUMBERS:
            return f"{{{', '.join(_runs(values, counts=False))}}}"
        return f"{{{min(values, key=float)} to {max(values, key=float)}}}"
    start = "0x" if all(value.startswith("0x") for value in values) else ""
    runs = [*_runs([value.removeprefix(start) for value in values], counts=not start)]
    if len(runs) > _MAX_SET_SIZE:
        runs = [*runs[:_MAX_SET_SIZE], "…"]
    return f"{start}{{{','.join(runs)}}}"


def _runs(values: Sequence[str], *, counts: bool) -> Iterator[str]:
    """Yield the values, but `5*3` for a value that comes 3 times or more in a row.

    With `counts`, also yield `0-3` for consecutive numbers, and `5*2` for a value that comes twice.
    Without `counts`, as for fractions, two equal neighbours are both written, since people can
    count the ranks in `{1.59, 1.42, 1.42, 1.38}` more easily than in `{1.59, 1.42*2, 1.38}`.
    """
    start = 0
    while start < len(values):
        end = start + 1
        while end < len(values) and values[end] == values[start]:
            end += 1
        if end == start + 2 and not counts:
            yield from values[start:end]
        elif end > start + 1:
            yield f"{values[start]}*{end - start}"
        else:
            while counts and end < len(values) and values[end] == _plus(values[start], end - start):
                end += 1
            yield "-".join(dict.fromkeys((values[start], values[end - 1])))
        start = end


def _plus(number: str, more: int) -> str:
    return str(int(number) + more).zfill(len(number)) if number.isdecimal() else ""


# --- short outputs of ranks, compared ---------------------------------------------------------

SHORT_LINES, _LONGEST_LINE = 12, 400
_MAX_ODD_RANKS, _MAX_SPREADS = 8, 4
_MIN_RANKS, _SEEN_AT_A_GLANCE = 3, 8

# A number that stands by itself, maybe with a unit, but not in a name, an address or a time.
# `12,254` is a number, but `10:11:12,254` is a time with the milliseconds of a logger.
_COUNTED_NUMBER = re.compile(
    r"(?<![\w.:/-])(?<!\d,)(-?(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?)"
    rf"(?={UNITS}?(?![\w/-]|[.:,]\d))"
)
_UNIT = re.compile(UNITS)
_DIGITS, _DIVIDER = re.compile(r"0x[0-9a-f]+|\d+"), re.compile("[ ./-]")
_LABEL = re.compile(r"((?:[A-Za-z_][\w./-]* )?)([A-Za-z_][\w./-]*)[\"']?\s*[:=]?\s*$")

TextsByLine: TypeAlias = tuple[tuple[str, ...], ...]
NumbersByLine: TypeAlias = tuple[tuple[str, ...], ...]
"""For each line of a short output: the texts between its numbers, and its numbers."""


def unlike_most(groups: Sequence[AlikeRanks]) -> frozenset[int]:
    """Return the first rank of each group whose short output has other words than most outputs.

    Return no ranks if at most half of all ranks have the same words, or if too many groups have
    other words.
    """
    words = {group.ranks[0]: _short(group.shown) for group in groups if group.shown.state == "ok"}
    counted = Counter[TextsByLine]()
    for group in groups:
        if short := words.get(group.ranks[0]):
            counted[short[0]] += len(group.ranks)
    if not counted:
        return frozenset()
    usual, ranks = counted.most_common(1)[0]
    odd = [rank for rank, short in words.items() if short and short[0] != usual]
    is_usual = 2 * ranks > sum(len(group.ranks) for group in groups)
    return frozenset(odd) if is_usual and len(odd) <= _MAX_ODD_RANKS else frozenset()


def spread(transcript: Transcript) -> str:
    """Return a text on how far numbers of ranks differ: `loss 2.23 (rank 7) to 2.3 (rank 0)`.

    Return "" for few ranks or lines, which people can compare themselves.  Numbers without a name,
    and names that have a curve, are left out.
    """
    short_outputs = {each.rank: short for each in transcript if (short := _short(each))}
    usual = Counter(words for words, _ in short_outputs.values()).most_common(1)
    if not usual:
        return ""
    usual_words, ranks = usual[0]
    if ranks < _MIN_RANKS or ranks * len(usual_words) <= _SEEN_AT_A_GLANCE:
        return ""
    same = {
        rank: numbers for rank, (words, numbers) in short_outputs.items() if words == usual_words
    }
    curves = {_DIVIDER.sub("_", name).casefold() for name in transcript.curves.by_name}
    # If several lines have the same name, only the last line counts.  In a training it has the
    # newest number.
    texts_by_name = {}
    for name, text in _spreads(usual_words, same):
        plain = _DIVIDER.sub("_", name).casefold()
        if curves.isdisjoint({plain, plain.rpartition("_")[2]}):
            texts_by_name[name] = text
    texts = [f"{name} {text}" for name, text in texts_by_name.items() if text]
    text = " · ".join(texts[-_MAX_SPREADS:])
    if not text or len(same) == len(transcript.ranks):
        return text
    return f"{len(same)} of {len(transcript.ranks)} ranks: {text}"


def _spreads(words: TextsByLine, numbers: dict[int, NumbersByLine]) -> Iterator[tuple[str, str]]:
    """Yield pairs for the printed numbers with a name: the name, and the range over the ranks.

    `words` has the texts between the numbers, and `numbers` the numbers by rank.  In `loss 2.3` the
    name is `loss`.  The range is a text such as `2.23 (rank 7) to 2.3 (rank 0)`.  It is "" if all
    ranks have the same number, or if each rank has printed its own rank.  A name has two words,
    such as `train loss`, if several numbers have the name `loss`.
    """
    labels = {
        (line, place): label
        for line in words
        for place in range(len(line) - 1)
        if (label := _LABEL.search(line[place]))
    }
    times = Counter(label[2] for label in labels.values())
    for index, line in enumerate(words):
        for place in range(len(line) - 1):
            values = {rank: lines[index][place] for rank, lines in numbers.items()}
            of = {rank: float(value.replace(",", "")) for rank, value in values.items()}
            is_own = all(number == rank for rank, number in of.items())
            label = labels.get((line, place))
            if label is None:
                continue
            name = f"{label[1] if times[label[2]] > 1 else ''}{label[2]}"
            if is_own or len({*of.values()}) == 1:
                yield name, ""
                continue
            low, high = min(of, key=of.__getitem__), max(of, key=of.__getitem__)
            match = _UNIT.match(line[place + 1])
            unit = match[0] if match else ""
            text = f"{values[low]}{unit} (rank {low}) to {values[high]}{unit} (rank {high})"
            yield name, text


def _short(output: RankTranscript) -> tuple[TextsByLine, NumbersByLine] | None:
    """Return the lines of a rank, split into words and numbers.

    Return None if the cell did not succeed on the rank, if the rank has displays, no lines or more
    than `SHORT_LINES` lines, or if a line is long.
    """
    if output.state != "ok" or output.displays or not 0 < output.line_count <= SHORT_LINES:
        return None
    lines = output.tail(SHORT_LINES)
    if any(not isinstance(line, ScreenLine) or len(line.text) > _LONGEST_LINE for line in lines):
        return None
    parts = [_parts(strip(line.text)) for line in lines if isinstance(line, ScreenLine)]
    return tuple(words for words, _ in parts), tuple(numbers for _, numbers in parts)


def _parts(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    parts = _COUNTED_NUMBER.split(text)
    # Replace digits in names of devices and files, and in addresses: ranks may have other digits.
    return tuple(_DIGITS.sub("0", part) for part in parts[::2]), tuple(parts[1::2])
