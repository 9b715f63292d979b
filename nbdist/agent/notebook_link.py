"""The connection of an agent or head to its notebook, and the event loop of the agent or head.

With one machine the agent has this connection; with several machines the head has it, and each
agent has a `nbdist.cluster.client.HeadLink` instead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import zmq
from zmq.eventloop.zmqstream import ZMQStream

from nbdist import __version__
from nbdist.agent.supervisor import Supervision
from nbdist.agent.unattended_healing import UnattendedHealing
from nbdist.agent.world_record import WorldRecord
from nbdist.output.events import Output
from nbdist.system import folders
from nbdist.system.processes import LEAVES_BYTE, STAYS_BYTE, Guard, adopt_orphans, kill_descendants
from nbdist.values.payload import Segment, SegmentGone, SegmentRef
from nbdist.wire import messages
from nbdist.wire.frames import pack, unpack
from nbdist.wire.queries import (
    ATTACH_SOCKET_PATTERN,
    Accepted,
    Attach,
    AttachRefused,
    Inspection,
    WorldInfo,
)
from nbdist.wire.spec import versions_here
from nbdist.wire.work import task_from
from nbdist.words import name_ranks

T = TypeVar("T")

log = logging.getLogger("nbdist.agent")

NOTEBOOK_LINK_LINGER = 500  # milliseconds to deliver queued messages after `close`
CHANGE_TIMEOUT, CHANGE_STEP = 20.0, 0.05
"""Seconds that an attaching notebook waits at most for changes of workers, and between checks."""
LAST_WORDS = 0.1  # seconds to wait for messages that the notebook sent before it ended
FIRST_LINE = 200  # characters of a task's title in `WorldInfo`


class NotebookLink:
    """The connection of a world to the notebook that uses it, if any notebook does.

    A world with the `detach` option keeps running if the notebook ends.  Such a world's output is
    recorded (`record`), and replayed to the next notebook that attaches (`Listener`).

    `on_message` is called with messages that the agent or head must carry out: those of the
    notebook, and similar ones of `Supervision` and `UnattendedHealing`.  `shut_down` is called on
    SIGTERM, and when the notebook of a world without `detach` ends.  It is also called when a
    detached world has no workers, or has lost all its machines (`has_machines`) and carries out no
    call.
    """

    problem = ""
    """Always "", because a notebook's exit is no error; `HeadLink.problem` may name an error."""

    def __init__(
        self,
        runtime: Path,
        notebook_pid: int,
        guard: Guard,
        on_message: Callable[[messages.Down], None],
        shut_down: Callable[[], None],
        has_machines: Callable[[], object] = lambda: True,
    ) -> None:
        self._runtime = runtime
        self._guard = guard
        self._on_message, self._shut_down = on_message, shut_down
        self._has_machines = has_machines
        self.record = WorldRecord()
        self._supervision = Supervision(self._deliver, self.send)
        self._healing = UnattendedHealing(self.record, self._heal)
        # The connection to the notebook; None while the world is detached, and after `close`.
        self._stream: ZMQStream | None = self._connect(folders.NOTEBOOK_SOCKET)
        self.notebook_pid = notebook_pid  # 0 while detached
        self._watched_fds: list[int] = []  # descriptors that become readable when the notebook ends
        self._replayed_in_flight = self._live_in_flight = 0  # unacknowledged batches
        self._owner_since = time.time()  # when the notebook got the world, or the world detached
        self._setup_segments: dict[str, Segment] = {}

    def __repr__(self) -> str:
        at = f"notebook {self.notebook_pid}" if self._stream else "detached"
        return f"<NotebookLink {at} {self.record}>"

    async def open(self) -> None:
        """Send `Hello`, and watch for the notebook's exit, the end of stdin, and SIGTERM."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._shut_down)
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        self._send_hello()
        self._watch_fd(os.dup(sys.stdin.fileno()))
        self._watch_notebook_process()

    def _connect(self, name: str) -> ZMQStream:
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        dealer.linger = NOTEBOOK_LINK_LINGER
        dealer.sndhwm = dealer.rcvhwm = 0
        dealer.connect(f"ipc://{self._runtime}/{name}")
        stream = ZMQStream(dealer)
        stream.on_recv(lambda frames: self._receive(unpack(frames[0])))
        return stream

    def _send_hello(self) -> None:
        assert self._stream is not None
        self._stream.send(pack(messages.Hello(__version__, os.getpid(), socket.gethostname())))

    def send(self, message: messages.Up) -> None:
        """Update the record from a message, and send the message to the notebook if there is one.

        While the world is detached, outputs count as acknowledged, so that the `Outbox` goes on.
        """
        self.record.record_sent(message)
        self._supervision.report(message)
        self._healing.check()
        if isinstance(message, messages.Outputs):
            self._live_in_flight += 1
        if self._stream is not None:
            self._stream.send(pack(message))
        elif isinstance(message, messages.Outputs):
            # No notebook acknowledges the batch: without this, the outbox would stop sending.
            self._live_in_flight -= 1
            loop = asyncio.get_running_loop()
            loop.call_soon(self._on_message, messages.BatchAcknowledged())
        if self._stream is None and not self._must_keep_world():
            self._shut_down()

    async def close(self) -> None:
        """Close the connection; queued messages may still be sent for `NOTEBOOK_LINK_LINGER`."""
        stream, self._stream = self._stream, None  # from here on `_notebook_ended` does nothing
        self._supervision.close()
        self._healing.forget()
        self._unwatch_all()
        if stream is not None:
            stream.close()
        for segment in self._setup_segments.values():
            segment.close()

    def _receive(self, message: messages.Down) -> None:
        match message:
            case messages.BatchAcknowledged():
                # Acknowledgements of replayed batches come first.  No outbox has sent such batches.
                if self._replayed_in_flight:
                    self._replayed_in_flight -= 1
                else:
                    self._live_in_flight -= 1
                    self._on_message(message)
                if not (self._replayed_in_flight or self._live_in_flight):
                    self.record.mark_all_acknowledged()
                return
            case messages.HandoverState():
                message = self._open_segments(message)
                if message.config.detach != self.record.detach:
                    self._guard.send(STAYS_BYTE if message.config.detach else LEAVES_BYTE)
            case messages.Interrupt() if self._supervision.is_repeated(message):
                return
            case messages.AgentRequest(request=messages.StartWorld() | messages.StopWorld()):
                self._supervision.close()
                self._healing.forget()
        if isinstance(message, messages.HandoverState):
            self.record.record_received(message)
        else:
            self._supervision.receive(message)
            self._deliver(message)
            self._healing.receive(message)

    def _deliver(self, message: messages.Down) -> None:
        """Record a message of the notebook or of this process, and call `on_message` with it."""
        self.record.record_received(message)
        self._on_message(message)

    def observe(self, rank: int, task_id: str, output: Output) -> None:
        """Pass a rank's output to `Supervision` and `UnattendedHealing` at once."""
        self._supervision.observe(rank, task_id, output)
        self._healing.observe(task_id, output, is_detached=self._stream is None)

    def _heal(self) -> None:
        dead = self.record.facts.dead if self.record.facts else ()
        log.warning("%s: replaced without the notebook", name_ranks(dead))
        self._deliver(messages.AgentRequest(messages.OWN_REQUEST, messages.Heal()))

    def _open_segments(self, state: messages.HandoverState) -> messages.HandoverState:
        """Open the shared memory of the set-up cells in this process, so that it stays available.

        Without this, the memory would be gone when the notebook exits.  The returned message refers
        to the segments that this process has opened.  Segments of earlier messages that are no
        longer needed are closed.
        """
        opened: dict[str, Segment] = {}
        new_refs: dict[str, SegmentRef] = {}
        for ref in (ref for _, task in state.setup for ref in task.segments):
            with suppress(SegmentGone):
                reused = opened.get(ref.path) or self._setup_segments.get(ref.path)
                segment = reused or Segment.of_another(ref)
                opened[segment.ref.path] = segment
                new_refs[ref.path] = segment.ref
        for path in self._setup_segments.keys() - opened.keys():
            self._setup_segments[path].close()
        self._setup_segments = opened
        return state._replace(setup=tuple((key, task.moved(new_refs)) for key, task in state.setup))

    def _watch_fd(self, fd: int) -> None:
        asyncio.get_running_loop().add_reader(fd, self._notebook_ended)
        self._watched_fds.append(fd)

    def _watch_notebook_process(self) -> None:
        try:
            self._watch_fd(os.pidfd_open(self.notebook_pid))
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(self._notebook_ended)

    def _unwatch_all(self) -> None:
        loop = asyncio.get_running_loop()
        for fd in self._watched_fds:
            loop.remove_reader(fd)
            os.close(fd)
        self._watched_fds = []

    def _notebook_ended(self) -> None:
        """Detach the world, or shut it down if it does not have the `detach` option.

        Called when the notebook has exited or has released the world.
        """
        if self._stream is None:
            return
        self._unwatch_all()
        if self.record.detach:
            asyncio.get_running_loop().call_later(LAST_WORDS, self._detach_from, self._stream)
        else:
            self._shut_down()

    def _detach_from(self, stream: ZMQStream) -> None:
        if self._stream is not stream:
            return
        stream.flush(zmq.POLLIN)
        if not self._must_keep_world():
            self._shut_down()
            return
        log.warning("notebook %d is gone; the world stays", self.notebook_pid)
        stream.close()
        self._stream, self.notebook_pid, self._owner_since = None, 0, time.time()
        # The notebook will neither acknowledge batches nor release the values that it was sent.
        for _ in range(self._live_in_flight):
            self._on_message(messages.BatchAcknowledged())
        self._on_message(messages.CloseDebuggers((*self.ranks,)))
        for release in self.record.pop_unreleased_values():
            self._on_message(release)
        self._live_in_flight = self._replayed_in_flight = 0
        self._healing.detach()

    def attach_connection_closed(self, pid: int) -> None:
        """Detach or shut down the world, because the attached notebook `pid` has disconnected.

        The notebook has closed its connection to the `Listener`.  Does nothing if another notebook
        has the world by now.
        """
        if pid == self.notebook_pid:
            self._notebook_ended()

    def _must_keep_world(self) -> bool:
        record = self.record
        return record.has_world and bool(record.pending_calls or self._has_machines())

    def _is_notebook_alive(self) -> bool:
        """Return True if a notebook has the world and its process runs.

        Asks Linux, because the event loop may not have noticed yet that the notebook has exited.
        """
        if self._stream is None:
            return False
        poller = select.poll()
        for fd in self._watched_fds:
            poller.register(fd, select.POLLIN)
        return bool(self._watched_fds) and not poller.poll(0)

    @property
    def ranks(self) -> Collection[int]:
        """The ranks of the world; empty while the world has no workers."""
        return self.record.ranks

    @property
    def tasks(self) -> Inspection:
        """The last task, and the last task during which or after which a rank failed."""
        return self.record.tasks

    def describe(self) -> WorldInfo:
        """Return what this process knows about the world, without asking the workers."""
        record, facts, run = self.record, self.record.facts, self.record.running_task
        return WorldInfo(
            version=__version__,
            host=socket.gethostname(),
            pool=facts.spec.config.pool if facts else "",
            name=facts.spec.name if facts else "",
            workers=len(record.ranks),
            state=record.state,
            cell=task_from(run.task).title[:FIRST_LINE] if run else "",
            began=record.began,
            notebook=self.notebook_pid if self._is_notebook_alive() else 0,
            since=self._owner_since,
            detach=record.detach,
            guard=self._guard.pid,
            versions=versions_here(),
        )

    async def attach(self, request: Attach) -> Accepted | AttachRefused:
        """Connect the world to the notebook that asks for it, or return why that is refused.

        A request is refused if another notebook uses the world, if the versions of nbdist differ,
        if a change of the workers is still in progress after `CHANGE_TIMEOUT` seconds, if there are
        no workers, or if the name of the notebook's socket is not valid.
        """
        deadline = time.monotonic() + CHANGE_TIMEOUT
        while True:
            info = self.describe()
            if request.version != __version__:
                return AttachRefused(
                    f"it is of nbdist {__version__}, and this is {request.version}"
                )
            if info.notebook:
                return AttachRefused(f"the notebook of process {info.notebook} uses it")
            if self._stream is None and not self.record.pending_calls:
                break
            if time.monotonic() > deadline:
                return AttachRefused("its workers are being started or healed just now")
            await asyncio.sleep(CHANGE_STEP)
        if not self.record.ranks:
            return AttachRefused("its workers have ended")
        if not ATTACH_SOCKET_PATTERN.fullmatch(request.socket):
            return AttachRefused("that is no notebook's socket")
        self.notebook_pid = request.pid
        self._stream = self._connect(request.socket)
        self._send_hello()
        batches = self.record.replay_batches()
        attached, decided = self.record.attached(self._owner_since), self._supervision.decided
        for message in (attached, *decided, *batches):
            self._stream.send(pack(message))
        if healed := self.record.unattended_change:
            self._stream.send(pack(messages.AgentReply(messages.OWN_REQUEST, healed)))
        self._healing.forget()
        self._replayed_in_flight += len(batches)
        self._owner_since = time.time()
        self._watch_notebook_process()
        return Accepted(os.getpid(), self._guard.pid)


