"""The connection from the notebook's process to the agent or head of a world.

`AgentConnection` has the link of a world.  One thread, which the link owns, sends and receives all
messages; other threads only wait for queues and futures.  So a KeyboardInterrupt in the main thread
cannot break off the sending or receiving of a message.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

import zmq

from nbdist import __version__
from nbdist.errors import AgentLost, ForkedProcess, StartError
from nbdist.output.events import Died
from nbdist.system.folders import JoinedFolder, RuntimeFolder
from nbdist.system.processes import find_leftovers
from nbdist.wire import messages
from nbdist.wire.frames import pack, unpack
from nbdist.wire.messages import (
    AgentReply,
    Attached,
    BatchAcknowledged,
    Hello,
    Reply,
    RequestBody,
    Starting,
)
from nbdist.world.agents import AGENT_MODULE, AgentProcess, AttachedAgent, require_open_files

log = logging.getLogger("nbdist.world")

HELLO_TIMEOUT = 30.0
CALL_TIMEOUT = 240.0  # seconds; must exceed an agent's longest time to start workers
AGENT_LEAVE_TIMEOUT = 25.0  # seconds; must exceed a head's time to end if Slurm does not answer
THREAD_TIMEOUT = 60.0
CLOSED = -1
DETACH_LINGER = 500  # milliseconds to deliver the last messages when the link detaches

CALL_TICK = 0.25
SHORTEST_WAIT = 0.001  # seconds; `SimpleQueue.get` can wait for ever if its timeout is shorter

AgentHandle = AgentProcess | AttachedAgent
"""The process that serves a world: this machine's agent, or the head of several machines."""

WorldNotice = (
    messages.Located
    | messages.Aborted
    | messages.Decided
    | messages.UsageReport
    | messages.NodeJoined
    | messages.UnresponsiveHosts
)
LinkEvent = messages.RankOutput | BatchAcknowledged | WorldNotice | messages.Healed | AgentLost


