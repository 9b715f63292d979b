"""The one bridge between the notebook's thread and the agents: the link's thread owns the socket.

The notebook's thread waits on queues and futures, and is the only one that meets KeyboardInterrupt.
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
from nbdist.output.events import Died, Output
from nbdist.system.folders import JoinedFolder, RuntimeFolder
from nbdist.system.processes import left_behind
from nbdist.wire import messages
from nbdist.wire.frames import pack, unpack
from nbdist.wire.messages import Answer, Attached, Hello, Received, Reply, Request, Starting
from nbdist.world.agents import AGENT, AgentProcess, AttachedAgent, require_open_files

log = logging.getLogger("nbdist.world")

HELLO_TIMEOUT = 30.0
CALL_TIMEOUT = 240.0  # longer than an agent takes for its slowest answer, a start
LEAVE_TIMEOUT = 12.0  # seconds; longer than a head takes whose Slurm does not answer
THREAD_TIMEOUT = 60.0
CLOSED = -1
DETACH_LINGER = 500  # milliseconds that the last messages may take to reach an agent that stays

TICK = 0.25
SHORTEST_WAIT = 0.001  # a queue's `get` can find microseconds negative, and waits for ever

Agent = AgentProcess | AttachedAgent
"""What serves the world: this machine's agent, or the head of agents on several."""

Item = tuple[int, str, Output]
News = messages.Located | messages.Aborted | messages.Used | messages.NodeJoined | messages.Silent
Arrived = Item | Received | News | AgentLost


