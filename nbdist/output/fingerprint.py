"""Computes digests by which outputs and errors of ranks are compared; parses progress bars.

Outputs are alike if they differ only in parts such as addresses and devices, which may be different
on each rank.  `Transcript` and `Screen` call these functions.  Pure: no I/O here.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import re
from typing import NamedTuple

from nbdist.output.ansi import strip
from nbdist.output.events import Failure, MimeBundle, RankError

TIME = (
    r"(?:(?<![\w:.])|(?<=\dm))(?:[A-Z]\d{4} |(?:\d{4}[-/]\d\d[-/]\d\d|\d\d[-/]\d\d[-/]\d{4})[ T])?"
    r"\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?![\w:])(?: \d+(?= \S+:\d+\]))?"
)
"""Matches a time of day as loggers write it, maybe with a date before the time.

The process id that torch's logger writes behind the time is matched too.  A colour code may be
right before the time, so a time may follow a digit and the letter `m`.
"""

_TIME = re.compile(TIME)
# Times are found by a search for `_PART_OF_TIME`, which is fast since it begins with a fixed
# character.  The whole time begins 13 characters before this part if it has a date, 8 characters if
# it has a short date as torch writes it (`E0314 `), and 2 characters if it has no date.
_PART_OF_TIME, _BEFORE_PART = re.compile(r":\d\d:\d\d"), (13, 8, 2)

_VARIES = re.compile(
    r"(?P<address>\b0x)[0-9a-fA-F]{6,16}\b"
    r"|(?P<device>\b(?:cuda|xpu|npu|hpu|mps):|\bGPU )\d+\b"
    r"|(?P<process>\b(?:pid|PID|[Pp]rocess)(?:[ =:]|: ))\d+\b"
    r"|(?P<nccl>:)\d+:\d+ \[\d+\](?= NCCL)"
)
_HINTS = ("0x", "cuda:", "xpu:", "npu:", "hpu:", "mps:", "GPU ", "pid", "PID", "rocess", " NCCL")
# Placeholders for varying parts and for times begin with `_MARK`.  If a text itself has this
# character, the character is doubled, so that the text cannot equal a text with placeholders.
_MARK, _PLACEHOLDER, _OF_TIME = "\0", "\0n", "\0t"
_ERROR_OF_GROUP = re.compile(r"^ *(?:\| *)+[A-Za-z_][\w.]*: .+", re.MULTILINE)
"""Matches a row `    | ValueError: rank 3 has no shard` in an exception group's traceback."""
_CELL_LINE = re.compile(r"Cell In\[\d+\], line (\d+)")
# The most characters of an error's text in which parts are replaced by placeholders.  A longer text
# is compared as it is, since the replacement would take too long.
_MAX_COMPARED = 100_000


def normal(text: str) -> str:
    """Return a text with placeholders for addresses, devices and pids, which differ between ranks.

    Texts that differ only in such parts become equal.
    """
    if _MARK in text:
        text = text.replace(_MARK, 2 * _MARK)
    if not any(hint in text for hint in _HINTS):  # true of most texts; `in` is faster than a search
        return text
    return _VARIES.sub(lambda match: f"{match[match.lastgroup or 0]}{_PLACEHOLDER}", text)


def may_have_time(text: str) -> bool:
    """Return False if the text surely has no time of day, and True if a slower search is needed."""
    return _PART_OF_TIME.search(text) is not None


def split_times(text: str) -> tuple[list[str], list[str]]:
    """Split a text at its times of day; return the texts between the times, and the times."""
    parts, times, done, match = list[str](), list[str](), 0, _TIME.match
    for part in _PART_OF_TIME.finditer(text):
        inside = part.start()
        for before in _BEFORE_PART:
            start = inside - before
            if start >= done and (time := match(text, start)) and time.end() > inside:
                parts.append(text[done:start])
                times.append(time[0])
                done = time.end()
                break
    return [*parts, text[done:]], times


def without_times(text: str) -> str:
    """Return a text with a placeholder for each time of day."""
    if _MARK in text:
        text = text.replace(_MARK, 2 * _MARK)
    return _OF_TIME.join(split_times(text)[0])


class OutputDigests(NamedTuple):
    """Two digests of an output, to compare it with the output of another rank.

    The `same` digests of two ranks are equal if the outputs differ in nothing except times of day.
    The `alike` digests are also equal if addresses, devices or process ids differ (`normal`).
    """

    alike: bytes
    same: bytes


