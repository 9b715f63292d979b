"""Tests of `nbdist.output.screen` and `ansi`: the terminal of one rank, and its colours as HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm.std import tqdm

from nbdist.output.ansi import ansi_html, cut, strip
from nbdist.output.screen import MAX_LINE_LENGTH, Screen, ScreenLine

RED = "\x1b[31m"
RESET = "\x1b[0m"


def screen_of(text: str, chunk: int = 65_536, stream: str = "stdout", **settings: int) -> Screen:
    screen = Screen(**settings)
    for start in range(0, len(text), chunk):
        screen.write(stream, text[start : start + chunk])
    return screen


def shown(screen: Screen) -> list[str]:
    return [line.text for line in screen.lines()]


def test_control_codes_act_as_in_a_terminal() -> None:
    """A screen shows text as a terminal does, and has the same key however the text is cut up."""
    for written, expected in (
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
    ):
        for chunk in (1, 2, 3, 5, 1000):
            screen = screen_of(written, chunk)
            assert shown(screen) == expected
            assert screen.key == screen_of(written).key


def test_characters_keep_their_colours() -> None:
    """Each line has all colour codes that it needs, and a character keeps its own colour."""
    assert shown(screen_of(f"{RED}abc{RESET}\rX")) == [f"X{RED}bc{RESET}"]
    assert shown(screen_of(f"abc\r{RED}X{RESET}")) == [f"{RED}X{RESET}bc"]
    lines = shown(screen_of(f"{RED}red\nstill{RESET} plain\n\x1b[1mx\x1b[22my\n"))
    assert lines == [f"{RED}red{RESET}", f"{RED}still{RESET} plain", "\x1b[1mx\x1b[22my"]


def test_lines_with_text_of_stderr_are_marked() -> None:
    """Both streams share a screen in their order, and lines with text of stderr are marked."""
    screen = Screen()
    screen.write("stdout", "out\npart ")
    screen.write("stderr", "and error\nwarning\n")
    screen.write("stdout", "out again\n")
    assert list(screen.lines()) == [
        ScreenLine("out", stderr=False),
        ScreenLine("part and error", stderr=True),
        ScreenLine("warning", stderr=True),
        ScreenLine("out again", stderr=False),
    ]
    screen.write("stderr", "bar")
    screen.write("stdout", "\rprinted over it")
    assert screen.tail(1) == [ScreenLine("printed over it", stderr=False)]


def test_empty_lines_of_stderr_are_not_marked() -> None:
    """Empty lines of stderr are not marked, and keys do not depend on the pieces of the text."""
    text = "warning\n\n\x1b[31m\x1b[0m\n  use this\n\n"
    for chunk in (1, 2, 3, 9, 10):
        screen = screen_of(text, chunk, "stderr")
        assert screen.key == screen_of(text, stream="stderr").key
        assert [line.stderr for line in screen.lines()] == [True, False, False, True, False]


def test_a_screen_keeps_its_last_lines() -> None:
    """A screen that is full keeps its last lines, and the number of dropped lines."""
    screen = screen_of("".join(f"{number}\n" for number in range(1000)), 100, keep_lines=10)
    assert shown(screen) == [str(number) for number in range(990, 1000)]
    assert screen.dropped == 990
    assert screen.end == 1000
    assert [line.text for line in screen.tail(2)] == ["998", "999"]
    assert [line.text for line in screen.lines(0, 992)] == ["990", "991"]
    # A line that never ends is cut, so that memory has a bound.
    screen = Screen()
    for _ in range(MAX_LINE_LENGTH // 1_000_000 + 1):
        screen.write("stdout", "." * 1_000_000)
    assert len(screen) == 1
    screen.write("stdout", "next")
    assert len(screen) == 2


def test_equal_screens_have_equal_keys() -> None:
    """Screens that show equal text, in equal streams, have equal keys."""
    assert screen_of(f"{RED}x{RESET}\n").key == screen_of("x\n").key
    assert screen_of("x\n").key != screen_of("x\n", stream="stderr").key
    # A line that is no longer kept still makes the keys differ.
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


@pytest.mark.parametrize(
    ("text", "times", "chunk"),
    [
        ("step {0} loss 0.{0}\n", 100_000, 65_536),
        ("\x1b[32mstep\x1b[0m {0} loss \x1b[1m0.{0}\x1b[0m\n", 50_000, 65_536),
        ("x", 100_000, 1),
        ("." * 100, 50_000, 100),
        ("\rtrain {0}%|####    | {0}/50000", 50_000, 65_536),
    ],
)
def test_the_last_line_of_a_flood_is_right(text: str, times: int, chunk: int) -> None:
    """The last line is right, however much text comes and in whatever pieces.

    In quadratic time this test would exceed every limit.
    """
    screen = screen_of("".join(text.format(number) for number in range(times)), chunk)
    last = strip(text.format(times - 1)).strip()
    assert strip(screen.tail(200)[-1].text).endswith(last)


# --- colours as HTML ---------------------------------------------------------------------------


def test_codes_of_styles_become_inline_css() -> None:
    """Each style becomes inline CSS, and no text and no other code becomes markup."""
    for text, html in (
        ("plain", "plain"),
        ("<b> & 'x' \"y\"", "&lt;b&gt; &amp; 'x' \"y\""),
        ("\x1b[1mbold\x1b[0m", '<span style="font-weight:bold">bold</span>'),
        (
            "\x1b[3mi\x1b[23m\x1b[4mu\x1b[24m!",
            '<span style="font-style:italic">i</span><span style="text-decoration:underline">u</',
        ),
        ("\x1b[38;2;200;80;10mtrue\x1b[m", '<span style="color:#c8500a">true</span>'),
        ("\x1b[38;5;28mcube\x1b[39m", '<span style="color:#008700">cube</span>'),
        ("\x1b[31;44mboth\x1b[0m", '<span style="color:#000000;background-color:#2f7fe6">both</'),
        ("\x1b[2mdim", '<span style="opacity:0.65">dim</span>'),
        ("\x1b[7minverse", '<span style="background-color:rgba(128,128,128,0.4)">inverse</span>'),
        ("\x1b[38;5mbroken\x1b[38;9;9mcodes", "brokencodes"),
        ("\x1b[31m\x1b[0mnothing", "nothing"),
    ):
        assert ansi_html(text).startswith(html)
    made = ansi_html("\x1b[31m<script>alert(1)</script>\x1b[38;2;1;2;999m<img>\x1b[0m\x1b")
    assert set(re.findall(r"<(/?\w+)", made)) == {"span", "/span"}
    assert "\x1b" not in made


def test_colours_are_legible() -> None:
    """Colours are legible on white and on black pages; a colour that would vanish is shifted."""
    named = [(f"{code}", 2.5, 2.5) for code in (*range(30, 38), *range(90, 98))]
    cube = [(f"38;5;{code}", 2.0, 1.8) for code in (16, 17, 18, 52, 230, 231, 232, 255)]
    for code, on_white, on_black in (*named, *cube):
        found = re.search(r"color:#(..)(..)(..)", ansi_html(f"\x1b[{code}mx"))
        red, green, blue = ((int(part, 16) / 255) ** 2.2 for part in found.groups())
        light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        assert 1.05 / (light + 0.05) > on_white, code
        assert (light + 0.05) / 0.056 > on_black, code
    # Text on a background keeps its own colour if that is legible, else is black or white.
    for codes in ("30;43", "38;5;231;48;5;18", "38;5;18;48;5;20"):
        colour = "000000" if codes == "30;43" else "ffffff"
        assert f"color:#{colour};" in ansi_html(f"\x1b[{codes}mx\x1b[0m")


@given(st.lists(st.sampled_from(["ab", "\x1b[31m", "\x1b[1m", "\x1b[0m", "c"])), st.integers(0, 20))
def test_both_parts_of_a_cut_keep_their_colours(parts: list[str], width: int) -> None:
    """Both parts of a cut text together are the text, each with its colours."""
    text = "".join(parts)
    start, rest = cut(text, width)
    assert (strip(start), strip(rest)) == (strip(text)[:width], strip(text)[width:])
    whole, halves = Screen(), Screen()
    whole.write("stdout", text)
    for part in (start, rest):
        halves.write("stdout", f"{part}\x1b[0m")
    assert [line.text for line in halves.tail(1)] == [line.text for line in whole.tail(1)]


# --- progress bars ------------------------------------------------------------------------------


def written(program: Callable[[IO[str], IO[str]], None], *, in_pieces: bool = True) -> Screen:
    """Return the screen after a program has written to both streams.

    With `in_pieces` each write is a piece of its own; otherwise all writes to a stream until the
    next write to the other stream are a single piece.
    """
    pieces: list[tuple[str, str]] = []

    class Stream(io.StringIO):
        name = "stdout"

        def write(self, text: str) -> int:
            pieces.append((self.name, text))
            return len(text)

    out, err = Stream(), Stream()
    err.name = "stderr"
    program(out, err)
    screen = Screen()
    for name, run in groupby(pieces, key=itemgetter(0)):
        texts = [text for _, text in run]
        for text in texts if in_pieces else ["".join(texts)]:
            screen.write(name, text)
    return screen


def bars_in(screen: Screen) -> list[tuple[str, str]]:
    """Return the names of a screen's bars, and how far the bars are."""
    return [(bar.name, bar.amount) for _, bar in screen.bars()]


