"""Tests of `nbdist.output.screen`: the terminal of one rank."""

from __future__ import annotations

import io
import random

import pytest
from tqdm import tqdm

from nbdist.output.ansi import strip
from nbdist.output.screen import LONGEST_LINE, Line, Screen

RED = "\x1b[31m"
RESET = "\x1b[0m"


def screen_of(text: str, chunk: int = 65_536, stream: str = "stdout", **settings: int) -> Screen:
    screen = Screen(**settings)
    for start in range(0, len(text), chunk):
        screen.write(stream, text[start : start + chunk])
    return screen


def shown(screen: Screen) -> list[str]:
    return [line.text for line in screen.lines()]


def nested_bars(*, leave_inner: bool) -> str:
    written = io.StringIO()
    for _ in tqdm(range(3), file=written, desc="outer", position=0, mininterval=0):
        for _ in tqdm(
            range(3), file=written, desc="inner", position=1, leave=leave_inner, mininterval=0
        ):
            pass
    return written.getvalue()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a\nb\n", ["a", "b"]),
        ("  a  \n\n\nb", ["  a  ", "", "", "b"]),
        ("no newline", ["no newline"]),
        ("", []),
        ("\n", [""]),
        ("abc\rx\n", ["xbc"]),
        ("abc\b\bX\n", ["aXc"]),
        ("10%\r20%\r30%", ["30%"]),
        ("dos\r\nline\r\n", ["dos", "line"]),
        ("long text\r\x1b[Kshort", ["short"]),
        ("long text\x1b[2K\rshort", ["short"]),
        ("abc\x1b[2Dxy", ["axy"]),
        ("ab\x1b[3Cc", ["ab   c"]),
        ("one\ntwo\x1b[A\rONE\x1b[B\rTWO", ["ONE", "TWO"]),
        ("one\ntwo\nthree\x1b[2A\x1b[Jend", ["one  end"]),
        ("abc\x1b[2D\x1b[1K", ["  c"]),
        ("a\tb", ["a\tb"]),
        ("bell\a null\0 form\f", ["bell null form"]),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ after", ["link after"]),
        ("\x1b[?25lhidden cursor\x1b[?25h\x1b(B", ["hidden cursor"]),
        ("\x1b[Aup at the top\x1b[99A", ["up at the top"]),
        ("ünïcödé 漢字 \N{GRINNING FACE}\n", ["ünïcödé 漢字 \N{GRINNING FACE}"]),
    ],
)
def test_controls(written: str, expected: list[str]) -> None:
    """A screen shows what a terminal would, however the text is cut into pieces."""
    for chunk in (1, 2, 3, 5, 1000):
        assert shown(screen_of(written, chunk)) == expected


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_nested_bars(chunk: int) -> None:
    """Nested tqdm bars are two lines; an inner bar that leaves takes its line with it."""
    lines = shown(screen_of(nested_bars(leave_inner=False), chunk))
    assert [line.split(":")[0] for line in lines] == ["outer"]
    assert "100%" in lines[0]
    lines = shown(screen_of(nested_bars(leave_inner=True), chunk))
    assert {line.split(":")[0] for line in lines} == {"outer", "inner"}


def test_colours_kept() -> None:
    """Colour codes stay, each line has all that it needs, and a character takes its own with it."""
    assert shown(screen_of(f"{RED}abc{RESET}\rX")) == [f"X{RED}bc{RESET}"]
    assert shown(screen_of(f"abc\r{RED}X{RESET}")) == [f"{RED}X{RESET}bc"]
    lines = shown(screen_of(f"{RED}red\nstill{RESET} plain\n\x1b[1mx\x1b[22my\n"))
    assert lines == [f"{RED}red{RESET}", f"{RED}still{RESET} plain", "\x1b[1mx\x1b[22my"]


def test_stderr() -> None:
    """Both streams share one screen in their order; lines that stderr wrote in say so."""
    screen = Screen()
    screen.write("stdout", "out\npart ")
    screen.write("stderr", "and error\nwarning\n")
    screen.write("stdout", "out again\n")
    assert list(screen.lines()) == [
        Line("out", stderr=False),
        Line("part and error", stderr=True),
        Line("warning", stderr=True),
        Line("out again", stderr=False),
    ]
    screen.write("stderr", "bar")
    screen.write("stdout", "\rprinted over it")
    assert screen.tail(1) == [Line("printed over it", stderr=False)]