class Digest:
    """Computes the `OutputDigests` of a text that arrives in pieces of whole lines."""

    __slots__ = ("_hashes",)

    def __init__(self) -> None:
        # Three hashes: for `OutputDigests.alike`, for `OutputDigests.same`, and for the streams
        # that the lines were written to.
        self._hashes = [hashlib.blake2b(digest_size=16) for _ in range(3)]

    def add(self, text: str, origins: bytes = b"") -> None:
        """Add the next lines; each byte of `origins` says whether a line is of stdout or stderr."""
        alike, same, of_origins = self._hashes
        timeless = without_times(text)
        alike.update(_bytes(normal(timeless)))
        same.update(_bytes(timeless))
        of_origins.update(origins)

    def add_key(self, key: OutputDigests) -> None:
        """Add the digests of a piece of output, such as a display or another text."""
        alike, same, _ = self._hashes
        alike.update(key.alike)
        same.update(key.same)

    def copy(self) -> Digest:
        twin = Digest.__new__(Digest)
        twin._hashes = [each.copy() for each in self._hashes]
        return twin

    @property
    def key(self) -> OutputDigests:
        alike, same, origins = (each.digest() for each in self._hashes)
        return OutputDigests(alike + origins, same + origins)


def key_of(text: str) -> OutputDigests:
    """Return the digests of a whole text."""
    digest = Digest()
    digest.add(text)
    return digest.key


WITHOUT_REFERENCES = 2
"""The version of marshal's format that writes a repeated object again, instead of a reference.

Equal JSON must give equal bytes.  With references the bytes would also depend on which equal parts
happen to be the same object.
"""


def content_key(data: MimeBundle) -> bytes:
    """Return a hash of a display's content, by Python's `hash`, which is fast for large content.

    Python salts this `hash`, so the result can only be compared within this process.
    """
    keys = []
    for kind, value in sorted(data.items()):
        is_text = isinstance(value, str)
        written = value if is_text else marshal.dumps(value, WITHOUT_REFERENCES)
        keys.append((kind, is_text, len(written), hash(written)))
    return _bytes(repr(keys))


def error_keys(rank: int, error: RankError | None) -> tuple[str, ...]:
    """Return texts by which errors are compared: two errors are alike if they share a text.

    An exception on rank 3 has two texts, and the second has a placeholder instead of the number 3.
    So the errors of ranks 3 and 5 are alike by the first text if both say "8 shards".  They are
    alike by the second text if rank 3 says "shard 3" and rank 5 says "shard 5".

    The death of a process has a single text, with its exit code.  Without an error the text is "".
    """
    if not isinstance(error, Failure):
        return (f"died {error.exit_code}" if error else "",)
    place, message = _place(error), _compared(error.message)
    number = re.compile(rf"(?<!\d)(?<!\d\.){rank}(?!\d|\.\d| sub-exception)")
    # The traceback of an exception group contains the messages of its errors, which may have the
    # number of the rank too.
    own_place = _ERROR_OF_GROUP.sub(lambda match: number.sub(_PLACEHOLDER, match[0]), place)
    with_placeholder = f"{own_place}\n{error.name}: {number.sub(_PLACEHOLDER, message)}"
    return f"{place}\n{error.name}: {message}", with_placeholder


def cell_line_of(failure: Failure) -> int:
    """Return the number of the cell's line that led to the error; 0 if the traceback has none."""
    match = _CELL_LINE.search(strip("\n".join(failure.traceback)))
    return int(match[1]) if match else 0


def _place(failure: Failure) -> str:
    """Return the traceback of a failure, in the form in which `error_keys` compares tracebacks.

    The message at the end is removed, because `error_keys` compares messages separately; only a
    message longer than `_MAX_COMPARED` stays.  For a KeyboardInterrupt, return only texts such as
    `Cell In[5], line 3`, because Stop interrupts ranks at random places in libraries.
    """
    text = "\n".join(failure.traceback)
    if failure.name == "KeyboardInterrupt":
        return " ".join(match[0] for match in _CELL_LINE.finditer(strip(text)))
    if len(failure.message) <= _MAX_COMPARED:
        text = strip(text).rstrip().removesuffix(strip(failure.message).rstrip())
    return _compared(text)


