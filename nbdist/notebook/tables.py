"""What commands show that is more than a line: tables and blocks, for pages and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from nbdist.words import aligned

if TYPE_CHECKING:
    from nbdist.notebook.display import CellDisplay

_CELL = "padding:0 16px 0 0;text-align:left;border:none;font-family:monospace"
_SHORT = 24
"""Characters that stay in one line, such as `busy 7.5 s`, also on a narrow page."""

_BLOCK = "font-family:monospace;font-size:13px;white-space:pre-wrap;margin:0;padding:0"


@dataclass(frozen=True, slots=True)
class Shown:
    """One output in both of its forms."""

    html: str
    text: str

    def on(self, display: CellDisplay) -> None:
        """Show it there."""
        display.show_table(self.html, self.text)


def table(
    head: str, rows: Sequence[Sequence[str]], colours: Mapping[str, str] | None = None
) -> Shown:
    """Draw rows, the first of which are headings, below a line.

    `colours` are those of cells by their first words.
    """
    html = f'<div style="font-family:monospace"><b>{escape(head)}</b>'
    if rows:
        first, *others = rows
        headings = "".join(f'<th style="{_CELL}">{heading}</th>' for heading in first)
        body = "".join(
            f"<tr>{''.join(_cell(text, colours or {}) for text in row)}</tr>" for row in others
        )
        html += f'<table style="border:none;margin:4px 0"><tr>{headings}</tr>{body}</table>'
    return Shown(f"{html}</div>", "\n".join([head, *aligned(rows)]))


def block(text: str) -> Shown:
    """Show lines as they are."""
    return Shown(f'<pre style="{_BLOCK}">{escape(text)}</pre>', text)


def below(parts: Iterable[Shown]) -> Shown:
    """Show several one below the other."""
    parts = [*parts]
    html, text = "".join(part.html for part in parts), "\n".join(part.text for part in parts)
    return Shown(html, text)


def _cell(text: str, colours: Mapping[str, str]) -> str:
    colour = colours.get(text.partition(" ")[0], "")
    style = f"{_CELL};color:{colour}" if colour else _CELL
    if len(text) <= _SHORT:
        style += ";white-space:nowrap"
    return f'<td style="{style}">{escape(text)}</td>'
