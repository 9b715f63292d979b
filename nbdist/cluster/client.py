"""The link of an agent, on one of several machines, to the head of its world.

If the connection is lost libzmq connects again, and both sides repeat what the other may have
missed. If the head is gone, or stdin ends, the agent leaves. Finding an address of the head is here
too.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import select
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.eventloop.zmqstream import ZMQStream
from zmq.utils.monitor import parse_monitor_message

from nbdist import __version__
from nbdist.cluster.ticket import (
    LONGEST_TICKET,
    BadTicket,
    Ticket,
    come_with,
    endpoint,
    ticket_from,
    what_to_say,
)
from nbdist.system.processes import Guard
from nbdist.topology import usable_cores, visible_gpus
from nbdist.wire import messages
from nbdist.wire.frames import pack
from nbdist.wire.messages import Run, Shutdown
from nbdist.wire.node_messages import (
    NodeDown,
    NodeFacts,
    NodeHello,
    NodeUp,
    Target,
    node_frames,
    node_message_from,
)
from nbdist.wire.spec import AGENTS_WAIT, versions_here
from nbdist.wire.store import Answer, Operation
from nbdist.wire.transfer import (
    Drop,
    Fetch,
    Kind,
    Mismatch,
    Numbered,
    Piece,
    Receiving,
    piece_of,
)
from nbdist.wire.work import task_from

TICKET_TIMEOUT = 60.0  # seconds for the ticket to come; a user may have to type it
LINK_LINGER = 500  # milliseconds for the last messages to reach the head


def read_ticket() -> Ticket:
    """Read a ticket's line from stdin, and nothing after the line; raises BadTicket."""
    line, end = b"", time.monotonic() + TICKET_TIMEOUT
    while not line.endswith(b"\n"):
        left = max(0.0, end - time.monotonic())
        if not select.select([sys.stdin.fileno()], [], [], left)[0]:
            raise BadTicket(f"no ticket came on stdin within {TICKET_TIMEOUT:.0f} s")
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte or len(line) > LONGEST_TICKET:
            raise BadTicket("stdin has ended before there was a ticket on it")
        line += byte
    return ticket_from(line)


