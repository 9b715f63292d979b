"""Tests of `nbdist.output.rich`: figures, tables and HTML as part of a panel."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from nbdist.output.events import Display
from nbdist.output.rich import leftovers
from tests.output.lab import Panel, figure, final_html, make, out


def test_figures() -> None:
    """Figures stand in their rank's block with their size, whether there are 0, 1 or 2."""
    figures = [figure("one"), figure("two")]
    panel = Panel(final_html(make(3, lambda rank: [out("x\n"), *figures[:rank]])))
    assert [image["width"] for image in panel.images] == ["300"] * 3
    for image in panel.images:
        kind, _, encoded = str(image["src"]).partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(encoded, validate=True).startswith(b"\x89PNG")
    assert "rank 2 ✓ 1 line, 2 displays" in panel.lines


def test_svg_is_an_image() -> None:
    """An SVG cannot be inline, so it becomes an image."""
    svg = "<svg xmlns='http://www.w3.org/2000/svg'><script>x</script></svg>"
    panel = Panel(final_html(make(1, lambda rank: [Display({"image/svg+xml": svg}, {})])))
    assert str(panel.images[0]["src"]).startswith("data:image/svg+xml;base64,")


def test_data_table() -> None:
    """A pandas table is embedded as it is; equal tables once."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"loss": [1.5, 2.5], "name": ["<a>", "b"]})
    shown = Display({"text/html": table._repr_html_(), "text/plain": repr(table)}, {})
    html = final_html(make(4, lambda rank: [shown]))
    assert html.count(table._repr_html_()) == 1
    assert leftovers(make(4, lambda rank: [shown])) == []


def test_broken_image() -> None:
    """An image that is not base64 is shown as its text."""
    broken = Display({"image/png": "not base64!", "text/plain": "<Figure>"}, {})
    assert Panel(final_html(make(2, lambda rank: [out("x\n"), broken]))).lines[-1] == "<Figure>"


def test_text_of_other_kinds() -> None:
    """Markdown and LaTeX are shown as text."""
    latex = Display({"text/latex": "$x$", "text/plain": "x"}, {})
    markdown = Display({"text/markdown": "**b**", "text/plain": "bold"}, {})
    assert Panel(final_html(make(1, lambda rank: [latex, markdown]))).lines[2:] == ["x", "bold"]


@pytest.mark.parametrize(
    "data",
    [
        {"application/vnd.plotly.v1+json": {"data": []}, "text/html": "<div>x</div>"},
        {"application/vnd.vegalite.v5+json": {}, "image/png": "aGk="},
        {"application/javascript": "alert(1)"},
        {"text/html": "<script>alert(1)</script>"},
        {"text/html": "<div><b>never closed"},
        {"text/html": "</div></details>closed too often"},
        {"text/html": "x" * 300_000},
    ],
)
def test_leftovers(data: dict[str, Any]) -> None:
    """What would not survive or would break the panel comes after it, with its ranks, once."""
    shown = Display({**data, "text/plain": "Figure"}, {})
    transcript = make(4, lambda rank: [out("x\n"), shown] if rank else [out("x\n")])
    assert leftovers(transcript) == [("ranks 1-3", dict(shown.data))]
    assert Panel(final_html(transcript)).lines[-2:] == ["Figure", "shown below"]
