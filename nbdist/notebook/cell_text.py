"""The text of a cell as somebody types it: whose it is, and what is in its magic's line.

Pure; `completion` asks it at each question of the front end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from IPython.core.inputtransformer2 import make_tokens_by_line

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


# --- what may stand around a cell's magic besides what IPython itself understands -------------


MAGICS = ("distributed", "rank", "local")

AT = "at line "
"""What comes before the number in the line that a cell with a misplaced magic becomes."""

_MAGIC = re.compile(rf"[ \t]*%%({'|'.join(MAGICS)})(?=[\s\[]|$)(.*)", re.DOTALL)
_BRACKETS = re.compile(r"\s*\[([^\]\n]*)\]")
_LOADS = re.compile(r"[ \t]*%load_ext[ \t]+nbdist[ \t]*(?:#.*)?$", re.MULTILINE)
_QUOTED = re.compile(r"'[^']*'?|\"[^\"]*\"?")
_COMMENT = re.compile(r"(?:^|\s)#")
_NOTEBOOKS = re.compile(r"(?:(\w+)\s*=\s*)?%(dist_\w+)(?:[ \t]+(.*))?")


@dataclass(frozen=True, slots=True)
class LineMagic:
    """A line of a cell that is a magic: its name, its text, and what its value is bound to."""

    name: str
    text: str
    target: str


def transform_first_lines(lines: list[str], *, local_is_plain: bool = True) -> list[str]:
    """Have a cell of ours begin with its magic; all lines below keep their numbers.

    Comments above it change places with it, and so does `%load_ext nbdist`, which has been done.
    `%%rank[0,1]`, nbdistributed's, is `%%rank 0,1`.  A cell of `%%local` is a plain one, but not in
    a terminal (`local_is_plain` False), which would take it for complete at the end of each line.
    A cell with one of them elsewhere becomes a line that raises: nothing of it runs.
    """
    if place := misplaced(lines):
        name, number = place
        return [f"get_ipython().run_line_magic('%{name}', '{AT}{number}')\n"]
    above = _count_above(lines)
    found = _MAGIC.fullmatch(lines[above]) if above < len(lines) else None
    if found is None:
        return lines
    name, rest = found.groups()
    if name == "rank":
        rest = _BRACKETS.sub(lambda ranks: " " + "".join(ranks[1].split()), rest, count=1)
    first = f"{'# ' * (name == 'local' and local_is_plain)}%%{name}{rest}"
    if not first.endswith("\n"):
        first += "\n"
    comments = [f"# {line}" if _LOADS.match(line) else line for line in lines[:above]]
    return [first, *comments, *lines[above + 1 :]]


def misplaced(lines: Sequence[str]) -> tuple[str, int] | None:
    """Find one of our cell magics that is not its cell's first line: its name, and which line.

    The line that auto mode puts above a cell is not counted.
    """
    begin = _count_above(lines)
    is_first = begin < len(lines) and _MAGIC.fullmatch(lines[begin]) is not None
    begin += is_first
    rest = [*lines[begin:]]
    code = next(iter(rest[_count_above(rest) :]), "")
    is_of_another = code.lstrip().startswith("%%") and not _MAGIC.match(code)
    if is_of_another or not any("%%" in line and _MAGIC.match(line) for line in rest):
        return None
    unseen = int(is_first and "--auto" in lines[begin - 1].split())
    for tokens in make_tokens_by_line(rest):
        token = next((each for each in tokens if each.string.strip()), None)
        if token is not None and token.string == "%":
            row = token.start[0]
            if found := _MAGIC.fullmatch(rest[row - 1]):
                return found[1], begin + row - unseen
    return None


def divide(cell: str) -> tuple[str, list[LineMagic]]:
    """Take the notebook's own magics off the end of a cell for the ranks: `%dist_gather loss`.

    None where nothing else would be left, nor from the text of another cell magic.
    """
    lines, found = cell.splitlines(keepends=True), list[LineMagic]()
    if cell.lstrip().startswith("%%"):
        return cell, found
    end = at = len(lines)
    while at:
        at -= 1
        if _is_comment(lines[at]):
            continue
        if (magic := _NOTEBOOKS.fullmatch(lines[at].rstrip())) is None:
            return "".join(lines[:end]), found
        found.insert(0, LineMagic(magic[2], magic[3] or "", magic[1] or ""))
        end = at
    return cell, []


def without_comment(line: str) -> str:
    """Take a comment off the end of a magic's line: `#` after a space, outside of quotes."""
    plain = _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), line)
    found = _COMMENT.search(plain)
    return line[: found.start()] if found else line


def _count_above(lines: Sequence[str]) -> int:
    """Count the lines at the beginning that say nothing, or load nbdist."""
    code = (at for at, line in enumerate(lines) if not (_is_comment(line) or _LOADS.match(line)))
    return next(code, len(lines))


def _is_comment(line: str) -> bool:
    text = line.strip()
    return not text or text.startswith("#")
