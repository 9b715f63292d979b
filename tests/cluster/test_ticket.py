"""Tests of `nbdist.cluster.ticket`: tickets, join keys, places, and `nbdist join`."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nbdist.cluster import ticket as tickets
from nbdist.cluster.ticket import BadTicket, HeadAddress, KeyPair, Ticket, place_from
from nbdist.errors import UsageError
from nbdist.terminal.__main__ import main
from tests.cluster.test_client import full_port
from tests.waiting import SOON


def test_a_ticket_crosses_as_a_line() -> None:
    """A ticket is read back from its line, and its `repr` does not show the secret."""
    keys = KeyPair.new()
    one = Ticket(("10.0.0.1", "fd00::1"), 4711, keys.public, keys, link_timeout=30.0)
    line = one.to_line()
    assert line.count(b"\n") == 1
    assert tickets.ticket_from(line) == one
    assert one.keys.secret not in repr(one)
    assert KeyPair.new() != KeyPair.new()


def test_a_line_that_is_no_ticket_is_refused() -> None:
    """A ticket that cannot lead to a head is refused too, in one sentence."""
    fields = {"addresses": ("a",), "port": 1, "server_key": "x" * 40, "keys": KeyPair.new()}
    wrong = {"port": 0}, {"port": 70000}, {"addresses": ()}, {"link_timeout": 0}
    lines = [Ticket(**{**fields, **change}).to_line() for change in wrong]  # type: ignore[arg-type]
    for line in (b"", b"{}", b"[1]", b"\xff", b'{"addresses": [], "port": 1}', b"hello", *lines):
        with pytest.raises(BadTicket, match="no ticket of a world"):
            tickets.ticket_from(line)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides variables of job launchers, the terminal, and worlds that wait."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"nothing\n")))


def ticket(*addresses: str, port: int = 4321) -> Ticket:
    return Ticket(addresses, port, KeyPair.new().public, KeyPair.new())


def test_a_key_is_found_by_the_place_that_is_shown() -> None:
    """Any name will do if the port is unique; only the user can read the file of a key."""

    def found(text: str) -> Ticket | None:
        return tickets.find_join_key(place_from(text))

    one, other = ticket("10.0.0.1", "fd00::1"), ticket("10.0.0.2")
    path = tickets.write_join_key(one)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    for text in ("10.0.0.1:4321", "[fd00::1]:4321", "lab.example.org:4321"):
        assert found(text) == one
    assert found("10.0.0.1:4322") is None
    tickets.write_join_key(other)
    assert (found("10.0.0.2:4321"), found("lab.example.org:4321")) == (other, None)
    tickets.write_join_key(new := ticket("10.0.0.1"))  # replaces an old key of the same place
    assert tickets.find_join_key(tickets.place_of(new)) == new
    assert len([*tickets.join_keys_folder().iterdir()]) == 2


def test_keys_of_dead_worlds_are_removed() -> None:
    """A key of this machine is removed if no process listens; another machine's key stays."""
    with socket.create_server(("127.0.0.1", 0)) as world:
        with socket.create_server(("127.0.0.1", 0)) as dead:
            gone = dead.getsockname()[1]
        alive = ticket("127.0.0.1", port=world.getsockname()[1])
        kept = [tickets.write_join_key(each) for each in (alive, ticket("203.0.113.7"))]
        tickets.write_join_key(ticket("127.0.0.1", port=gone))
        tickets.drop_dead_join_keys()
        assert sorted(tickets.join_keys_folder().iterdir()) == sorted(kept)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """The error has a remedy; a file or pipe that has no key is refused too."""
    path = tickets.write_join_key(ticket("10.0.0.1"))
    path.chmod(0o644)
    with pytest.raises(PermissionError, match=r"others can read .*: `chmod 600 "):
        tickets.read_key_file(path)
    assert tickets.find_join_key(HeadAddress("10.0.0.1", 4321)) is None
    path.chmod(0o600)
    path.write_text("{}")
    os.mkfifo(pipe := tmp_path / "pipe", 0o600)
    for file in (path, pipe):  # no process writes to the pipe
        with pytest.raises(BadTicket, match="no ticket of a world"):
            tickets.read_key_file(file)
    assert tickets.find_join_key(HeadAddress("10.0.0.1", 4321)) is None


def test_places_are_read_as_they_are_written() -> None:
    """IPv6 addresses are in brackets; the error says why a text is no place."""
    for text in ("a.example.org:1", "10.0.0.1:65535", "[fe80::1%eth0]:4321"):
        assert str(place := place_from(text)) == text
        assert tickets.endpoint(place.host, place.port) == f"tcp://{text}"
    for text, why in (
        *((text, "it is HOST:PORT") for text in ("", "a", "a:", ":1", "a:x", "a:123456")),
        ("a:0", "there is no port 0"),
        ("a:70000", "there is no port 70000"),
        ("fd00::1:4321", "write an IPv6 address in brackets"),
    ):
        with pytest.raises(UsageError, match=f"^`nbdist join {text}`: {why}"):
            place_from(text)


