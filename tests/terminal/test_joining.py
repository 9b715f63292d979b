"""Tests of `nbdist.terminal.joining`: what ends before there is an agent.

Agents that come are tested with the worlds to which they come: tests/cluster/test_launcher.py.
"""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from nbdist.terminal.console import main
from nbdist.wire.offers import write_offer
from nbdist.wire.ticket import KeyPair, Ticket, listen_with


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job launcher has started this process, no terminal is there, and no world waits."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"nothing\n")))


@pytest.fixture
def port() -> Iterator[int]:
    """Somebody else's, who listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["join", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_stale_place(capsys: pytest.CaptureFixture[str], port: int) -> None:
    """Nobody listens there any more, or there is no key: it is said at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    told = said(capsys, f"127.0.0.1:{gone}")
    assert told.startswith(f"nbdist: `nbdist join 127.0.0.1:{gone}`: no world waits there (Conn")
    told = said(capsys, f"127.0.0.1:{port}")
    assert told.startswith(f"nbdist: `nbdist join 127.0.0.1:{port}`: ")
    assert "/nbdist/joins has no key for it. Where the home folder is not" in told


@pytest.fixture
def worlds() -> Iterator[list[tuple[zmq.Socket[bytes], Ticket]]]:
    """Two that wait for agents: where each listens, and its ticket."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as a, context.socket(zmq.ROUTER) as b:
        tickets = []
        for listens in (a, b):
            listen_with(listens, keys := KeyPair.new())
            port = listens.bind_to_random_port("tcp://127.0.0.1", min_port=0)
            tickets.append(Ticket(("127.0.0.1",), port, keys.public, KeyPair.new(), fork=False))
        yield [*zip((a, b), tickets, strict=True)]


@pytest.fixture(params=["another world", "sshd", "nobody who speaks"])
def elsewhere(
    request: pytest.FixtureRequest, worlds: list[tuple[zmq.Socket[bytes], Ticket]]
) -> Iterator[int]:
    """A port at which a world's key is not taken."""
    if request.param == "another world":
        yield worlds[1][1].port
        return
    with socket.create_server(("127.0.0.1", 0)) as server, suppress(OSError):
        if request.param == "sshd":
            threading.Thread(target=greet, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def greet(server: socket.socket) -> None:
    """Say to all who come what sshd does."""
    with suppress(OSError):  # it is over
        while True:
            with server.accept()[0] as one, suppress(ConnectionError):
                one.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
                one.recv(1)


def test_a_key_of_elsewhere(
    capsys: pytest.CaptureFixture[str],
    worlds: list[tuple[zmq.Socket[bytes], Ticket]],
    elsewhere: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried at the address that was typed alone, and refused with the name of its world."""
    monkeypatch.setattr("nbdist.terminal.joining.REACH_TIMEOUT", 0.5)
    own, ticket = worlds[0]
    (key := tmp_path / "key").touch(0o600)
    key.write_bytes(ticket.to_line())
    told = said(capsys, f"127.0.0.1:{elsewhere}", "--key-file", str(key))
    assert told == (
        f"nbdist: `nbdist join 127.0.0.1:{elsewhere}`: what listens there does not take this key, "
        f"made for the world at 127.0.0.1:{ticket.port}: that one has ended, or the address is "
        "another's."
    )
    assert not own.poll(0)


def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, port: int) -> None:
    """A place that is none, a key file that is not there, a key that is none, an unknown name."""
    assert said(capsys, "nowhere") == (
        "nbdist: `nbdist join nowhere`: it is HOST:PORT, as shown by the notebook."
    )
    place = f"127.0.0.1:{port}"
    missing = str(tmp_path / "missing")
    told = said(capsys, place, "--key-file", missing)
    assert told == f"nbdist: `--key-file {missing}`: No such file or directory."
    told = said(capsys, place, "--key-file", "-")
    assert told.startswith(f"nbdist: `nbdist join {place}`: that is no ticket of a world")
    write_offer(Ticket(("127.0.0.1",), port, KeyPair.new().public, KeyPair.new()))
    told = said(capsys, f"nowhere.invalid:{port}")
    assert told.startswith(f"nbdist: `nbdist join nowhere.invalid:{port}`: ")