def _compared(text: str) -> str:
    if len(text) <= _MAX_COMPARED:
        return normal(without_times(strip(text)))
    return hashlib.blake2b(_bytes(text), digest_size=16).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


UNITS = r"(?:\s?(?:ns|[\u00b5\u03bcmu]s|s|min|[KMG]i?B|kB|%)(?!\w))"
NUMBER = (
    r"(?<![\w.:/-])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
    rf"(?={UNITS}?(?![\w/-]|[.:]\d))"
)
"""Matches a number that stands by itself or before a unit, and not in a name, address or time."""

# --- parsing progress bars ---------------------------------------------------------------------

BAR_SIGNS = ("%|", "it/s", "s/it", "━━━━━", "[=====")
"""Signs of a progress bar: `read_row` parses only rows that have one, since parsing is slow.

Nearly every bar has one of the signs, and few other texts have one.
"""

LONGEST_BAR = 2000
"""The most characters of a row that can be a progress bar."""

_SIGNS = ("%", "/", "[", "━", " of ")
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_AMOUNT = rf"{_NUMBER}(?:[kKMGTPE]i?)?B?"
_TIMES = r"\[(?P<elapsed>[\d:]+)(?:<(?P<remaining>[\d:?]+))?(?:,\s*(?P<rate>[^,\]]*))?"
_TQDM = re.compile(
    r"(?P<name>.*?)\s*(?P<percent>\d+(?:\.\d+)?)%(?:\|[^|]*\||\s)\s*"
    rf"(?P<done>{_AMOUNT})/(?P<total>{_AMOUNT}|\?)\s*{_TIMES}(?:,\s*(?P<rest>.*?))?"
    r"(?:\]\s*(?P<more>[^\]]*))?"  # the `]` is missing if tqdm has cut a bar that is too wide
)
_BAR_WITHOUT_TOTAL = re.compile(
    rf"(?:(?P<name>.*): )?(?P<done>{_AMOUNT})(?:/\?)? ?(?P<unit>[A-Za-z]+)? "
    rf"{_TIMES}(?:,\s*(?P<rest>.*))?\]"
)
_BRACKET = re.compile(r"[\[\]]")
# Matches the amount done in a bar of tqdm, and the bracket that opens before the times.
_METER = re.compile(r"(?:^|\|\s*|\s)\d[\w,.]*(?:/[\w,.?]+)? ?[A-Za-z]* ?\[(?=\d+:\d\d)")
_FASTPROGRESS = re.compile(
    rf"(?P<name>[^|]*?)\s*\|[^|]*\|\s*(?P<percent>[\d.]+)%\s*\[(?P<done>{_AMOUNT})/"
    rf"(?P<total>{_AMOUNT})\s+(?P<elapsed>[\d:]+)<(?P<remaining>[\d:?]+)(?P<rest>[^\]]*)\]"
)
# Five or more signs that draw a bar: lines as in rich, signs in brackets as in Keras, or blocks.
_DRAWN = re.compile(r"[━╸╺]{5,}[━╸╺ ]*|[\[|][=#>.\-█▉▊▋▌▍▎▏░▒▓ ]{5,}[\]|]|[█▉▊▋▌▍▎▏░▒▓]{5,}")
_PERCENT = re.compile(rf"(?<![\w.]){_NUMBER}\s?%")
_COUNTS = re.compile(
    rf"(?<![\w./-])(?P<done>{_AMOUNT})\s?(?:/|of)\s?(?P<total>{_AMOUNT})(?![\w/.-])"
)
_CLOCK = re.compile(r"(?:ETA:\s*)?(?<![\d:])(?P<time>(?:\d+:)?\d+:\d\d(?![\d:])|-:--:--)")
_SECONDS = re.compile(r"(?:ETA:\s*)?(?P<time>\d+s)(?=\s|$)")
_RATE = re.compile(r"[^\s\0]+(?: \w+)?/(?:s|it|step|sec|epoch|batch)\b")
_SUFFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SEPARATORS = " \t:-•|·"