# --- `nbdist join` ------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which a server of the test listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["join", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_bad_input_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, port: int) -> None:
    """A wrong or stale place, a missing or wrong key, and an unknown name are errors."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    with full_port() as full, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tickets, "JOIN_REACH_TIMEOUT", 0.2)
        assert f"{full}`: no world waits there (no answer): it" in said(capsys, f"127.0.0.1:{full}")
    place, missing = f"127.0.0.1:{port}", str(tmp_path / "missing")
    told = said(capsys, f"127.0.0.1:{gone}")
    assert told.startswith(f"nbdist: `nbdist join 127.0.0.1:{gone}`: no world waits there (Conn")
    told = said(capsys, place)
    assert told.startswith(f"nbdist: `nbdist join {place}`: ")
    assert "/nbdist/joins has no key for it. Where the home folder is not" in told
    told = said(capsys, "nowhere")
    assert told == "nbdist: `nbdist join nowhere`: it is HOST:PORT, as shown by the notebook."
    told = said(capsys, place, "--key-file", missing)
    assert told == f"nbdist: `--key-file {missing}`: No such file or directory."
    told = said(capsys, place, "--key-file", "-")
    assert told.startswith(f"nbdist: `nbdist join {place}`: that is no ticket of a world")
    tickets.write_join_key(ticket("127.0.0.1", port=port))
    told = said(capsys, f"nowhere.invalid:{port}")
    assert told.startswith(f"nbdist: `nbdist join nowhere.invalid:{port}`: ")


@pytest.mark.world
def test_a_join_fails_with_its_agent(port: int) -> None:
    """If a signal kills the process of the agent, `nbdist join` exits with code 1."""
    tickets.write_join_key(ticket("127.0.0.1", port=port))
    command = [sys.executable, "-m", "nbdist.terminal", "join", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as joined:
        try:
            assert b"joins the world" in joined.stderr.readline()
            (agent,) = psutil.Process(joined.pid).children()
            agent.kill()
            assert joined.wait(SOON) == 1
        finally:
            joined.kill()  # its agent ends with it


def test_the_first_process_of_a_node_leads() -> None:
    """A process leads its node if each variable with its number says 0, or if it has no number."""
    for environ, leads, node in (
        ("", True, -1),
        ("GROUP_RANK=1 LOCAL_RANK=0", True, 1),
        ("GROUP_RANK=1 LOCAL_RANK=3", False, 1),
        ("OMPI_COMM_WORLD_LOCAL_RANK=0", True, -1),
        ("OMPI_COMM_WORLD_LOCAL_RANK=1", False, -1),
        ("SLURM_NODEID=2 SLURM_LOCALID=0", True, 2),
        ("SLURM_NODEID=2 SLURM_LOCALID=1", False, 2),
        ("SLURM_NODEID=2 SLURM_LOCALID=0 OMPI_COMM_WORLD_LOCAL_RANK=1", False, 2),
        ("SLURM_NODEID=2 SLURM_LOCALID=0 GROUP_RANK=1 LOCAL_RANK=1", False, 1),
        ("JOB_COMPLETION_INDEX=3", True, 3),
        ("JOB_COMPLETION_INDEX=3 OMPI_COMM_WORLD_LOCAL_RANK=1", False, 3),
        ("LOCAL_RANK=zero", True, -1),
    ):
        found = tickets.node_position(dict(each.split("=") for each in environ.split()))
        assert found == (leads, node), environ


def test_one_process_joins_per_node(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """Only one process of a node joins; the others exit with 0, since torchrun would end all.

    The environment of an agent has no numbers of processes.
    """
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["join", f"127.0.0.1:{port}"]) == 0
    assert capsys.readouterr().err == (
        "nbdist: one `nbdist join` per node: local rank 0 joins, this one ends\n"
    )
    kept = {"PATH": "/bin", "HF_HOME": "/hf", "SLURM_JOB_ID": "7"}
    told = ("RANK", "LOCAL_RANK", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE")
    environ = {**kept, **dict.fromkeys((*told, "SLURM_LOCALID", "OMP_NUM_THREADS"), "1")}
    assert tickets.agent_environ(environ | {"TORCHELASTIC_RUN_ID": "none"}) == kept
    assert tickets.agent_environ(environ) == {**kept, "OMP_NUM_THREADS": "1"}
