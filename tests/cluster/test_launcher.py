"""Tests of `nbdist.cluster.launcher`: a command that runs agents, from its ticket to its end."""

from __future__ import annotations

import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nbdist.cluster.launcher import AgentCommand, LaunchError, find_launcher
from nbdist.cluster.ssh import SshLauncher
from nbdist.wire.ticket import KeyPair, Ticket
from tests.cluster.launchers import install
from tests.waiting import SOON

TICKET = Ticket(("127.0.0.1",), 1, "x" * 40, KeyPair.new())


@contextmanager
def running(program: str, folder: Path) -> Iterator[AgentCommand]:
    """An interpreter that runs this in an agent's place."""
    command = AgentCommand("a", [sys.executable, "-c", program], TICKET, folder)
    try:
        yield command
    finally:
        command.end(SOON)
        command.close()


@pytest.mark.world
def test_it_gets_the_ticket_and_ends_with_its_stdin(tmp_path: Path) -> None:
    """Nothing of the ticket is in its command, and what it writes can be read."""
    program = "import sys; print(len(sys.stdin.readline())); sys.stdout.flush(); sys.stdin.read()"
    with running(program, tmp_path) as command:
        assert command.exit_code() is None
        assert repr(command) == f"<AgentCommand {command.pid} exit code None>"
        assert TICKET.keys.secret not in command.command
    assert command.exit_code() == 0
    lines = (tmp_path / "a.log").read_text().split()
    assert lines == [str(len(TICKET.to_line()))]


@pytest.mark.world
def test_it_says_when_it_has_ended(tmp_path: Path) -> None:
    """And what it wrote last."""
    with running("import sys; sys.exit('no torch here')", tmp_path) as command:
        assert select.select([command], [], [], SOON)[0] == [command]
        assert (command.exit_code(), command.last_lines()) == (1, ["no torch here"])


@pytest.mark.world
def test_one_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    """After its stdin has ended, and then a SIGTERM, in vain."""
    program = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile 1: signal.pause()"
    )
    command = AgentCommand("a", [sys.executable, "-c", program], TICKET, tmp_path)
    command.end(0.1)
    assert command.exit_code() in (-signal.SIGKILL, -signal.SIGTERM)
    command.close()


def test_one_that_there_is_not(tmp_path: Path) -> None:
    """OSError, and nothing is left open."""
    with pytest.raises(FileNotFoundError):
        AgentCommand("a", ["/nowhere/ssh"], TICKET, tmp_path)


def test_launchers_by_name() -> None:
    """They are entry points, the house's own as others."""
    assert isinstance(find_launcher("ssh"), SshLauncher)


def test_a_launcher_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which, and what its module lacks."""
    install(tmp_path)
    (tmp_path / "my_launcher.py").write_text("from nbdist.cluster.launcher import Gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LaunchError, match=r"`--launcher here` cannot be loaded: .*Gone"):
        find_launcher("here")
