"""Short outputs of ranks held against one another: who is unlike most, and how far numbers lie.

Ranks are alike here whose lines have the same words: numbers and progress bars do not count.
Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nbdist.output.ansi import strip
from nbdist.output.folding import Group
from nbdist.output.progress import read_bar
from nbdist.output.rank_transcript import RankTranscript
from nbdist.output.screen import Line
from nbdist.output.transcript import Transcript

SHORT_LINES = 12
_MOST_ODD = 8
_MOST_SPREADS = 4
_FEWEST_RANKS, _SEEN_AT_A_GLANCE = 3, 8
_LONGEST_LINE = 400

_UNITS = r"(?:\s?(?:ns|[\u00b5\u03bcmu]s|s|min|[KMG]i?B|kB|%)(?!\w))"
# A number that stands by itself, not one in a name, an address or a time; with its unit.
_NUMBER = re.compile(
    r"(?<![\w.:/-])(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
    rf"(?={_UNITS}?(?![\w/-]|[.:]\d))"
)
_UNIT = re.compile(_UNITS)
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_LABEL = re.compile(r"([A-Za-z_][\w./-]*)[\"']?\s*[:=]?\s*$")

Words = tuple[tuple[str, ...], ...]
"""A short output without its numbers, line by line."""


@dataclass(frozen=True, slots=True)
class _Short:
    """What a rank has said in few lines: what stands between its numbers, and these."""

    words: Words
    numbers: tuple[tuple[str, ...], ...]


def unlike_most(groups: Sequence[Group]) -> frozenset[int]:
    """Find the first ranks of the groups whose short output has other words than that of most."""
    words = {group.ranks[0]: _short(group.shown) for group in groups if group.state == "ok"}
    counted = Counter[Words]()
    for group in groups:
        if short := words.get(group.ranks[0]):
            counted[short.words] += len(group.ranks)
    if not counted:
        return frozenset()
    usual, ranks = counted.most_common(1)[0]
    odd = [rank for rank, short in words.items() if short and short.words != usual]
    is_usual = 2 * ranks > sum(len(group.ranks) for group in groups)
    return frozenset(odd) if is_usual and len(odd) <= _MOST_ODD else frozenset()


def spread(transcript: Transcript) -> str:
    """Say how far numbers lie apart: `loss 2.23 (rank 7) to 2.3 (rank 0)`.

    "" where there are none, or so few lines that it is seen at a glance.
    """
    said = {each.rank: short for each in transcript if (short := _short(each))}
    usual = Counter(short.words for short in said.values()).most_common(1)
    if not usual:
        return ""
    words, ranks = usual[0]
    if ranks < _FEWEST_RANKS or ranks * len(words) <= _SEEN_AT_A_GLANCE:
        return ""
    numbers = {rank: short.numbers for rank, short in said.items() if short.words == words}
    # Of what comes in several lines the last counts: the end of a training.
    found = dict(_spreads(words, numbers))
    return " · ".join(f"{name} {text}".strip() for name, text in [*found.items()][-_MOST_SPREADS:])


def _spreads(
    words: Words, numbers: dict[int, tuple[tuple[str, ...], ...]]
) -> Iterator[tuple[str, str]]:
    for index, line in enumerate(words):
        for place in range(len(line) - 1):
            values = {rank: lines[index][place] for rank, lines in numbers.items()}
            is_own = all(float(value) == rank for rank, value in values.items())
            if is_own or len(set(values.values())) == 1:
                continue
            low, high = (pick(values, key=lambda rank: float(values[rank])) for pick in (min, max))
            label = _LABEL.search(line[place])
            found = _UNIT.match(line[place + 1])
            unit = found[0] if found else ""
            text = f"{values[low]}{unit} (rank {low}) to {values[high]}{unit} (rank {high})"
            yield label[1] if label else "", text


def _short(said: RankTranscript) -> _Short | None:
    """Take a rank's lines apart, if it has said only some short ones and has not failed."""
    if said.state != "ok" or said.displays or not 0 < said.line_count <= SHORT_LINES:
        return None
    lines = said.tail(SHORT_LINES)
    if any(not isinstance(line, Line) or len(line.text) > _LONGEST_LINE for line in lines):
        return None
    parts = [_parts(strip(line.text)) for line in lines if isinstance(line, Line)]
    return _Short(tuple(words for words, _ in parts), tuple(numbers for _, numbers in parts))


def _parts(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if bar := read_bar(text):
        return (f"\0{bar.name}",), ()
    found = _NUMBER.split(text)
    # Other digits are in names: of a device, a file, an address.
    return tuple(_DIGITS.sub("0", part) for part in found[::2]), tuple(found[1::2])
