"""Tests of `nbdist.output.ansi`: coloured text as HTML."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.ansi import ansi_html, cut, strip
from nbdist.output.screen import Screen


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "plain"),
        ("<b> & 'x' \"y\"", "&lt;b&gt; &amp; 'x' \"y\""),
        ("\x1b[1mbold\x1b[0m", '<span style="font-weight:bold">bold</span>'),
        ("\x1b[3mi\x1b[23m\x1b[4mu\x1b[24m!", None),
        ("\x1b[38;2;200;80;10mtrue\x1b[m", '<span style="color:#c8500a">true</span>'),
        ("\x1b[38;5;28mcube\x1b[39m", '<span style="color:#008700">cube</span>'),
        ("\x1b[31;44mboth\x1b[0m", '<span style="color:#000000;background-color:#2f7fe6">both</'),
        ("\x1b[2mdim", '<span style="opacity:0.65">dim</span>'),
        ("\x1b[7minverse", '<span style="background-color:rgba(128,128,128,0.4)">inverse</span>'),
        ("\x1b[38;5mbroken\x1b[38;9;9mcodes", "brokencodes"),
        ("\x1b[31m\x1b[0mnothing", "nothing"),
    ],
)
def test_styles(text: str, html: str | None) -> None:
    """Each style becomes inline CSS, plain text is only escaped."""
    made = ansi_html(text)
    if html is not None:
        assert made.startswith(html)
    else:
        assert "font-style:italic" in made
        assert "text-decoration:underline" in made
        assert made.endswith("!")


def test_nothing_to_inject() -> None:
    """No text and no code comes through as markup."""
    made = ansi_html("\x1b[31m<script>alert(1)</script>\x1b[38;2;1;2;999m<img>\x1b[0m\x1b")
    assert set(re.findall(r"<(/?\w+)", made)) == {"span", "/span"}
    assert "\x1b" not in made


def test_colours_are_legible() -> None:
    """On a white page and on a black one; what would vanish on one of them is shifted."""
    named = [(f"{code}", 2.5, 2.5) for code in (*range(30, 38), *range(90, 98))]
    cube = [(f"38;5;{code}", 2.0, 1.8) for code in (16, 17, 18, 52, 230, 231, 232, 255)]
    for code, on_white, on_black in (*named, *cube):
        light = luminance(ansi_html(f"\x1b[{code}mx"))
        assert 1.05 / (light + 0.05) > on_white, code
        assert (light + 0.05) / 0.056 > on_black, code


def luminance(html: str) -> float:
    found = re.search(r"color:#(..)(..)(..)", html)
    assert found is not None
    red, green, blue = ((int(part, 16) / 255) ** 2.2 for part in found.groups())
    return float(0.2126 * red + 0.7152 * green + 0.0722 * blue)


def test_text_on_a_background_can_be_read() -> None:
    """As the line of a traceback that is marked: in its own colour, or in black or white."""
    for codes, colour in (
        ("30;43", "#000000"),
        ("38;5;231;48;5;18", "#ffffff"),
        ("38;5;18;48;5;20", "#ffffff"),
    ):
        assert f"color:{colour};" in ansi_html(f"\x1b[{codes}mx\x1b[0m")


@given(st.lists(st.sampled_from(["ab", "\x1b[31m", "\x1b[1m", "\x1b[0m", "c"])), st.integers(0, 20))
def test_cut(parts: list[str], width: int) -> None:
    """Both parts together are the text, each with its colours."""
    text = "".join(parts)
    start, rest = cut(text, width)
    assert (strip(start), strip(rest)) == (strip(text)[:width], strip(text)[width:])
    whole, halves = Screen(), Screen()
    whole.write("stdout", text)
    for part in (start, rest):
        halves.write("stdout", f"{part}\x1b[0m")
    assert [line.text for line in halves.tail(1)] == [line.text for line in whole.tail(1)]
