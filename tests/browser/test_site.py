"""Tests of the manual as a site: what Sphinx makes of pages and docstrings, and how it looks.

The site is built once, which takes 6 s of a processor.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bs4 import BeautifulSoup, Tag

import nbdist
from nbdist import errors
from tests.browser.conftest import Lab
from tests.sources import PACKAGE

if TYPE_CHECKING:
    from playwright.sync_api import Page

DOCS = PACKAGE.parent / "docs"
BUILD_TIMEOUT = 300.0  # seconds

INTERNAL = {"call", "follow", "snapshot_store", "submit", "task", "session"}
"""Attributes of a World that nbdist's own magics use, and that the manual leaves out."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; a warning of Sphinx is an error."""
    pytest.importorskip("sphinx", reason="sphinx is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def reference(site: Path) -> BeautifulSoup:
    """The page of the reference."""
    return read(site, "reference")


def read(site: Path, page: str) -> BeautifulSoup:
    return BeautifulSoup((site / f"{page}.html").read_text(), "html.parser")


def find(page: BeautifulSoup | Tag, *where: Any, **how: Any) -> Tag:
    found = page.find(*where, **how)
    assert isinstance(found, Tag), (where, how)
    return found


def test_the_reference_has_all_public_names(reference: BeautifulSoup) -> None:
    """The reference has each name of nbdist and each method of World, and nothing internal."""
    ids = {str(each["id"]) for each in reference.select("dt[id^=nbdist]")}
    listed = {each.rpartition(".")[2] for each in ids if each.count(".") >= 1}
    assert {*nbdist.__all__} - {"__version__"} <= listed
    of_world = {name for name in vars(nbdist.World) if not name.startswith("_")}
    prefix = "nbdist.World."
    assert {each.removeprefix(prefix) for each in ids if each.startswith(prefix)} == (
        of_world - INTERNAL
    )
    assert {"nbdist.CellResult.stdout", "nbdist.Job.result"} <= ids
    in_errors = [each for each in ids if each.startswith("nbdist.errors.") and each.count(".") == 2]
    assert len(in_errors) > 20
    for each in in_errors:
        assert isinstance(getattr(errors, each.rpartition(".")[2]), type), each


def test_examples_in_docstrings_are_code(reference: BeautifulSoup) -> None:
    """Examples in docstrings are highlighted as Python, and nothing is a quotation."""
    assert reference.select("article dl blockquote") == []
    for name in ("World", "World.map", "World.gather", "CellResult", "distributed", "Job"):
        entry = find(reference, "dt", id=f"nbdist.{name}").find_next_sibling("dd")
        assert isinstance(entry, Tag)
        example = find(entry, "div", class_="highlight-python")
        assert example.select("span.n"), name
    examples = [each.get_text() for each in reference.select("div.highlight-python")]
    world = next(each for each in examples if each.startswith("with World(n=4)"))
    assert world.splitlines()[2] == '    print(world.gather("x"))'


def test_stars_and_dashes_of_options_stay(reference: BeautifulSoup) -> None:
    """Stars of patterns and double dashes of options are shown as they are typed."""
    text = find(reference, "article").get_text()
    assert "'HF_*,WANDB_*'" in text
    assert "\N{EN DASH}" not in text
    assert " -- " not in text
    signatures = [each.get_text() for each in reference.select("dt.sig")]
    assert [each for each in signatures if "~" in each] == []
    assert find(reference, "article").select("td > p em") == []
    assert "--hang-timeout SECONDS" in text


def test_code_of_distributed_cells_is_highlighted(site: Path) -> None:
    """The code below `%%distributed` is highlighted as that of other cells; so are magics in it."""
    page = read(site, "cells")
    first = find(page, "div", class_="highlight-python")
    assert first.get_text().startswith("%%distributed -n 2\nprint(")
    assert [each.get_text() for each in first.select("span.nb")] == ["print"]


@pytest.fixture
def page(jupyter: Lab) -> Iterator[Page]:
    """A new page of the browser of all tests: a process can have only one."""
    browser = jupyter.page.context.browser
    assert browser is not None
    with browser.new_page(viewport={"width": 1280, "height": 900}) as page:
        yield page


CUT_OFF = """() => [...document.querySelectorAll("article table")].filter(
    each => each.scrollWidth > each.parentElement.clientWidth
).length"""

LOOKS = """kind => {
    const block = document.querySelector(`div.highlight-${kind} pre`);
    const style = getComputedStyle(block);
    const behind = getComputedStyle(block.parentElement).backgroundColor;
    return [behind, style.backgroundColor, style.borderTopStyle, style.borderLeftStyle];
}"""


def test_no_table_is_cut_off(site: Path, page: Page) -> None:
    """On a page of 1280 or 700 pixels no column of a table is cut off."""
    for file in sorted(DOCS.rglob("*.md")):
        name = file.relative_to(DOCS).with_suffix(".html")
        page.goto((site / name).as_uri())
        for width in (1280, 700):
            page.set_viewport_size({"width": width, "height": 900})
            assert (name, width, page.evaluate(CUT_OFF)) == (name, width, 0)


def test_tables_divide_names_only_between_their_parts(site: Path) -> None:
    """A table can divide a long name between its parts, and never a short name."""
    parts = {
        each.get_text(): each.get_text("|")
        for name in ("timeouts", "reference")
        for each in read(site, name).select("td span.pre")
    }
    assert parts["world/stop.SPARE_TIMEOUT"] == "world/|stop.|SPARE_TIMEOUT"
    assert parts["--stop-on-difference"] == "--stop-|on-|difference"
    assert parts["--hang-timeout"] == "--hang-timeout"


def test_output_does_not_look_like_code(site: Path, page: Page) -> None:
    """The output of a cell has a line at its side, and no box as the cell's code has."""
    page.goto((site / "cells.html").as_uri())
    nothing = "rgba(0, 0, 0, 0)"
    for theme in ("light", "dark"):
        page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
        assert page.evaluate(LOOKS, "text") == [nothing, nothing, "none", "solid"]
        _, background, top, left = page.evaluate(LOOKS, "python")
        assert background != nothing
        assert (top, left) == ("solid", "solid")
