"""The connection from the notebook's process to the agent or head of a world.

`AgentConnection` has the link of a world.  One thread, which the link owns, sends and receives all
messages; other threads only wait for queues and futures.  So a KeyboardInterrupt in the main thread
cannot break off the sending or receiving of a message.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future

from nbdist.errors import AgentLost, ForkedProcess
from nbdist.system.folders import JoinedFolder, RuntimeFolder
from nbdist.system.processes import find_leftovers
from nbdist.wire import messages
from nbdist.wire.messages import (
    AgentReply,
    AgentRequest,
    Attached,
    BatchAcknowledged,
    Hello,
    Reply,
    RequestBody,
    Starting,
)
from nbdist.world.agent_start import HELLO_TIMEOUT, AgentStart, ticks_until_done
from nbdist.world.agents import (
    AGENT_MODULE,
    AgentHandle,
    AttachedAgent,
    agent_loss,
    require_open_files,
)
from nbdist.world.event_queue import EventQueue
from nbdist.world.link_socket import LinkSocket

log = logging.getLogger("nbdist.world")

CALL_TIMEOUT = 240.0  # seconds; must exceed an agent's longest time to start workers
AGENT_LEAVE_TIMEOUT = 25.0  # seconds; must exceed a head's time to end if Slurm does not answer
THREAD_TIMEOUT = 60.0
DETACH_LINGER = 500  # milliseconds to deliver the last messages when the link detaches

CALL_TICK = 0.25


class PendingRequests:
    """The requests of a link whose replies have not arrived; this class itself sends nothing.

    Any thread may call `add`; the link's thread calls `resolve` and `fail`.
    """

    def __init__(self) -> None:
        self._replies: dict[int, Future[Reply]] = {}  # by the request's number
        self._numbers = itertools.count(1)

    def __repr__(self) -> str:
        return f"<PendingRequests {[*self._replies]}>"

    def __len__(self) -> int:
        return len(self._replies)

    def number_from(self, number: int) -> None:
        """Give this number to the next request, and higher numbers to later requests."""
        self._numbers = itertools.count(number)

    def add(self, request: RequestBody) -> tuple[AgentRequest[RequestBody], Future[Reply]]:
        """Return the message that brings a request to the agent, and a future of the reply."""
        reply: Future[Reply] = Future()
        number = next(self._numbers)
        reply.add_done_callback(lambda _: self._replies.pop(number, None))
        self._replies[number] = reply
        return AgentRequest(number, request), reply

    def resolve(self, number: int, reply: Reply) -> None:
        """Give the reply to the request with this number to the thread that waits for it."""
        if (pending := self._replies.get(number)) is not None:
            pending.set_result(reply)

    def fail(self, lost: AgentLost) -> None:
        """Raise `lost` in the threads that wait for replies, because the agent has ended."""
        for each in [*self._replies.values()]:
            if not each.done():
                each.set_exception(lost)


class Link:
    """A connection to the agent or head of a world.

    A reply goes to the caller that has sent the request; only a `Healed` reply is also an event.
    All other messages of the agent are events, except those about a start and those of debuggers.
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
        self._folder = folder or RuntimeFolder()
        # Bind the socket now, so that an agent that is started or asked later can connect at once.
        self.socket = LinkSocket(f"ipc://{self._folder.path}/{self._folder.socket}")
        self.events = EventQueue()  # events that `nbdist.world.inbox` has yet to handle
        # The link's thread calls this function with each message of a debugger, and with None once
        # the agent has ended.
        self.on_debugger: Callable[[messages.FromDebugger | None], None] | None = None
        self._start = AgentStart(self._folder.path, module, fork_server=fork_server)
        self._requests = PendingRequests()
        self._progress = Starting(0)  # of the workers' start
        self._lost: AgentLost | None = None
        self._opened = self._closing = self._is_detached = False
        self._thread = threading.Thread(target=self._run, name="nbdist-link", daemon=True)

    def open(self) -> None:
        """Start the link's thread, and return at once.

        The thread starts the agent, unless `take_over` has given it an agent that is running.  The
        caller has to call `close` or `detach` in the end, even if this call was interrupted.
        """
        # The link's thread starts the process, so that no KeyboardInterrupt can come between the
        # start and the assignment to `AgentStart.agent`.
        self._opened = True
        self._thread.start()

    def __repr__(self) -> str:
        state = "lost" if self._lost else "closed" if self._closing else "up"
        return f"<Link {state} {self._start.agent} {len(self._requests)} calls open>"

    def check_process(self) -> None:
        """Raise ForkedProcess in a fork of the link's process, which lacks the link's thread."""
        if os.getpid() != self.pid:
            raise ForkedProcess("nbdist")

    @property
    def agent(self) -> AgentHandle:
        """The process that serves the world; read this only once that process has started."""
        assert self._start.agent is not None
        return self._start.agent

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
        # Wait in short steps: a Stop just before a wait is noticed only at the end of the wait.
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
        self._progress = Starting(0)
        for _ in self._start.wait_for_hello(tick):
            yield self._progress
        answer = self.ask(request)
        if self._lost is not None:  # the agent may have ended before `ask` registered the future
            raise self._lost
        try:
            for _ in ticks_until_done(answer, timeout, tick):
                yield self._progress
            return answer.result()
        except TimeoutError:
            raise agent_loss(self.agent) from None

    def take_over(self, agent: AttachedAgent) -> Attached:
        """Open the link to a running agent; return the agent's description of the world.

        Raises StartError and AgentLost as `call` does.
        """
        self._start.use_running(agent)
        self.open()
        for _ in self._start.wait_for_hello(HELLO_TIMEOUT):
            pass
        attached = self._start.wait_for_world()
        self._requests.number_from(attached.next_call)
        return attached

    def ask(self, request: RequestBody) -> Future[Reply]:
        """Send a request from any thread and return a future of its reply.

        The future raises AgentLost if the agent has ended.  Wait for the future with a timeout.
        """
        self.check_process()
        if self._lost is not None:
            answer: Future[Reply] = Future()
            answer.set_exception(self._lost)
            return answer
        message, answer = self._requests.add(request)
        self.send(message)
        return answer

    def send(self, message: messages.Down) -> None:
        """Have the link's thread send a message; for a request with a reply use `call` or `ask`."""
        self.socket.send(message)

    def drop_events(self) -> None:
        """Drop the events that wait, such as those of workers that have ended.

        Batches of outputs among them are acknowledged.
        """
        while self.events.waiting:
            event = self.events.waiting.popleft()
            if isinstance(event, BatchAcknowledged) and self.is_up:
                self.socket.acknowledge(event)

    def close(self) -> str:
        """End the agent with its processes, then close the link; do nothing in a forked process.

        Returns a sentence about processes that are left on other machines, "" for none.
        """
        if self._closing or os.getpid() != self.pid:  # a fork does not own the link's resources
            return ""
        self._closing = True
        self.send(messages.Shutdown())
        if self._opened:
            self._start.wait_until_launched(AGENT_LEAVE_TIMEOUT)
        leftovers = ""
        if (agent := self._start.agent) is not None:
            agent.end(AGENT_LEAVE_TIMEOUT)
            leftovers = find_leftovers(agent.last_lines())
        self._release_resources()
        self._folder.close()
        return leftovers

    def detach(self) -> None:
        """Close the link.  An agent with the option `detach` keeps running, any other exits."""
        if self._closing or os.getpid() != self.pid:
            return
        self._closing = self._is_detached = True
        if self._opened:
            self._start.wait_until_launched(AGENT_LEAVE_TIMEOUT)
        self.socket.wake()
        self._release_resources()
        self._folder.release()

    def _release_resources(self) -> None:
        # The thread ends soon, because the agent has ended or the link is detached.
        if self._thread.is_alive():
            self._thread.join(THREAD_TIMEOUT)
        # Close the socket first, then the agent's descriptors.  So an agent that still runs gets
        # the last messages before it notices that this notebook has left.
        self.socket.close(DETACH_LINGER if self._is_detached else 0)
        if self._start.agent is not None:
            self._start.agent.close()
        self.events.close()

    # --- the link's thread ---------------------------------------------------------------

    def _run(self) -> None:
        if (agent := self._start.launch()) is None:
            return
        try:
            self._serve(agent)
        except Exception:
            # A bug in nbdist: fail all calls, so that their callers do not wait for ever.
            log.exception("the link to %s has failed", agent.host)
            self._fail(agent)

    def _serve(self, agent: AgentHandle) -> None:
        while True:
            has_ended = self.socket.wait(agent.fileno())
            self._read()
            if self._start.has_hello:
                self.socket.send_waiting()
            if self._is_detached:
                return
            if has_ended:
                self._read()  # the last messages of the agent
                self._fail(agent)
                return

    def _read(self) -> None:
        for message in self.socket.receive():
            self._handle_message(message)

    def _handle_message(self, message: messages.Up) -> None:
        match message:
            case Hello() | Attached():
                self._start.record_message(message)
            case AgentReply(number, reply):
                # `nbdist.world.inbox` must handle a `Healed` reply even if Stop has ended the call,
                # and in the right order among the messages about deaths.
                if isinstance(reply, messages.Healed):
                    self.events.add(reply)
                self._requests.resolve(number, reply)
            case messages.Outputs(items):
                # `BatchAcknowledged` marks the end of the batch among the events, and is later
                # passed to `LinkSocket.acknowledge`.
                self.events.add(*items, BatchAcknowledged())
            case Starting() as starting:
                self._progress = starting
            case messages.FromDebugger():
                if self.on_debugger is not None:
                    self.on_debugger(message)
            case event:
                self.events.add(event)

    def _fail(self, agent: AgentHandle) -> None:
        self._lost = lost = agent_loss(agent)
        log.debug("agent ended: %s", lost)
        self._start.fail(lost)
        self._requests.fail(lost)
        self.events.add(lost)
        if self.on_debugger is not None:
            self.on_debugger(None)
