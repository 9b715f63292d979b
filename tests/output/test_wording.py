"""Tests of `nbdist.output.wording` and `html_parts`: errors in a line, figures, tracebacks."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbdist.output.ansi import strip
from nbdist.output.events import IGNORES_STOP, Died, Display, Failure, plain_of
from nbdist.output.html import figures, page_only_displays
from nbdist.output.html_parts import lines_html, traceback_html
from nbdist.output.layout import final_layout
from nbdist.output.mimes import MIMES
from nbdist.output.screen import ScreenLine
from nbdist.output.text import panel_text
from nbdist.output.wording import (
    clip,
    error_text,
    fold_ranks,
    seconds_text,
    shorten_traceback,
    split_traceback,
    traceback_rows,
    traceback_text,
)
from tests.output.lab import (
    Panel,
    failure,
    figure,
    final_html,
    final_text,
    live_html,
    make,
    out,
    running,
    tabs_html,
)


def test_seconds_and_errors_become_short_texts() -> None:
    """Seconds are as exact as needed, and an error is a line without colours."""
    seconds = {0.04: "0.0 s", 599.9: "599.9 s", 725.0: "12 min 5 s", 7620.0: "2 h 7 min"}
    assert {each: seconds_text(each) for each in seconds} == seconds
    failure = Failure("ValueError", "\x1b[31mbad\x1b[0m\nshard", (), 1)
    assert error_text(failure) == traceback_text(failure) == "ValueError: bad"
    assert error_text(Failure("Stop", "", (), 1)) == "Stop"
    killed = "killed (SIGKILL), often by the system for using too much memory"
    assert error_text(Died(-9, 1)) == killed
    assert error_text(Died(-9, 1, why="it ended the agent")) == "the process was killed by SIGKILL"
    assert error_text(Died(3, 1)) == "the process exited with code 3"
    stopped = Died(-9, 1, why=IGNORES_STOP)
    assert (stopped.end, stopped.by_stop) == ("ignored Stop and was killed", True)
    # Ranks with equal texts come together, in the order of the first rank of each text.
    assert [*fold_ranks({3: "b", 0: "b", 2: "a"}).items()] == [("b", [0, 3]), ("a", [2])]


PARTS = st.lists(st.sampled_from(["a", "<", "\x1b[31m", "\x1b[0m"]), max_size=60).map("".join)


@given(PARTS, st.integers(1, 30))
def test_a_clipped_text_says_how_much_more(text: str, width: int) -> None:
    """A clipped text has as much of the text as fits, and says how many characters are left out."""
    found = clip(text, width)
    plain = strip(text)
    if len(text) <= width:
        assert found == text
    elif found != text:
        start, _, more = found.partition(" … ")
        assert plain.startswith(strip(start))
        assert len(start) <= width
        assert more.endswith("more characters")


def test_lines_of_stderr_are_tinted() -> None:
    """Lines of a stream come together, those of stderr tinted; an empty line keeps its height."""
    said = [
        ScreenLine("a", stderr=False),
        ScreenLine("", stderr=False),
        ScreenLine("b", stderr=True),
    ]
    html = lines_html(said, opens=False)
    assert html.count("<pre") == 2
    assert html.count("rgba(255,80,80,0.1)") == 1
    assert ">a\n </pre>" in html


@given(length=st.integers(1, 30_000), is_coloured=st.booleans())
def test_the_rest_of_a_long_line_opens(*, length: int, is_coloured: bool) -> None:
    """All of a line is in the panel; a very long line shows its beginning, and the rest opens."""
    text = (",".join(map(str, range(10_000))))[:length]
    said = f"\x1b[31m{text}\x1b[0m" if is_coloured else text
    panel = Panel(
        lines_html([ScreenLine("a", stderr=False), ScreenLine(said, stderr=False)], opens=True)
    )
    seen = "".join(panel.words)
    is_long = len(said) > 600
    assert panel.opened == [False] * is_long
    if is_long:
        start, _more, rest = re.split(r"( … (?:[\d,]+ )?more characters\n)", seen)
        assert len(start) <= len("a\n") + 230
        seen = start + rest
    assert seen == f"a\n{text}" + "\n" * (not is_long)


def test_figures_are_in_the_block_of_their_rank() -> None:
    """Figures are in their rank's block with their size, whether the rank has 0, 1 or 2."""
    both = [figure("one"), figure("two")]
    panel = Panel(final_html(make(3, lambda rank: [out("x\n"), *both[:rank]])))
    assert [image["width"] for image in panel.images] == ["300"] * 3
    for image in panel.images:
        kind, _, encoded = str(image["src"]).partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(encoded, validate=True).startswith(b"\x89PNG")
    assert "rank 2 ✓" in panel.lines
    # An SVG is embedded as an image, never inline; invalid base64 is shown as its text.
    svg = "<svg xmlns='http://www.w3.org/2000/svg'><script>x</script></svg>"
    panel = Panel(final_html(make(1, lambda rank: [Display({"image/svg+xml": svg}, {})])))
    assert str(panel.images[0]["src"]).startswith("data:image/svg+xml;base64,")
    broken = Display({"image/png": "not base64!", "text/plain": "<Figure>"}, {})
    assert Panel(final_html(make(2, lambda rank: [out("x\n"), broken]))).lines[-1] == "<Figure>"


