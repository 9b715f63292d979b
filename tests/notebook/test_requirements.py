"""Versions that nbdist does not run with, and what is said of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.notebook.extension import check_libraries
from nbdist.system.requirements import is_within
from tests.notebook.front_end import Notebook


def test_what_is_installed_is_right() -> None:
    """Nothing is said where pip has installed what pyproject.toml asks for."""
    check_libraries()


@pytest.mark.parametrize(
    ("found", "wanted", "is_right"),
    [
        ("6.17.1", ">=6.17.1,!=7.0.*", True),
        ("6.4.0", ">=6.17.1,!=7.0.*", False),
        ("7.0.1", ">=6.17.1,!=7.0.*", False),
        ("2.13.0+cpu", ">=2.8", True),
        ("2.8.0a0+6e3f12.nv25.5", ">=2.8", True),
        ("2.7.1+cu126", ">=2.8", False),
        ("4.0", ">=3.0,<4", False),
        ("our own", ">=2.8", True),
    ],
)
def test_builds_and_previews_are_their_version(found: str, wanted: str, is_right: bool) -> None:  # noqa: FBT001
    """What stands after a version's number does not count."""
    assert is_within(found, wanted) is is_right


@pytest.mark.own_agent
def test_an_old_library_is_refused(fresh: Callable[..., Notebook], tmp_path: Path) -> None:
    """`%load_ext` says in one line what is wrong and what to do; nothing is loaded or started."""
    metadata = tmp_path / "torch-2.3.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.3.1\n")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    notebook = fresh(env={"PYTHONPATH": path})
    error = notebook.run("%load_ext nbdist").error
    assert error.startswith(
        "WrongVersion: nbdist does not run with torch 2.3.1, so nothing was loaded: "
        "`%pip install 'torch>="
    )
    assert error.endswith("'`, then restart the kernel.")
    assert notebook.value("'distributed' in get_ipython().magics_manager.magics['cell']") is False
    assert notebook.process.children() == []
