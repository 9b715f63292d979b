"""What may stand above a cell's magic, or in its line, besides what IPython itself understands.

A transformer of input: pure, since IPython calls it several times for a cell.
"""

from __future__ import annotations

import re

MAGICS = ("distributed", "rank", "local")

_MAGIC = re.compile(rf"[ \t]*%%({'|'.join(MAGICS)})(?=[\s\[]|$)(.*)", re.DOTALL)
_BRACKETS = re.compile(r"\s*\[([^\]\n]*)\]")


def transform_first_lines(lines: list[str], *, local_is_plain: bool = True) -> list[str]:
    """Have a cell of ours begin with its magic; all lines below keep their numbers.

    Comments above it change places with it.  `%%rank[0,1]`, nbdistributed's, is `%%rank 0,1`.
    A cell of `%%local` is a plain one, but not in a terminal (`local_is_plain` False), which
    would take it for complete at the end of each line.
    """
    above = 0
    while above < len(lines) and _is_comment(lines[above]):
        above += 1
    found = _MAGIC.fullmatch(lines[above]) if above < len(lines) else None
    if found is None:
        return lines
    name, rest = found.groups()
    if name == "rank":
        rest = _BRACKETS.sub(lambda ranks: " " + "".join(ranks[1].split()), rest, count=1)
    first = f"{'# ' * (name == 'local' and local_is_plain)}%%{name}{rest}"
    if not first.endswith("\n"):
        first += "\n"
    return [first, *lines[:above], *lines[above + 1 :]]


def _is_comment(line: str) -> bool:
    text = line.strip()
    return not text or text.startswith("#")