@pytest.mark.parametrize("kind", [each.kind for each in MIMES if each.is_base64])
def test_each_kind_of_image(kind: str) -> None:
    """Each kind of image is in all panels and found as an image, and none is below a panel."""
    shown = Display({kind: "aGk=\n", "text/plain": "<Image>"}, {kind: {"width": 90}})
    said = lambda rank: [out("x\n"), shown]  # noqa: E731
    ended = make(2, said)
    for html in (live_html(running(2, said)), final_html(ended), tabs_html(ended)):
        assert {each["src"] for each in Panel(html).images} == {f"data:{kind};base64,aGk="}
        assert {each["width"] for each in Panel(html).images} == {"90"}
    assert [each.data for _, each in figures(ended)] == [{kind: "aGk=\n"}]
    assert page_only_displays(ended) == []


def test_a_table_of_pandas_is_embedded_once() -> None:
    """A table of pandas is embedded as it is, and equal tables are embedded once."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"loss": [1.5, 2.5], "name": ["<a>", "b"]})._repr_html_()
    transcript = make(4, lambda rank: [Display({"text/html": table, "text/plain": "x"}, {})])
    assert final_html(transcript).count(table) == 1
    assert page_only_displays(transcript) == []


def test_the_source_is_shown_for_class_names() -> None:
    """If text/plain is only the name of a class, the display's source is its text."""
    plain = "<IPython.core.display.Markdown object>"
    for data, text in [
        ({"text/plain": ["a\n", "b"]}, "a\nb"),
        ({"image/png": "x"}, "<image/png>"),
        ({"text/plain": ""}, ""),
        ({}, ""),
        ({"text/markdown": "**b**", "text/plain": plain}, "**b**"),
        ({"text/latex": ["$x", "$"], "text/plain": "x"}, "x"),
        ({"application/json": {"a": [1]}, "text/plain": plain}, '{"a": [1]}'),
        ({"application/json": [0] * 1000, "text/plain": plain}, f"{str([0] * 1000)[:2000]}…"),
        ({"application/geo+json": {}, "text/plain": "<IPython.display.GeoJSON object>"}, "{}"),
        ({"application/x-mine": 1}, "<application/x-mine>"),
        ({"text/html": "<b>", "text/plain": "<IPython.core.display.HTML object>"}, None),
    ]:
        assert plain_of(data) == (data["text/plain"] if text is None else text)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"application/vnd.plotly.v1+json": {}, "text/html": "<div>x</div>"}, "plotly figure"),
        ({"application/vnd.vega.v5+json": {}, "image/png": "aGk="}, "application/vnd.vega.v5+json"),
        ({"application/javascript": "alert(1)"}, "application/javascript"),
        ({"text/markdown": "**b**"}, "Markdown"),
        ({"text/latex": "$x$"}, "LaTeX"),
        ({"application/json": {}, "text/html": "<b>x</b>"}, "JSON"),
        ({"text/html": "<script>alert(1)</script>"}, "HTML"),
        ({"text/html": "<div><b>never closed"}, "HTML"),
        ({"text/html": "</div></details>closed too often", "text/latex": "$x$"}, "HTML"),
        ({"text/html": "x" * 300_000}, "HTML"),
    ],
)
def test_displays_that_panels_cannot_embed_come_below(data: dict[str, Any], kind: str) -> None:
    """A display that a panel cannot embed comes below the panel, once, with its ranks."""
    shown = Display({**data, "text/plain": "Figure"}, {})
    transcript = make(4, lambda rank: [out("x\n"), shown] if rank else [out("x\n")])
    assert page_only_displays(transcript) == [((1, 2, 3), shown)]
    assert Panel(final_html(transcript)).lines[-1] == f"{kind}, shown below"
    # On a page a block that would say nothing else is left out; in a terminal the block stays.
    transcript = make(4, lambda rank: [shown] if rank else [out("x\n")])
    assert Panel(final_html(transcript)).lines[1:] == ["rank 0 ✓", "x"]
    assert final_text(transcript).splitlines()[1:] == ["── rank 0 ──", "x"]
    in_terminal = panel_text(final_layout(transcript, is_on_page=False))
    assert in_terminal.splitlines()[1:] == ["── rank 0 ──", "x", "── ranks 1-3 (same) ──", "Figure"]
    transcript = make(4, lambda rank: [shown, *([failure()] if rank == 2 else [])])
    assert f"{kind}, shown below" in Panel(final_html(transcript)).lines
    # HTML and images are in the panel, also if a display has other forms beside them.
    for picture in ({"text/html": "<b>x</b>"}, {"image/png": "aGk="}):
        beside = Display({"text/latex": "x", "text/markdown": "x", **picture}, {})
        assert page_only_displays(make(1, lambda rank, beside=beside: [beside])) == []


