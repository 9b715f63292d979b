"""Tests of `nbdist.cluster.ticket`: what is read and refused, where keys lie, and who joins."""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from nbdist.cluster.ticket import (
    BadTicket,
    KeyPair,
    Place,
    Ticket,
    drop_dead_join_keys,
    endpoint,
    find_join_key,
    join_keys_folder,
    listen_with,
    part_of,
    place_from,
    place_of,
    read_key_file,
    ticket_from,
    without_starters,
    write_join_key,
)
from nbdist.errors import UsageError
from nbdist.terminal.__main__ import main


def test_a_ticket_crosses_as_a_line() -> None:
    """It comes back as it was; its secret is in no text that people or logs see."""
    keys = KeyPair.new()
    ticket = Ticket(("10.0.0.1", "fd00::1"), 4711, keys.public, keys, link_timeout=30.0)
    line = ticket.to_line()
    assert line.count(b"\n") == 1
    assert ticket_from(line) == ticket
    assert ticket.keys.secret not in repr(ticket)
    assert KeyPair.new() != KeyPair.new()


@pytest.mark.parametrize(
    "change",
    [
        *(b"", b"{}", b"[1]", b"\xff", b'{"addresses": [], "port": 1}', b"hello"),
        *({"port": 0}, {"port": 70000}, {"addresses": ()}, {"link_timeout": 0}),
    ],
)
def test_what_is_no_ticket(change: bytes | dict[str, object]) -> None:
    """It is refused in a sentence; so is one that cannot lead anywhere."""
    fields = {"addresses": ("a",), "port": 1, "server_key": "x" * 40, "keys": KeyPair.new()}
    line = change if isinstance(change, bytes) else Ticket(**{**fields, **change}).to_line()
    with pytest.raises(BadTicket, match="no ticket of a world"):
        ticket_from(line)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job launcher has started this process, no terminal is there, and no world waits."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"nothing\n")))


def ticket(*addresses: str, port: int = 4321) -> Ticket:
    return Ticket(addresses, port, KeyPair.new().public, KeyPair.new())


def test_a_key_is_found_by_the_place_that_is_shown() -> None:
    """Also by another name or address of it, where the port tells which; only the user can."""
    one = ticket("10.0.0.1", "fd00::1")
    path = write_join_key(one)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    places = ["10.0.0.1:4321", "[fd00::1]:4321", "lab.example.org:4321"]
    assert [find_join_key(place_from(text, "nbdist join")) for text in places] == [one] * 3
    assert find_join_key(place_from("10.0.0.1:4322", "nbdist join")) is None
    other = ticket("10.0.0.2")
    write_join_key(other)
    assert find_join_key(place_from("10.0.0.2:4321", "nbdist join")) == other
    assert find_join_key(place_from("lab.example.org:4321", "nbdist join")) is None
    write_join_key(new := ticket("10.0.0.1"))  # at an old one's place, in whose stead it is
    assert find_join_key(place_of(new)) == new
    assert len([*join_keys_folder().iterdir()]) == 2


def test_keys_of_dead_worlds_are_removed() -> None:
    """Those of this machine where nobody listens any more; who knows of another's."""
    with socket.create_server(("127.0.0.1", 0)) as world:
        port = world.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as dead:
            gone = dead.getsockname()[1]
        kept = [
            write_join_key(ticket("127.0.0.1", port=port)),
            write_join_key(ticket("203.0.113.7")),
        ]
        write_join_key(ticket("127.0.0.1", port=gone))
        drop_dead_join_keys()
        assert sorted(join_keys_folder().iterdir()) == sorted(kept)


def test_a_key_that_others_can_read_is_none(tmp_path: Path) -> None:
    """It is refused with what to do; what is no key, too."""
    path = write_join_key(ticket("10.0.0.1"))
    path.chmod(0o644)
    with pytest.raises(PermissionError, match=r"others can read .*: `chmod 600 "):
        read_key_file(path)
    assert find_join_key(Place("10.0.0.1", 4321)) is None
    path.chmod(0o600)
    path.write_text("{}")
    with pytest.raises(BadTicket, match="no ticket of a world"):
        read_key_file(path)
    assert find_join_key(Place("10.0.0.1", 4321)) is None
    os.mkfifo(pipe := tmp_path / "pipe", 0o600)
    with pytest.raises(BadTicket, match="no ticket of a world"):
        read_key_file(pipe)  # nobody writes there


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "it is HOST:PORT") for text in ("", "a", "a:", ":1", "a:x", "a:123456")),
        ("a:0", "there is no port 0"),
        ("a:70000", "there is no port 70000"),
        ("fd00::1:4321", "write an IPv6 address in brackets"),
        *((text, "") for text in ("a.example.org:1", "10.0.0.1:65535", "[fe80::1%eth0]:4321")),
    ],
)
def test_places(text: str, why: str) -> None:
    """They are written as they are read, IPv6 in brackets; of what is none it is told why."""
    if not why:
        assert str(place := place_from(text, "nbdist join")) == text
        assert endpoint(place.host, place.port) == f"tcp://{text}"
        return
    with pytest.raises(UsageError, match=f"^`nbdist join {text}`: {why}"):
        place_from(text, "nbdist join")


