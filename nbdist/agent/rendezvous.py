"""Where ranks meet to form a group, and what ends their wait where one of them cannot come.

At a socket an agent's workers ask the store in which their groups meet.  It passes on what they
ask, to a store that is kept here, or to where all nodes' ranks meet.  What is no operation ends the
connection that it came by, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from nbdist.agent.processes import ProcessSource
from nbdist.agent.worker import Worker
from nbdist.system import folders
from nbdist.system.limits import Lack
from nbdist.wire import control
from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.node_messages import Groups
from nbdist.wire.spec import WorkerStart, WorldSpec, over_file, torchrun_variables
from nbdist.wire.store import (
    MOST_BYTES,
    SOCKET,
    Answer,
    Operation,
    Refused,
    operation_from,
    to_frame,
)
from nbdist.wire.views import user_at

# --- the store that is asked ------------------------------------------------------------------


log = logging.getLogger("nbdist.agent")

MOST_ASKING = 4096
"""Connections at a time; each has a descriptor.  A rank has one for each thread that asks."""

PRIVATE_SOCKET = 0o600

AskStore = Callable[[Operation], Awaitable[Answer]]
"""Raises ConnectionError where nobody is there any more who could answer."""


class StoreWindow:
    """Answers on a socket in the runtime folder, which only this user can open."""

    def __init__(self, runtime: Path, ask: AskStore) -> None:
        self.path = runtime / SOCKET
        self._ask = ask
        self._server: asyncio.Server | None = None
        self._asking: set[_Asking] = set()

    def __repr__(self) -> str:
        return f"<StoreWindow {self.path}, {len(self._asking)} connections>"

    async def open(self) -> None:
        """Answer from now on; anew where the socket has been removed.  Raises OSError.

        A cleaner of /tmp does that; who is connected stays so.
        """
        if self._server is not None and self.path.exists():
            return
        if self._server is not None:
            self._server.close()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Asking(self._ask, self._asking), self.path, backlog=MOST_ASKING
        )
        self.path.chmod(PRIVATE_SOCKET)

    async def close(self) -> None:
        """End all connections, and what is asked by them."""
        if self._server is not None:
            self._server.close()
        works = [asking.end() for asking in [*self._asking]]
        await asyncio.gather(*filter(None, works), return_exceptions=True)
        self.path.unlink(missing_ok=True)


class _Asking(asyncio.Protocol):
    """One connection: who has it asks one thing at a time."""

    def __init__(self, ask: AskStore, all_asking: set[_Asking]) -> None:
        self._ask = ask
        self._all = all_asking
        self._cutter = FrameCutter(MOST_BYTES)
        self._work: asyncio.Task[None] | None = None
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take it; called by asyncio."""
        self._transport = cast("asyncio.WriteTransport", transport)
        is_user = user_at(transport.get_extra_info("socket")) == os.geteuid()
        if not is_user or len(self._all) >= MOST_ASKING:
            self._transport.abort()
            return
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        """Take it; called by asyncio."""
        try:
            for frame in self._cutter.feed(data):
                if self._work is not None:
                    raise BadFrame("more was asked before the answer came")
                operation = operation_from(frame)
                self._work = asyncio.get_running_loop().create_task(self._answer(operation))
        except BadFrame as error:
            log.warning("a process of the world asked the store what cannot be read: %s", error)
            self.end()

    def connection_lost(self, _: Exception | None) -> None:
        """Take it; called by asyncio."""
        self.end()

    def end(self) -> asyncio.Task[None] | None:
        """End the connection; what it waits for, if there is anything, ends in the next turn."""
        self._all.discard(self)
        self._transport.abort()
        if self._work is not None:
            self._work.cancel()
        return self._work

    async def _answer(self, operation: Operation) -> None:
        try:
            frame = to_frame(await self._ask(operation))
        except ConnectionError as error:
            log.warning("the store cannot be asked any more: %s", error)
            self._work = None
            self.end()
            return
        if len(frame) > MOST_BYTES:
            frame = to_frame(Refused(f"these values have more than {MOST_BYTES >> 20} MiB"))
        self._work = None
        self._transport.write(frame)


# --- where ranks meet -------------------------------------------------------------------------


ASKS_ONCE = {"GLOO_ENABLE_STORE_V2_API": "1"}
"""Has gloo ask a store for the addresses of all ranks at once, not for one after the other: for
a group of 32 on 2 cores 64 questions instead of 2,080, and 90 ms instead of 350 (torch 2.13)."""

CALLED_OFF_GRACE = 3.0
"""Seconds for a rank to come back from a forming that has been called off."""

KILL_STEP = 0.05
"""Seconds between two looks whether a worker that is being started has a process by now."""