@pytest.mark.parametrize("leave", [True, False])
def test_lines_beside_nested_bars_are_kept(*, leave: bool) -> None:
    """Lines beside nested bars stay as printed, and each bar is kept once, in its last state."""

    def program(out: IO[str], err: IO[str]) -> None:
        for epoch in tqdm(range(3), desc="epoch", file=err, mininterval=0):
            for step in tqdm(range(9), desc="step", file=err, mininterval=0, leave=leave):
                if step % 4 == 0:
                    print(f"  {epoch} {step}", file=out)

    screen = written(program)
    lines = [f"  {epoch} {step}" for epoch in range(3) for step in (0, 4, 8)]
    assert [line.text for line in screen.tail(99)] == lines
    assert (screen.line_count, len(screen)) == (9, 9)
    assert bars_in(screen) == [("step", "9/9")] * 3 * leave + [("epoch", "3/3")]
    # The key, by which ranks are compared, is of the lines alone.
    alone = Screen()
    alone.write("stdout", "".join(f"{line}\n" for line in lines))
    assert screen.key == alone.key


def test_a_bar_that_is_broken_off_is_kept() -> None:
    """The bar of a loop that was left early is kept, although a line took its row."""

    def program(out: IO[str], err: IO[str]) -> None:
        for step in tqdm(range(9), desc="train", file=err, mininterval=0):
            print(step, file=out)
            if step == 3:
                break

    screen = written(program)
    assert [line.text for line in screen.tail(99)] == ["0", "1", "2", "3"]
    assert bars_in(screen) == [("train", "3/9")]
    screen = Screen()
    screen.write("stderr", "\r 50%|#####     | 1/2 [00:00<00:00, 9it/s]")
    screen.write("stdout", "done")
    assert [(line.text, line.stderr) for line in screen.tail(9)] == [("done", False)]
    assert bars_in(screen) == [("", "1/2")]


