"""What ties a process to the notebook that it serves: messages, the notebook's end, the next one.

For the agent of a world on one machine, or the head of several agents.
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
from nbdist.wire.spec import versions_here
from nbdist.wire.views import SOCKET, Accepted, Attach, Findings, Refused, WorldInfo
from nbdist.wire.work import task_from

Result = TypeVar("Result")

log = logging.getLogger("nbdist.agent")

LINK_LINGER = 500  # milliseconds that the last messages may take to reach the notebook
CHANGE_TIMEOUT, CHANGE_STEP = 20.0, 0.05  # seconds a notebook waits while workers start or heal
LAST_WORDS = 0.1  # seconds for what a notebook has said just before its end
FIRST_LINE = 200  # characters of a cell's line that are shown


class NotebookLink:
    """The notebook that has this world, if any does, as agents see it.

    A world that is to be detached outlives it: what comes up is kept then (`WorldRecord`), and a
    notebook that asks (`Listener`) gets all of it.
    `receive` takes what it sends; `leave` is called where the world is to end with it, and
    where no notebook has the world and `has_machines` is false.
    """

    problem = ""
    """A notebook that is gone has ended the world or released it: either is in order."""

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
        self._end: ZMQStream | None = self._connect(folders.SOCKET)
        self.notebook_pid = notebook_pid
        self._ends: list[int] = []
        self._replayed = self._live = 0  # batches under way
        self._since = time.time()
        self._segments: dict[str, Segment] = {}

    def __repr__(self) -> str:
        at = f"notebook {self.notebook_pid}" if self._end else "detached"
        return f"<NotebookLink {at} {self._record}>"

    async def open(self) -> None:
        """Say hello to the notebook, and watch for its end: that of stdin, or of its process."""
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
        """Send a message to the notebook; where there is none, keep what the next one needs."""
        self._record.take_up(message)
        if isinstance(message, messages.Outputs):
            self._live += 1
        if self._end is not None:
            self._end.send(pack(message))
        elif isinstance(message, messages.Outputs):
            self._live -= 1
            loop = asyncio.get_running_loop()
            loop.call_soon(self._hand_on, messages.Received())
            died = any(isinstance(output, Died) for _, _, output in message.items)
            if died and self._record.unfinished:  # others may wait for it: no notebook frees them
                everyone = tuple(self._record.known.pids)
                loop.call_soon(self._hand_on, messages.Abort(everyone))
        if self._end is None and not self._is_wanted():
            self._leave()

    async def close(self) -> None:
        """End the link; what was sent has a moment to arrive."""
        end, self._end = self._end, None  # no notebook is lost any more
        self._unwatch()
        if end is not None:
            end.close()
        for segment in self._segments.values():
            segment.close()

    def _receive(self, message: messages.Down) -> None:
        match message:
            case messages.Received():
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
        """Hold the memory in which names of set-up cells lie: its owner may end."""
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
        """Note that the notebook has ended, or released the world, after its last messages."""
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
        for _ in range(self._live):
            self._hand_on(messages.Received())
        for release in self._record.unread():
            self._hand_on(release)
        self._live = self._replayed = 0

    def let_go_by(self, pid: int) -> None:
        """Note that the connection of a notebook has ended that had the world, or has it."""
        if pid == self.notebook_pid:
            self._lose()

    def _is_wanted(self) -> bool:
        record = self._record
        return record.has_world and bool(record.changing or self._has_machines())

    def _notebook_lives(self) -> bool:
        """Look at its ends, which may not have been noticed yet."""
        if self._end is None:
            return False
        ends = select.poll()
        for end in self._ends:
            ends.register(end, select.POLLIN)
        return bool(self._ends) and not ends.poll(0)

    @property
    def ranks(self) -> Collection[int]:
        """Those of the world, none before its start."""
        return self._record.known.pids.keys()

    @property
    def tasks(self) -> Findings:
        """The last task, and the last one that failed."""
        return self._record.tasks

    def describe(self) -> WorldInfo:
        """Return what is known without asking the ranks."""
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
        """Give the world to a notebook, if none has it."""
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
    """Ends all tasks."""


class Serving:
    """The tasks of such a process; `answer` does what a call asks for, `send` its answer."""

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
        """Work until `leave` is called; what is under way then is cancelled.

        Raises what one of the tasks has raised, or a callback of the loop's: a fault of ours,
        which ends all.  Its line is the last of the log, and the notebook shows it.
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
        """Do this once all calls before it have been answered."""
        self._asked.put_nowait(ask)

    async def reply(
        self, number: int, answer: Callable[..., Awaitable[Any]], *arguments: Any
    ) -> None:
        """Send what this returns as the answer to a call; to be done beside the other calls."""
        self._send(messages.Answer(number, await answer(*arguments)))

    def do(self, work: Coroutine[Any, Any, object]) -> None:
        """Do something beside the calls, until it is to leave."""
        if self._gone.is_set():
            work.close()
        else:
            self._tasks.create_task(work)

    def leave(self) -> None:
        """End: the notebook is done with this process, or has ended."""
        self._gone.set()

    def fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End loudly, rather than go on half, after a fault of ours in a callback."""
        loop.default_exception_handler(context)
        self._fault = self._fault or context.get("exception") or RuntimeError(context["message"])
        self.leave()

    async def _answer_asked(self) -> None:
        while True:
            ask = await self._asked.get()
            self._send(messages.Answer(ask.id, await self._answer(ask.request)))


def run(runtime: Path, serve: Callable[[], Awaitable[Result]]) -> Result:
    """Call this on a loop, until it is over; returns with nothing left behind."""

    async def serving() -> Result:
        return await serve()

    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    adopt_orphans()
    # Until the end: what cleans up after dead agents finds that this one runs.
    folders.join(runtime, folders.runtime(runtime))
    try:
        return asyncio.run(serving())
    finally:
        end_descendants()
        shutil.rmtree(runtime, ignore_errors=True)