class Bar(NamedTuple):
    """A progress bar as parsed from a line; times are in seconds.

    `done` and `total` are as they were written ("1.2G"), or "" if the line did not have them.
    `fraction` is between 0 and 1, or None if neither a total nor a percentage is known.  `elapsed`
    and `remaining` are None, and `rate` and `name` are "", if the line did not have them.
    `other_text` is the text of the line that is none of these fields, such as tqdm's postfix.
    """

    name: str = ""
    done: str = ""
    total: str = ""
    fraction: float | None = None
    elapsed: float | None = None
    remaining: float | None = None
    rate: str = ""
    other_text: str = ""

    @property
    def is_finished(self) -> bool:
        return self.fraction is not None and self.fraction >= 1

    def is_before(self, later: Bar) -> bool:
        """Return True if `later` can be a later state of this bar, by its progress and time.

        Callers must have compared the names and totals of the two bars.  A finished bar has no
        later state.
        """
        is_later = later.position >= self.position
        return not self.is_finished and is_later and (later.elapsed or 0) >= (self.elapsed or 0)

    @property
    def amount(self) -> str:
        """The amount done: `315/500`, or `315` if the total is unknown."""
        return f"{self.done}/{self.total}" if self.total else self.done

    @property
    def time_left(self) -> float | None:
        """The remaining seconds that the bar shows, else an estimate from its pace.

        None if the bar shows too little for an estimate.
        """
        if self.remaining is None and self.fraction and self.elapsed is not None:
            return self.elapsed * (1 - self.fraction) / self.fraction
        return self.remaining

    @property
    def position(self) -> float:
        """The fraction done, or the amount done if the fraction is unknown, to compare bars."""
        return number_of(self.done) if self.fraction is None else self.fraction


def read_bar(text: str, *, is_edited: bool = False) -> Bar | None:
    """Parse a line as a progress bar; None if the line is no bar.

    If the line does not have the form of tqdm's bars, it counts as a bar only if it contains a
    drawing such as `[====>   ]`, or if its characters were overwritten (`is_edited`).
    """
    if len(text) > LONGEST_BAR or not any(sign in text for sign in _SIGNS):
        return None
    plain = strip(text).strip()
    if match := _match_tqdm(plain):
        return _from_tqdm(match)
    drawn = _DRAWN.search(plain)
    return _from_any(plain, drawn) if drawn or is_edited else None


def read_row(text: str, *, is_edited: bool) -> Bar | None:
    """Parse a whole row of a terminal as a progress bar; None if the row is no bar.

    A bar in the form of tqdm's bars counts in any row.  Another bar counts only in a row that a
    program has drawn again (`is_edited`), since people also print lines that look like bars.  If
    there is other text in the row, such a bar must also be finished: while a bar runs, the text
    beside it may be printed text.
    """
    if len(text) > LONGEST_BAR or not any(sign in text for sign in BAR_SIGNS):
        return None
    if not (is_edited or "[" in text):  # a bar of tqdm has its times in brackets
        return None
    plain = strip(text).strip()
    if match := _match_tqdm(plain):
        return _from_tqdm(match)
    drawn = _DRAWN.search(plain) if is_edited else None
    bar = _from_any(plain, drawn) if drawn else None
    return bar if bar is not None and (bar.is_finished or not bar.other_text) else None


def end_of_bar(text: str) -> int:
    """Return the index at which text behind a bar of tqdm begins; 0 if there is no such text."""
    begins = _METER.search(text)
    if begins is None:
        return 0
    end = _end_of_brackets(text, begins.end())
    if not text[end:].strip():  # nothing behind the bar: skip the slow parse
        return 0
    return end if read_row(text[:end], is_edited=False) else 0


def is_cut(text: str) -> bool:
    """Return True if the text has a bar of tqdm without its closing bracket.

    tqdm cuts a bar that is wider than the line.  Other text may follow the cut bar.
    """
    begins = _METER.search(text)
    return begins is not None and not _end_of_brackets(text, begins.end())


def _end_of_brackets(text: str, start: int = 0) -> int:
    """Return the index behind the `]` that closes a bracket opened before index `start`, or 0.

    Pairs of brackets behind `start` are skipped.  The result is 0 if no `]` closes the bracket.
    """
    depth = 1
    for bracket in _BRACKET.finditer(text, start):
        depth += 1 if bracket[0] == "[" else -1
        if not depth:
            return bracket.end()
    return 0


def _match_tqdm(plain: str) -> re.Match[str] | None:
    matches = (pattern.fullmatch(plain) for pattern in (_TQDM, _BAR_WITHOUT_TOTAL, _FASTPROGRESS))
    return next(filter(None, matches), None)


