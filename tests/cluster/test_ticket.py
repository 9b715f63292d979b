"""Tests of `nbdist.cluster.ticket`: what is read and refused, and where keys lie."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from nbdist.cluster.ticket import (
    BadTicket,
    KeyPair,
    Place,
    Ticket,
    drop_dead_join_keys,
    endpoint,
    find_join_key,
    join_keys_folder,
    place_from,
    place_of,
    read_key_file,
    ticket_from,
    write_join_key,
)
from nbdist.errors import UsageError


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
    "line",
    [b"", b"{}", b"[1]", b"\xff", b'{"addresses": [], "port": 1}', b"hello"],
)
def test_what_is_no_ticket(line: bytes) -> None:
    """It is refused in a sentence."""
    with pytest.raises(BadTicket, match="no ticket of a world"):
        ticket_from(line)


@pytest.mark.parametrize(
    "change", [{"port": 0}, {"port": 70000}, {"addresses": ()}, {"link_timeout": 0}]
)
def test_tickets_that_lead_nowhere(change: dict[str, object]) -> None:
    """So is one that cannot lead anywhere."""
    fields = {"addresses": ("a",), "port": 1, "server_key": "x" * 40, "keys": KeyPair.new()}
    with pytest.raises(BadTicket):
        ticket_from(Ticket(**{**fields, **change}).to_line())


def test_endpoints() -> None:
    """IPv6 addresses stand in brackets."""
    assert endpoint("10.0.0.1", 7) == "tcp://10.0.0.1:7"
    assert endpoint("fd00::1", 7) == "tcp://[fd00::1]:7"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder is the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


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


def test_a_world_at_an_old_ones_place_has_its_own_key() -> None:
    """The file is written anew, whole or not at all."""
    write_join_key(ticket("10.0.0.1"))
    new = ticket("10.0.0.1")
    path = write_join_key(new)
    assert find_join_key(place_of(new)) == new
    assert list(join_keys_folder().iterdir()) == [path]


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
        ("", "it is HOST:PORT"),
        ("a", "it is HOST:PORT"),
        ("a:", "it is HOST:PORT"),
        (":1", "it is HOST:PORT"),
        ("a:x", "it is HOST:PORT"),
        ("a:123456", "it is HOST:PORT"),
        ("a:0", "there is no port 0"),
        ("a:70000", "there is no port 70000"),
        ("fd00::1:4321", "write an IPv6 address in brackets"),
    ],
)
def test_what_is_no_place(text: str, why: str) -> None:
    """And why."""
    with pytest.raises(UsageError, match=f"^`nbdist join {text}`: {why}"):
        place_from(text, "nbdist join")


@pytest.mark.parametrize("text", ["a.example.org:1", "10.0.0.1:65535", "[fe80::1%eth0]:4321"])
def test_a_place_is_written_as_it_is_read(text: str) -> None:
    """IPv6 in brackets."""
    assert str(place_from(text, "nbdist join")) == text