class HeadLink:
    """Sends messages to the head, and passes the head's messages to the agent.

    `problem` says why the link has ended before the head did; "" if it has not.
    """

    def __init__(
        self,
        way: Way,
        port: int,
        receive: Callable[[NodeDown], None],
        leave: Callable[[], None],
        guard: Guard | None = None,
    ) -> None:
        """`port` is the MASTER_PORT that is bound here."""
        self._way = way
        place = endpoint(way.address, way.ticket.port)
        self._place = place.removeprefix("tcp://")
        self._port = port
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._hand_on, self._leave = receive, leave
        self.memory = Receiving(self.send)
        self._has_come = self._is_dismissed = False
        self.problem = ""
        self._talk = Numbered()
        self._heard = 0.0
        self._giving_up: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._identity = b"agent" + secrets.token_bytes(16)
        if guard is not None:
            guard.tell(what_to_say(self._identity, way.ticket, way.address))
        link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        link.linger = LINK_LINGER
        link.routing_id = self._identity
        come_with(link, way.ticket)
        monitor: Any = link.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
        )
        self._watch = ZMQStream(monitor)
        link.connect(place)
        self._link = ZMQStream(link)
        self._link.on_recv(self._receive, copy=False)

    async def open(self) -> None:
        """Introduce this agent; leave if the link is lost, stdin ends, or a SIGTERM comes."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        self._watch.on_recv(self._note)
        if stat.S_ISFIFO(mode := os.fstat(sys.stdin.fileno()).st_mode) or stat.S_ISSOCK(mode):
            loop.add_reader(sys.stdin.fileno(), self._leave)
        facts = NodeFacts(
            name=socket.gethostname(),
            number=self._way.number,
            address=self._way.own,
            port=self._port,
            cores=usable_cores(),
            gpus=visible_gpus(os.environ),
            python=sys.executable,
            versions=versions_here(),
        )
        self.send(NodeHello(__version__, os.getpid(), facts))

    def send(self, message: NodeUp) -> None:
        """Send a message to the head."""
        self._link.send_multipart(self._talk.message(node_frames(message)), copy=False)

    async def ask_store(self, operation: Operation) -> Answer:
        """Return the answer of the head's store.

        If the head is gone there is none: the agent leaves then, which ends this wait.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self.send(messages.Ask(number, operation))
            return await answer
        finally:
            del self._answers[number]

    # --- the connection -------------------------------------------------------------------

    def _note(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._say_again()
            self._has_come = True
        elif not self._has_come or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            had = "a world that has ended had it, or another one"
            self._lose(f"{self._place} does not take this key: {had}")
        elif self._is_dismissed:
            self._leave()
        else:
            self._begin_giving_up()

    def _say_again(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        if self._has_come:
            self._link.send(self._talk.sign(Kind.AGAIN))
            for frames in self._talk.again():
                self._link.send_multipart(frames, copy=False)

    def _begin_giving_up(self) -> None:
        """Leave if libzmq does not connect again in time, or at once if nothing listens there."""
        loop = asyncio.get_running_loop()
        if self._giving_up is None:
            timeout = self._way.ticket.link_timeout
            left = self._heard + AGENTS_WAIT * timeout - loop.time()
            self._giving_up = loop.call_later(max(timeout, left), self._lose)
        if self._looking is None or self._looking.done():
            self._looking = loop.create_task(self._look())

    async def _look(self) -> None:
        found = await _connect(self._way.address, self._way.ticket.port, REACH_TIMEOUT)
        if isinstance(found, ConnectionRefusedError):  # no process listens on that port
            self._lose()

    def _lose(self, problem: str = "") -> None:
        lost = f"the connection to the world at {self._place} was lost"
        self.problem = self.problem or problem or f"{lost}, and the workers here were ended"
        self._leave()

    async def close(self) -> None:
        """Close the link; sent messages have `LINK_LINGER` to arrive."""
        if self._giving_up is not None:
            self._giving_up.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self._link.send_multipart([self._talk.sign(Kind.ENDED), self._identity])
        self._link.flush(zmq.POLLOUT)
        self._link.socket.disable_monitor()
        self._watch.close()
        self._link.close()
        self.memory.close()

    def _receive(self, frames: list[zmq.Frame]) -> None:
        header, *data = frames
        self._heard = asyncio.get_running_loop().time()
        try:
            kind = self._talk.take(header.bytes)
        except Mismatch:
            kind = Kind.ENDED
        match kind:
            case Kind.MESSAGE:
                self._take(*data)
            case Kind.BEAT if self._talk.has_read:
                self._link.send(self._talk.sign(Kind.BEAT))
            case Kind.ENDED:
                self._lose()

    def _take(self, frame: zmq.Frame, *data: zmq.Frame) -> None:
        match node_message_from(frame.bytes, *(each.buffer for each in data)):
            case messages.Answer(number, answer):
                asked = self._answers.get(number)
                if asked is not None and not asked.done():
                    asked.set_result(answer)
            case Fetch() as fetch:
                self.send(piece_of(fetch))
            case Piece() as piece:
                self.memory.take(piece)
            case Drop(path):
                self.memory.drop([path])
            case Run() as run:
                # Let the task refer to memory of the notebook that was received here before it.
                if places := self.memory.places(run.segments):
                    run = run._replace(task=pack(task_from(run.task).moved(places)))
                self._hand_on(run)
            case message:
                self._is_dismissed = self._is_dismissed or isinstance(message, Shutdown)
                self._hand_on(message)


WAY_TIMEOUT = 5.0  # seconds for one of the head's addresses to answer
ORDER_GRACE = 0.2  # further seconds for an address that is before the quickest in order
REACH_TIMEOUT = 4.0  # seconds for a machine to answer: enough for two lost packets


class NoWay(OSError):
    """No address of the head can be reached; the message names each with its port, and why."""


@dataclass(frozen=True, slots=True)
class Way:
    """How an agent reaches its head: by this `address` of the ticket, from its `own` address.

    `number` is that of the node, -1 if it has none yet.
    """

    ticket: Ticket
    address: str
    own: str
    number: int = -1


def find_way(ticket: Ticket, number: int = -1) -> Way:
    """Connect to all addresses at once, and choose the first in their order that answers.

    An earlier address has `ORDER_GRACE` seconds more than the quickest: on the head's own machine
    all answer, also those by which no other machine can be reached. Raises NoWay after
    `WAY_TIMEOUT` seconds, or as soon as all have refused.
    """
    return asyncio.run(_find_way(ticket, number))


async def _find_way(ticket: Ticket, number: int) -> Way:
    tried = [
        asyncio.create_task(_connect(each, ticket.port, WAY_TIMEOUT)) for each in ticket.addresses
    ]
    for quickest in asyncio.as_completed(tried):
        if isinstance(await quickest, str):
            break
    await asyncio.wait(tried, timeout=ORDER_GRACE)
    problems = []
    for address, attempt in zip(ticket.addresses, tried, strict=True):
        match attempt.result() if attempt.done() else None:
            case str(own):
                return Way(ticket, address, own, number)
            case OSError() as error:
                problems.append(f"{address}:{ticket.port}: {_why(error, WAY_TIMEOUT)}")
    said = "; ".join(problems)
    raise NoWay(f"{socket.gethostname()} cannot reach the notebook's machine at {said}")


async def first_unreached(targets: Sequence[Target], timeout: float = REACH_TIMEOUT) -> str:
    """Try to reach all targets at once; return one that was not reached, and why, or ""."""
    tried = await asyncio.gather(*(_connect(to.address, to.port, timeout) for to in targets))
    for to, error in zip(targets, tried, strict=True):
        # A machine that refuses was reached; nothing listens on that port.
        if isinstance(error, OSError) and not isinstance(error, ConnectionRefusedError):
            return f"{to.name} at {to.address}:{to.port}: {_why(error, timeout)}"
    return ""


async def _connect(address: str, port: int, timeout: float) -> str | OSError:
    """Connect once; return this machine's address on that route, or the error."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as attempt:
            attempt.settimeout(0.0)
            async with asyncio.timeout(timeout):
                await asyncio.get_running_loop().sock_connect(attempt, (address, port))
            return str(attempt.getsockname()[0])
    except OSError as error:
        return error


def _why(error: OSError, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:.0f} s"
    number = error.errno or 0
    # The error of a name that cannot be resolved has a negative number.
    return os.strerror(number) if number > 0 else error.strerror or str(error)