class Link:
    """A connection to the agents of a world, from their start to their end.

    `asides` can be read when something has come while no task runs; with `tells_all` whenever
    something has come.
    """

    def __init__(
        self,
        module: str = AGENT,
        *,
        fork_server: bool = True,
        folder: RuntimeFolder | JoinedFolder | None = None,
    ) -> None:
        require_open_files()
        self.pid = os.getpid()
        self.arrived: deque[Arrived] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_woken = False
        self._folder = folder or RuntimeFolder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        # With a domain libzmq refuses old protocols: by ZMTP 1.0 any byte makes a peer of a process
        # that connects, and every other message would go there.
        self._socket.zap_domain = b"nbdist"
        # Bound before the agent is started: no port is guessed, no connection retried.
        self.address = f"ipc://{self._folder.path}/{self._folder.socket}"
        self._socket.bind(self.address)
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.asides, self._asides_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waiting: deque[messages.Down] = deque()
        self._last_received: Received | None = None
        self._answers: dict[int, Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._hello: Future[Hello] = Future()
        self._attached: Future[Attached] = Future()
        self._lost: AgentLost | None = None
        self._opened = self._closing = self._is_detached = self._is_remembered = False
        self.tells_all = False
        self._starting = Starting(0)
        self._launched = threading.Event()
        self._agent: Agent | None = None
        self.module = module
        self._launch: Callable[[], Agent] = partial(
            AgentProcess, self._folder.path, module, fork_server=fork_server
        )
        self._thread = threading.Thread(target=self._run, name="nbdist-link", daemon=True)

    def open(self) -> None:
        """Start the agents; the caller has to call `close`, also where this was interrupted."""
        # In the link's thread no KeyboardInterrupt can come between a process and its owner.
        self._opened = True
        self._thread.start()

    def __repr__(self) -> str:
        state = "lost" if self._lost else "closed" if self._closing else "up"
        return f"<Link {state} {self._agent} {len(self._answers)} calls open>"

    def check_process(self) -> None:
        """Raise ForkedProcess in a fork of the process that made it: its thread is not there."""
        if os.getpid() != self.pid:
            raise ForkedProcess("nbdist")

    @property
    def agent(self) -> Agent:
        """What serves the world, once it was started."""
        assert self._agent is not None
        return self._agent

    @property
    def is_up(self) -> bool:
        """Whether calls can be made."""
        return self._lost is None and not self._closing

    def call(
        self, request: Request, timeout: float = CALL_TIMEOUT, patience: float = float("inf")
    ) -> Reply:
        """Return the reply; AgentLost, StartError, KeyboardInterrupt after `patience` seconds."""
        # Stop is not met by a wait that begins just as it comes, but by the next one.
        calling = self.calling(request, timeout, tick=min(TICK, patience))
        end = time.monotonic() + patience
        while time.monotonic() < end:
            try:
                next(calling)
            except StopIteration as ended:
                reply: Reply = ended.value
                return reply
        raise KeyboardInterrupt

    def calling(
        self, request: Request, timeout: float = CALL_TIMEOUT, tick: float = TICK
    ) -> Generator[Starting, None, Reply]:
        """Do as `call`, but yield every `tick` seconds how far the workers' start is."""
        self.check_process()
        self._starting = Starting(0)
        yield from self._wait_for_hello(tick)
        answer = self.ask(request)
        if self._lost is not None:  # it may have ended before there was an answer to fail
            raise self._lost
        try:
            yield from self._until_done(answer, timeout, tick)
            return answer.result()
        except TimeoutError:
            raise _lost(self.agent) from None

    def take_over(self, agent: AttachedAgent) -> Attached:
        """Open it to an agent that is there; return what that says.  Raises as `call`."""
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

    def ask(self, request: Request) -> Future[Reply]:
        """Ask an agent that has said hello, from any thread; wait for the reply with a bound."""
        self.check_process()
        answer: Future[Reply] = Future()
        if self._lost is not None:
            answer.set_exception(self._lost)
            return answer
        number = next(self._numbers)
        answer.add_done_callback(lambda _: self._answers.pop(number, None))
        self._answers[number] = answer
        self.send(messages.Ask(number, request))
        return answer

    def send(self, message: messages.Down) -> None:
        """Send a message that has no reply; what it leads to arrives in `arrived`."""
        self._is_remembered |= isinstance(message, messages.Remember)
        self._waiting.append(message)
        _write_to(self._wake_end)

    def wait(self, timeout: float) -> None:
        """Wait until something is in `arrived`, at most `timeout` seconds.

        Stop may come here; nothing is lost, as the consumer removes an item after taking it in.
        """
        deadline = time.monotonic() + timeout
        while not (self.arrived or self._is_woken) and (left := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                self._bell.get(timeout=max(left, SHORTEST_WAIT))
        self._is_woken = False

    def wake(self) -> None:
        """End `wait`, now or the next time; a handler of signals may call it."""
        self._is_woken = True
        self._bell.put(None)

    def received(self, batch: Received) -> None:
        """Acknowledge this batch, once, also where Stop has the caller do it again.

        One may wait for the next message, down or up: the agent may have several under way.
        But not where the next notebook is to be shown what this one has not seen.
        """
        if batch is not self._last_received:
            self._last_received = batch
            self._waiting.append(batch)
        if len(self._waiting) > 1 or self._is_remembered:
            _write_to(self._wake_end)

    def close(self) -> str:
        """End the agents and all they hold; return what they could not end elsewhere, or ""."""
        if self._closing or os.getpid() != self.pid:  # a fork of the notebook owns nothing here
            return ""
        self._closing = True
        self.send(messages.Shutdown())
        if self._opened:
            self._launched.wait(LEAVE_TIMEOUT)
        left = ""
        if self._agent is not None:
            self._agent.end(LEAVE_TIMEOUT)
            left = left_behind(self._agent.last_lines())
        self._end()
        self._folder.close()
        return left

    def detach(self) -> None:
        """End the link alone: agents that outlive their notebook go on, and others end."""
        if self._closing or os.getpid() != self.pid:
            return
        self._closing = self._is_detached = True
        if self._opened:
            self._launched.wait(LEAVE_TIMEOUT)
        _write_to(self._wake_end)
        self._end()
        self._folder.release()

    def _end(self) -> None:
        if self._thread.is_alive():  # all that it waits for has ended
            self._thread.join(THREAD_TIMEOUT)
        # First: what was said last is to come before the end.
        self._socket.close(DETACH_LINGER if self._is_detached else 0)
        self._context.term()
        if self._agent is not None:
            self._agent.close()
        ends = (self._wake, self._wake_end, self.asides, self._asides_end)
        # A later wake-up is not to write to what has these numbers then.
        self._wake_end = self._asides_end = CLOSED
        for end in ends:
            os.close(end)

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
        """Come round until it is done; TimeoutError after `timeout` seconds."""
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
            # A fault of ours; callers that wait must not do so for ever.
            log.exception("the link to %s has failed", agent.host)
            self._fail(agent)

    def _serve(self, agent: Agent) -> None:
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
                self._read()  # its last messages
                self._fail(agent)
                return

    def _write(self) -> None:
        with suppress(zmq.Again):  # the agent has just gone
            while self._waiting and self._hello.done():
                self._socket.send(pack(self._waiting.popleft()), zmq.NOBLOCK)

    def _read(self) -> None:
        with suppress(zmq.Again):
            while True:
                self._take(unpack(self._socket.recv(zmq.NOBLOCK)))

    def _take(self, message: messages.Up) -> None:
        match message:
            case Hello() as hello:
                self._hello.set_result(hello)
            case Attached() as attached:
                self._attached.set_result(attached)
            case Answer(number, reply):
                if (answer := self._answers.get(number)) is not None:
                    answer.set_result(reply)
            case messages.Outputs(items):
                # What ends a batch is to be sent back.
                self._arrive(*items, Received())
            case Starting() as starting:
                self._starting = starting
            case news:
                self._arrive(news)

    def _arrive(self, *items: Arrived) -> None:
        self.arrived.extend(items)
        self._bell.put(None)
        if self.tells_all or any(map(_is_aside, items)):
            _write_to(self._asides_end)

    def _fail(self, agent: Agent) -> None:
        self._lost = lost = _lost(agent)
        log.debug("agent ended: %s", lost)
        calls: tuple[Future[Any], ...] = (self._hello, self._attached, *self._answers.values())
        for each in calls:
            if not each.done():
                each.set_exception(lost)
        self._arrive(lost)


def _lost(agent: Agent) -> AgentLost:
    return AgentLost(agent.host, agent.exit_code(), "".join(agent.last_lines()[-1:]))


def _write_to(end: int) -> None:
    """Make a pipe readable, unless it is closed; a full one is readable."""
    if end != CLOSED:
        with suppress(BlockingIOError):
            os.write(end, b"x")


def _is_aside(item: Arrived) -> bool:
    """Return True if it can come while no cell runs: a death, or output after a cell."""
    if isinstance(item, tuple):
        return not item[1] or isinstance(item[2], Died)
    return isinstance(item, AgentLost)
