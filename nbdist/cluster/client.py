"""An agent's link to the head of its world, if the world has several machines.

Runs in the agent. If the connection is lost, libzmq connects again, and the agent and the head both
resend messages that the other may have missed. The agent exits if the head has ended, if the
connection stays lost, or if its stdin is a pipe that is closed. `find_route` finds the address at
which an agent reaches its head.
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
    connect_with,
    endpoint,
    guard_line,
    ticket_from,
)
from nbdist.system.processes import Guard
from nbdist.topology import usable_cores, visible_gpus
from nbdist.wire import messages
from nbdist.wire.frames import pack
from nbdist.wire.messages import RunTask, Shutdown
from nbdist.wire.node_messages import (
    NodeDown,
    NodeFacts,
    NodeHello,
    NodeUp,
    ProbeTarget,
    node_frames,
    node_message_from,
)
from nbdist.wire.spec import AGENTS_WAIT, versions_here
from nbdist.wire.store import Operation, StoreReply
from nbdist.wire.transfer import (
    Drop,
    Fetch,
    FrameKind,
    Mismatch,
    Numbered,
    Receiving,
    SegmentPiece,
    piece_of,
)
from nbdist.wire.work import task_from

TICKET_TIMEOUT = 60.0  # seconds for the ticket to arrive on stdin
HEAD_LINK_LINGER = 500  # milliseconds for the last messages to reach the head after `close`


def read_ticket() -> Ticket:
    """Read the ticket from the first line of stdin; raises BadTicket if none comes in time.

    No more than this line is read, because the agent later waits for the end of stdin.
    """
    line, deadline = b"", time.monotonic() + TICKET_TIMEOUT
    while not line.endswith(b"\n"):
        seconds_left = max(0.0, deadline - time.monotonic())
        if not select.select([sys.stdin.fileno()], [], [], seconds_left)[0]:
            raise BadTicket(f"no ticket came on stdin within {TICKET_TIMEOUT:.0f} s")
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte or len(line) > LONGEST_TICKET:
            raise BadTicket("stdin has ended before there was a ticket on it")
        line += byte
    return ticket_from(line)


class HeadLink:
    """The agent's link to the head: sends messages, and passes the head's messages to `on_message`.

    `memory` has copies of the big values that the head has sent. `problem` says why the agent has
    given up the link; it is "" if the agent has not given up.
    """

    def __init__(
        self,
        route: Way,
        port: int,
        on_message: Callable[[NodeDown], None],
        leave: Callable[[], None],
        guard: Guard | None = None,
    ) -> None:
        """Connect to the head; `open` then sends the first message.

        `on_message` is called with the messages of the head, except those that the link handles
        itself: answers to `ask_store`, and messages about copies of memory. `port` is a free port
        of this machine, reserved for MASTER_PORT. `leave` is called when the agent must exit. The
        `guard` of this agent reports to the head if the agent is killed.
        """
        self._route = route
        head_endpoint = endpoint(route.address, route.ticket.port)
        self._head_address = head_endpoint.removeprefix("tcp://")
        self._port = port
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[StoreReply]] = {}
        self._on_message, self._leave = on_message, leave
        self.memory = Receiving(self.send)
        self._has_connected = self._is_shut_down = False
        self.problem = ""
        self._numbered = Numbered()
        self._received_at = 0.0
        self._lost_timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Task[None] | None = None
        self._identity = b"agent" + secrets.token_bytes(16)
        if guard is not None:
            guard.send(guard_line(self._identity, route.ticket, route.address))
        link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        link.linger = HEAD_LINK_LINGER
        link.routing_id = self._identity
        connect_with(link, route.ticket)
        monitor: Any = link.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
        )
        self._monitor = ZMQStream(monitor)
        link.connect(head_endpoint)
        self._link = ZMQStream(link)
        self._link.on_recv(self._handle_frames, copy=False)

    async def open(self) -> None:
        """Send the agent's first message, `NodeHello`, and watch for reasons to exit.

        The agent exits at SIGTERM, if its stdin is closed, or if the link is given up.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        self._monitor.on_recv(self._handle_event)
        if stat.S_ISFIFO(mode := os.fstat(sys.stdin.fileno()).st_mode) or stat.S_ISSOCK(mode):
            loop.add_reader(sys.stdin.fileno(), self._leave)
        facts = NodeFacts(
            name=socket.gethostname(),
            number=self._route.number,
            address=self._route.local_address,
            port=self._port,
            cores=usable_cores(),
            gpus=visible_gpus(os.environ),
            python=sys.executable,
            versions=versions_here(),
        )
        self.send(NodeHello(__version__, os.getpid(), facts))

    def send(self, message: NodeUp) -> None:
        """Send a message to the head, and again if the connection is lost before it arrives."""
        self._link.send_multipart(self._numbered.message(node_frames(message)), copy=False)

    async def ask_store(self, operation: Operation) -> StoreReply:
        """Send an operation on the world's store to the head, and return the store's answer.

        If the head has ended, no answer comes, and the agent exits.
        """
        number = next(self._numbers)
        answer: asyncio.Future[StoreReply] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            self.send(messages.AgentRequest(number, operation))
            return await answer
        finally:
            del self._pending[number]

    # --- the connection -------------------------------------------------------------------

    def _handle_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._resend()
            self._has_connected = True
        elif not self._has_connected or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            reason = "a world that has ended had it, or another one"
            self._give_up(f"{self._head_address} does not take this key: {reason}")
        elif self._is_shut_down:
            self._leave()
        else:
            self._start_lost_timer()

    def _resend(self) -> None:
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None
        if self._has_connected:
            self._link.send(self._numbered.bare_header(FrameKind.AGAIN))
            for frames in self._numbered.replay():
                self._link.send_multipart(frames, copy=False)

    def _start_lost_timer(self) -> None:
        """Start a timer; when it ends, the agent gives up the link unless libzmq has reconnected.

        Also test the head's port. If nothing listens on the port, the head has exited, and the
        agent gives up the link without waiting for the timer.
        """
        loop = asyncio.get_running_loop()
        if self._lost_timer is None:
            timeout = self._route.ticket.link_timeout
            seconds_left = self._received_at + AGENTS_WAIT * timeout - loop.time()
            self._lost_timer = loop.call_later(max(timeout, seconds_left), self._give_up)
        if self._probing is None or self._probing.done():
            self._probing = loop.create_task(self._probe_head())

    async def _probe_head(self) -> None:
        result = await _connect(self._route.address, self._route.ticket.port, HEAD_REACH_TIMEOUT)
        if isinstance(result, ConnectionRefusedError):  # the head has exited: its port is closed
            self._give_up()

    def _give_up(self, problem: str = "") -> None:
        text = f"the connection to the world at {self._head_address} was lost"
        self.problem = self.problem or problem or f"{text}, and the workers here were ended"
        self._leave()

    async def close(self) -> None:
        """Tell the head that this agent exits, and close the link.

        After that, libzmq has `HEAD_LINK_LINGER` milliseconds to send the messages that wait.
        """
        if self._lost_timer is not None:
            self._lost_timer.cancel()
        if self._probing is not None:
            self._probing.cancel()
        self._link.send_multipart([self._numbered.bare_header(FrameKind.ENDED), self._identity])
        self._link.flush(zmq.POLLOUT)
        self._link.socket.disable_monitor()
        self._monitor.close()
        self._link.close()
        self.memory.close()

    def _handle_frames(self, frames: list[zmq.Frame]) -> None:
        header, *data = frames
        self._received_at = asyncio.get_running_loop().time()
        try:
            kind = self._numbered.read_header(header.bytes)
        except Mismatch:
            kind = FrameKind.ENDED
        match kind:
            case FrameKind.MESSAGE:
                self._handle_message(*data)
            case FrameKind.BEAT if self._numbered.has_read:
                self._link.send(self._numbered.bare_header(FrameKind.BEAT))
            case FrameKind.ENDED:
                self._give_up()

    def _handle_message(self, frame: zmq.Frame, *data: zmq.Frame) -> None:
        match node_message_from(frame.bytes, *(each.buffer for each in data)):
            case messages.AgentReply(number, answer):
                future = self._pending.get(number)
                if future is not None and not future.done():
                    future.set_result(answer)
            case Fetch() as fetch:
                self.send(piece_of(fetch))
            case SegmentPiece() as piece:
                self.memory.add_piece(piece)
            case Drop(path):
                self.memory.drop([path])
            case RunTask() as run:
                # The task refers to segments on the notebook's machine. Let it refer to the copies
                # on this machine.
                if places := self.memory.places(run.segments):
                    run = run._replace(task=pack(task_from(run.task).moved(places)))
                self._on_message(run)
            case message:
                self._is_shut_down = self._is_shut_down or isinstance(message, Shutdown)
                self._on_message(message)


