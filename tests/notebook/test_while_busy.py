"""Tests of `nbdist.notebook.completion`: questions that come while a cell runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import ipykernel
import pytest

from tests.notebook.front_end import Notebook, Outcome, lasting
from tests.waiting import SOON

pytestmark = pytest.mark.skipif(
    int(ipykernel.__version__.split(".")[0]) < 7, reason="ipykernel 6 has one thread for requests"
)


two = lasting("%load_ext nbdist", "%%distributed -n 2\nimport pathlib, time\nmine = 1")


class Gate:
    """A file for which a cell waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wait = f"import pathlib, time\nwhile not pathlib.Path({str(path)!r}).exists(): " \
                    "time.sleep(0.01)"  # fmt: skip

    def open(self) -> None:
        self.path.touch()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.open()


def ask_meanwhile(notebook: Notebook, cell: str, gate: Gate, ask: Callable[[], str]) -> Any:
    """The reply to what is asked while a cell runs, which waits for the gate."""
    asked: list[dict[str, Any]] = []

    def meanwhile(outcome: Outcome) -> None:
        # That the kernel is busy it says before the cell begins; what is asked then has its turn.
        if (outcome.displays or outcome.streams) and not asked:
            asked.append(notebook.reply_to(ask()))
            gate.open()

    ran = notebook.run(cell, meanwhile)
    assert ran.errors == []
    return asked[0]


def begun(notebook: Notebook, gate: Gate) -> str:
    """A cell that runs, and waits for the gate."""
    request: str = notebook.client.execute("print('begun', flush=True)\n" + gate.wait)
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        said = notebook.client.get_iopub_msg(timeout=SOON)
        if said["parent_header"].get("msg_id") == request and said["msg_type"] == "stream":
            return request
    raise AssertionError(f"not begun within {SOON} s")


def test_the_workers_answer(two: Notebook, gate: Gate, tmp_path: Path) -> None:
    """Before the cell has ended: names, what they are, options, nothing."""
    cell = "print('begun', flush=True)\n" + gate.wait
    client = two.client
    reply = ask_meanwhile(two, cell, gate, lambda: client.complete("%%distributed\nmin"))
    assert "mine" in reply["matches"]
    assert (reply["cursor_start"], reply["cursor_end"]) == (14, 17)

    def ask_again(name: str, ask: Callable[[], str]) -> Any:
        again = Gate(tmp_path / name)
        cell = "%%distributed\nprint('begun')\n" + again.wait
        try:
            return ask_meanwhile(two, cell, again, ask)
        finally:
            again.open()

    reply = ask_again("d", lambda: client.inspect("%%distributed\nmine"))
    assert "int" in reply["data"]["text/plain"]
    reply = ask_again("a", lambda: client.complete("%%distributed --back"))
    assert reply["matches"] == ["--backend"]
    assert ask_again("b", lambda: client.complete("%%distributed\nnope."))["matches"] == []
    reply = ask_again("c", lambda: client.inspect("%%distributed\nnope"))
    assert (reply["found"], reply["status"]) == (False, "ok")


def test_the_state_that_front_ends_show(two: Notebook, gate: Gate) -> None:
    """A reply is complete for them when an idle state has come; the cell goes on, busy."""
    client: Any = two.client
    cell = begun(two, gate)
    request = client.complete("%%distributed\nmin")
    states, deadline = [], time.monotonic() + SOON
    while states != ["idle", "busy"] and time.monotonic() < deadline:
        said = client.get_iopub_msg(timeout=SOON)
        if said["parent_header"].get("msg_id") == request and said["msg_type"] == "status":
            states.append(said["content"]["execution_state"])
    assert states == ["idle", "busy"]
    gate.open()
    assert two.reply_to(cell)["status"] == "ok"


def test_everything_else_waits_for_the_cell(two: Notebook, gate: Gate) -> None:
    """Also what nobody has signed; and afterwards the notebook's kernel answers again."""
    client: Any = two.client
    cell = begun(two, gate)
    plain = client.complete("prin")
    forged = client.session.msg(
        "complete_request", {"code": "%%distributed\nmin", "cursor_pos": 17}
    )
    key, client.session.key = client.session.key, b"wrong"
    client.shell_channel.send(forged)
    client.session.key = key
    gate.open()
    assert two.reply_to(cell)["status"] == "ok"
    assert "print" in two.reply_to(plain)["matches"]
    with pytest.raises(Empty):
        client.get_shell_msg(timeout=0.3)
    assert (
        "mine"
        in client.complete("%%distributed\nmin", reply=True, timeout=SOON)["content"]["matches"]
    )


def test_without_nbdist(two: Notebook, gate: Gate) -> None:
    """Requests go where they went."""
    assert two.run("%unload_ext nbdist").errors == []
    cell = begun(two, gate)
    request = two.client.complete("prin")
    gate.open()
    assert two.reply_to(cell)["status"] == "ok"
    assert "print" in two.reply_to(request)["matches"]
