"""What users call their variables is nothing to nbdist's own requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook

NAMES = ("globals", "__import__", "dict", "open", "list", "os", "eval", "type")


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    """With two workers that have other values under names of Python's own."""
    environ = {"NBDIST_SNAPSHOT_DIR": str(tmp_path), "NBDIST_LOG_DIR": ""}
    notebook = Notebook("%load_ext nbdist", env=environ)
    bind = "\n".join(f"{name} = 'the user\\'s'" for name in NAMES)
    assert notebook.run(f"%%distributed -n 2\nx = [rank]\n{bind}").errors == []
    yield notebook
    notebook.close()


def test_requests_work_beside_such_names(notebook: Notebook) -> None:
    """Snapshots, memory, names to and from ranks, and calls."""
    for line in (
        "%dist_snapshot x --name s",
        "%dist_restore --name s",
        "%dist_clean",
        "%dist_status -v",
        "%dist_sync x --from 0 -r 1",
        "%dist_gather x --as xs",
    ):
        assert notebook.run(line).errors == [], line
    assert notebook.value("xs") == [[0], [0]]
    assert notebook.run(f"%%distributed\nassert {NAMES[0]} == 'the user\\'s'").errors == []
