"""Tests of `nbdist.output.text`: a cell's output for terminals, logs and diffs."""

from __future__ import annotations

import io

import pytest
from tqdm import tqdm

from nbdist.output.events import (
    Clear,
    Died,
    Display,
    DisplayUpdate,
    Done,
    InputRequest,
    Skipped,
    Typed,
)
from nbdist.output.layout import final_layout
from nbdist.output.text import PlainLines, failures_text, head_text, whole_text
from nbdist.output.wording import in_log_only
from tests.output.lab import (
    err,
    failure,
    final_text,
    live_text,
    make,
    nested_bars,
    out,
    running,
)


def test_the_text_of_failures_has_nothing_else() -> None:
    """The text of failures has what failed ranks raised and nothing else, in colours if allowed."""
    shown = final_layout(make(2, lambda rank: [out("a\n"), *([failure()] if rank else [])]))
    header, *traceback = failures_text(shown, colours=True)
    assert header == "── rank 1 ✗ ──"
    assert traceback == ["-----", "\x1b[36mCell In[1], line 2\x1b[39m", "E: bad"]
    plain = [header, "-----", "Cell In[1], line 2", "E: bad"]
    assert [*failures_text(shown, colours=False)] == plain
    short = tuple(each._replace(traceback=each.traceback[:0]) for each in shown.blocks)
    assert [*failures_text(shown._replace(blocks=short), colours=True)] == [header, *traceback]
    assert head_text(shown) == "2 ranks · 1.2 s · ✓ 1 · ✗ 1"


def test_ranks_that_ended_alike_are_named_once() -> None:
    """Ranks with equal errors are named together, even if they have printed different text."""
    released = failure("it waited", 9)._replace(connections="ended")
    said = {1: [out("1\n"), failure("bad", 1)], 4: [out("4\n")]}
    ended = make(5, lambda rank: said.get(rank, [out(f"{rank}\n"), released]))
    text = [*failures_text(final_layout(ended), colours=False)]
    assert text[0] == "── rank 1 ✗ ──"
    assert text[-2:] == ["── ranks 0,2-3 ⊘ ──", "E: it waited"]
    assert len([row for row in text if row.startswith("── ")]) == 2


def test_the_whole_text_has_the_error_of_each_rank() -> None:
    """The whole text has the traceback of each chosen rank that raised an exception."""
    said = [failure(), failure("worse", 2, line=3), Died(9, 3)]
    text = whole_text(make(3, lambda rank: [out(f"{rank}\n"), said[rank]]), [1, 2])
    lines = ["-----", "Cell In[1], line 3", "E: worse"]
    assert text.split("\n")[:-1] == ["── rank 1 ──", "1", *lines, "── rank 2 ──", "2"]
    assert "exited with code 9" in text


def test_the_whole_text_counts_lines_that_only_the_log_has() -> None:
    """Lines that a screen has dropped, or that never came, are counted in their places."""
    lines = out("".join(f"{number}\n" for number in range(10_002)))
    text = whole_text(make(1, lambda rank: [lines, Skipped(9, 3), out("end\n")]), [0], {0: "0.log"})
    first, dropped, *kept, skipped, last = text.split("\n")
    assert (first, last) == ("── rank 0 ──", "end")
    assert kept == [*map(str, range(2, 10_002))]
    assert [dropped, skipped] == [in_log_only(lines, "0.log") for lines in (2, 3)]


def test_lines_that_are_left_out_are_counted() -> None:
    """Lines that are not shown are counted, with the command and the file that have them."""
    lines = out("".join(f"{number}\n" for number in range(500)))
    text = final_text(make(1, lambda rank: [lines, Skipped(9, 3), out("end\n")]), {0: "0.log"})
    assert "… 301 lines more: %dist_output -r 0 --all, or 0.log\n301\n" in text
    assert text.endswith("\n499\n… 3 lines only in the log: 0.log\nend")


