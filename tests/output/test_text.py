"""Tests of `nbdist.output.text`: a cell's output for terminals, logs and diffs."""

from __future__ import annotations

import pytest

from nbdist.output.events import Died, Display, Failure, Output, Skipped
from nbdist.output.final import final_layout
from nbdist.output.text import MOST_CHARACTERS, failures_text, head_text
from tests.output.lab import final_text, live_text, make, out


def failure(message: str, time_ns: int = 1) -> Failure:
    traceback = ("\x1b[31m-----\x1b[39m", "Cell In[1], line 2", f"\x1b[31mE\x1b[39m: {message}")
    return Failure("E", message, traceback, time_ns)


def owners(text: str) -> dict[str, list[str]]:
    """Each line under the header that it follows."""
    found: dict[str, list[str]] = {}
    header = ""
    for line in text.split("\n")[1:]:
        if line.startswith("── "):
            header = line
            assert header not in found
            found[header] = []
        else:
            found[header].append(line)
    return found


def test_silent_cell() -> None:
    """A cell that shows nothing is one line."""
    assert final_text(make(8, lambda rank: [])) == "8 ranks · 1.2 s"


def test_values() -> None:
    """Values have headers too: every line can be attributed."""
    value = Display({"text/plain": "tensor(1.)"}, {}, is_result=True)
    text = final_text(make(2, lambda rank: [value]))
    assert text == "2 ranks · 1.2 s · ✓ 2\n── ranks 0-1 (same) ──\ntensor(1.)"


def test_every_line_has_a_header() -> None:
    """Each line stands below the header of its ranks, without colours."""
    said: dict[int, list[Output]] = {
        3: [out("\x1b[32mgreen\x1b[0m\n"), Display({"text/plain": "Figure(1)"}, {})],
        5: [out("shape (3, 4)\n"), failure("bad shard")],
    }
    text = final_text(make(8, lambda rank: said.get(rank, [out("shape (3, 4)\n")])))
    assert text.startswith("8 ranks · 1.2 s · ✓ 7 · ✗ 1\n")
    assert owners(text) == {
        "── ranks 0-2,4,6-7 (same) ──": ["shape (3, 4)"],
        "── rank 3 ──": ["green", "Figure(1)"],
        "── rank 5 ✗ ──": ["shape (3, 4)", "-----", "Cell In[1], line 2", "E: bad shard"],
    }


def test_failures_alone() -> None:
    """What ended the cell, and nothing else: in colours where they can be shown."""
    said: dict[int, list[Output]] = {0: [out("a\n")], 1: [out("b\n"), failure("bad")]}
    shown = final_layout(make(2, lambda rank: said[rank]))
    header, *traceback = failures_text(shown, colours=True)
    assert header == "── rank 1 ✗ ──"
    assert traceback == ["\x1b[31m-----\x1b[39m", "Cell In[1], line 2", "\x1b[31mE\x1b[39m: bad"]
    plain = [*failures_text(shown, colours=False)]
    assert plain == [header, "-----", "Cell In[1], line 2", "E: bad"]
    assert head_text(shown) == "2 ranks · 1.2 s · ✓ 1 · ✗ 1"


def test_failures_that_follow() -> None:
    """The first failure has its traceback, the others a line each."""
    said: dict[int, list[Output]] = {
        0: [failure("later", 9)],
        1: [failure("first", 1)],
        2: [Died(3, 10)],
    }
    found = owners(final_text(make(3, lambda rank: said[rank])))
    assert found["── rank 0 ✗ ──"] == ["E: later"]
    assert found["── rank 1 ✗ ──"][-1] == "E: first"
    assert found["── rank 2 ✗ ──"] == ["the process exited with code 3"]


def test_what_is_left_out_is_named() -> None:
    """Lines that are not shown are counted, with the way to them."""
    lines = out("".join(f"{number}\n" for number in range(500)))
    text = final_text(make(1, lambda rank: [lines, Skipped(9, 3), out("end\n")]), {0: "0.log"})
    assert "… 301 lines more: %dist_output -r 0 --all, or 0.log\n301\n" in text
    assert text.endswith("\n499\n… 3 lines only in the log: 0.log\nend")


def test_live() -> None:
    """While the cell runs there are the last lines of each group, failed ones first."""
    steps = out("".join(f"step {number}\n" for number in range(40)))
    said = {1: [steps, failure("bad")]}
    transcript = make(4, lambda rank: said.get(rank, [steps]), finished=False)
    lines = live_text(transcript, 3.0, note="ranks 0,2-3 wait").split("\n")
    assert lines[:4] == [
        "4 ranks · 3.0 s · ● 3 · ✗ 1",
        "ranks 0,2-3 wait",
        "── rank 1 ✗ ──",
        "step 28",
    ]
    assert lines[15:18] == ["E: bad", "── ranks 0,2-3 (same) ──", "step 28"]


@pytest.mark.parametrize("ranks", [4, 64, 1024])
def test_bounds(ranks: int) -> None:
    """However much was said, the text is bounded; the first and last rank are in it."""
    lines = "".join(f"step {number} {'x' * 300}\n" for number in range(100))
    transcript = make(ranks, lambda rank: [out(f"{lines}rank {rank}\n")])
    text = final_text(transcript)
    assert len(text) < MOST_CHARACTERS + 10_000
    assert f"── rank {ranks - 1} ──" in text
    assert len(live_text(transcript, 1.0)) < 20_000


def test_live_of_many_ranks() -> None:
    """Of many ranks that differ there is a line for each distinct last line, and the failed."""
    said = {40: [out("mine\n"), failure("bad")]}
    transcript = make(
        64, lambda rank: said.get(rank, [out(f"{rank}\nlast {rank // 3}\n")]), finished=False
    )
    lines = live_text(transcript, 1.0).split("\n")
    assert lines[1:8] == [
        "── rank 40 ✗ ──",
        "mine",
        "E: bad",
        "── ranks 0-2 ──",
        "last 0",
        "── ranks 3-5 ──",
        "last 1",
    ]
    assert lines[-2:] == ["last 15", "── and ranks 48-63 ──"]
