"""Auto mode: whether it is on, and what it has made of the cell that runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from IPython.core.inputtransformer2 import find_end_of_continued_line, make_tokens_by_line

from nbdist.notebook.cell_text import cell_magic
from nbdist.notebook.shipping.free_names import names_filled_in

NOTE = "auto mode: `%%local` on the first line runs a cell here"
"""What every panel says while it is on."""


class AutoMode:
    """Whether it is on, and for which pool.

    `running` is what the kernel runs in place of the last cell, and `typed` what that was;
    `ran` is what it has run in place of those in the history, by their numbers.  `loaded` are the
    packages of extensions that the ranks have loaded.
    """

    def __init__(self) -> None:
        self.pool: str | None = None
        self.running = self.typed = ""
        self.ran: dict[int, str] = {}
        self.loaded: set[str] = set()

    def __repr__(self) -> str:
        return f"<AutoMode {'off' if self.pool is None else f'on for {self.pool}'}>"

    @property
    def is_on(self) -> bool:
        """Whether plain cells run on the workers."""
        return self.pool is not None


# --- which lines of a cell in auto mode run here, and which on the ranks; pure ----------------


Place = Literal["here", "there", "both", "command"]

REASONS: dict[Place, dict[str, str]] = {
    "here": {
        "nbdist's own": "local distributed rank",
        "installs for all ranks at once": "pip conda mamba micromamba uv",
        "the notebook's folder and environment, which the ranks follow": "cd pushd popd dirs dhist"
        " bookmark env set_env",
        "reads or changes the notebook's page, history or log": "load loadpy edit ed history hist"
        " recall rep rerun macro save notebook pastebin page logon logoff logstart logstop"
        " logstate store",
        "sets how the notebook takes input": "colors automagic autocall autoawait doctest_mode gui",
        "shows the notebook's help": "magic lsmagic quickref pprint connect_info qtconsole",
        "looks at the rank that failed by itself": "debug pdb tb",
        "has one server or client for all": "tensorboard sql bigquery",
    },
    "both": {
        "loads magics, or settings of figures, that either side can need": "load_ext reload_ext"
        " unload_ext matplotlib pylab config",
        "changes how modules are loaded, or what is shown": "autoreload aimport xmode precision",
    },
    "command": {
        "a command of the system, as after `!`": "sx system cat cp mv rm mkdir rmdir ls ll lf lk"
        " ldir lx less more man",
    },
}
"""Line magics that are not for the ranks alone, with the reason; of nbdist's there are more.

A command runs once, here: with each rank it would install, copy or download the same again.  On
the ranks it runs where it fills in a variable of theirs.
"""

CELLS_HERE = {
    "nbdist's own": "local distributed rank",
    "shows the same from each rank": "html HTML javascript js latex markdown svg SVG",
    "writes one file": "writefile file",
    "runs another program, which knows no variables": "bash sh script perl ruby pypy python"
    " python2 python3 system sx cmd !",
    "has one client for all": "sql bigquery",
}
"""Cell magics that are the notebook's, with the reason."""

AROUND = ("time", "capture")
"""Cell magics that are wherever all lines below them are."""

OWN_SETTINGS = re.compile(r"\s*(NbDist\b|$)")
"""Of `%config`: what only the notebook has, or shows."""

