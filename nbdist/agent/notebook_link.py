"""The connection of an agent or head to its notebook, and the event loop that serves it.

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
from nbdist.agent.world_record import WorldRecord
from nbdist.output.events import Died
from nbdist.system import folders
from nbdist.system.processes import LEAVES, STAYS, Guard, adopt_orphans, end_descendants
from nbdist.values.payload import Segment, SegmentGone, SegmentRef
from nbdist.wire import messages
from nbdist.wire.frames import pack, unpack
from nbdist.wire.queries import SOCKET, Accepted, Attach, Findings, Refused, WorldInfo
from nbdist.wire.spec import versions_here
from nbdist.wire.work import task_from

Result = TypeVar("Result")

log = logging.getLogger("nbdist.agent")

LINK_LINGER = 500  # milliseconds to deliver queued messages after `close`
CHANGE_TIMEOUT, CHANGE_STEP = 20.0, 0.05
"""Seconds that a notebook which attaches waits while workers start or heal, and between polls."""
LAST_WORDS = 0.1  # seconds for the last messages of a notebook that has ended to arrive
FIRST_LINE = 200  # characters of a task's title in `WorldInfo`


class NotebookLink:
    """The connection of a world to the notebook that uses it, if any notebook does.

    If the notebook ends, a world with the `detach` option keeps running.  Its output is then
    recorded (`WorldRecord`) and replayed to the next notebook that attaches (`Listener`).

    `receive` gets the notebook's messages.  `leave` is called if the notebook ends and the world
    does not detach, and if a detached world has no workers or `has_machines` returns false.
    """

    problem = ""
    """Always empty: the end of a notebook is no error.  `HeadLink.problem` can have a reason."""

    def __init__(
        self,
        runtime: Path,
        notebook_pid: int,
        guard: Guard,
        receive: Callable[[messages.Down], None],
        leave: Callable[[], None],
        has_machines: Callable[[], object] = lambda: True,
    ) -> None:
        self._runtime = runtime
        self._guard = guard
        self._hand_on, self._leave = receive, leave
        self._has_machines = has_machines
        self._record = WorldRecord()
        self._end: ZMQStream | None = self._connect(folders.SOCKET)  # None while detached
        self.notebook_pid = notebook_pid  # 0 while detached
        self._ends: list[int] = []  # descriptors that become readable when the notebook ends
        self._replayed = self._live = 0  # unacknowledged batches
        self._since = time.time()  # when the present notebook got the world, or it was detached
        self._segments: dict[str, Segment] = {}

    def __repr__(self) -> str:
        at = f"notebook {self.notebook_pid}" if self._end else "detached"
        return f"<NotebookLink {at} {self._record}>"

    async def open(self) -> None:
        """Send `Hello`, then watch for the notebook's end: of its process, or of our stdin."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        self._say_hello()
        self._watch(os.dup(sys.stdin.fileno()))
        self._watch_process()

    def _connect(self, name: str) -> ZMQStream:
        link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        link.linger = LINK_LINGER
        link.sndhwm = link.rcvhwm = 0
        link.connect(f"ipc://{self._runtime}/{name}")
        stream = ZMQStream(link)
        stream.on_recv(lambda frames: self._receive(unpack(frames[0])))
        return stream

    def _say_hello(self) -> None:
        assert self._end is not None
        self._end.send(pack(messages.Hello(__version__, os.getpid(), socket.gethostname())))

    def send(self, message: messages.Up) -> None:
        """Send a message to the notebook.  While detached, only record it for the next notebook."""
        self._record.take_up(message)
        if isinstance(message, messages.Outputs):
            self._live += 1
        if self._end is not None:
            self._end.send(pack(message))
        elif isinstance(message, messages.Outputs):
            # No notebook acknowledges the batch: without this, the outbox would stop sending.
            self._live -= 1
            loop = asyncio.get_running_loop()
            loop.call_soon(self._hand_on, messages.Received())
            died = any(isinstance(output, Died) for _, _, output in message.items)
            if died and self._record.unfinished:
                # Other ranks may wait for the dead rank, and no notebook aborts their collectives.
                everyone = tuple(self._record.known.pids)
                loop.call_soon(self._hand_on, messages.Abort(everyone))
        if self._end is None and not self._is_wanted():
            self._leave()

    async def close(self) -> None:
        """Close the connection.  Queued messages are still delivered within `LINK_LINGER`."""
        end, self._end = self._end, None  # from here on `_lose` does nothing
        self._unwatch()
        if end is not None:
            end.close()
        for segment in self._segments.values():
            segment.close()

    def _receive(self, message: messages.Down) -> None:
        match message:
            case messages.Received():
                # The replayed batches were sent first, and the outbox did not send them.
                if self._replayed:
                    self._replayed -= 1
                else:
                    self._live -= 1
                    self._hand_on(message)
                if not (self._replayed or self._live):
                    self._record.seen()
                return
            case messages.Remember():
                message = self._holding(message)
                if message.config.detach != self._record.detach:
                    self._guard.tell(STAYS if message.config.detach else LEAVES)
        self._record.take_down(message)
        if not isinstance(message, messages.Remember):
            self._hand_on(message)

    def _holding(self, memory: messages.Remember) -> messages.Remember:
        """Open the shared memory of the set-up cells here, so that it outlives the notebook.

        The returned message refers to the segments that this process has opened.  Segments that
        only earlier messages referred to are closed.
        """
        held: dict[str, Segment] = {}
        places: dict[str, SegmentRef] = {}
        for ref in (ref for _, task in memory.setup for ref in task.segments):
            with suppress(SegmentGone):
                known = held.get(ref.path) or self._segments.get(ref.path)
                segment = known or Segment.of_another(ref)
                held[segment.ref.path] = segment
                places[ref.path] = segment.ref
        for path in self._segments.keys() - held.keys():
            self._segments[path].close()
        self._segments = held
        return memory._replace(setup=tuple((key, task.moved(places)) for key, task in memory.setup))

    def _watch(self, end: int) -> None:
        asyncio.get_running_loop().add_reader(end, self._lose)
        self._ends.append(end)

    def _watch_process(self) -> None:
        try:
            self._watch(os.pidfd_open(self.notebook_pid))
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(self._lose)

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for end in self._ends:
            loop.remove_reader(end)
            os.close(end)
        self._ends = []

    def _lose(self) -> None:
        """Detach the world or leave: the notebook has ended, or has released the world."""
        if self._end is None:
            return
        self._unwatch()
        if self._record.detach:
            asyncio.get_running_loop().call_later(LAST_WORDS, self._detach_from, self._end)
        else:
            self._leave()

    def _detach_from(self, notebook: ZMQStream) -> None:
        if self._end is not notebook:
            return
        notebook.flush(zmq.POLLIN)
        if not self._is_wanted():
            self._leave()
            return
        log.warning("notebook %d is gone; the world stays", self.notebook_pid)
        notebook.close()
        self._end, self.notebook_pid, self._since = None, 0, time.time()
        # The notebook will neither acknowledge batches nor release the values that it was sent.
        for _ in range(self._live):
            self._hand_on(messages.Received())
        for release in self._record.unread():
            self._hand_on(release)
        self._live = self._replayed = 0

    def let_go_by(self, pid: int) -> None:
        """Handle the closed attach connection of a notebook, as `Listener` saw it.

        Does nothing if another notebook has the world by now.
        """
        if pid == self.notebook_pid:
            self._lose()

    def _is_wanted(self) -> bool:
        record = self._record
        return record.has_world and bool(record.changing or self._has_machines())

    def _notebook_lives(self) -> bool:
        """Poll the watched descriptors: the event loop may not have noticed the end yet."""
        if self._end is None:
            return False
        ends = select.poll()
        for end in self._ends:
            ends.register(end, select.POLLIN)
        return bool(self._ends) and not ends.poll(0)

    @property
    def ranks(self) -> Collection[int]:
        """The ranks of the world; empty before it is started."""
        return self._record.known.pids.keys()

    @property
    def tasks(self) -> Findings:
        """The last task, and the last task in which, or after which, a rank failed."""
        return self._record.tasks

    def describe(self) -> WorldInfo:
        """Return what is known about the world without asking its workers."""
        record, spec, run = self._record, self._record.known.spec, self._record.known.run
        return WorldInfo(
            version=__version__,
            host=socket.gethostname(),
            pool=spec.config.pool if spec else "",
            name=spec.name if spec else "",
            workers=len(record.known.pids),
            state=record.state,
            cell=task_from(run.task).title[:FIRST_LINE] if run and record.unfinished else "",
            began=record.began,
            notebook=self.notebook_pid if self._notebook_lives() else 0,
            since=self._since,
            detach=record.detach,
            guard=self._guard.pid,
            versions=versions_here(),
        )

    async def admit(self, wanted: Attach) -> Accepted | Refused:
        """Give the world to a notebook, unless another notebook uses it.

        Waits at most `CHANGE_TIMEOUT` for a notebook that has just ended to be noticed, and for
        workers that are starting or healing.
        """
        deadline = time.monotonic() + CHANGE_TIMEOUT
        while True:
            held = self.describe()
            if wanted.version != __version__:
                return Refused(f"it is of nbdist {__version__}, and this is {wanted.version}")
            if held.notebook:
                return Refused(f"the notebook of process {held.notebook} uses it")
            if self._end is None and not self._record.changing:
                break
            if time.monotonic() > deadline:
                return Refused("its workers are being started or healed just now")
            await asyncio.sleep(CHANGE_STEP)
        if not SOCKET.fullmatch(wanted.socket):
            return Refused("that is no notebook's socket")
        self.notebook_pid = wanted.pid
        self._end = self._connect(wanted.socket)
        self._say_hello()
        again = self._record.again()
        for message in (self._record.attached(self._since), *again):
            self._end.send(pack(message))
        self._replayed += len(again)
        self._since = time.time()
        self._watch_process()
        return Accepted(os.getpid(), self._guard.pid)