def _from_tqdm(match: re.Match[str]) -> Bar | None:
    fields = {name: (value or "").strip() for name, value in match.groupdict().items()}
    if fields.get("more") or _end_of_brackets(fields["rest"]):
        return None  # text was printed behind the bar, so the row counts as a line
    total = fields.get("total", "").replace("?", "")
    percent = float(fields["percent"]) / 100 if fields.get("percent") else None
    if "unit" in fields and not total:
        fields["done"] += fields["unit"]
    return Bar(
        fields["name"].rstrip(_SEPARATORS),
        fields["done"],
        total,
        fraction_of(fields["done"], total, percent),
        seconds_of(fields["elapsed"]),
        seconds_of(fields["remaining"]),
        fields.get("rate", ""),
        fields["rest"],
    )


def _from_any(plain: str, drawn: re.Match[str] | None) -> Bar | None:
    """Parse a bar of any library, whose columns may be in any order.

    `drawn` is the drawing in the text, such as `[====>   ]`, or None.  Returns None if the text has
    neither counts such as `3/10` nor a percentage, or if the percentage is above 100.
    """
    left, right = (plain[: drawn.start()], plain[drawn.end() :]) if drawn else (plain, "")
    remainder = f"{left}\0{right}"
    # If there are counts such as `3/10` on both sides of the drawing, the left ones belong to the
    # name, as in Lightning's "Epoch 0/1".
    counts = _COUNTS.search(right) or _COUNTS.search(left)
    percent = _PERCENT.search(remainder)
    if counts and not 0 <= number_of(counts["done"]) <= number_of(counts["total"]):
        counts = None
    share = float(percent[0].rstrip(" %").replace(",", "")) / 100 if percent else None
    if not (counts or percent) or (share is not None and not 0 <= share <= 1):
        return None
    done, total = (counts["done"], counts["total"]) if counts else ("", "")
    for match in (counts, percent):
        remainder = remainder.replace(match[0], "\0", 1) if match else remainder
    fraction = fraction_of(done, total, share)
    remainder, elapsed, remaining = _without_times(remainder, is_finished=fraction == 1)
    rate = _RATE.search(remainder) if drawn else None
    remainder = remainder.replace(rate[0], "\0", 1) if rate else remainder
    name, *parts = (part.strip(_SEPARATORS) for part in remainder.split("\0"))
    other_text = " ".join(filter(None, parts))
    return Bar(name, done, total, fraction, elapsed, remaining, rate[0] if rate else "", other_text)


def _without_times(text: str, *, is_finished: bool) -> tuple[str, float | None, float | None]:
    """Return a bar's text with null characters for times, and the elapsed and remaining seconds.

    If there is only one time, it is the remaining time, or the elapsed time of a finished bar.  A
    time that the bar lacks is None.
    """
    clocks = [*_CLOCK.finditer(text)][:2]
    if not clocks and "\0" in text:
        clocks = [*_SECONDS.finditer(text)][:1]
    for clock in clocks:
        text = text.replace(clock[0], "\0", 1)
    times = [*(seconds_of(clock["time"]) for clock in clocks), None, None]
    if len(clocks) == 1:
        times = [times[0], None] if is_finished else [None, times[0]]
    return text, times[0], times[1]


def fraction_of(done: str, total: str, percent: float | None) -> float | None:
    """Return `done / total`, or `percent` if the total is unknown; None if both are unknown.

    The result is at most 1.  `percent` is a fraction, such as 0.63 for 63 %.
    """
    whole = number_of(total)
    if whole > 0:
        return min(1.0, number_of(done) / whole)
    return None if percent is None else min(1.0, percent)


def number_of(text: str) -> float:
    """Parse `1,200`, `1.2G` or `15it`; 0 if the text does not begin with a number."""
    match = re.match(rf"({_NUMBER})([kKMGTPE]?)", text)
    if match is None:
        return 0.0
    return float(match[1].replace(",", "")) * _SUFFIXES.get(match[2], 1)


def seconds_of(text: str) -> float | None:
    """Parse `00:12`, `1:02:03` or `4s` to seconds; None for other text, such as `?`."""
    parts = text.strip().removesuffix("s").split(":")
    if not all(part.isdigit() for part in parts):
        return None
    return functools.reduce(lambda total, part: 60 * total + int(part), parts, 0.0)


def clock_text(seconds: float) -> str:
    """Return seconds as progress bars do: `00:12`, or `1:02:03` from an hour on."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes:02}:{remainder:02}"
