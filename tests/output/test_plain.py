"""Tests of `nbdist.output.plain`: all ranks as one stream of lines."""

from __future__ import annotations

import io

import pytest
from tqdm import tqdm

from nbdist.output.events import (
    Clear,
    Died,
    Display,
    Done,
    Failure,
    InputRequest,
    Skipped,
    Text,
    Typed,
    Update,
)
from nbdist.output.plain import PlainLines


def out(text: str) -> Text:
    return Text("stdout", text)


@pytest.fixture(autouse=True)
def no_tqdm_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tqdm from starting a thread that would outlive the test."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def test_same_line_of_all_ranks() -> None:
    """A line that every rank has said comes at once, and once."""
    lines = PlainLines(range(3))
    assert list(lines.receive(0, out("a\n"), 0.0)) == []
    assert list(lines.receive(2, out("a\n"), 0.01)) == []
    assert list(lines.receive(1, out("a\n"), 0.02)) == ["[0-2] a"]


def test_waits_for_a_moment() -> None:
    """A line of some ranks waits 100 ms for the others, no longer."""
    lines = PlainLines(range(4))
    assert list(lines.receive(0, out("a\n"), 0.0)) == []
    assert list(lines.receive(2, out("a\n"), 0.05)) == []
    assert list(lines.due(0.09)) == []
    assert list(lines.due(0.11)) == ["[0,2] a"]
    assert list(lines.receive(1, out("a\n"), 0.12)) == []
    assert list(lines.due(0.3)) == ["[1] a"]


def test_order_within_a_rank() -> None:
    """Lines of a rank never change places, though equal ones of others are merged."""
    lines = PlainLines(range(3))
    said = {0: "a\nb\nc\n", 1: "warning\na\nb\nc\n", 2: "a\nc\n"}
    for rank, text in said.items():
        list(lines.receive(rank, out(text), 0.0))
    shown = list(lines.due(0.2))
    for rank, text in said.items():
        mine = [line.partition("] ")[2] for line in shown if names(line, rank)]
        assert mine == text.splitlines()
    assert shown == ["[1] warning", "[0-2] a", "[0-1] b", "[0-2] c"]


def names(line: str, rank: int) -> bool:
    spans = line[1:].partition("]")[0].split(",")
    ends = [span.partition("-") for span in spans]
    return any(int(low) <= rank <= int(high or low) for low, _, high in ends)


def test_incomplete_lines() -> None:
    """A line is shown when it is complete, or when the rank has ended."""
    lines = PlainLines([0])
    assert list(lines.receive(0, out("loss "), 0.0)) == []
    assert list(lines.due(5.0)) == []
    assert list(lines.receive(0, out("0.5\nnext"), 6.0)) == ["[0] loss 0.5"]
    assert list(lines.receive(0, Done("ok", 6.0), 7.0)) == ["[0] next"]


def test_end_without_done() -> None:
    """At the end everything comes out, also of ranks that never finished."""
    lines = PlainLines(range(2))
    list(lines.receive(0, out("a\nb"), 0.0))
    assert list(lines.finish(0.01)) == ["[0] a", "[0] b"]
    assert list(lines.finish(0.02)) == []


def test_colours_stay() -> None:
    """Colours of a line are kept, and end with it."""
    lines = PlainLines([0])
    said = list(lines.receive(0, out("\x1b[31mred\nmore\x1b[0m\n"), 0.0))
    assert said == ["[0] \x1b[31mred\x1b[0m", "[0] \x1b[31mmore\x1b[0m"]


def test_a_bar_is_its_last_state() -> None:
    """Of a progress bar a log has one line, however long it ran; cut short, where it stood."""
    for steps in (100, 30):
        lines, written = PlainLines([0]), io.StringIO()
        shown: list[str] = []
        progress = tqdm(total=100, file=written, mininterval=0, desc="train")
        for second in range(steps):
            progress.update(1)
            text = written.getvalue()
            written.seek(0)
            written.truncate()
            shown += lines.receive(0, Text("stderr", text), float(second))
            shown += lines.due(float(second))
        assert shown == []
        progress.close()
        shown += lines.finish(float(steps))
        (line,) = shown
        assert line.startswith(f"[0] train: {steps:3}%")


def test_nested_bars_do_not_flood() -> None:
    """Nested bars, which move up and down in the terminal, do not print a line for each step."""
    written = io.StringIO()
    for _ in tqdm(range(3), file=written, desc="outer", position=0, mininterval=0):
        for _ in tqdm(
            range(50), file=written, desc="inner", position=1, mininterval=0, leave=False
        ):
            pass
    text = written.getvalue() + "done\n"
    for chunk, most in ((len(text), 2), (1000, 8)):
        lines = PlainLines([0])
        shown: list[str] = []
        for start in range(0, len(text), chunk):
            shown += lines.receive(0, Text("stderr", text[start : start + chunk]), 0.0)
        assert len(shown) <= most
        assert shown[-2].startswith("[0] outer: 100%")
        assert shown[-1] == "[0] done"


def test_other_outputs() -> None:
    """Displays show their text, failures a line, since all is told at the end; each on its own."""
    lines = PlainLines([3])
    shown: list[str] = []
    for output in (
        out("begun "),
        Display({"text/plain": "a b\n0 1", "text/html": "<table>"}, {}),
        Update({"image/png": "x"}, {}, "id"),
        Clear(wait=False),
        Skipped(100, 12, displays=2),
        Failure("ValueError", "bad", ("-----", "ValueError: bad"), 1),
        Died(-9, 2),
    ):
        shown += lines.receive(3, output, 0.0)
    assert shown == [
        "[3] begun ",
        "[3] a b",
        "[3] 0 1",
        "[3] <image/png>",
        "[3] … 2 displays left out; the newest are kept",
        "[3] … 12 lines only in the log",
        "[3] ✗ ValueError: bad",
        "[3] ✗ killed (SIGKILL), often by the system for using too much memory",
    ]


def test_what_is_typed() -> None:
    """Before a prompt comes all that is there, a line without an end too; the rest is on screen."""
    lines = PlainLines(range(2))
    shown = [*lines.receive(0, out("a\nwho"), 0.0), *lines.receive(1, out("b\n"), 0.0)]
    shown += lines.receive(0, InputRequest(1, "? "), 0.0)
    assert shown == []
    shown += lines.flush()
    shown += lines.receive(0, Typed("ada"), 0.1)
    shown += lines.finish(0.2)
    assert sorted(shown) == ["[0] a", "[0] who", "[1] b"]


def test_nothing_is_lost() -> None:
    """Every line of a big burst comes out, in order, also when ranks differ."""
    lines = PlainLines(range(4))
    shown: list[str] = []
    for rank in range(4):
        text = "".join(f"{rank if number % 2 else 'all'} {number}\n" for number in range(20_000))
        shown += lines.receive(rank, out(text), 0.0)
    shown += lines.finish(0.1)
    for rank in range(4):
        mine = [line for line in shown if names(line, rank)]
        assert [int(line.split()[-1]) for line in mine] == list(range(20_000))
    assert len(shown) == 10_000 + 40_000
