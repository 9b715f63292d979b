"""When the outputs of two ranks count as alike: the same but for what must differ.

Addresses, device numbers and process ids differ between ranks that do the same; in an
error's text the rank's own number does too.  What differs is shown all the same:
`nbdist.output.folding`.  Pure.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from nbdist.output.ansi import strip
from nbdist.output.events import Died, Failure, RankError
from nbdist.output.progress import BAR_SIGNS, read_bar

_VARIES = re.compile(
    r"(?P<address>\b0x)[0-9a-fA-F]{6,16}\b"
    r"|(?P<device>\b(?:cuda|xpu|npu|hpu|mps):|\bGPU )\d+\b"
    r"|(?P<process>\b(?:pid|PID|[Pp]rocess)(?:[ =:]|: ))\d+\b"
    r"|(?P<nccl>:)\d+:\d+ \[\d+\](?= NCCL)"
)
_HINTS = ("0x", "cuda:", "xpu:", "npu:", "hpu:", "mps:", "GPU ", "pid", "PID", "rocess", " NCCL")
# Stands for what varies; a character that text may have as well, and then twice.
_MARK, _PLACE = "\0", "\0n"
_CELL_LINE = re.compile(r"Cell In\[\d+\], line \d+")
# An error's text that is longer counts as it is.
_MOST_COMPARED = 100_000


def normal(text: str) -> str:
    """Put a placeholder for all that may differ between ranks that are alike."""
    # Most text holds nothing of the kind, and `in` is far faster than a search.
    if _MARK in text:
        text = text.replace(_MARK, 2 * _MARK)
    if not any(hint in text for hint in _HINTS):
        return text
    return _VARIES.sub(lambda found: f"{found[found.lastgroup or 0]}{_PLACE}", text)


def without_bars(text: str) -> str:
    """Put a placeholder for each line that is a progress bar: its times are chance."""
    if not any(sign in text for sign in BAR_SIGNS):
        return text
    return "\n".join(map(_bar_out, text.split("\n")))


def _bar_out(line: str) -> str:
    if any(sign in line for sign in BAR_SIGNS) and (bar := read_bar(line)):
        return f"{_MARK}{bar.name}"
    return line


class Key(NamedTuple):
    """Equal `alike` means equal output; with equal `exact` as well to the last character.

    Equal `but_bars` means that, but for the lines that are progress bars.
    """

    alike: bytes
    but_bars: bytes
    exact: bytes


class Digest:
    """A running `Key` of text that comes in blocks of whole lines."""

    __slots__ = ("_alike", "_but_bars", "_exact", "_origins")

    def __init__(self) -> None:
        self._alike = hashlib.blake2b(digest_size=16)
        self._but_bars = hashlib.blake2b(digest_size=16)
        self._exact = hashlib.blake2b(digest_size=16)
        self._origins = hashlib.blake2b(digest_size=16)

    def add(self, text: str, origins: bytes = b"") -> None:
        """Take in the next lines; `origins` has a byte for each (stdout or stderr)."""
        self._exact.update(_bytes(text))
        text = without_bars(text)
        self._but_bars.update(_bytes(text))
        self._alike.update(_bytes(normal(text)))
        self._origins.update(origins)

    def add_key(self, key: Key) -> None:
        """Take in what another one has taken in."""
        self._alike.update(key.alike)
        self._but_bars.update(key.but_bars)
        self._exact.update(key.exact)

    def copy(self) -> Digest:
        twin = Digest()
        twin._alike = self._alike.copy()
        twin._but_bars = self._but_bars.copy()
        twin._exact = self._exact.copy()
        twin._origins = self._origins.copy()
        return twin

    @property
    def key(self) -> Key:
        origins = self._origins.digest()
        digests = (self._alike.digest(), self._but_bars.digest(), self._exact.digest())
        return Key(*(digest + origins for digest in digests))


def key_of(text: str) -> Key:
    """Make the key of one text."""
    digest = Digest()
    digest.add(text)
    return digest.key


def error_keys(rank: int, error: RankError | None) -> tuple[str, ...]:
    """Make keys such that two errors are alike where they share one.

    The first keeps the rank's own number, the second has a placeholder for it: ranks 3
    and 5 may both say "5 shards", or each its own number, and are alike either way.
    """
    match error:
        case None:
            return ("",)
        case Died(exit_code=code):
            return (f"died {code}",)
        case Failure(name=name, message=message):
            place = _place(error)
            said = _compared(message)
            own = re.sub(rf"(?<!\d)(?<!\d\.){rank}(?!\d|\.\d)", _PLACE, said)
            return tuple(f"{place}\n{name}: {text}" for text in (said, own))


def _place(failure: Failure) -> str:
    """Take the traceback without the message at its end: its numbers are line numbers.

    Of Stop only the cell's own lines: where in a library it hits is chance.
    """
    text = "\n".join(failure.traceback)
    if failure.name == "KeyboardInterrupt":
        return " ".join(_CELL_LINE.findall(strip(text)))
    if len(failure.message) <= _MOST_COMPARED:
        text = strip(text).rstrip().removesuffix(strip(failure.message).rstrip())
    return _compared(text)


def _compared(text: str) -> str:
    if len(text) <= _MOST_COMPARED:
        return normal(strip(text))
    return hashlib.blake2b(_bytes(text), digest_size=16).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
