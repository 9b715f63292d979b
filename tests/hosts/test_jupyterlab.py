"""The notebook about many machines in JupyterLab, as its reader sees it: two hosts over ssh."""

from __future__ import annotations

import shutil

import pytest

from tests.browser.conftest import Lab, browser, browser_path, lab
from tests.browser.test_quickstart import all_text, clear_outputs
from tests.hosts.network import Host
from tests.notebooks.test_notebooks import MANY_MACHINES

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

__all__ = ["browser", "browser_path", "lab"]
"""Fixtures of the browser's tests."""


def test_many_machines_in_jupyterlab(hosts: list[Host], path: None, lab: Lab) -> None:
    """Run All goes through, and each panel says on which host what was."""
    copy = lab.folder / MANY_MACHINES.name
    shutil.copy(MANY_MACHINES, copy)
    clear_outputs(copy)
    notebook = lab.open(copy.name)
    cells = notebook.run_all()
    notebook.screenshot("many-machines")
    shown = all_text(cells)
    assert "rank 2 is worker 0 on node2" in shown
    assert "rank 3 on node2" in shown
    assert "ranks that answer: 4" in shown
