"""Coloured terminal text as HTML with inline styles; runs in the notebook kernel.

Colours that a program took from the 16 named ones become shades that are legible on
white and on black, since the page's theme is not known and may change.
"""

from __future__ import annotations

from functools import lru_cache
from html import escape

from nbdist.world.sgr import (
    BOLD,
    DIM,
    INVERSE,
    ITALIC,
    PLAIN,
    SGR,
    STRIKE,
    UNDERLINE,
    Style,
    restyle,
)

Rgb = tuple[int, int, int]

# black red green yellow blue magenta cyan white, then the bright ones.
_NAMED: tuple[Rgb, ...] = (
    (0x6E, 0x76, 0x81),
    (0xD4, 0x3A, 0x3A),
    (0x1E, 0x93, 0x50),
    (0xA8, 0x7A, 0x00),
    (0x2F, 0x7F, 0xE6),
    (0xB0, 0x4F, 0xC4),
    (0x0C, 0x8D, 0xA0),
    (0x86, 0x8E, 0x96),
    (0x7D, 0x85, 0x90),
    (0xEA, 0x4E, 0x4E),
    (0x28, 0xA2, 0x5C),
    (0xBC, 0x8B, 0x10),
    (0x4A, 0x90, 0xF0),
    (0xC2, 0x67, 0xD6),
    (0x1F, 0x9C, 0xB0),
    (0x95, 0x9D, 0xA5),
)
_CUBE = (0, 95, 135, 175, 215, 255)
# Relative luminance between which text can be read on both white and near-black.
_DARKEST, _LIGHTEST = 0.08, 0.38
_MARKED = 0.4


def ansi_html(text: str) -> str:
    """The text escaped, its colours as `<span style=...>`; other escapes must be gone."""
    if "\x1b" not in text:
        return escape(text, quote=False)
    parts: list[str] = []
    style, position = PLAIN, 0
    for code in SGR.finditer(text):
        parts.append(_span(text[position : code.start()], style))
        style, position = restyle(style, code[1]), code.end()
    parts.append(_span(text[position:], style))
    return "".join(parts).replace("\x1b", "")


def _span(text: str, style: Style) -> str:
    if not text:
        return ""
    css = _css(style)
    escaped = escape(text, quote=False)
    return f'<span style="{css}">{escaped}</span>' if css else escaped


@lru_cache(maxsize=4096)
def _css(style: Style) -> str:
    rules = _colour_rules(style)
    attributes = style.attributes
    if BOLD in attributes:
        rules.append("font-weight:bold")
    if DIM in attributes:
        rules.append("opacity:0.65")
    if ITALIC in attributes:
        rules.append("font-style:italic")
    if UNDERLINE in attributes:
        rules.append("text-decoration:underline")
    elif STRIKE in attributes:
        rules.append("text-decoration:line-through")
    return ";".join(rules)


def _colour_rules(style: Style) -> list[str]:
    front, back = _rgb(style.foreground), _rgb(style.background)
    if INVERSE in style.attributes:
        # The page's own colours are not known: grey stands for the text's as a background.
        front, back = back, front or (128, 128, 128)
    if front and back:
        return [f"color:{_hex(front)}", f"background-color:{_hex(back)}"]
    if front:
        return [f"color:{_hex(_legible(front))}"]
    if back:
        return ["background-color:rgba({},{},{},{})".format(*back, _MARKED)]
    return []


def _rgb(colour: str) -> Rgb | None:
    codes = [int(code) for code in colour.split(";") if code]
    match codes:
        case []:
            return None
        case [_, 5, number]:
            return _from_256(number)
        case [_, 2, red, green, blue]:
            return red, green, blue
        case [code]:
            return _NAMED[code % 10 + (8 if code >= 90 else 0)]
        case _:
            return None


def _from_256(number: int) -> Rgb:
    if number < 16:
        return _NAMED[number]
    if number >= 232:
        grey = 8 + 10 * (number - 232)
        return grey, grey, grey
    number -= 16
    return _CUBE[number // 36], _CUBE[number // 6 % 6], _CUBE[number % 6]


def _legible(colour: Rgb) -> Rgb:
    """The colour itself, or the nearest shade of it that is readable in both themes."""
    light = _luminance(colour)
    if light > _LIGHTEST:
        return _mix(colour, 0, (_LIGHTEST / light) ** (1 / 2.2))
    if light < _DARKEST:
        # So much white, in linear light, brings it up to the wanted luminance.
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
