"""Cells that an assistant runs by `nbdist mcp`, as the notebook's user sees them in JupyterLab."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import nbformat
import pytest
from anyio.from_thread import start_blocking_portal

from tests.browser.conftest import NO_IDLE_IMPORTS

if TYPE_CHECKING:
    from tests.browser.conftest import Lab

WORLD = f"page-{os.getpid()}"


def test_cells_of_an_assistant_are_below_the_user_cell(lab: Lab) -> None:
    """The assistant's name, code and output are below the user's cell, in page and saved file."""
    sdk, types = pytest.importorskip("mcp"), pytest.importorskip("mcp_types")
    cells = [
        f"{NO_IDLE_IMPORTS}%load_ext nbdist",
        f"%%distributed -n 2 --name {WORLD}\nloss = 2.5 - rank\nloss",
    ]
    lab.write("assistant.ipynb", cells)
    notebook = lab.open("assistant.ipynb")
    notebook.run_all()

    async def ask() -> None:
        args = ["-m", "nbdist.terminal", "mcp", "--allow-run"]
        server = sdk.StdioServerParameters(command=sys.executable, args=args, env={**os.environ})
        about = types.Implementation(name="<b>helper</b>", version="2.1")
        async with sdk.Client(server, client_info=about) as client:
            given = {"world": WORLD, "code": "found = loss * 2\nfound"}
            await client.call_tool("run", given)
            await client.call_tool("run", {"world": WORLD, "code": "found / 0"})

    with start_blocking_portal() as portal:  # playwright has this thread's loop
        portal.call(ask)
    said = "<b>helper</b> 2.1 ran this by `nbdist mcp`"
    shown = notebook.wait_for(1, "ZeroDivisionError")
    for text in (said, "found = loss * 2", "5.0", "3.0"):
        assert text in shown
    notebook.screenshot("assistant")
    notebook.screenshot("assistant-narrow", width=700, theme="JupyterLab Dark")
    notebook.save()
    saved = nbformat.read(lab.folder / "assistant.ipynb", as_version=4)
    assert said in str(saved.cells[1].outputs)
