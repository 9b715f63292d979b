"""The text of a cell as somebody types it: whose it is, and what is in its magic's line.

Pure; `completion` asks it at each question of the front end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CELL_MAGICS = ("distributed", "rank")
"""Those whose cells the workers run."""

_FIRST = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*%%(\w+)")
_POOL = re.compile(r"(?<!\S)--pool(?:\s*=\s*|\s+)(\S+)")
_RANKS = re.compile(r"(?<!\S)(?:-r|--ranks)(?:\s*=\s*|\s+)(\[[^\]]*\]|\S+)")
_LINE_MAGIC = re.compile(r"[ \t]*%(\w+)(?=\s)")
_ATTRIBUTE = re.compile(r"\.\w*$")
_ROOT = re.compile(r"(?<![\w.)\]}'\"])([^\W\d]\w*)(?:\.\w*)*$")


@dataclass(frozen=True, slots=True)
class MagicLine:
    """A line that begins with a magic: its name, what follows, where that begins in the cell."""

    name: str
    text: str
    start: int

    @property
    def pool(self) -> str | None:
        """What it says after `--pool`."""
        found = _POOL.search(self.text)
        return found[1] if found else None

    @property
    def ranks(self) -> str | None:
        """What it says after `-r`; of `%%rank` all but the options."""
        if self.name == "rank":
            return "".join(_POOL.sub(" ", self.text).split()) or None
        found = _RANKS.search(self.text)
        return found[1] if found else None


def cell_magic(code: str) -> MagicLine | None:
    """Find the cell magic that a cell begins with, below comments perhaps."""
    found = _FIRST.match(code)
    if found is None:
        return None
    rest = code[found.end() :].partition("\n")[0]
    return MagicLine(found[1], rest, found.end())


def line_magic(code: str, cursor: int) -> MagicLine | None:
    """Find the line magic in whose options the cursor is, as far as it is typed."""
    begin = code.rfind("\n", 0, cursor) + 1
    found = _LINE_MAGIC.match(code[begin:cursor])
    if found is None:
        return None
    return MagicLine(found[1], code[begin + found.end() : cursor], begin + found.end())


def as_comment(code: str) -> str:
    """Give the cell as Python with each character in its place: the magic's line is a comment."""
    found = _FIRST.match(code)
    if found is None:
        return code
    place = code.index("%%", found.start(1) - 2)
    return f"{code[:place]}# {code[place + 2 :]}"


def root_at(code: str, cursor: int) -> tuple[str, bool]:
    """Find the first name of what is typed before the cursor, and whether an attribute is."""
    typed = code[:cursor]
    found = _ROOT.search(typed)
    return found[1] if found else "", _ATTRIBUTE.search(typed) is not None
