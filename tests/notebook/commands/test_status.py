"""Tests of `nbdist.notebook.commands.status`: whose the names are, and that there are none."""

from __future__ import annotations

from collections.abc import Callable

from nbdist.notebook.commands.status import owners_text


def test_owners():
    """A line for each of both."""
    owners = {
        "model": ("workers", frozenset({0, 1})),
        "x": ("notebook", frozenset({0})),
        "a": ("workers", frozenset({1})),
    }
    assert owners_text(owners) == "the workers' own: a, model\nthe notebook's, shipped: x"
    assert owners_text({}) == "the workers' own: none\nthe notebook's, shipped: none"


def test_without_workers(typed: Callable[[str], str]):
    """How some are started, and with `-v` that no name is anywhere."""
    shown = typed("%dist_status -v").splitlines()
    assert shown[0].startswith("no workers are running · `%%distributed -n 4`")
    assert shown[1:] == ["the workers' own: none", "the notebook's, shipped: none"]