def test_each_loop_that_is_broken_off_has_a_bar() -> None:
    """Each loop has a bar of its own, even if an earlier loop with an equal name was left early."""

    def program(out: IO[str], err: IO[str]) -> None:
        for epoch in range(3):
            for step in tqdm(range(9), desc="train", file=err, mininterval=0):
                if epoch != 1:
                    print(step, file=out)
                if step == 3:
                    break

    screen = written(program)
    assert [line.text for line in screen.tail(99)] == [*"0123"] * 2
    assert bars_in(screen) == [("train", "3/9")] * 3


@pytest.mark.parametrize("in_pieces", [True, False])
def test_text_behind_a_cut_bar_is_a_line(*, in_pieces: bool) -> None:
    """Text behind a bar is a line, although tqdm has cut the bar and written no end."""

    def program(out: IO[str], err: IO[str]) -> None:
        for step in (bar := tqdm(range(4), desc="cut", ncols=60, file=err, mininterval=0)):
            bar.set_postfix(loss=1.2345, accuracy=0.123456, lr=1e-4)
            print("  behind", step, file=err)

    screen = written(program, in_pieces=in_pieces)
    assert screen.tail(99) == [ScreenLine(f"  behind {step}", stderr=True) for step in range(4)]
    ((_, bar),) = screen.bars()
    assert (bar.name, bar.amount) == ("cut", "4/4")
    # How much of the postfix is left depends on the speed of the loop.
    assert "accuracy=0.123, loss=1.23, lr=0.0001".startswith(bar.other_text)
    assert "behind" not in bar.other_text


