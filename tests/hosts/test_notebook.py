"""Notebooks whose workers are on other hosts: what magics say of them, and tutorials."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from nbdist.terminal.worlds import kill_world
from nbdist.world.agents import Found, worlds
from tests.hosts.network import Host, Network
from tests.hosts.sshd import Sshd
from tests.notebook.commands.test_attach import LOOP, STEPS
from tests.notebook.front_end import Notebook, Outcome, body
from tests.notebooks.test_notebooks import (
    MANY_MACHINES,
    check_run,
    code_cells,
    run,
    text,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world

LOGS = "/tmp/nbt-logs"
"""Which each host has for itself."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The notebook's, with a module of the user's."""
    with tempfile.TemporaryDirectory(prefix="nbt-") as folder:
        Path(folder, "mine.py").write_text("x = 1\n")
        yield Path(folder)


@pytest.fixture(scope="module")
def notebook(sshd: Sshd, hosts_of_module: list[Host], folder: Path) -> Iterator[Notebook]:
    """One with two workers, each on a host of its own."""
    environ = {**sshd.environ, "NBDIST_LOG_DIR": LOGS}
    notebook = Notebook(f"%cd -q {folder}", "%load_ext nbdist", env=environ)
    line = "%%distributed --hosts node1:1,node2:1 --name logs --link-timeout 3"
    assert notebook.run(f"{line}\nprint('hello from', rank)").errors == []
    yield notebook
    notebook.close()


def test_status_and_stacks_name_hosts(notebook: Notebook) -> None:
    """In the head line, and for each rank; and strangers are counted."""
    lines = notebook.run("%dist_status").text.splitlines()
    assert lines[0].startswith("2 workers as 2x1 on node1 and node2 · gloo · ready")
    assert lines[1].split()[:3] == ["rank", "host", "state"]
    assert [line.split()[:2] for line in lines[2:4]] == [["0", "node1"], ["1", "node2"]]
    assert "── ranks 0 on node1, 1 on node2 same · idle ──" in notebook.run("%dist_stack").text
    last = notebook.run("%dist_status -v").text.splitlines()[-1]
    assert last == "refused connections without this world's keys: none"


def test_logs_of_all_hosts(notebook: Notebook) -> None:
    """With the host of each rank, and where the files are there."""
    lines = notebook.run("%dist_log --tail 3 --grep hello").text.splitlines()
    said = ["── rank 0 on node1 ──", "hello from 0", "── rank 1 on node2 ──", "hello from 1"]
    assert lines[:4] == said
    assert lines[4:] == [
        f"files: node1:{LOGS}/logs/node1/attempt_0/[0]/[stdout,stderr].log",
        f"files: node2:{LOGS}/logs/node2/attempt_0/[1]/[stdout,stderr].log",
    ]
    error = notebook.run("%dist_log --attempt 7").error
    assert "`--attempt 7`: there are 0, the last is now." in error


def test_a_module_that_hosts_do_not_have(notebook: Notebook) -> None:
    """One line says where it lies, and which option sends it; so does `%dist_why` name the host."""
    error = notebook.run("%%distributed -r 1\nimport mine").error
    assert "rank 1 on node2 after" in error
    assert "`mine.py` is in the notebook's folder, which node2 does not have: " in error
    assert "rank 1 on node2 (pid " in notebook.run("%dist_why").text
    # So it does of a large output, which lies in a file there.
    cell = "%%distributed -r 1\nfrom IPython.display import HTML\nHTML('x' * 10_000_001)"
    assert "node2:/" in notebook.run(cell).text


def test_who_is_lost_and_who_came(notebook: Notebook, hosts: list[Host]) -> None:
    """In the next cell, in a line."""

    def is_whole() -> bool:
        return notebook.run("%dist_status").text.startswith("2 workers as 2x1 on node1 and node2 ")

    def is_back() -> bool:
        return "now 2 workers" in notebook.run("%%distributed\nmark = 1").text

    hosts[1].link_down()
    wait_until(lambda: not is_whole(), "node2 is lost")
    assert "now 1 worker" in notebook.run("%%distributed\nmark = 1").text
    hosts[1].link_up()
    wait_until(is_back, "node2 is back")
    assert notebook.run("%%distributed\nprint(world_size, rank)").text.count("2 ") >= 2


NAME = f"far-{os.getpid()}"

FIRST = f"%%distributed --hosts node1:1,node2:1 --detach --name {NAME}\n"


def found() -> list[Found]:
    return [each for each in worlds() if each.info.name == NAME]


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
    wait_until(lambda: found()[0].info.state == "busy", "it runs")
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
