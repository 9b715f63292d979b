"""Tests of `nbdist.world.link`: calls, their end, and strangers at the agent's socket."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
import zmq

from nbdist.output.events import Text
from nbdist.wire.messages import Answer, GetStatus, Hello, Outputs, to_bytes
from nbdist.world.launchers import find_launcher
from nbdist.world.link import Link
from nbdist.world.world import World
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world

SENT: dict[str, list[bytes]] = {
    "garbage": [b"garbage"],
    "nothing": [b""],
    "many frames": [b"a", b"b", b"c"],
    "a pickle that runs code": [b"cposix\nabort\n(tR."],
    "a hello": [to_bytes(Hello("0", 1, "nowhere"))],
    "an answer": [to_bytes(Answer(1, None))],
    "outputs": [to_bytes(Outputs(((7, "", Text("stdout", "from nobody")),)))],
    "outputs that are none": [to_bytes(Outputs((3,)))],  # type: ignore[arg-type]
}

SOON = 10.0


def send(address: str, kind: int, frames: list[bytes]) -> None:
    """What a stranger sends, and has sent when this returns."""
    context = zmq.Context()
    stranger = context.socket(kind)
    stranger.linger = int(SOON * 1000)
    stranger.connect(address)
    stranger.send_multipart(frames)
    stranger.close()
    context.term()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2, log_dir="", show=False) as started:
        yield started


@pytest.mark.parametrize("sent", SENT)
def test_strangers_are_dropped(world: World, sent: str, caplog: pytest.LogCaptureFixture) -> None:
    """With a line in the log; the world works on."""
    world.execute("kept = rank")
    with caplog.at_level(logging.WARNING, "nbdist.world"):
        for kind in (zmq.DEALER, zmq.REQ):
            send(world.session.link.address, kind, SENT[sent])
        wait_until(lambda: len(caplog.messages) >= 2, "both are in the log")
    assert all("stranger" in message for message in caplog.messages)
    assert len(caplog.messages) == 2
    assert world.gather("kept") == [0, 1]
    assert len(world.status()) == 2


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)), b"\xff" * 64],
    ids=["http", "all bytes", "ones"],
)
def test_bytes_of_another_protocol(world: World, data: bytes) -> None:
    """They are nothing to the link."""
    with closing(socket.socket(socket.AF_UNIX)) as stranger:
        stranger.connect(world.session.link.address.removeprefix("ipc://"))
        with suppress(BrokenPipeError):
            stranger.sendall(data * 1000)
        assert [row.rank for row in world.status()] == [0, 1]
    assert world.execute("1").ok


@pytest.mark.parametrize("sent", sorted(SENT.keys() - {"a hello"}))
def test_strangers_who_come_first(sent: str) -> None:
    """The agent is the one who says hello."""
    link = Link(find_launcher("local"), fork_server=False)
    try:
        send(link.address, zmq.DEALER, SENT[sent])
        link.open()
        assert link.call(GetStatus()) == ()
    finally:
        link.close()