# --- calls ------------------------------------------------------------------------------------


class _Left(Exception):
    """Raised in the task group to cancel all of its tasks."""


class Serving:
    """Runs an agent's or head's calls in order, and other coroutines concurrently.

    `answer` carries out a request and returns the reply; `send` sends the reply to the notebook.
    """

    def __init__(
        self,
        answer: Callable[[messages.Request], Awaitable[messages.Reply]],
        send: Callable[[messages.Answer], None],
    ) -> None:
        self._answer = answer
        self._send = send
        self._asked: asyncio.Queue[messages.Ask[Any]] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._fault: BaseException | None = None

    async def until_left(self) -> None:
        """Serve until `leave` is called, then cancel everything in progress.

        Raises the first exception of a task or of an event loop callback.  Such an exception is a
        bug in nbdist and ends the process.  It is the last line of the process's log, which the
        notebook shows.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._answer_asked())
                await self._gone.wait()
                raise _Left
        except* _Left:
            pass
        except* Exception as faults:  # noqa: BLE001 (it is raised below, without its group)
            self._fault = self._fault or faults.exceptions[0]
        finally:
            self._gone.set()
        if self._fault is not None:
            raise self._fault

    def call(self, ask: messages.Ask[Any]) -> None:
        """Carry out a call after all earlier calls have been answered."""
        self._asked.put_nowait(ask)

    async def reply(
        self, number: int, answer: Callable[..., Awaitable[Any]], *arguments: Any
    ) -> None:
        """Send what `answer` returns as the reply to a call.

        Pass this coroutine to `do`, so that the call does not wait for others.
        """
        self._send(messages.Answer(number, await answer(*arguments)))

    def do(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine concurrently.  `leave` cancels it; after `leave` it is not started."""
        if self._gone.is_set():
            work.close()
        else:
            self._tasks.create_task(work)

    def leave(self) -> None:
        """Make `until_left` return: the notebook no longer needs this process, or has ended."""
        self._gone.set()

    def fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Leave, because an event loop callback raised.  For `loop.set_exception_handler`."""
        loop.default_exception_handler(context)
        self._fault = self._fault or context.get("exception") or RuntimeError(context["message"])
        self.leave()

    async def _answer_asked(self) -> None:
        while True:
            ask = await self._asked.get()
            self._send(messages.Answer(ask.id, await self._answer(ask.request)))


def run(runtime: Path, serve: Callable[[], Awaitable[Result]]) -> Result:
    """Run `serve` in an event loop, then kill all descendants and remove the runtime folder."""

    async def serving() -> Result:
        return await serve()

    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    adopt_orphans()
    # The lock is held until this process exits.  Without it another process that cleans up after
    # dead agents would remove the folder.
    folders.join(runtime)
    try:
        return asyncio.run(serving())
    finally:
        end_descendants()
        shutil.rmtree(runtime, ignore_errors=True)