class Large(str):
    """A text whose copies fail, since large texts must not be copied for each display."""

    def __repr__(self) -> str:
        raise AssertionError

    encode = __repr__  # type: ignore[assignment]


def test_displays_below_a_panel_are_compared_by_value() -> None:
    """Displays are compared by value, without addresses in texts; large texts are not copied."""
    texts = [Large("x" * 300_000), Large("y" * 300_000)]
    shown = [Display({"text/html": text, "text/plain": "Figure"}, {}) for text in texts]
    found = page_only_displays(make(2, lambda rank: shown[rank:]))
    assert found == [((0,), shown[0]), ((0, 1), shown[1])]
    # 1 is neither 1.0 nor true; whether parts are a single object makes no difference.
    values = [{"a": ["a", "a"], "b": [1, None]}, {"a": [*"aa"], "b": [1, None]}]
    values += [{"a": ["a", "a"], "b": [other, None]} for other in (1.0, True, "1")]
    transcript = make(5, lambda rank: [Display({"application/x": values[rank]}, {})])
    assert [ranks for ranks, _ in page_only_displays(transcript)] == [(0, 1), (2,), (3,), (4,)]
    mine = [{"application/x": {"a": 1}, "text/plain": f"<Mine at 0x{n:08x}>"} for n in range(2)]
    found = page_only_displays(make(2, lambda rank: [Display(mine[rank], {})]))
    assert [ranks for ranks, _ in found] == [(0, 1)]


# --- tracebacks -------------------------------------------------------------------------


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