class Link:
    """A connection to the agent or head of a world.

    `arrived` has the events that the consumer, `nbdist.world.inbox`, has yet to handle.  A reply
    goes to the caller that has sent the request; only a `Healed` reply is also an event.

    `idle_signal` is a file descriptor for an event loop.  It becomes readable after an event that
    must be handled even while no cell runs, such as a death.  If `signals_all_messages` is True, it
    becomes readable after every event.
    """

    def __init__(
        self,
        module: str = AGENT_MODULE,
        *,
        fork_server: bool = True,
        folder: RuntimeFolder | JoinedFolder | None = None,
    ) -> None:
        require_open_files()
        self.pid = os.getpid()
        self.arrived: deque[LinkEvent] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_woken = False
        self._folder = folder or RuntimeFolder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        # With a ZAP domain, libzmq accepts only new versions of its protocol.  With version 1.0,
        # any process that connects and sends a byte would count as a second peer, and this socket
        # would send every other message to that process.
        self._socket.zap_domain = b"nbdist"
        # Bind before the agent starts, so that the agent can connect at once.
        self.address = f"ipc://{self._folder.path}/{self._folder.socket}"
        self._socket.bind(self.address)
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.idle_signal, self._idle_signal_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waiting: deque[messages.Down] = deque()
        self._last_received: BatchAcknowledged | None = None
        self._answers: dict[int, Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._hello: Future[Hello] = Future()
        self._attached: Future[Attached] = Future()
        self._lost: AgentLost | None = None
        self._opened = self._closing = self._is_detached = self._is_remembered = False
        self.signals_all_messages = False
        # The link's thread calls this function with each message of a debugger, and with None once
        # the agent has ended.
        self.on_debugger: Callable[[messages.FromDebugger | None], None] | None = None
        self._starting = Starting(0)
        self._launched = threading.Event()
        self._agent: AgentHandle | None = None
        self.module = module
        self._launch: Callable[[], AgentHandle] = partial(
            AgentProcess, self._folder.path, module, fork_server=fork_server
        )
        self._thread = threading.Thread(target=self._run, name="nbdist-link", daemon=True)

    def open(self) -> None:
        """Start the link's thread, and return at once.

        The thread starts the agent, unless `take_over` has given it an agent that is running.  The
        caller has to call `close` or `detach` in the end, even if this call was interrupted.
        """
        # The link's thread starts the process, so that no KeyboardInterrupt can come between the
        # start and the assignment to `_agent`.
        self._opened = True
        self._thread.start()

    def __repr__(self) -> str:
        state = "lost" if self._lost else "closed" if self._closing else "up"
        return f"<Link {state} {self._agent} {len(self._answers)} calls open>"

    def check_process(self) -> None:
        """Raise ForkedProcess in a fork of the link's process, which lacks the link's thread."""
        if os.getpid() != self.pid:
            raise ForkedProcess("nbdist")

    @property
    def agent(self) -> AgentHandle:
        """The process that serves the world; read this only once that process has started."""
        assert self._agent is not None
        return self._agent

    @property
    def is_up(self) -> bool:
        """Whether the link is neither lost nor closed."""
        return self._lost is None and not self._closing

    def call(
        self, request: RequestBody, timeout: float = CALL_TIMEOUT, patience: float = float("inf")
    ) -> Reply:
        """Send a request and return the reply.

        Raises StartError if the agent did not start or has another version of nbdist, and AgentLost
        if the agent ends or does not reply within `timeout` seconds.  Raises KeyboardInterrupt
        after `patience` seconds: a caller gives this time if the user has pressed Stop and should
        not wait longer.
        """
        # Wait in short steps: a Stop that comes just before a wait is noticed only at its end.
        calling = self.calling(request, timeout, tick=min(CALL_TICK, patience))
        end = time.monotonic() + patience
        while time.monotonic() < end:
            try:
                next(calling)
            except StopIteration as ended:
                reply: Reply = ended.value
                return reply
        raise KeyboardInterrupt

    def calling(
        self, request: RequestBody, timeout: float = CALL_TIMEOUT, tick: float = CALL_TICK
    ) -> Generator[Starting, None, Reply]:
        """Send a request; return the reply as the generator's value.

        Until the reply comes, yield the progress of the workers' start every `tick` seconds.
        Raises StartError and AgentLost as `call` does.
        """
        self.check_process()
        self._starting = Starting(0)
        yield from self._wait_for_hello(tick)
        answer = self.ask(request)
        if self._lost is not None:  # the agent may have ended before `ask` registered the future
            raise self._lost
        try:
            yield from self._until_done(answer, timeout, tick)
            return answer.result()
        except TimeoutError:
            raise _lost(self.agent) from None

    def take_over(self, agent: AttachedAgent) -> Attached:
        """Open the link to a running agent; return the agent's description of the world.

        Raises StartError and AgentLost as `call` does.
        """
        self._launch = lambda: agent
        self.open()
        for _ in self._wait_for_hello(HELLO_TIMEOUT):
            pass
        try:
            attached = self._attached.result(HELLO_TIMEOUT)
        except TimeoutError:
            raise self._lost or _lost(self.agent) from None
        self._numbers = itertools.count(attached.next_call)
        return attached

    def ask(self, request: RequestBody) -> Future[Reply]:
        """Send a request from any thread and return a future of its reply.

        The future raises AgentLost if the agent has ended.  Wait for the future with a timeout.
        """
        self.check_process()
        answer: Future[Reply] = Future()
        if self._lost is not None:
            answer.set_exception(self._lost)
            return answer
        number = next(self._numbers)
        answer.add_done_callback(lambda _: self._answers.pop(number, None))
        self._answers[number] = answer
        self.send(messages.AgentRequest(number, request))
        return answer

    def send(self, message: messages.Down) -> None:
        """Have the link's thread send a message; for a request with a reply use `call` or `ask`."""
        self._is_remembered |= isinstance(message, messages.HandoverState)
        self._waiting.append(message)
        _write_to(self._wake_end)

    def wait(self, timeout: float) -> None:
        """Wait until `arrived` has an item or `wake` has been called, at most `timeout` seconds.

        Stop may raise KeyboardInterrupt here.  No item is lost by that, since the consumer removes
        an item only after handling the item.
        """
        deadline = time.monotonic() + timeout
        while (
            not (self.arrived or self._is_woken) and (remaining := deadline - time.monotonic()) > 0
        ):
            with suppress(queue.Empty):
                self._bell.get(timeout=max(remaining, SHORTEST_WAIT))
        self._is_woken = False

    def wake(self) -> None:
        """Make the current or the next `wait` return; a signal handler may call this."""
        self._is_woken = True
        self._bell.put(None)

    def acknowledge(self, batch: BatchAcknowledged) -> None:
        """Acknowledge a batch of outputs; a second call for the same batch does nothing.

        The consumer repeats a call that Stop has interrupted.  Usually the acknowledgement is sent
        when the link's thread next sends or receives a message, because the agent can send several
        batches without an acknowledgement.  It is sent at once if other messages wait, or if the
        world can be detached: the next notebook gets all batches that were not acknowledged.
        """
        if batch is not self._last_received:
            self._last_received = batch
            self._waiting.append(batch)
        if len(self._waiting) > 1 or self._is_remembered:
            _write_to(self._wake_end)

    def close(self) -> str:
        """End the agent with its processes, then close the link; do nothing in a forked process.

        Returns a sentence about processes that are left on other machines, "" for none.
        """
        if self._closing or os.getpid() != self.pid:  # a fork does not own the link's resources
            return ""
        self._closing = True
        self.send(messages.Shutdown())
        if self._opened:
            self._launched.wait(AGENT_LEAVE_TIMEOUT)
        leftovers = ""
        if self._agent is not None:
            self._agent.end(AGENT_LEAVE_TIMEOUT)
            leftovers = find_leftovers(self._agent.last_lines())
        self._release_resources()
        self._folder.close()
        return leftovers

    def detach(self) -> None:
        """Close the link.  An agent with the option `detach` keeps running, any other exits."""
        if self._closing or os.getpid() != self.pid:
            return
        self._closing = self._is_detached = True
        if self._opened:
            self._launched.wait(AGENT_LEAVE_TIMEOUT)
        _write_to(self._wake_end)
        self._release_resources()
        self._folder.release()

    def _release_resources(self) -> None:
        # The thread ends soon, because the agent has ended or the link is detached.
        if self._thread.is_alive():
            self._thread.join(THREAD_TIMEOUT)
        # Close the socket first, then the agent's descriptors.  So the agent gets the last messages
        # before it notices the end of this notebook.
        self._socket.close(DETACH_LINGER if self._is_detached else 0)
        self._context.term()
        if self._agent is not None:
            self._agent.close()
        descriptors = (self._wake, self._wake_end, self.idle_signal, self._idle_signal_end)
        # Once a descriptor is closed, a file that is opened later can get its number.  A later
        # `send` must not write to that file.
        self._wake_end = self._idle_signal_end = CLOSED
        for descriptor in descriptors:
            os.close(descriptor)

    def _wait_for_hello(self, tick: float) -> Iterator[Starting]:
        try:
            yield from self._until_done(self._hello, HELLO_TIMEOUT, tick)
            hello = self._hello.result()
        except TimeoutError:
            raise self._start_error(f"did not answer within {HELLO_TIMEOUT:.0f} s") from None
        except AgentLost as lost:
            raise self._start_error("ended at once") from lost
        except OSError as error:
            raise self._start_error(str(error)) from None
        if hello.version != __version__:
            raise self._start_error(f"is nbdist {hello.version}, the notebook {__version__}")

    def _until_done(self, future: Future[Any], timeout: float, tick: float) -> Iterator[Starting]:
        """Yield the progress of the workers' start every `tick` seconds until the future is done.

        Raises TimeoutError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while wait([future], min(tick, deadline - time.monotonic())).not_done:
            if time.monotonic() >= deadline:
                raise TimeoutError
            yield self._starting

    def _start_error(self, why: str) -> StartError:
        if (agent := self._agent) is None:
            return StartError(None, os.uname().nodename, self.module, why)
        return StartError(None, agent.host, agent.command, why, agent.last_lines())

    # --- the link's thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            agent = self._agent = self._launch()
        except OSError as error:
            self._hello.set_exception(error)
            return
        finally:
            self._launched.set()
        try:
            self._serve(agent)
        except Exception:
            # A bug in nbdist: fail all calls, so that their callers do not wait for ever.
            log.exception("the link to %s has failed", agent.host)
            self._fail(agent)

    def _serve(self, agent: AgentHandle) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        poller.register(agent.fileno(), zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._socket in ready:
                self._read()
            if self._wake in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            self._write()
            if self._is_detached:
                return
            if agent.fileno() in ready:
                self._read()  # the last messages of the agent
                self._fail(agent)
                return

    def _write(self) -> None:
        with suppress(zmq.Again):  # the agent has just ended
            while self._waiting and self._hello.done():
                self._socket.send(pack(self._waiting.popleft()), zmq.NOBLOCK)

    def _read(self) -> None:
        with suppress(zmq.Again):
            while True:
                self._handle_message(unpack(self._socket.recv(zmq.NOBLOCK)))

    def _handle_message(self, message: messages.Up) -> None:
        match message:
            case Hello() as hello:
                self._hello.set_result(hello)
            case Attached() as attached:
                self._attached.set_result(attached)
            case AgentReply(number, reply):
                # The consumer must handle a `Healed` reply even if Stop has ended the call, and in
                # the right order among the messages about deaths.
                if isinstance(reply, messages.Healed):
                    self._add_arrived(reply)
                if (answer := self._answers.get(number)) is not None:
                    answer.set_result(reply)
            case messages.Outputs(items):
                # This object marks the end of the batch in `arrived`; the consumer passes it to
                # `acknowledge`.
                self._add_arrived(*items, BatchAcknowledged())
            case Starting() as starting:
                self._starting = starting
            case messages.FromDebugger():
                if self.on_debugger is not None:
                    self.on_debugger(message)
            case item:
                self._add_arrived(item)

    def _add_arrived(self, *items: LinkEvent) -> None:
        self.arrived.extend(items)
        self._bell.put(None)
        if self.signals_all_messages or any(map(_can_come_while_idle, items)):
            _write_to(self._idle_signal_end)

    def _fail(self, agent: AgentHandle) -> None:
        self._lost = lost = _lost(agent)
        log.debug("agent ended: %s", lost)
        calls: tuple[Future[Any], ...] = (self._hello, self._attached, *self._answers.values())
        for each in calls:
            if not each.done():
                each.set_exception(lost)
        self._add_arrived(lost)
        if self.on_debugger is not None:
            self.on_debugger(None)


def _lost(agent: AgentHandle) -> AgentLost:
    return AgentLost(agent.host, agent.exit_code(), "".join(agent.last_lines()[-1:]))


def _write_to(descriptor: int) -> None:
    """Write to a pipe, so that its other end becomes readable; do nothing if it is closed."""
    if descriptor != CLOSED:
        with suppress(BlockingIOError):
            os.write(descriptor, b"x")


def _can_come_while_idle(item: LinkEvent) -> bool:
    """Return True if an item must be handled even while no cell runs.

    Such items are deaths, output outside of tasks, and the end of the agent.
    """
    if isinstance(item, tuple):
        return not item[1] or isinstance(item[2], Died)
    return isinstance(item, AgentLost)