WAY_TIMEOUT = 5.0  # seconds for an address of the head to answer
ORDER_GRACE = 0.2  # seconds for better addresses to answer, once any address has answered
HEAD_REACH_TIMEOUT = 4.0  # seconds for a machine to answer: time to resend two lost packets


class NoWay(OSError):
    """Raised if the agent can reach no address of its head; the message has the error of each."""


@dataclass(frozen=True, slots=True)
class Way:
    """How an agent reaches its head.

    `address` is the address in the `ticket` at which the head has answered. `local_address` is the
    address of the agent's machine in this connection. `number` is the number of the agent's node,
    or -1 if the head has to choose a number.
    """

    ticket: Ticket
    address: str
    local_address: str
    number: int = -1


def find_route(ticket: Ticket, number: int = -1) -> Way:
    """Return the route to the head by the best address in the ticket that answers.

    The ticket lists the best address first. All addresses are tried at once. Once any address has
    answered, the others have `ORDER_GRACE` seconds more: on the head's own machine, an address of
    a container bridge may answer first, but other machines cannot reach it. `number` is the number
    of the agent's node, or -1 if the head has to choose a number. Raises NoWay if no address
    answers within `WAY_TIMEOUT` seconds.
    """
    return asyncio.run(_find_route(ticket, number))