@pytest.mark.parametrize("in_pieces", [True, False])
def test_spaces_behind_a_bar_belong_to_the_line(*, in_pieces: bool) -> None:
    """Spaces behind a bar belong to the printed line, unless they erase a bar that was longer."""

    def program(out: IO[str], err: IO[str]) -> None:
        for step in (bar := tqdm(range(3), desc="train", file=err, mininterval=0)):
            for width in (9 - 3 * step, 7 - 2 * step):
                bar.set_postfix_str("x" * width)
            print("    indented", step, file=err)

    screen = written(program, in_pieces=in_pieces)
    assert [line.text for line in screen.tail(99)] == [f"    indented {n}" for n in range(3)]
    assert bars_in(screen) == [("train", "3/3")]


@pytest.mark.parametrize("stream", ["out", "err", "no"])
@pytest.mark.parametrize("every", [0, 99])
def test_bars_that_wipe_themselves_out_leave_nothing(stream: str, every: int) -> None:
    """Bars that wipe themselves out leave nothing, however seldom they are drawn."""
    lines = [f"{a} {b} {c}" for a in range(2) for b in range(2) for c in range(3)]

    def program(out: IO[str], err: IO[str]) -> None:
        left = iter(lines)
        inner = {"file": err, "mininterval": every, "leave": False}
        for _ in tqdm(range(2), desc="a", file=err, mininterval=every):
            for _ in tqdm(range(2), desc="b", **inner):
                for _ in tqdm(range(3), desc="c", **inner):
                    if stream != "no":
                        print(next(left), file=out if stream == "out" else err)

    screen = written(program)
    assert [line.text for line in screen.tail(99)] == lines * (stream != "no")
    assert bars_in(screen) == [("a", "2/2")]


@st.composite
def loops(draw: st.DrawFn) -> Callable[[IO[str], IO[str]], list[str]]:
    """Draw a program of up to three nested loops with bars; it returns the lines that it prints."""
    depth, room = draw(st.integers(1, 3)), draw(st.sampled_from([None, 60]))
    counts = draw(st.lists(st.integers(2, 3), min_size=3, max_size=3))
    intervals = draw(st.lists(st.sampled_from([0, 99]), min_size=3, max_size=3))
    stay = [True, *draw(st.lists(st.booleans(), min_size=2, max_size=2))]
    # The line behind each loop and in the innermost loop: the spaces before, and the stream.
    line = st.none() | st.tuples(st.sampled_from(["", "    "]), st.booleans())
    printed = draw(st.lists(line, min_size=4, max_size=4))
    on_stderr, has_postfix, breaks, by_tqdm = (draw(st.booleans()) for _ in range(4))

    def program(out: IO[str], err: IO[str]) -> list[str]:
        lines: list[str] = []

        def say(level: int) -> None:
            if (said := printed[level]) is not None:
                lines.append(f"{said[0]}line {len(lines)}")
                write = tqdm.write if by_tqdm else print
                write(lines[-1], file=err if said[1] else out)

        def loop(level: int) -> None:
            if level == depth:
                say(level)
                return
            bar = tqdm(
                range(counts[level]),
                desc="abc"[level],
                file=err if on_stderr else out,
                mininterval=intervals[level],
                leave=stay[level],
                ncols=room,
            )
            for step in bar:
                if has_postfix and level == depth - 1:
                    bar.set_postfix(loss=1.2345 + step, accuracy=0.123456, lr=1e-4)
                loop(level + 1)
                if breaks and step and level == depth - 1:
                    break
            say(level)

        loop(0)
        return lines

    return program


