"""Tests of `nbdist.notebook.commands.auto`: a notebook in which plain cells run on workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.notebook.auto_mode import NOTE
from tests.notebook.front_end import Notebook
from tests.waiting import SOON


@pytest.fixture(scope="module")
def auto(own_cache: dict[str, str]) -> Iterator[Notebook]:
    """With two workers, and auto mode on."""
    first = ("%load_ext nbdist", "%dist_init -n 2", "here = 'notebook'")
    notebook = Notebook(*first, env=own_cache)
    assert "auto mode is on" in notebook.run("%dist_auto on").text
    yield notebook
    notebook.close()


def test_plain_cells(auto: Notebook) -> None:
    """They run on all ranks, in their own line numbers, and every panel says why."""
    shown = auto.run("where = rank\nwhere").text
    assert "── rank 1 ──\n1" in shown
    assert NOTE in shown
    failed = auto.run("# first\nraise ValueError(here)")
    (error,) = failed.errors
    assert "2 of 2 ranks failed" in error["evalue"]
    assert "line 2" in failed.panel["text/plain"]
    assert "ValueError: notebook" in failed.panel["text/plain"]
    assert "Docstring" in auto.run("torch.add?").text


def test_names_while_they_are_typed(auto: Notebook) -> None:
    """They are the workers' in plain cells; the notebook's in those of `%%local`."""
    auto.run("import types\nthere = types.SimpleNamespace(layer=1)")

    def offered(code: str) -> list[str]:
        reply = auto.client.complete(code, reply=True, timeout=SOON)["content"]
        return [*reply["matches"]]

    assert offered("there.la") == ["layer"]
    assert "there" in offered("x = the")
    assert "there" not in offered("%%local\nthe")
    told = auto.client.inspect("there", reply=True, timeout=SOON)["content"]
    assert "Rank:      0" in told["data"]["text/plain"]


def test_cells_that_stay_here(auto: Notebook) -> None:
    """Magics, commands, `%%local`, and whatever front ends ask for themselves."""
    assert auto.run("%%local\nhere").results == [{"text/plain": "'notebook'"}]
    assert "rank" in auto.run("# on the notebook\n%%local\nrank").errors[0]["evalue"]
    assert "".join(auto.run("!echo here").streams).split() == ["here"]
    assert auto.run("%time here").results == [{"text/plain": "'notebook'"}]
    request = auto.client.execute("", silent=True, user_expressions={"found": "here"})
    while (reply := auto.client.get_shell_msg(timeout=SOON))["parent_header"]["msg_id"] != request:
        pass
    assert reply["content"]["user_expressions"]["found"]["data"]["text/plain"] == "'notebook'"


def test_off(auto: Notebook) -> None:
    """Cells run here again, but for one with the tag; `%%local` is a cell like any other."""
    assert "auto mode is on" in auto.run("%dist_auto").text
    assert "auto mode is off" in auto.run("%dist_auto off").text
    assert auto.run("here").results == [{"text/plain": "'notebook'"}]
    assert auto.run("%%local\nhere").results == [{"text/plain": "'notebook'"}]
    assert auto.run("get_ipython().run_cell_magic('local', '', 'made = here')").errors == []
    assert auto.value("made") == "notebook"
    assert tagged(auto, "rank") == ["2 ranks · "]
    assert "`%dist_auto maybe`: `%dist_auto on` or" in auto.run("%dist_auto maybe").error


def tagged(notebook: Notebook, code: str) -> list[str]:
    """What a cell with the tag shows, as JupyterLab sends it."""
    content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
    client: Any = notebook.client
    message = client.session.msg("execute_request", content)
    message["metadata"] = {"tags": ["distributed"], "cellId": "a"}
    client.shell_channel.send(message)
    shown = []
    while True:
        said = client.get_iopub_msg(timeout=SOON)
        if said["parent_header"].get("msg_id") != message["header"]["msg_id"]:
            continue
        if said["msg_type"] == "display_data":
            shown.append(said["content"]["data"]["text/plain"][:10])
        if said["content"].get("execution_state") == "idle":
            return shown
