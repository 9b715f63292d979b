"""Tests of the parts of a link that need no agent: its events, its socket and its open requests."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from nbdist.errors import AgentLost
from nbdist.output.events import Died, Text
from nbdist.system.wake_pipe import WakePipe
from nbdist.wire.frames import pack, unpack
from nbdist.wire.messages import (
    AgentRequest,
    BatchAcknowledged,
    Down,
    GetStatus,
    HandoverState,
    Hello,
    Located,
    Shutdown,
)
from nbdist.world.agent_link import PendingRequests
from nbdist.world.event_queue import EventQueue, LinkEvent
from nbdist.world.link_socket import LinkSocket
from tests.waiting import SOON

HELLO, LOST = Hello("1", 2, "here"), AgentLost("here", -9)


def is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0.0)[0])


# --- events ---------------------------------------------------------------------------------------


@pytest.fixture
def events() -> Iterator[EventQueue]:
    queue = EventQueue()
    yield queue
    queue.close()


@pytest.mark.parametrize(
    ("event", "can_come"),
    [
        ((0, "task", Text("stdout", "x")), False),
        ((0, "", Text("stdout", "x")), True),
        ((0, "task", Died(1, 0)), True),
        (LOST, True),
        (Located({}), False),
    ],
)
def test_events_that_can_come_between_cells_wake_the_event_loop(
    events: EventQueue, event: LinkEvent, *, can_come: bool
) -> None:
    """Events that must be handled between cells wake the event loop; with `signals_all` all do."""
    signal = events.idle_signal
    events.add(event)
    assert is_readable(signal.fileno()) is can_come
    signal.clear()
    events.signals_all = True
    events.add(event)
    assert is_readable(signal.fileno())
    assert repr(events) == "<EventQueue 2 events waiting>"


def test_a_wait_ends_at_an_event_and_at_a_wake(events: EventQueue) -> None:
    """`wait` returns at once if an event waits or `wake` was called, else at its timeout."""
    begun = time.monotonic()
    events.wake()
    events.wait(SOON)
    adding = threading.Thread(target=events.add, args=(Located({}),))
    adding.start()
    for _ in range(2):  # the event stays until the consumer has handled it
        events.wait(SOON)
    adding.join()
    assert time.monotonic() - begun < SOON
    events.waiting.popleft()
    begun = time.monotonic()
    events.wait(0.05)  # wake-ups by the earlier event and `wake` do not end this wait
    assert time.monotonic() - begun >= 0.05


# --- requests -------------------------------------------------------------------------------------


def test_a_reply_reaches_the_caller_of_its_request() -> None:
    """Replies may come in any order; a reply that nobody waits for is dropped."""
    requests = PendingRequests()
    (first, one), (second, two) = requests.add(GetStatus()), requests.add(GetStatus())
    assert [first, second] == [AgentRequest(1, GetStatus()), AgentRequest(2, GetStatus())]
    for number in (2, 2, 7):
        requests.resolve(number, ())
    assert (one.done(), two.done()) == (False, True)
    assert repr(requests) == "<PendingRequests [1]>"
    requests.fail(LOST)
    assert (one.exception(0.0), two.exception(0.0), len(requests)) == (LOST, None, 0)
    requests.number_from(9)
    assert requests.add(GetStatus())[0].id == 9


# --- the socket -----------------------------------------------------------------------------------


class Peer:
    """Plays an agent at a link's socket; after `process.wake()` the agent counts as ended."""

    def __init__(self, link_socket: LinkSocket) -> None:
        self.link_socket = link_socket
        self.process = WakePipe()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(link_socket.address)

    def wait(self) -> bool:
        """Wait as the link's thread does, in this thread; return True if the agent has ended."""
        return self.link_socket.wait(self.process.fileno())

    def receive(self) -> Down:
        """Send what waits, as the link's thread does; return the agent's next message."""
        self.link_socket.send_waiting()
        assert self.socket.poll(SOON * 1000)
        message: Down = unpack(self.socket.recv())
        return message


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """A `Peer` that has connected to the link's socket and sent its first message."""
    monkeypatch.chdir(tmp_path)  # a socket's path must be short, so it is relative
    link_socket = LinkSocket("ipc://socket")
    peer = Peer(link_socket)
    peer.socket.send(pack(HELLO))
    assert not peer.wait()
    assert [*link_socket.receive()] == [HELLO]
    yield peer
    peer.socket.close()
    peer.context.term()
    peer.process.close()
    link_socket.close(0)


def test_a_wait_of_the_socket_ends_at_messages_and_at_the_end_of_the_agent(peer: Peer) -> None:
    """A wait ends at a message of the agent, at `send`, and when the agent has ended."""
    peer.link_socket.send(Shutdown())
    assert repr(peer.link_socket) == "<LinkSocket ipc://socket 1 messages waiting>"
    assert not peer.wait()
    assert peer.receive() == Shutdown()
    peer.socket.send(pack(Located({})))
    assert not peer.wait()
    assert [*peer.link_socket.receive()] == [Located({})]
    peer.process.wake()
    assert peer.wait()


def test_an_acknowledgement_waits_for_the_next_message(peer: Peer) -> None:
    """A batch is acknowledged once, mostly together with the next message.

    The thread is woken at once only if messages wait already, or if the world can be detached.
    """
    link_socket, pipe = peer.link_socket, peer.link_socket._wake_pipe
    batch = BatchAcknowledged()
    for _ in range(2):
        link_socket.acknowledge(batch)
        assert not is_readable(pipe.fileno())
    link_socket.acknowledge(BatchAcknowledged())
    assert is_readable(pipe.fileno())
    link_socket.send(HandoverState())
    sent = [peer.receive() for _ in range(3)]
    assert sent == [BatchAcknowledged(), BatchAcknowledged(), HandoverState()]
    pipe.clear()
    link_socket.acknowledge(BatchAcknowledged())
    assert is_readable(pipe.fileno())
