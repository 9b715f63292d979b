"""Tests of `nbdist.notebook.subshells`: what can be asked beside a cell that runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import ipykernel
import pytest

from nbdist.notebook.subshells import is_in_subshell, refusal
from tests.notebook.front_end import Notebook
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world

HAS_SUBSHELLS = int(ipykernel.__version__.partition(".")[0]) >= 7


class Subshell:
    """A console of JupyterLab's that was opened as a subshell."""

    def __init__(self, notebook: Notebook) -> None:
        self._client = notebook.client
        request = self._client.session.msg("create_subshell_request", {})
        self._client.control_channel.send(request)
        reply = self._client.get_control_msg(timeout=SOON)
        self._id = reply["content"]["subshell_id"]

    def run(self, code: str) -> str:
        """What it shows, or the error that it raises."""
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        request = self._client.session.msg("execute_request", {**content, "user_expressions": {}})
        request["header"]["subshell_id"] = self._id
        self._client.shell_channel.send(request)
        shown, deadline = [], time.monotonic() + SOON
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=0.2)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != request["header"]["msg_id"]:
                continue
            match message["content"]:
                case {"data": {"text/plain": text}}:
                    shown.append(text)
                case {"evalue": text}:
                    shown.append(text)
                case {"execution_state": "idle"}:
                    return "\n".join(shown)
        raise AssertionError(f"not done after {SOON} s: {code}")


def matches(notebook: Notebook, code: str) -> list[str]:
    """What a front end offers to complete it with."""
    request = notebook.client.complete(code)
    while True:
        reply = notebook.client.get_shell_msg(timeout=SOON)
        if reply["parent_header"]["msg_id"] == request:
            found: list[str] = reply["content"]["matches"]
            return found


@pytest.mark.skipif(not HAS_SUBSHELLS, reason="ipykernel 6 has no subshells")
def test_beside_a_cell(kernel: Notebook, tmp_path: Path) -> None:
    """Status and stacks answer, others are refused; the cell's own output is whole."""
    gate = tmp_path / "gate"
    assert kernel.run("%dist_init -n 2").errors == []
    subshell = Subshell(kernel)
    lines = "".join(f"{number}\n" for number in range(300))
    cell = (
        "%%distributed\nimport os, time\nnumber = 0\n"
        f"while number < 300 or not os.path.exists({str(gate)!r}):\n"
        "    if number < 300: print(number)\n"
        "    number += 1; time.sleep(0.002)"
    )
    kernel.client.execute(cell)
    said = ""
    while "busy" not in said or "line " not in said:
        said = subshell.run("%dist_status")
    assert said.startswith("2 workers on ")
    assert " · running a cell" in said.splitlines()[0]
    for _ in range(30):
        assert "running a cell\n── rank" in subshell.run("%dist_stack")
    assert "no lines" in subshell.run("%dist_log") or "files: " in subshell.run("%dist_log")
    refused = subshell.run("%dist_memory")
    assert refused.startswith("`%dist_memory` cannot run in a subshell")
    assert "`%dist_stack`, `%dist_status`" in refused
    assert subshell.run("%%distributed\n1").startswith("`%%distributed` cannot run")
    # That cells have ended beside it does not make who types wait for it.
    assert "number" in matches(kernel, "%%distributed\nnumb")
    gate.touch()
    again = kernel.run("%dist_output --all")
    # All that arrived while the others looked is the cell's.
    assert lines in again.text


def test_who_is_in_one():
    """By the header of the message that has sent the cell; a terminal's shell has none."""

    def shell_of(header: dict[str, Any]) -> Any:
        return SimpleNamespace(get_parent=lambda: {"header": header})

    assert is_in_subshell(shell_of({"subshell_id": "af80"}))
    assert not is_in_subshell(shell_of({"subshell_id": None}))
    assert not is_in_subshell(shell_of({}))
    terminal: Any = SimpleNamespace()
    assert not is_in_subshell(terminal)


def test_refusal(typed: Callable[[str], str]):
    """Names those that can."""
    assert str(refusal("%x", ["%b", "%a"])) == (
        "`%x` cannot run in a subshell, beside other cells; these can run: `%a`, `%b`."
    )
    assert typed("%dist_status").startswith("no workers")
