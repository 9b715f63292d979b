"""What terminal colour codes (SGR, `ESC[...m`) mean.

Pure, runs in the notebook kernel; `world.screen` keeps one `Style` per character and
`notebook.ansi` turns styles into HTML.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

SGR = re.compile(r"\x1b\[([0-9;:]*)m")
RESET = "\x1b[0m"

BOLD, DIM, ITALIC, UNDERLINE, INVERSE, STRIKE = 1, 2, 3, 4, 7, 9
_ATTRIBUTES = frozenset({BOLD, DIM, ITALIC, UNDERLINE, INVERSE, STRIKE})
# What each "switch off" code ends; 21 is "double underline" or "not bold", by terminal.
_ENDS = {
    21: frozenset({BOLD}),
    22: frozenset({BOLD, DIM}),
    23: frozenset({ITALIC}),
    24: frozenset({UNDERLINE}),
    27: frozenset({INVERSE}),
    29: frozenset({STRIKE}),
}


@dataclass(frozen=True, slots=True)
class Style:
    """How a character looks; `foreground` and `background` are SGR parameters ("31", "38;5;28")."""

    foreground: str = ""
    background: str = ""
    attributes: frozenset[int] = frozenset()

    @property
    def codes(self) -> str:
        """The shortest parameters that lead from the plain style to this one, "" for plain."""
        parts = [str(code) for code in sorted(self.attributes)]
        return ";".join([*parts, *filter(None, (self.foreground, self.background))])


PLAIN = Style()


@lru_cache(maxsize=4096)
def restyle(style: Style, parameters: str) -> Style:
    """The style after `ESC[<parameters>m`; unknown parameters change nothing."""
    codes = [int(code) if code else 0 for code in parameters.replace(":", ";").split(";")]
    position = 0
    while position < len(codes):
        code = codes[position]
        if code in (38, 48):
            colour, position = _extended_colour(codes, position)
            if colour:
                style = _coloured(style, code, colour)
            continue
        style = _simple(style, code)
        position += 1
    return style


def _simple(style: Style, code: int) -> Style:
    if code == 0:
        return PLAIN
    if code in _ATTRIBUTES:
        return replace(style, attributes=style.attributes | {code})
    if code in _ENDS:
        return replace(style, attributes=style.attributes - _ENDS[code])
    if 30 <= code <= 37 or 90 <= code <= 97:
        return replace(style, foreground=str(code))
    if 40 <= code <= 47 or 100 <= code <= 107:
        return replace(style, background=str(code))
    if code == 39:
        return replace(style, foreground="")
    if code == 49:
        return replace(style, background="")
    return style


def _extended_colour(codes: list[int], position: int) -> tuple[str, int]:
    """The colour that starts with 38 or 48 at `position`, and the position after it."""
    count = {5: 3, 2: 5}.get(codes[position + 1] if position + 1 < len(codes) else -1)
    if count is None or position + count > len(codes):
        return "", len(codes)
    values = codes[position : position + count]
    if max(values[2:]) > 255:
        return "", position + count
    return ";".join(map(str, values)), position + count


def _coloured(style: Style, code: int, colour: str) -> Style:
    return replace(style, foreground=colour) if code == 38 else replace(style, background=colour)


def strip(text: str) -> str:
    """The text without its colours."""
    return SGR.sub("", text) if "\x1b" in text else text