# --- `nbdist join` ------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    """Somebody else's, who listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["join", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


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
    monkeypatch.setattr("nbdist.cluster.ticket.KEY_TIMEOUT", 0.5)
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
    """A place that is none or stale, a key that is not there or none, an unknown name."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    told = said(capsys, f"127.0.0.1:{gone}")
    assert told.startswith(f"nbdist: `nbdist join 127.0.0.1:{gone}`: no world waits there (Conn")
    told = said(capsys, f"127.0.0.1:{port}")
    assert told.startswith(f"nbdist: `nbdist join 127.0.0.1:{port}`: ")
    assert "/nbdist/joins has no key for it. Where the home folder is not" in told
    assert said(capsys, "nowhere") == (
        "nbdist: `nbdist join nowhere`: it is HOST:PORT, as shown by the notebook."
    )
    place = f"127.0.0.1:{port}"
    missing = str(tmp_path / "missing")
    told = said(capsys, place, "--key-file", missing)
    assert told == f"nbdist: `--key-file {missing}`: No such file or directory."
    told = said(capsys, place, "--key-file", "-")
    assert told.startswith(f"nbdist: `nbdist join {place}`: that is no ticket of a world")
    write_join_key(Ticket(("127.0.0.1",), port, KeyPair.new().public, KeyPair.new()))
    told = said(capsys, f"nowhere.invalid:{port}")
    assert told.startswith(f"nbdist: `nbdist join nowhere.invalid:{port}`: ")


TORCHRUN = {"GROUP_RANK": "1"}
SLURM = {"SLURM_NODEID": "2"}


@pytest.mark.parametrize(
    ("environ", "leads", "node"),
    [
        ({}, True, -1),
        ({**TORCHRUN, "LOCAL_RANK": "0"}, True, 1),
        ({**TORCHRUN, "LOCAL_RANK": "3"}, False, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, True, -1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, -1),
        ({**SLURM, "SLURM_LOCALID": "0"}, True, 2),
        ({**SLURM, "SLURM_LOCALID": "1"}, False, 2),
        ({**SLURM, "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, -1),
        ({**SLURM, "SLURM_LOCALID": "0", **TORCHRUN, "LOCAL_RANK": "1"}, False, 1),
        ({"JOB_COMPLETION_INDEX": "3"}, True, 3),
        ({"JOB_COMPLETION_INDEX": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, False, 3),
        ({"LOCAL_RANK": "zero"}, True, -1),
    ],
)
def test_who_leads_a_node(environ: Mapping[str, str], leads: bool, node: int) -> None:  # noqa: FBT001
    """The first there, by whatever stands nearest; without a number it is alone."""
    assert part_of(environ) == (leads, node)


def test_one_joins_per_node(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """The others say so and have succeeded: torchrun ends all where one has not."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["join", f"127.0.0.1:{port}"]) == 0
    assert capsys.readouterr().err == (
        "nbdist: one `nbdist join` per node: local rank 0 joins, this one ends\n"
    )


def test_workers_do_not_take_themselves_for_others() -> None:
    """What torchrun or mpirun has said to the process is none of the agent's environment."""
    environ = {
        **{"PATH": "/bin", "HF_HOME": "/hf", "RANK": "3", "LOCAL_RANK": "1", "MASTER_PORT": "1"},
        **{"TORCHELASTIC_RUN_ID": "none", "OMPI_COMM_WORLD_RANK": "3", "OMP_NUM_THREADS": "1"},
        **{"PMIX_NAMESPACE": "x", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "1"},
    }
    kept = {"PATH": "/bin", "HF_HOME": "/hf", "SLURM_JOB_ID": "7"}
    assert without_starters(environ) == kept
    del environ["TORCHELASTIC_RUN_ID"]
    assert without_starters(environ) == {**kept, "OMP_NUM_THREADS": "1"}