def test_keeps_the_last_lines() -> None:
    """Of more lines than it may keep a screen has the last ones, and the number dropped."""
    screen = screen_of("".join(f"{number}\n" for number in range(1000)), 100, keep_lines=10)
    assert shown(screen) == [str(number) for number in range(990, 1000)]
    assert screen.dropped == 990
    assert screen.end == 1000
    assert [line.text for line in screen.tail(2)] == ["998", "999"]
    assert [line.text for line in screen.lines(0, 992)] == ["990", "991"]
    # A line that never ends is cut, so that memory has a bound.
    screen = Screen()
    for _ in range(LONGEST_LINE // 1_000_000 + 1):
        screen.write("stdout", "." * 1_000_000)
    assert len(screen) == 1
    screen.write("stdout", "next")
    assert len(screen) == 2


def random_text(random_: random.Random) -> str:
    parts = ["step 1", "x", "\n", "\n", "\r", "\b", "\x1b[A", "\x1b[B", "\x1b[K", "\x1b[2K"]
    parts += [RED, RESET, "\x1b[1;32m", "loss 0.5", "\x1b[2C", "\x1b[D", "\r\n"]
    return "".join(random_.choice(parts) for _ in range(300))


def test_pieces_do_not_matter() -> None:
    """However text is cut into pieces, the lines and the key come out the same."""
    random_ = random.Random(1)
    for _ in range(60):
        text = random_text(random_)
        whole = screen_of(text)
        for chunk in (1, 3, 50):
            cut = screen_of(text, chunk)
            assert cut.key == whole.key
            assert [strip(line) for line in shown(cut)] == [strip(line) for line in shown(whole)]


def test_key() -> None:
    """Keys are equal for equal screens, alike where only addresses or devices differ."""
    first = screen_of("<Model at 0x7f12ab34cd56> on cuda:0, pid 4711\n")
    second = screen_of("<Model at 0x7f99ab34cd99> on cuda:3, pid 4712\n", chunk=3)
    assert first.key.alike == second.key.alike
    assert first.key.exact != second.key.exact
    assert screen_of("rank 0: loss\n").key.alike != screen_of("rank 1: loss\n").key.alike
    assert screen_of(f"{RED}x{RESET}\n").key == screen_of("x\n").key
    assert screen_of("x\n").key != screen_of("x\n", stream="stderr").key
    # A line that is no longer kept still tells two ranks apart.
    rest = "".join(f"{number}\n" for number in range(500))
    settings = {"chunk": 64, "keep_lines": 20}
    assert screen_of("a\n" + rest, **settings).key == screen_of("a\n" + rest).key
    assert screen_of("a\n" + rest, **settings).key != screen_of("b\n" + rest, **settings).key
    # Asking for the key in between changes nothing, not even before lines are rewritten.
    text = "".join(f"{number}\n" for number in range(300)) + "\x1b[200Aabove\n" + "\x1b[250B"
    asked = Screen()
    for start in range(0, len(text), 40):
        asked.write("stdout", text[start : start + 40])
        assert asked.key == asked.key
    assert asked.key == screen_of(text).key


PLAIN = "".join(f"step {number} loss 0.{number}\n" for number in range(200_000))
COLOURED = "".join(
    f"\x1b[32mstep\x1b[0m {number} loss \x1b[1m0.{number}\x1b[0m\n" for number in range(50_000)
)
BAR = "".join(f"\rtrain {number}%|####    | {number}/100000" for number in range(100_000))


@pytest.mark.parametrize(
    ("text", "chunk", "last"),
    [
        pytest.param(PLAIN, 65_536, "step 199999 loss 0.199999", id="200,000 lines"),
        pytest.param(COLOURED, 65_536, "step 49999 loss 0.49999", id="50,000 coloured lines"),
        pytest.param("x" * 200_000, 1, "x" * 80, id="200,000 single characters"),
        pytest.param(BAR, 65_536, BAR.rpartition("\r")[2], id="100,000 states of a bar"),
    ],
)
def test_floods(text: str, chunk: int, last: str) -> None:
    """However much comes, and in whatever pieces, the last line is the right one.

    In quadratic time this would outlast every limit.
    """
    assert strip(screen_of(text, chunk).tail(200)[-1].text).startswith(last)
