"""Panels are as in the files of `tests/output/panels/`, which people have looked at."""

from __future__ import annotations

import pytest

from tests.output import panels
from tests.output.lab import Panel

MOST_BYTES = 400_000  # of all files
AGAIN = "`python -m tests.output.panels --write` writes them again: look at each in a browser"


@pytest.fixture
def made() -> dict[str, bytes]:
    return panels.made()


def test_no_panel_has_changed(made: dict[str, bytes]) -> None:
    """Each panel equals its file, so that a change of its look is made on purpose."""
    changed = panels.changed(made, panels.there())
    assert changed == [], AGAIN
    assert sum(map(len, made.values())) < MOST_BYTES


def test_a_changed_missing_or_extra_file_is_named(made: dict[str, bytes]) -> None:
    """A file with another text, a missing file and an extra file are each named."""
    *kept, last = sorted(made)
    other = {name: made[name] for name in kept} | {kept[0]: b"", "99-old.txt": b""}
    assert panels.changed(made, other) == sorted([kept[0], last, "99-old.txt"])


def test_panels_have_only_markup_that_pages_allow(made: dict[str, bytes]) -> None:
    """Each panel closes its tags, and has nothing that pages remove."""
    html = [text.decode() for name, text in made.items() if name.endswith(".html")]
    assert len(html) >= 40
    for each in html:
        assert Panel(panels.own_markup(each)).lines