class HeldPort:
    """MASTER_PORT: for stores that user code or its child processes make.

    It is bound, and so no other program gets it; and since both sides say SO_REUSEADDR, as
    torch's TCPStore does, rank 0 can listen on it, again and again.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.number = int(self._socket.getsockname()[1])

    def __repr__(self) -> str:
        return f"<HeldPort {self.number}>"

    def close(self) -> None:
        """Let other programs have it."""
        self._socket.close()


class Rendezvous:
    """What the ranks of a world meet by: store, port, files, and the generation of their group.

    One after the other for all worlds that the agent starts, which are counted by `attempt`.
    With `store_socket` the ranks ask there for what is else in a file.
    """

    def __init__(self, runtime: Path, store_socket: str = "", address: str = "127.0.0.1") -> None:
        """`address` is that on which user code's own rank 0 can listen."""
        self._store_socket = store_socket
        self.attempt = self.generation = 0
        self._sized_in = 0
        self._runtime = runtime
        self._port = HeldPort(address)
        self._store = -1

    def __repr__(self) -> str:
        return f"<Rendezvous world {self.attempt} generation {self.generation}>"

    @property
    def port(self) -> int:
        """The MASTER_PORT that is held here."""
        return self._port.number

    def begin_world(self, attempt: int) -> None:
        """Have a new store, and the first generation of a group."""
        self.make_folder()
        self._drop_store()
        self.attempt = attempt
        self.generation = self._sized_in = 1
        # A file without a name: the world must outlive the cleaning of /tmp.
        self._store = os.memfd_create(f"nbdist-store{self.attempt}")

    def make_folder(self) -> None:
        """Make the runtime folder again, where it has been removed.

        Raises PermissionError where another user has made one of that name since.
        """
        try:
            self._runtime.mkdir(mode=folders.PRIVATE_FOLDER)
        except FileExistsError:
            folders.check_private(self._runtime)
        else:
            folders.claim(self._runtime, folders.runtime(self._runtime))

    def go_on(self, generation: int, sized_in: int) -> None:
        """Have this generation of the group, which has its size since that one."""
        self.generation, self._sized_in = generation, sized_in

    def close(self) -> None:
        """End; the workers have been stopped."""
        self._port.close()
        self._drop_store()

    def _drop_store(self) -> None:
        if self._store >= 0:
            os.close(self._store)
        self._store = -1

    @property
    def over_file(self) -> Path:
        """The file by which the forming of this generation is called off."""
        return over_file(self._over, self.generation)

    @property
    def _over(self) -> Path:
        return self._runtime / f"world{self.attempt}"

    def start_of(
        self, spec: WorldSpec, rank: int, log_folder: Path | None, joins: Groups | None = None
    ) -> WorkerStart:
        """Return what a worker starts with; `joins` are the groups that a later one joins."""
        seat = spec.seat(rank)
        return WorkerStart(
            rank=rank,
            local_rank=seat.local_rank,
            local_world_size=seat.local_world_size,
            world=spec,
            connection_file=f"{self._name_of(rank)}.json",
            token=secrets.token_hex(8),
            store_path=f"/proc/{os.getpid()}/fd/{self._store}",
            over_path=str(self._over),
            generation=self.generation,
            environ=self.environ_of(spec, rank, log_folder),
            joins=joins,
            gpus=spec.gpus_of(rank),
            sized_in=self._sized_in,
            store_socket=self._store_socket,
        )

    def environ_of(self, spec: WorldSpec, rank: int, log_folder: Path | None) -> Mapping[str, str]:
        """Work out the rank's part of the environment."""
        in_logs = log_folder and str(log_folder / "error.json")
        error_file = in_logs or f"{self._name_of(rank)}.error.json"
        variables = torchrun_variables(spec, rank, self._port.number, error_file)
        return {**variables, **ASKS_ONCE} if self._store_socket else variables

    def _name_of(self, rank: int) -> str:
        return f"{self._runtime}/a{self.attempt}g{self.generation}r{rank}"


class CallOff:
    """Calls the forming of a group off when one that is to take part cannot.

    That is a worker which lived and has died (`ends`, by their exit codes) or does not form its
    groups, or one that is being started.
    `file` is for those that wait in the store.  A new one waits there in C++: it is killed.
    """

    def __init__(self, file: Path, ends: Sequence[asyncio.Future[int]]) -> None:
        self._file = file
        self._ends = ends
        self._event = asyncio.Event()

    def __repr__(self) -> str:
        return f"<CallOff {self._file.name} {'called off' if self._event.is_set() else 'open'}>"

    def __enter__(self) -> CallOff:
        for end in self._ends:
            end.add_done_callback(self._call_off)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.remove_done_callback(self._call_off)

    async def ask(
        self, worker: Worker, request: control.Request, timeout: float
    ) -> control.Answer | None:
        """Ask one that lives to form its groups; the others are told where it does not."""
        asked = asyncio.ensure_future(worker.ask_or_end(request, timeout + CALLED_OFF_GRACE))
        await asyncio.wait({asked}, timeout=timeout)
        if not (asked.done() and isinstance(asked.result(), control.Ok)):
            self._call_off()
        return await asked

    async def start(self, worker: Worker, source: ProcessSource, timeout: float) -> str:
        """Start a worker in the place of a dead one; return what kept it from that, else ""."""
        start = asyncio.ensure_future(worker.start(source))
        over = asyncio.ensure_future(self._event.wait())
        await asyncio.wait({start, over}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        in_time = start.done()
        while not start.done():
            worker.kill()
            await asyncio.wait({start}, timeout=KILL_STEP)
        error = start.exception()
        if error is None or (self._event.is_set() and not in_time):  # the cause is another rank's
            return ""
        self._call_off()
        if not isinstance(error, ChildProcessError):
            raise error
        last = "" if isinstance(error, Lack) else "\n".join(worker.output.last_lines[-1:])
        why = error if in_time else "not in time"
        return f"rank {worker.rank} could not start: {why} {last}".rstrip()

    def _call_off(self, _: object = None) -> None:
        self._file.touch()
        self._event.set()
