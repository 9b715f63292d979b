"""When the outputs of two ranks count as equal: the same but for what must differ.

Addresses, device numbers and process ids differ between ranks that do the same; in an
error's text the rank's own number does too.  Pure, runs in the notebook kernel.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from nbdist.wire.outputs import Died, Failure
from nbdist.world.sgr import strip

_VARIES = re.compile(
    r"(?P<address>\b0x[0-9a-fA-F]{6,16}\b)"
    r"|(?P<device>\b(?:cuda|xpu|npu|hpu|mps):|\bGPU )\d+\b"
    r"|(?P<process>\b(?:pid|PID|[Pp]rocess)(?:[ =:]|: ))\d+\b"
    r"|(?P<nccl>:)\d+:\d+ \[\d+\](?= NCCL)"
)
_HINTS = ("0x", "cuda:", "xpu:", "npu:", "hpu:", "mps:", "GPU ", "pid", "PID", "rocess", " NCCL")
_CELL_LINE = re.compile(r"Cell In\[\d+\], line \d+")
# So much of an error's text is looked at.
_MOST_COMPARED = 100_000


def normal(text: str) -> str:
    """The text with a placeholder for everything that may differ between equal ranks."""
    # Most text holds nothing of the kind, and `in` is far faster than a search.
    if not any(hint in text for hint in _HINTS):
        return text
    return _VARIES.sub(lambda found: f"<{found.lastgroup}>", text)


class Key(NamedTuple):
    """Equal `alike` means equal output; equal `exact` as well means to the last character."""

    alike: bytes
    exact: bytes


class Digest:
    """A running `Key` of text that comes in blocks of whole lines."""

    __slots__ = ("_alike", "_exact", "_origins")

    def __init__(self) -> None:
        self._alike = hashlib.blake2b(digest_size=16)
        self._exact = hashlib.blake2b(digest_size=16)
        self._origins = hashlib.blake2b(digest_size=16)

    def add(self, text: str, origins: bytes = b"") -> None:
        """Take in the next lines; `origins` has a byte for each (stdout or stderr)."""
        self._exact.update(_bytes(text))
        self._alike.update(_bytes(normal(text)))
        self._origins.update(origins)

    def copy(self) -> Digest:
        twin = Digest()
        twin._alike = self._alike.copy()
        twin._exact = self._exact.copy()
        twin._origins = self._origins.copy()
        return twin

    @property
    def key(self) -> Key:
        origins = self._origins.digest()
        return Key(self._alike.digest() + origins, self._exact.digest() + origins)


def key_of(text: str) -> Key:
    """The key of one text."""
    digest = Digest()
    digest.add(text)
    return digest.key


def error_keys(rank: int, error: Failure | Died | None) -> tuple[str, ...]:
    """Two errors are the same where they share one of these keys.

    The first keeps the rank's own number, the second has a placeholder for it: ranks 3
    and 5 may both say "5 shards", or each its own number, and are the same either way.
    """
    match error:
        case None:
            return ("",)
        case Died(exit_code=code):
            return (f"died {code}",)
        case Failure(name=name, message=message):
            place = _place(error)
            said = normal(strip(message[:_MOST_COMPARED]))
            own = re.sub(rf"(?<!\d)(?<!\d\.){rank}(?!\d|\.\d)", "<rank>", said)
            return tuple(f"{place}\n{name}: {text}" for text in (said, own))


def _place(failure: Failure) -> str:
    """The traceback without the message at its end: numbers in it are line numbers.

    Of Stop only the cell's own lines: where in a library it hits is chance.
    """
    text = strip("\n".join(failure.traceback)[-_MOST_COMPARED:]).rstrip()
    if failure.name == "KeyboardInterrupt":
        return " ".join(_CELL_LINE.findall(text))
    return normal(text.removesuffix(strip(failure.message).rstrip()))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
