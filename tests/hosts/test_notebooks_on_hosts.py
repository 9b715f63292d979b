"""Tutorials on several hosts: the one about them, and another one with another first line."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.hosts.network import Host
from tests.notebooks.test_notebooks import (
    MANY_MACHINES,
    NOTEBOOKS,
    check_run,
    code_cells,
    learned,
    run,
    text,
)


@pytest.mark.usefixtures("hosts", "path")
def test_the_quickstart_on_two_hosts(tmp_path: Path) -> None:
    """Only the line that starts the workers differs; what is shown is of the same kinds."""
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    [start] = [cell for cell in code_cells(notebook) if "-n 4" in cell.source]
    start.source = start.source.replace("-n 4", "--hosts node1:2,node2:2")
    fresh = run(notebook, tmp_path)
    check_run(notebook, fresh)
    learned(fresh)


def test_many_machines(hosts: list[Host], path: None, tmp_path: Path) -> None:
    """It runs and is saved as it runs, and shows what two hosts have learned together."""
    saved = nbformat.read(MANY_MACHINES, as_version=4)
    fresh = run(saved, tmp_path)
    check_run(saved, fresh)
    for notebook in (saved, fresh):
        assert "rank 2 is worker 0 on node2" in text(notebook)
        said = [o.evalue for cell in code_cells(notebook) for o in cell.outputs if "evalue" in o]
        assert "rank 3 on node2" in said[0]
        assert "rank 1 on node1" in said[1]
        assert "ranks that answer: 4" in text(notebook)