@given(program=loops(), in_pieces=st.booleans())
def test_lines_of_random_loops_are_as_printed(
    *, program: Callable[[IO[str], IO[str]], list[str]], in_pieces: bool
) -> None:
    """A screen has all lines of a program as they were printed, and no other lines."""
    lines = list[str]()
    screen = written(lambda out, err: lines.extend(program(out, err)), in_pieces=in_pieces)
    assert [line.text for line in screen.tail(999)] == lines


def test_lines_after_nested_bars_begin_at_their_start() -> None:
    """A line begins at its start, although nested bars have left the cursor behind a bar."""

    def program(out: IO[str], err: IO[str]) -> None:
        for epoch in tqdm(range(3), desc="epoch", file=err, mininterval=0):
            for step in tqdm(range(2), desc="step", file=err, mininterval=0, leave=False):
                print(step, file=out)
                print("  twice", file=out)
            print(f"loss {epoch}", file=out)

    lines = [x for n in range(3) for x in ("0", "  twice", "1", "  twice", f"loss {n}")]
    assert [line.text for line in written(program).tail(99)] == lines


@pytest.mark.parametrize(
    ("text", "lines", "bars"),
    [
        ("epoch 3: 50%|##   | 1/2 [00:00<00:00, 9it/s]\n", [], [("epoch 3", "1/2")]),
        ("50%|##   | 1/2 [00:00<00:00, 9it/s] loss [a]\n", None, []),
        ("saved\n50%|##   | 1/2 [00:00<00:00, 9it/s] loss [a]\nnext\n", None, []),
        ("\r50%|##   | 1/2 [00:00<00:00, 9it/s][a] loss\n", ["[a] loss"], [("", "1/2")]),
        ("\r3it [00:01, 3it/s][=====>...] 50% 1/2", ["[=====>...] 50% 1/2"], [("", "3it")]),
    ],
)
def test_bars_in_pieces_are_read_as_at_once(
    text: str, lines: list[str] | None, bars: list[tuple[str, str]]
) -> None:
    """Text that comes in pieces is read as the same text at once; printed text is a single line."""
    for chunk in (1, 2, 3, 5, 29, 41, 1000):
        screen = screen_of(text, chunk)
        assert shown(screen) == (text.splitlines() if lines is None else lines)
        assert bars_in(screen) == bars


def test_a_warning_behind_a_bar_is_a_line() -> None:
    """A warning behind a bar is a line of its stream, also if both come in a single piece."""
    screen = Screen()
    screen.write("stderr", "\r 50%|#####     | 1/2 [00:00<00:00, 9it/s]careful\n\r100%|#")
    screen.write("stderr", "#########| 2/2 [00:00<00:00, 9it/s]\n")
    assert screen.tail(9) == [ScreenLine("careful", stderr=True)]
    assert bars_in(screen) == [("", "2/2")]


def test_old_bars_are_forgotten() -> None:
    """Old bars are forgotten, and bars never count as lines, however many they are."""
    screen = Screen(keep_lines=100)
    for number in range(3000):
        screen.write("stderr", f"\r100%|#####| {number}/{number} [00:00<00:00, 9it/s]\n")
        screen.write("stdout", f"{number}\n")
    assert screen.line_count == 3000
    assert [line.text for line in screen.tail(3)] == ["2997", "2998", "2999"]
    assert len(screen) == screen.line_count - screen.dropped_lines <= 100
    assert 900 < len(screen.bars()) < 1300
    # A bar far above the last rows, under the cursor, does not count as a line either.
    bar = "\r100%|#####| 1/1 [00:00<00:00, 9it/s]"
    screen = screen_of(f"{bar}\n{bar}\n{bar}\n\x1b[3A\r{bar}", keep_lines=1)
    assert len(screen) == 0
    assert screen_of(f"{bar}\na\x1b[A{bar}", keep_lines=1).line_count == 1


def test_bars_of_joined_screens_are_no_lines() -> None:
    """Bars among the lines of joined screens do not count as lines."""
    screens = [Screen(), Screen()]
    for screen in screens:
        screen.write("stderr", "\r100%|#####| 1/1 [00:00<00:00, 9it/s]\n")
        screen.write("stdout", "a\nb\n")
    joined = Screen.joined(screens)
    assert (joined.line_count, joined.dropped_lines, len(joined)) == (4, 0, 4)
    assert bars_in(joined) == [("", "1/1")] * 2
