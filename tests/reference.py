"""Writes the tables of options of `%%distributed` and of worlds: `python -m tests.reference`.

The tables in docs/reference.md come from the code; a test compares them with the page.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nbdist.config import OPTIONS
from nbdist.notebook.command import find_commands
from nbdist.notebook.options import arguments_of

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

CELL_OPTIONS_HEAD = "| option of `%%distributed` | what it does |\n|---|---|\n"
WORLD_OPTIONS_HEAD = "| option | argument | what it means |\n|---|---|---|\n"

_CODE = re.compile(
    r"(`[^`]+`|(?<!\w)'[^']+'(?!\w)|(?<![\w-])--?[a-z][\w-]*|%dist_\w+|\$\w+|~/[\w./]+"
    r"|[A-Z]+(?:_[A-Z]+)+(?:=\w+)?)"
)


def in_markdown(text: str) -> str:
    """Return a text of help as Markdown: examples and options as code, other characters escaped."""
    pieces = enumerate(_CODE.split(text))
    return "".join(
        f"`{piece.strip('`')}`" if number % 2 else re.sub(r"([*_<>|\[\]])", r"\\\1", piece)
        for number, piece in pieces
    )


def cell_option_rows() -> Iterator[str]:
    """Yield a row for each option of `%%distributed` that is not an option of the workers."""
    (distributed,) = (each for each in find_commands() if each.name == "distributed")
    for each in arguments_of(distributed.run):
        if each.dest not in OPTIONS and each.help != argparse.SUPPRESS:
            name = each.metavar or each.dest.upper()
            value = "" if each.nargs == 0 else f" [{name}]" if each.nargs == "?" else f" {name}"
            flags = ", ".join(f"`{flag}{value}`" for flag in each.option_strings)
            yield f"| {flags} | {in_markdown((each.help or '').replace('%%', '%'))} |"


def world_option_rows() -> Iterator[str]:
    """Yield a row for each option of the workers, with its flag and its argument in Python."""
    for name, each in OPTIONS.items():
        flag = f"`{each.flag} {each.metavar}".strip() + "`" if each.flag else "-"
        yield f"| {flag} | `{name}` | {in_markdown(each.help)} |"


TABLES = {CELL_OPTIONS_HEAD: cell_option_rows, WORLD_OPTIONS_HEAD: world_option_rows}


def rows_in(page: str, head: str) -> Sequence[str]:
    """Return the rows of the page's table with this head."""
    _, _, after = page.partition(head)
    return after.partition("\n\n")[0].splitlines()


def main() -> None:
    """Write the tables into the page anew."""
    page = PAGE.read_text()
    for head, make_rows in TABLES.items():
        page = page.replace(head + "\n".join(rows_in(page, head)), head + "\n".join(make_rows()))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