_PLACES = {
    name: place
    for place, groups in REASONS.items()
    for names in groups.values()
    for name in names.split()
}
_CELLS = {name for names in CELLS_HERE.values() for name in names.split()}
_LINE = re.compile(
    r"(?P<bound>[^\W\d][\w, ]*=\s*)?(?:%(?P<name>[^\W\d]\w*)|(?P<bang>!!?)(?![=!]))(?P<rest>.*)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Side:
    """What the notebook knows: `is_theirs` of a variable, `is_ours` of a magic in no table."""

    is_theirs: Callable[[str], bool] = lambda name: False
    is_ours: Callable[[str], bool] = lambda magic: False


@dataclass(frozen=True, slots=True)
class Part:
    """Lines of a cell, from `first` on, that run here, or on the ranks."""

    first: int
    text: str
    is_here: bool = False


def parts_of(code: str, side: Side) -> list[Part]:
    """Split a cell, in the order in which its parts run; none for a cell without code.

    What stands inside of blocks, or of strings, is never parted from them.
    """
    if (magic := cell_magic(code)) is not None or code.lstrip().startswith("%%!"):
        is_here = _is_cell_here(magic.name if magic else "!", code, side)
        return [Part(0, code, is_here=is_here)]
    lines = code.splitlines(keepends=True)
    parts: list[Part] = []
    begun = 0
    kept = [*lines]  # for the ranks
    for first, end, place in _magics(lines, side):
        text = "".join(lines[first:end])
        if place == "here":
            parts += _for_ranks(kept, begun, first)
            kept[first:end], begun = ["#\n"] * (end - first), end
        parts.append(Part(first, text, is_here=True))
    return [*parts, *_for_ranks(kept, begun, len(kept))]


def in_one(code: str, parts: list[Part], magic: str) -> str:
    """Write a cell that runs its parts in their order, each in the lines that it has here."""
    if len(parts) == 1:
        return code if parts[0].is_here else f"%%{magic}\n{code}"
    name, _, options = magic.partition(" ")
    lines = [""] * len(code.splitlines())
    for part in parts:
        if part.is_here:
            for number, line in enumerate(part.text.splitlines(), part.first):
                lines[number] = line
            continue
        free = (at for at in range(part.first, len(lines)) if not lines[at])
        text = "#\n" * part.first + part.text
        call = f"get_ipython().run_cell_magic({name!r}, {options!r}, {text!r})"
        at = next(free, len(lines))
        lines[at : at + 1] = [call]
    return "\n".join(lines)


def _is_cell_here(name: str, code: str, side: Side) -> bool:
    if name in AROUND:
        below = parts_of(code.lstrip().partition("\n")[2], side)
        return bool(below) and all(part.is_here for part in below)
    return name in _CELLS or (name not in _PLACES and side.is_ours(f"%%{name}"))


def _for_ranks(lines: list[str], first: int, end: int) -> list[Part]:
    """Give these lines as one part, if there is code in them."""
    there = lines[first:end]
    has_code = any(line.strip() and not line.lstrip().startswith("#") for line in there)
    return [Part(first, "".join(there))] if has_code else []


def _magics(lines: list[str], side: Side) -> Iterator[tuple[int, int, Place]]:
    """Find the magics and commands at the cell's own level that do not run on the ranks alone."""
    left, end = [*lines], 0
    while True:
        # One at a time: what stands behind it, such as `it's`, may be no tokens of Python.
        for first in (row for row in _beginnings(left) if row >= end):
            if found := _LINE.match(left[first]):
                break
        else:
            return
        end = find_end_of_continued_line(left, first) + 1
        whole = "".join(left[first:end])
        left[first:end] = ["\n"] * (end - first)
        found = _LINE.match(whole)
        assert found is not None
        place = _place_of(found, "".join(lines[:first]), side)
        if place != "there":
            yield first, end, place


def _place_of(found: re.Match[str], above: str, side: Side) -> Place:
    """Say where a line runs that is a magic or a command."""
    name, rest, is_bound = found["name"], found["rest"], bool(found["bound"])
    if name is not None and name.startswith("dist_"):
        return "here"
    place = _PLACES.get(name or "", "there")
    if found["bang"] or place == "command":
        uses = names_filled_in(rest)
        fills_in = any(side.is_theirs(use) or re.search(rf"\b{use}\b", above) for use in uses)
        return "there" if is_bound or fills_in else "here"
    if place == "both" and (name == "config" and OWN_SETTINGS.match(rest)):
        return "here"
    if place == "both" and rest.strip() == "nbdist":  # `%load_ext nbdist`
        return "here"
    return "here" if name not in _PLACES and side.is_ours(f"%{name}") else place


def _beginnings(lines: list[str]) -> Iterator[int]:
    """Find the lines at which a statement at the cell's own level begins; none in no Python."""
    try:
        statements = make_tokens_by_line(lines)
    except SyntaxError:  # wrong indentation: reported when the cell is sent
        return
    for tokens in statements:
        for token in tokens:
            if token.string.strip() and not token.string.startswith("#"):
                if token.start[1] == 0:
                    yield token.start[0] - 1
                break