# --- calls ------------------------------------------------------------------------------------


class _Left(Exception):
    """Raised in the task group to cancel all of its tasks."""


class Serving:
    """Carries out queued calls to an agent or head in order; runs other coroutines concurrently.

    A call is a request with a number (`AgentRequest`).  `answer` carries out the request of a
    queued call and returns the reply; `send` sends the reply.
    """

    def __init__(
        self,
        answer: Callable[[messages.RequestBody], Awaitable[messages.Reply]],
        send: Callable[[messages.AgentReply], None],
    ) -> None:
        self._answer = answer
        self._send = send
        self._calls: asyncio.Queue[messages.AgentRequest[Any]] = asyncio.Queue()
        self._stopped = asyncio.Event()
        self._error: BaseException | None = None

    async def run_until_stopped(self) -> None:
        """Carry out calls and coroutines until `stop` is called, then cancel those in progress.

        Raises the first exception of a coroutine or of a callback of the event loop.  Such an
        exception is a bug in nbdist, and ends the process.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._serve_calls())
                await self._stopped.wait()
                raise _Left
        except* _Left:
            pass
        except* Exception as faults:  # noqa: BLE001 (it is raised below, without its group)
            self._error = self._error or faults.exceptions[0]
        finally:
            self._stopped.set()
        if self._error is not None:
            raise self._error

    def enqueue(self, ask: messages.AgentRequest[Any]) -> None:
        """Queue a call, which is carried out once all earlier calls in the queue are answered."""
        self._calls.put_nowait(ask)

    async def reply(
        self, number: int, answer: Callable[..., Awaitable[Any]], *arguments: Any
    ) -> None:
        """Call `answer` with `arguments`, and send the result as the reply to call `number`.

        The caller passes this coroutine to `spawn`, so that the call does not wait in the queue.
        """
        self._send(messages.AgentReply(number, await answer(*arguments)))

    def spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine concurrently; `stop` cancels it, and after `stop` none is started."""
        if self._stopped.is_set():
            coroutine.close()
        else:
            self._tasks.create_task(coroutine)

    def stop(self) -> None:
        """Make `run_until_stopped` cancel everything in progress and return."""
        self._stopped.set()

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error in a callback of the event loop: `run_until_stopped` raises the error.

        Pass this method to `loop.set_exception_handler`.
        """
        loop.default_exception_handler(context)
        self._error = self._error or context.get("exception") or RuntimeError(context["message"])
        self.stop()

    async def _serve_calls(self) -> None:
        while True:
            ask = await self._calls.get()
            self._send(messages.AgentReply(ask.id, await self._answer(ask.request)))


def run(runtime: Path, serve: Callable[[], Awaitable[T]]) -> T:
    """Run `serve` in an event loop, then kill all descendants and remove the runtime folder."""

    async def main() -> T:
        return await serve()

    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    adopt_orphans()
    # The lock is held until this process exits.  Without the lock, another process that cleans up
    # after dead agents could remove the folder.
    folders.join(runtime)
    try:
        return asyncio.run(main())
    finally:
        kill_descendants()
        shutil.rmtree(runtime, ignore_errors=True)
