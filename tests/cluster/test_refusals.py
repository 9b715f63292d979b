"""Tests of `nbdist.cluster.refusals`: against what a real libzmq says of real strangers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from nbdist.cluster.refusals import HEARD, Refusals
from nbdist.wire.ticket import KeyPair, listen_with
from tests.waiting import SOON


class Door:
    """A socket that lets in whoever has its key, and what is counted at it."""

    def __init__(self) -> None:
        self.keys = KeyPair.new()
        self.refusals = Refusals()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        listen_with(self._socket, self.keys)
        self._monitor: Any = self._socket.get_monitor_socket(HEARD)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1", min_port=0)

    def hear(self, last: int) -> int:
        """Take in all events up to this one; how many were refused by then."""
        deadline = time.monotonic() + SOON
        while time.monotonic() < deadline:
            if self._monitor.poll(100):
                event = parse_monitor_message(self._monitor.recv_multipart())
                self.refusals.take(event["event"], event["value"])
                if event["event"] == last:
                    return self.refusals.count
        raise AssertionError("it did not happen")

    def comer(self, server: str = "") -> zmq.Socket[bytes]:
        """Somebody who connects, with a key of the server's, or none."""
        comer = self._context.socket(zmq.DEALER)
        comer.linger, comer.reconnect_ivl = 0, -1
        if server:
            own = KeyPair.new()
            comer.curve_serverkey = server.encode()
            comer.curve_publickey = own.public.encode()
            comer.curve_secretkey = own.secret.encode()
        comer.connect(f"tcp://127.0.0.1:{self.port}")
        return comer

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(0)


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def test_one_with_the_key(door: Door) -> None:
    """It is not counted, neither when it comes nor when it goes."""
    comer = door.comer(door.keys.public)
    assert door.hear(zmq.EVENT_HANDSHAKE_SUCCEEDED) == 0
    comer.close()
    assert door.hear(zmq.EVENT_DISCONNECTED) == 0


@pytest.mark.parametrize("key", ["", KeyPair.new().public], ids=["none", "another"])
def test_one_without_it(door: Door, key: str) -> None:
    """It is counted once."""
    with door.comer(key):
        assert door.hear(zmq.EVENT_DISCONNECTED) == 1
    assert repr(door.refusals) == "<Refusals 1>"


def test_one_that_says_something_else(door: Door) -> None:
    """It is counted; one that says nothing is not, though both just end."""
    with socket.create_connection(("127.0.0.1", door.port)) as other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert door.hear(zmq.EVENT_DISCONNECTED) == 1
    with socket.create_connection(("127.0.0.1", door.port)):
        pass
    assert door.hear(zmq.EVENT_DISCONNECTED) == 1


def test_the_log_cannot_be_filled() -> None:
    """Of very many, few have a line."""
    refusals, said = Refusals(), 0
    for _ in range(10_000):
        assert refusals.take(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
        said += refusals.is_worth_a_line
    assert said == 20 + 9
