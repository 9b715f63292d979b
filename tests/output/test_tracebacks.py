"""Tests of `nbdist.output.wording`: own lines are seen, a library's can be folded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.ansi import strip
from nbdist.output.wording import parted, shortened, traceback_html, traceback_rows
from tests.output.lab import Panel

HEAD = "---------\nRuntimeError        Traceback (most recent call last)"
END = "\nRuntimeError: mat1 and mat2"
PLACES = {
    "cell": "\x1b[36mCell \x1b[32mIn[4], line 3\x1b[0m",
    "own": "File ~/work/model.py:7, in forward(x)",
    "torch": "File /usr/lib/python3.11/site-packages/torch/nn/module.py:1773, in call(x)",
    "json": "File /usr/lib/python3.11/json/decoder.py:337, in decode(x)",
    "old": "/usr/lib/python3.8/site-packages/torch/nn/module.py in call(x)",
    "older": "<ipython-input-3-a0b1> in <module>",
}


def traceback_of(*places: str) -> str:
    frames = [
        f"{PLACES[place]}\n      1 x = 1\n----> 3 {place}_{number}(x)\n"
        for number, place in enumerate(places)
    ]
    return "\n".join([HEAD, *frames, END])


def test_deep() -> None:
    """Of calls in libraries only the last, which raised it, is seen; all that is one's own is."""
    text = traceback_of("cell", *["torch"] * 5, "own", "torch", "json", "torch", "torch")
    rows = traceback_rows(text, 100)
    seen = [strip(row).removeprefix("----> 3 ") for row in rows if "---> " in row or "…" in row]
    folded = ["… 5 calls in torch", "… 3 calls in torch, json"]
    assert seen == ["cell_0(x)", folded[0], "own_6(x)", folded[1], "torch_10(x)"]
    assert rows[-1] == "RuntimeError: mat1 and mat2"


def test_html_has_all() -> None:
    """On a page what is folded opens."""
    text = traceback_of("cell", *["torch"] * 5, "own")
    html = traceback_html(text, 100, 1000)
    panel = Panel(html)
    assert panel.opened == [False]
    rows = [row for row in strip(text).split("\n") if row.strip()]
    assert [line for line in panel.lines if line in rows] == rows
    assert "… 5 calls in torch" in panel.lines


def test_flat() -> None:
    """A short traceback is as it was, whichever IPython wrote it."""
    for places in (["cell", "torch", "torch", "own"], ["older", "own", "old"], []):
        text = traceback_of(*places)
        assert traceback_rows(text, 100) == text.split("\n")
    assert traceback_rows(traceback_of("older", "old", "old", "old", "old"), 100)[5:7] == [
        "",
        "… 3 calls in torch",
    ]


def test_errors_that_led_to_others() -> None:
    """Each of them keeps the call that raised it."""
    one = traceback_of("cell", *["torch"] * 4)
    middle = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    rows = traceback_rows(one + middle + traceback_of("cell", *["json"] * 4), 100)
    assert [row for row in rows if row.startswith("…")] == [
        "… 3 calls in torch",
        "… 3 calls in json",
    ]
    assert sum("_4(x)" in row for row in rows) == 2


def test_too_long() -> None:
    """The cell's own line is seen however few rows there are, and the last rows are."""
    text = traceback_of("cell", *["own"] * 200)
    rows = [strip(row) for row in traceback_rows(text, 6)]
    assert rows[:3] == ["---------", "Cell In[4], line 3", "----> 3 cell_0(x)"]
    assert rows[3].startswith("… ")
    assert rows[-1] == "RuntimeError: mat1 and mat2"
    assert len(rows) == 10


def test_long_tracebacks() -> None:
    """The first line and the last ones are shown, and how many are missing."""
    html = traceback_html("\n".join(f"frame {number}" for number in range(100)), 3, 100)
    assert Panel(html).lines == ["frame 0", "… 96 lines …", "frame 97", "frame 98", "frame 99"]


@given(st.lists(st.sampled_from([*PLACES])), st.integers(1, 200))
def test_nothing_is_lost(places: list[str], most: int) -> None:
    """Put together, the parts are the traceback; fewer rows than asked for are never seen."""
    text = traceback_of(*places)
    assert "\n".join(row for part in parted(text) for row in part.rows) == text
    seen = sum(len(part.seen) for part in shortened(text, most))
    assert seen <= most + 5