def test_live_text_of_many_ranks_has_last_lines() -> None:
    """The live text of many different ranks has the failed ranks and each distinct last line."""
    said = {40: [out("mine\n"), failure()]}
    usual = "{}\nlast {}\n"
    transcript = running(64, lambda rank: said.get(rank, [out(usual.format(rank, rank // 3))]))
    lines = live_text(transcript).split("\n")
    failed, *rest = ["── rank 40 ✗ ──", "── ranks 0-2 ──", "last 0", "── ranks 3-5 ──", "last 1"]
    assert lines[1:8] == [failed, "mine", "E: bad", *rest]
    assert lines[-2:] == ["last 15", "── and 16 more: ranks 48-63 ──"]


# --- plain mode ---------------------------------------------------------------------------------


def test_a_line_waits_for_equal_lines_of_others() -> None:
    """A line of some ranks waits 100 ms for the other ranks; a line of all ranks comes at once."""
    lines = PlainLines(range(2))
    assert list(lines.receive(0, out("a\n"), 0.0)) == []
    assert list(lines.receive(1, out("a\n"), 0.02)) == ["[0-1] a"]
    lines = PlainLines(range(4))
    assert list(lines.receive(0, out("a\n"), 0.0)) == []
    assert list(lines.receive(2, out("a\n"), 0.05)) == []
    assert list(lines.due(0.09)) == []
    assert list(lines.due(0.11)) == ["[0,2] a"]
    assert list(lines.receive(1, out("a\n"), 0.12)) == []
    assert list(lines.due(0.3)) == ["[1] a"]


def test_lines_of_a_rank_stay_in_order() -> None:
    """Lines of a rank never change places, although equal lines of ranks are merged."""
    lines = PlainLines(range(3))
    said = {0: "a\nb\nc\n", 1: "warning\na\nb\nc\n", 2: "a\nc\n"}
    for rank, text in said.items():
        list(lines.receive(rank, out(text), 0.0))
    shown = list(lines.due(0.2))
    assert shown == ["[1] warning", "[0-2] a", "[0-1] b", "[0-2] c"]


def test_displays_stay_together() -> None:
    """The lines of a display, such as the rows of a table, are never among lines of other ranks."""
    lines = PlainLines(range(3))
    rows = {0: "   loss\n0   1.9", 1: "   loss\n0   1.8", 2: "   loss\n0   1.9"}
    shown: list[str] = []
    for rank, text in rows.items():
        shown += lines.receive(rank, Display({"text/plain": text}, {}), 0.0)
    shown += lines.due(0.2)
    assert shown == ["[1]    loss", "[1] 0   1.8", "[0,2]    loss", "[0,2] 0   1.9"]


def test_a_line_is_shown_once_it_is_complete() -> None:
    """A line is shown once it is complete, or once the rank or the cell has ended."""
    lines = PlainLines([0])
    assert list(lines.receive(0, out("loss "), 0.0)) == []
    assert list(lines.due(5.0)) == []
    assert list(lines.receive(0, out("0.5\nnext"), 6.0)) == ["[0] loss 0.5"]
    assert list(lines.receive(0, Done("ok", 6.0), 7.0)) == ["[0] next"]
    lines = PlainLines(range(2))
    list(lines.receive(0, out("a\nb"), 8.0))
    assert [list(lines.finish(8.01)) for _ in range(2)] == [["[0] a", "[0] b"], []]
    # Colours of a line are kept, and end with the line.
    lines = PlainLines([0])
    said = list(lines.receive(0, out("\x1b[31mred\nmore\x1b[0m\n"), 0.0))
    assert said == ["[0] \x1b[31mred\x1b[0m", "[0] \x1b[31mmore\x1b[0m"]


def test_a_line_that_is_written_again_is_shown_again() -> None:
    """If a program moves the cursor up and writes over a line, the new line is shown, too."""
    lines = PlainLines([0])
    assert list(lines.receive(0, out("step 1\nloss 5\n"), 0.0)) == ["[0] step 1", "[0] loss 5"]
    again = "\x1b[2A\x1b[Kstep 2\n\x1b[Kloss 4\n"
    assert list(lines.receive(0, out(again), 1.0)) == ["[0] step 2", "[0] loss 4"]
    assert list(lines.finish(2.0)) == []


@pytest.mark.parametrize("steps", [100, 30])
def test_a_log_has_the_last_state_of_a_bar(steps: int) -> None:
    """A log has a single line for a progress bar, with its last state, however long the bar ran."""
    lines, written = PlainLines([0]), io.StringIO()
    shown: list[str] = []
    progress = tqdm(total=100, file=written, mininterval=0, desc="train")
    for second in range(steps):
        progress.update(1)
        text = written.getvalue()
        written.seek(0)
        written.truncate()
        shown += lines.receive(0, err(text), float(second))
        shown += lines.due(float(second))
    assert shown == []
    progress.close()
    (line,) = lines.finish(float(steps))
    percent = [] if steps == 100 else [f"{steps}%"]
    assert line.split()[: 3 + len(percent)] == ["[0]", "train", *percent, f"{steps}/100"]


@pytest.mark.parametrize("chunk", [100_000, 1000])
def test_nested_bars_do_not_flood(chunk: int) -> None:
    """Nested bars, which move up and down in the terminal, do not print a line for each step."""
    text = nested_bars()[-1] + "done\n"
    lines = PlainLines([0])
    shown: list[str] = []
    for start in range(0, len(text), chunk):
        shown += lines.receive(0, err(text[start : start + chunk]), 0.0)
    shown += lines.finish(0.0)
    assert len(shown) == 2
    assert shown[0] == "[0] done"
    assert shown[1].startswith("[0] epoch  4/4")


def test_displays_and_failures_become_plain_lines() -> None:
    """Displays become lines of text, and each failure becomes a line without its traceback."""
    lines = PlainLines([3])
    shown: list[str] = []
    for output in (
        out("begun "),
        Display({"text/plain": "a b\n0 1", "text/html": "<table>"}, {}),
        DisplayUpdate({"image/png": "x"}, {}, "id"),
        Clear(wait=False),
        Skipped(100, 12, displays=2),
        failure(),
        failure("it waited")._replace(connections="ended"),
        failure("", name="KeyboardInterrupt"),
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
        "[3] ✗ E: bad",
        "[3] ⊘ E: it waited",
        "[3] ■ KeyboardInterrupt",
        "[3] ✗ killed (SIGKILL), often by the system for using too much memory",
    ]


def test_all_text_is_printed_before_a_prompt() -> None:
    """Before a prompt all text is printed, also an incomplete line; typed text is not repeated."""
    lines = PlainLines(range(2))
    shown = [*lines.receive(0, out("a\nwho"), 0.0), *lines.receive(1, out("b\n"), 0.0)]
    shown += lines.receive(0, InputRequest(1, "? "), 0.0)
    assert shown == []
    shown += lines.flush()
    shown += lines.receive(0, Typed("ada"), 0.1)
    shown += lines.finish(0.2)
    assert sorted(shown) == ["[0] a", "[0] who", "[1] b"]
