"""Parses the colour codes of terminals (SGR), and writes coloured text as legible HTML.

The notebook's process and the command `nbdist` call these functions.  Pure: no I/O here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from html import escape
from typing import NamedTuple

SGR = re.compile(r"\x1b\[([0-9;:]*)m")
RESET = "\x1b[0m"

BOLD, DIM, ITALIC, UNDERLINE, INVERSE, STRIKE = 1, 2, 3, 4, 7, 9
_ATTRIBUTES = frozenset({BOLD, DIM, ITALIC, UNDERLINE, INVERSE, STRIKE})
# The attributes that each "off" code ends.  Some terminals take 21 for "double underline" instead.
_OFF_CODES = {
    21: {BOLD},
    22: {BOLD, DIM},
    23: {ITALIC},
    24: {UNDERLINE},
    27: {INVERSE},
    29: {STRIKE},
}


class Style(NamedTuple):
    """A character's style.

    `foreground` and `background` are SGR parameters such as "38;5;28", or "" for the default
    colours.  `attributes` are codes such as `BOLD`.
    """

    foreground: str = ""
    background: str = ""
    attributes: frozenset[int] = frozenset()

    @property
    def codes(self) -> str:
        """The SGR parameters that give plain text this style; "" for the plain style."""
        parts = [str(code) for code in sorted(self.attributes)]
        return ";".join([*parts, *filter(None, (self.foreground, self.background))])


PLAIN = Style()


@lru_cache(maxsize=4096)
def restyle(style: Style, parameters: str) -> Style:
    """Return a style as the code `ESC[<parameters>m` changes it; ignore unknown parameters."""
    codes = [int(code) if code else 0 for code in parameters.replace(":", ";").split(";")]
    while codes:
        match codes:
            case [38 | 48 as code, 5, number, *codes]:
                if number < 256:
                    style = _coloured(style, code, f"{code};5;{number}")
            case [38 | 48 as code, 2, red, green, blue, *codes]:
                if max(red, green, blue) < 256:
                    style = _coloured(style, code, f"{code};2;{red};{green};{blue}")
            case [38 | 48, *_]:
                break
            case [code, *codes]:
                style = _simple(style, code)
    return style


def _simple(style: Style, code: int) -> Style:
    if code == 0:
        return PLAIN
    if code in _ATTRIBUTES:
        return style._replace(attributes=style.attributes | {code})
    if code in _OFF_CODES:
        return style._replace(attributes=style.attributes - _OFF_CODES[code])
    tens, unit = divmod(code, 10)
    if tens in (3, 4, 9, 10) and unit < 8:
        return _coloured(style, 38 if tens in (3, 9) else 48, str(code))
    return _coloured(style, code - 1, "") if code in (39, 49) else style


def _coloured(style: Style, code: int, colour: str) -> Style:
    return style._replace(foreground=colour) if code == 38 else style._replace(background=colour)


def styled(text: str) -> Iterator[tuple[str, Style]]:
    """Yield the parts of a text between its colour codes, each part with its style."""
    first, *pieces = SGR.split(text)
    yield first, PLAIN
    style = PLAIN
    for parameters, part in zip(pieces[::2], pieces[1::2], strict=True):
        style = restyle(style, parameters)
        yield part, style


def strip(text: str) -> str:
    """Return a text without its colour codes."""
    return SGR.sub("", text) if "\x1b" in text else text


def cut(text: str, width: int) -> tuple[str, str]:
    """Split a text after `width` characters; both parts have the colours of the text.

    The characters of colour codes do not count.
    """
    style, position, shown = PLAIN, 0, 0
    for code in SGR.finditer(text):
        if shown + code.start() - position >= width:
            break
        shown += code.start() - position
        style, position = restyle(style, code[1]), code.end()
    end = position + width - shown
    if style == PLAIN or end >= len(text):
        return text[:end], text[end:]
    return f"{text[:end]}{RESET}", f"\x1b[{style.codes}m{text[end:]}"


# --- as HTML ----------------------------------------------------------------------------

Rgb = tuple[int, int, int]

# Black, red, green, yellow, blue, magenta, cyan and white, then the same colours bright.
_NAMED_COLOURS = bytes.fromhex(
    "6e7681 d43a3a 1e9350 a87a00 2f7fe6 b04fc4 0c8da0 868e96"
    "7d8590 ea4e4e 28a25c bc8b10 4a90f0 c267d6 1f9cb0 959da5"
)
_RULES = {
    BOLD: "font-weight:bold",
    DIM: "opacity:0.65",
    ITALIC: "font-style:italic",
    STRIKE: "text-decoration:line-through",
    UNDERLINE: "text-decoration:underline",
}
_CUBE = (0, 95, 135, 175, 215, 255)
# Text is legible on both white and nearly black pages if its relative luminance is in this range.
_DARKEST, _LIGHTEST = 0.08, 0.38
_MARKED = 0.4
# Text with less contrast to its background than `_FAINT` turns white, or black if the background's
# luminance is above `_MIDDLE`.
_FAINT, _MIDDLE = 3.5, 0.18


def ansi_html(text: str) -> str:
    """Return the text as escaped HTML, with its colours as `<span style=...>`.

    Escape sequences other than colours must have been removed from the text before.
    """
    if "\x1b" not in text:
        return escape(text, quote=False)
    html = ""
    for part, style in styled(text):
        css, escaped = _css(style), escape(part, quote=False)
        html += f'<span style="{css}">{escaped}</span>' if css and part else escaped
    return html.replace("\x1b", "")


@lru_cache(maxsize=4096)
def _css(style: Style) -> str:
    rules = []
    front, back = _rgb(style.foreground), _rgb(style.background)
    if INVERSE in style.attributes:
        # The colours of the page are not known, so inverse text without a colour gets a grey
        # background.
        front, back = back, front or (128, 128, 128)
    if front and back:
        low, high = sorted((_luminance(front), _luminance(back)))
        if (high + 0.05) / (low + 0.05) < _FAINT:  # the contrast ratio of WCAG
            front = (0, 0, 0) if _luminance(back) > _MIDDLE else (255, 255, 255)
        rules += [f"color:{_hex(front)}", f"background-color:{_hex(back)}"]
    elif front:
        rules.append(f"color:{_hex(_legible(front))}")
    elif back:
        rules.append("background-color:rgba({},{},{},{})".format(*back, _MARKED))
    rules += [rule for attribute, rule in _RULES.items() if attribute in style.attributes]
    return ";".join(rules)


def _rgb(colour: str) -> Rgb | None:
    match [int(code) for code in colour.split(";") if code]:
        case [_, 2, red, green, blue]:
            return red, green, blue
        case [_, 5, number]:
            pass
        case [code]:
            number = code % 10 + (8 if code >= 90 else 0)
        case _:
            return None
    if number < 16:
        red, green, blue = _NAMED_COLOURS[3 * number : 3 * number + 3]
        return red, green, blue
    if number < 232:
        number -= 16
        return _CUBE[number // 36], _CUBE[number // 6 % 6], _CUBE[number % 6]
    grey = 8 + 10 * (number - 232)
    return grey, grey, grey


def _legible(colour: Rgb) -> Rgb:
    """Return the colour, or a similar shade that is legible on both white and nearly black."""
    light = _luminance(colour)
    if light > _LIGHTEST:
        return _mix(colour, 0, (_LIGHTEST / light) ** (1 / 2.2))
    if light < _DARKEST:
        # Mixing the colour with this share of white, in linear light, gives `_DARKEST`.
        share = (_DARKEST - light) / (1 - light)
        return _mix(colour, 255, 1 - share ** (1 / 2.2))
    return colour


def _luminance(colour: Rgb) -> float:
    red, green, blue = (float((part / 255) ** 2.2) for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _mix(colour: Rgb, other: int, share: float) -> Rgb:
    red, green, blue = (round(part * share + other * (1 - share)) for part in colour)
    return red, green, blue


def _hex(colour: Rgb) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)
