"""Tests of `nbdist.output.wording`: figures, tables and HTML as part of a panel."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from nbdist.output.events import Display, plain_of
from nbdist.output.html import leftovers
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
    """Where text/plain is the name of a class, there is the source, or what there is."""
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


@pytest.mark.parametrize("kind", ["text/latex", "text/markdown"])
def test_what_stands_beside_a_picture(kind: str) -> None:
    """HTML and images are in the panel, whatever else says the same."""
    for picture in ({"text/html": "<b>x</b>"}, {"image/png": "aGk="}):
        shown = Display({kind: "x", "text/plain": "x", **picture}, {})
        assert leftovers(make(1, lambda rank, shown=shown: [shown])) == []


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
def test_leftovers(data: dict[str, Any], kind: str) -> None:
    """What would not survive or would break the panel comes after it, with its ranks, once."""
    shown = Display({**data, "text/plain": "Figure"}, {})
    transcript = make(4, lambda rank: [out("x\n"), shown] if rank else [out("x\n")])
    assert leftovers(transcript) == [((1, 2, 3), shown)]
    assert Panel(final_html(transcript)).lines[-1] == f"{kind}, shown below"


class Large(str):
    """A text that takes too long to be copied, for each display of a flood."""

    def __repr__(self) -> str:
        raise AssertionError

    encode = __repr__  # type: ignore[assignment]


def test_large_contents_are_not_copied() -> None:
    """They are compared at the cell's end all the same: control is to be back soon after Stop."""
    texts = [Large("x" * 300_000), Large("y" * 300_000)]
    shown = [Display({"text/html": text, "text/plain": "Figure"}, {}) for text in texts]
    transcript = make(2, lambda rank: shown[rank:])
    assert leftovers(transcript) == [((0,), shown[0]), ((0, 1), shown[1])]


def test_json_is_compared_by_its_values() -> None:
    """Whether or not parts of it are one object; 1 is neither 1.0 nor true."""
    one, same = {"a": ["a", "a"], "b": [1, None]}, {"a": [*"aa"], "b": [1, None]}
    others = [{"a": ["a", "a"], "b": [other, None]} for other in (1.0, True, "1")]
    values = [one, same, *others]
    transcript = make(5, lambda rank: [Display({"application/x": values[rank]}, {})])
    assert [ranks for ranks, _ in leftovers(transcript)] == [(0, 1), (2,), (3,), (4,)]


def test_addresses_in_texts() -> None:
    """They do not make two of what is otherwise equal."""
    bundle = {"application/x-mine": {"a": 1}}
    transcript = make(
        2, lambda rank: [Display({**bundle, "text/plain": f"<Mine at 0x{rank:08x}>"}, {})]
    )
    assert [ranks for ranks, _ in leftovers(transcript)] == [(0, 1)]