async def _find_route(ticket: Ticket, number: int) -> Way:
    attempts = [
        asyncio.create_task(_connect(each, ticket.port, WAY_TIMEOUT)) for each in ticket.addresses
    ]
    for quickest in asyncio.as_completed(attempts):
        if isinstance(await quickest, str):
            break
    await asyncio.wait(attempts, timeout=ORDER_GRACE)
    problems = []
    for address, attempt in zip(ticket.addresses, attempts, strict=True):
        match attempt.result() if attempt.done() else None:
            case str(local_address):
                return Way(ticket, address, local_address, number)
            case OSError() as error:
                problems.append(f"{address}:{ticket.port}: {_error_text(error, WAY_TIMEOUT)}")
    listed = "; ".join(problems)
    raise NoWay(f"{socket.gethostname()} cannot reach the notebook's machine at {listed}")


async def first_unreached(
    targets: Sequence[ProbeTarget], timeout: float = HEAD_REACH_TIMEOUT
) -> str:
    """Try to connect to all targets; return "" if this machine can reach them all.

    Otherwise, return a text with the first target out of reach, its address and the error.
    """
    errors = await asyncio.gather(*(_connect(to.address, to.port, timeout) for to in targets))
    for peer, error in zip(targets, errors, strict=True):
        # A machine that refuses the connection was reached, but nothing listens on the port.
        if isinstance(error, OSError) and not isinstance(error, ConnectionRefusedError):
            return f"{peer.name} at {peer.address}:{peer.port}: {_error_text(error, timeout)}"
    return ""


async def _connect(address: str, port: int, timeout: float) -> str | OSError:
    """Try to connect to a port; return this machine's address in the connection, or the error."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as attempt:
            attempt.settimeout(0.0)
            async with asyncio.timeout(timeout):
                await asyncio.get_running_loop().sock_connect(attempt, (address, port))
            return str(attempt.getsockname()[0])
    except OSError as error:
        return error


def _error_text(error: OSError, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:.0f} s"
    number = error.errno or 0
    # If a name cannot be resolved, the error has a negative number, which `strerror` does not know.
    return os.strerror(number) if number > 0 else error.strerror or str(error)
