"""A world on two hosts whose notebook is killed: its head keeps it for the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from nbdist.terminal.listing import kill_world
from nbdist.world.agents import Found, worlds
from tests.hosts.network import Host, Network
from tests.hosts.sshd import Sshd
from tests.notebook.commands.test_attach import LOOP, STEPS
from tests.notebook.front_end import Notebook, Outcome, body
from tests.waiting import wait_until

NAME = f"far-{os.getpid()}"

FIRST = f"%%distributed --hosts node1:1,node2:1 --detach --name {NAME}\n"


def found() -> list[Found]:
    return [each for each in worlds() if each.held.name == NAME]


@pytest.fixture
def first(sshd: Sshd, hosts: list[Host]) -> Iterator[Notebook]:
    """A notebook whose world outlives it; that is ended after the test."""
    notebook = Notebook("%load_ext nbdist", env=sshd.environ)
    yield notebook
    notebook.close()
    for _ in found():
        kill_world(NAME)


@pytest.fixture
def second(sshd: Sshd, first: Notebook) -> Iterator[Notebook]:
    """The one after it."""
    notebook = Notebook("%load_ext nbdist", env=sshd.environ)
    yield notebook
    notebook.close()


def test_killed_in_mid_cell(
    first: Notebook, second: Notebook, network: Network, hosts: list[Host]
) -> None:
    """The cell goes on, on all hosts; the next kernel shows what was missed, and works on.

    `nbdist kill` leaves nothing on any host of a world that nobody has.
    """
    gate = network.folder / "gate"
    line = "import socket\nwhere = socket.gethostname()"
    assert first.run(f"{FIRST}GATE = {str(gate)!r}\n{line}").errors == []
    first.client.execute(LOOP)
    wait_until(lambda: found()[0].held.state == "busy", "it runs")
    os.kill(first.process.pid, signal.SIGKILL)
    wait_until(lambda: found()[0].is_detached, "its notebook is gone")

    def open_gate(outcome: Outcome) -> None:
        if outcome.updates:  # it is followed live
            gate.touch()

    shown = second.run(f"%dist_attach {NAME}", open_gate)
    gate.unlink()
    assert body(shown)[1:-1] == [*STEPS, "trained"]
    assert second.run("%dist_gather where").errors == []
    assert second.value("where") == ["node1", "node2"]
    lines = second.run("%dist_status").text.splitlines()
    assert lines[0].startswith("2 workers as 2x1 on node1 and node2 · gloo · ready")
    assert second.run("%dist_restart -r 1").errors == []
    assert body(second.run("%%distributed\ndist.barrier()\nprint('met')"))[-1] == "met"
    os.kill(second.process.pid, signal.SIGKILL)
    wait_until(lambda: found()[0].is_detached, "this notebook is gone too")
    assert all(host.left() for host in hosts[:2])
    assert kill_world(NAME) == 0
    assert found() == []
