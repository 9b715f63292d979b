"""Tutorials on several hosts: the one about them, and the others with another first line."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.hosts.network import Host
from tests.notebooks.test_notebooks import (
    MANY_MACHINES,
    NOTEBOOKS,
    code_cells,
    failed,
    is_to_fail,
    kinds,
    run,
    text,
)

pytestmark = pytest.mark.timeout(300)

ON_HOSTS = "--hosts node1:2,node2:2"


@pytest.mark.usefixtures("hosts", "path")
@pytest.mark.parametrize("tutorial", NOTEBOOKS, ids=lambda path: path.stem)
def test_tutorials_run_on_two_hosts(tutorial: Path, tmp_path: Path) -> None:
    """Only the line that starts the workers differs; cells fail that are to fail, and no other."""
    notebook = nbformat.read(tutorial, as_version=4)
    for cell in code_cells(notebook):
        cell.source = cell.source.replace("-n 4", ON_HOSTS)
    for cell in code_cells(run(notebook, tmp_path)):
        assert bool(failed(cell)) == is_to_fail(cell), cell


def test_many_machines(hosts: list[Host], path: None, tmp_path: Path) -> None:
    """It runs and is saved as it runs, and shows what two hosts have learned together."""
    saved = nbformat.read(MANY_MACHINES, as_version=4)
    fresh = run(saved, tmp_path)
    for cell, again in zip(code_cells(saved), code_cells(fresh), strict=True):
        assert failed(cell) == failed(again), again
        assert bool(failed(again)) == is_to_fail(again), again
    assert [kinds(cell) for cell in code_cells(saved)] == [kinds(c) for c in code_cells(fresh)]
    for notebook in (saved, fresh):
        assert "rank 2 is worker 0 on node2" in text(notebook)
        said = [o.evalue for cell in code_cells(notebook) for o in cell.outputs if "evalue" in o]
        assert "rank 3 on node2" in said[0]
        assert "rank 1 on node1" in said[1]
        assert "ranks that answer: 4" in text(notebook)