def test_calls_in_libraries_are_folded() -> None:
    """All calls of the user's own code are shown; of calls in libraries, only the last."""
    text = traceback_of("cell", *["torch"] * 5, "own", "torch", "json", "torch", "torch")
    rows = traceback_rows(text, 100)
    seen = [strip(row).removeprefix("----> 3 ") for row in rows if "---> " in row or "…" in row]
    folded = ["… 5 calls in torch", "… 3 calls in torch, json"]
    assert seen == ["cell_0(x)", folded[0], "own_6(x)", folded[1], "torch_10(x)"]
    assert rows[-1] == "RuntimeError: mat1 and mat2"
    # On a page folded calls can be opened.
    panel = Panel(traceback_html(shorten_traceback(text, 100, 1000)))
    assert panel.opened == [False, False]
    rows = [row for row in strip(text).split("\n") if row.strip()]
    assert [line for line in panel.lines if line in rows] == rows
    assert "… 5 calls in torch" in panel.lines
    # A short traceback does not change, whichever version of IPython wrote the text.
    for places in (["cell", "torch", "torch", "own"], ["older", "own", "old"], []):
        text = traceback_of(*places)
        assert traceback_rows(text, 100) == text.split("\n")
    assert traceback_rows(traceback_of("older", "old", "old", "old", "old"), 100)[5:7] == [
        "",
        "… 3 calls in torch",
    ]


def test_headers_fit_a_narrow_page() -> None:
    """The first two rows of a traceback are narrower than IPython's; other rows do not change."""
    name, words = "\x1b[31mValueError\x1b[39m", "Traceback (most recent call last)"
    header = f"\x1b[31m{'-' * 75}\x1b[39m\n{name}{' ' * 32}{words}\nCell In[1], line 1"
    text = f"{header}\n\nDuring handling of the above:\n\n{header}\n{'-' * 75}"
    narrow = ["-" * 66, f"ValueError{' ' * 23}{words}", "Cell In[1], line 1"]
    lines = Panel(traceback_html(shorten_traceback(text, 100, 1000))).lines
    assert lines == [*narrow, "During handling of the above:", *narrow, "-" * 75]
    long_name = f"{'-' * 75}\n{'E' * 60} {words}"
    assert Panel(traceback_html(shorten_traceback(long_name, 100, 1000))).lines == long_name.split(
        "\n"
    )


def test_each_of_several_errors_keeps_its_call() -> None:
    """If errors led to other errors, each error keeps the call that raised it."""
    one = traceback_of("cell", *["torch"] * 4)
    middle = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    rows = traceback_rows(one + middle + traceback_of("cell", *["json"] * 4), 100)
    assert [row for row in rows if row.startswith("…")] == [
        "… 3 calls in torch",
        "… 3 calls in json",
    ]
    assert sum("_4(x)" in row for row in rows) == 2
    # The cell's own line and the last rows are shown, however few rows are allowed.
    text = traceback_of("cell", *["own"] * 200)
    rows = [strip(row) for row in traceback_rows(text, 6)]
    assert rows[:3] == ["---------", "Cell In[4], line 3", "----> 3 cell_0(x)"]
    assert rows[3].startswith("… ")
    assert rows[-1] == "RuntimeError: mat1 and mat2"
    assert len(rows) == 10
    # Of any other text the first line and the last lines are shown.
    text = "\n".join(f"frame {number}" for number in range(100))
    html = traceback_html(shorten_traceback(text, 3, 100))
    assert Panel(html).lines == ["frame 0", "… 96 lines …", "frame 97", "frame 98", "frame 99"]


@given(st.lists(st.sampled_from([*PLACES])), st.integers(1, 200))
def test_the_parts_of_a_traceback_are_complete(places: list[str], most: int) -> None:
    """Joined parts are the traceback, and at most five rows more than allowed are shown."""
    text = traceback_of(*places)
    assert "\n".join(row for part in split_traceback(text) for row in part.rows) == text
    seen = sum(len(part.visible_rows) for part in shorten_traceback(text, most))
    assert seen <= most + 5
