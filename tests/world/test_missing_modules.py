"""Tests of `nbdist.world.recovery`: where a module lies that another machine lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbdist.world.code_sync import CodeSync
from nbdist.world.recovery import missing_text

MISSING = "No module named 'mine'"


def test_a_module_of_the_folder(tmp_path: Path) -> None:
    """A file, or a package, or what is in one: the option that sends it."""
    (tmp_path / "mine.py").touch()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "part.py").touch()
    said = missing_text(MISSING, "b", tmp_path, [], None)
    where = "is in the notebook's folder, which b does not have: `--sync-code` sends it."
    assert said == f"`mine.py` {where}"
    said = missing_text(
        "No module named 'pkg.part'; 'pkg' is not a package", "b", tmp_path, [], None
    )
    assert said == f"`pkg/part.py` {where}"
    assert missing_text("No module named 'pkg'", "b", tmp_path, [], None).startswith(
        "`pkg/__init__.py`"
    )


@pytest.mark.world
def test_a_module_that_is_left_out(tmp_path: Path) -> None:
    """Why, and how it goes along; nothing of one that does."""
    (tmp_path / "mine.py").touch()
    code = CodeSync(tmp_path)
    code.listing.look()
    assert missing_text(MISSING, "b", tmp_path, [], code) == ""
    (tmp_path / ".nbdistignore").write_text("mine.py\n")
    code.listing.look()
    assert missing_text(MISSING, "b", tmp_path, [], code) == (
        "`mine.py` is in the notebook's folder, but `--sync-code` leaves it out: git or nbdist "
        "ignores it. `!mine.py` in .nbdistignore sends it."
    )


def test_modules_that_lie_elsewhere(tmp_path: Path) -> None:
    """In another folder of the notebook's path, or installed."""
    folder, other = tmp_path / "nb", tmp_path / "src"
    installed = tmp_path / "lib" / "python3.11" / "site-packages"
    for each in (folder, other, installed / "package"):
        each.mkdir(parents=True)
    (other / "mine.py").touch()
    (installed / "package" / "__init__.py").touch()
    path = ["", str(other), str(installed)]
    assert missing_text(MISSING, "b", folder, path, None) == (
        f"`mine` is in {other}, which b does not have: install it there."
    )
    said = missing_text("No module named 'package.sub'", "b", folder, path, None)
    assert said == "`package` is installed on the notebook's machine, but not on b."


def test_other_errors(tmp_path: Path) -> None:
    """Of modules that are nowhere, and of none."""
    assert missing_text("No module named 'nowhere_at_all'", "b", tmp_path, [], None) == ""
    assert missing_text("invalid literal", "b", tmp_path, [], None) == ""
