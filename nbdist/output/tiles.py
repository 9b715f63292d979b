"""Which blocks of a panel stand side by side: figures, small tables, a few short lines.  Pure.

They come in rank order from left to right, and wrap where the page is narrower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from nbdist.output.ansi import strip
from nbdist.output.layout import Block, Hidden, Item
from nbdist.output.rank_transcript import Shown
from nbdist.output.rich import embed, is_image

_WIDEST_LINE, _WIDEST_TABLE = 42, 60
_MOST_LINES = 16
_ROW = "display:flex;flex-wrap:wrap;column-gap:14px;align-items:flex-start"
# Two figures fit beside one another on a page of 700 pixels with its margins, and none is much
# larger than it was.
_FIGURE = ";flex:1 1 {}%;max-width:620px;min-width:240px;box-sizing:border-box"
_OTHER = ";flex:0 1 auto;min-width:0"


def tiled(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Yield runs of neighbours that stand side by side, and the others one by one."""
    for side_by_side, run in groupby(blocks, key=is_tile):
        found = [*run]
        if side_by_side:
            yield found
        else:
            yield from ([block] for block in found)


def is_tile(block: Block) -> bool:
    """Say whether a block is narrow and low enough; failed ranks have the whole width."""
    is_calm = block.is_open and not block.failed and not block.group.has_failed
    return is_calm and bool(block.items) and all(map(_is_narrow, block.items))


def _is_narrow(item: Item) -> bool:
    match item:
        case Hidden():
            return False
        case Shown():
            html = embed(item.display)
            if html is not None and is_image(html):
                return True
            # How wide a table is drawn is not known, but it is about as wide as its text.
            rows = item.plain.split("\n")
            return _fits(rows, _WIDEST_LINE if html is None else _WIDEST_TABLE)
        case lines:
            return _fits([strip(line.text) for line in lines], _WIDEST_LINE)


def _fits(rows: list[str], width: int) -> bool:
    return len(rows) <= _MOST_LINES and max(map(len, rows)) <= width


def tile_style(block: Block, count: int) -> str:
    """Give what a block's style says of its place among so many: figures share the width.

    Three beside one another where there is room, but two and four are two in a row.
    """
    shown = (item for item in block.items if isinstance(item, Shown))
    has_figure = any((html := embed(item.display)) and is_image(html) for item in shown)
    return _FIGURE.format(45 if count in (2, 4) else 30) if has_figure else _OTHER


def tiles_html(blocks: Iterable[str]) -> str:
    """Put the blocks side by side."""
    return f'<div style="{_ROW}">{"".join(blocks)}</div>'
