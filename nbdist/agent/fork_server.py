"""The fork server, a process that has imported torch and forks workers for its agent.

A new agent's or head's process calls `start_guarded` first.  The process becomes a guard, and its
child becomes the agent or head, and can start a fork server.  The start of a world waits longest
for the fork server's import of torch.  Therefore this file imports little: everything else is
imported after the fork server was started.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nbdist.system.folders import current_folder
from nbdist.system.limits import raise_file_limit, word_start_error
from nbdist.system.processes import MODULE_OPTIONS, Guard, fork_below_guard
from nbdist.wire.frames import FrameCutter, framed, pack, unpack

if TYPE_CHECKING:
    from nbdist.wire.spec import WorkerStart

# --- the start of an agent or head ------------------------------------------------------------


def start_guarded(
    runtime: Path, notebook_pid: int | None, *, fork_server: bool, grace: float = 0.0
) -> tuple[Guard, ForkServerProcess | None]:
    """Fork a child that becomes the agent or head; this process becomes the child's guard.

    If `fork_server`, the child also starts a fork server.  Returns only in the child: the child's
    `Guard`, and the fork server or None.  `notebook_pid` is None if the notebook is on another
    machine.  `grace` is for `fork_below_guard`.  Exits with a message if a process cannot be
    started.
    """
    raise_file_limit()
    try:
        guard = fork_below_guard(runtime, notebook_pid, grace, _clean_up_after_kill)
        return guard, start_fork_server(runtime) if fork_server else None
    except OSError as error:
        sys.exit(f"nbdist: {word_start_error(error)}")


def _clean_up_after_kill(last_word: bytes) -> None:
    """Tell the head, if any, that the agent was killed; remove code folders of killed agents.

    The agent's guard calls this function.  `last_word` has all bytes that the agent has sent to the
    guard.  If the agent has reached a head, these bytes end with a line (`guard_line`) that says
    how to reach the head and which agent this was.
    """
    # These imports would delay the start of each agent if they were at the top of this file.
    if last_word.endswith(b"\n"):
        from nbdist.cluster.ticket import report_killed_agent

        report_killed_agent(last_word)
    import tempfile

    from nbdist.agent.code_folder import remove_dead_folders

    with suppress(OSError):
        remove_dead_folders(Path(tempfile.gettempdir()))


# --- messages between agent and fork server ------------------------------------------------------

TOGETHER = 0.001  # seconds; a request that comes this soon after another is served with it
DESCRIPTORS = 2  # how many file descriptors come with a `Fork`: the worker's stdout and stderr


class Fork(NamedTuple):
    """The agent asks the fork server to fork a worker; the answer has the same `number`."""

    number: int
    start: WorkerStart


@dataclass(frozen=True, slots=True)
class Imported:
    """The fork server tells the agent that it has imported torch and can fork workers."""


class Forked(NamedTuple):
    """The fork server tells the agent that it has forked the worker of request `number`.

    The worker has the process id `pid`, and becomes a child of the agent.
    """

    number: int
    pid: int


class ForkFailed(NamedTuple):
    """The fork server tells the agent that the worker of request `number` could not be forked."""

    number: int
    errno: int


FromForkServer = Imported | Forked | ForkFailed


class ForkServerProcess(NamedTuple):
    """The process of a fork server, and the socket by which the agent is connected to it."""

    popen: subprocess.Popen[bytes]
    socket: socket.socket


LOG = "fork_server.log"
"""The runtime folder's file with the fork server's own output, such as an error of an import."""


def start_fork_server(runtime: Path) -> ForkServerProcess:
    """Start a fork server and return without waiting for its imports; raises OSError."""
    agent_end, server_end = socket.socketpair()
    try:
        with server_end, (runtime / LOG).open("wb") as log:
            server_fd = server_end.fileno()
            popen = subprocess.Popen(
                [
                    sys.executable,
                    *MODULE_OPTIONS,
                    "nbdist.agent.fork_server",
                    str(server_fd),
                    str(runtime),
                ],
                pass_fds=[server_fd],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**FIT_FOR_FORKS, **os.environ},
                cwd=current_folder(),
                start_new_session=True,
            )
    except OSError:
        agent_end.close()
        raise
    return ForkServerProcess(popen, agent_end)


# --- the fork server ----------------------------------------------------------------------------

REQUEST_READ_SIZE = 1 << 16

IMPORTED_AT_START = (
    "nbdist.worker.main",
    "IPython.core.debugger",
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "IPython.utils.wildcard",
    "tornado.locks",
    "tornado.platform.asyncio",
    "tornado.queues",
)
"""Modules that a worker needs to run its first cell; the fork server imports them at its start."""

IMPORTED_WHEN_IDLE = (
    "pygments.formatters.terminal256",
    "stack_data",
    "numpy.random",
    "mpmath",
    "sympy.core",
    "torch.fx.experimental.symbolic_shapes",
    "torch.onnx.ops",
    "torch.distributed._functional_collectives",
    "torch.distributed.tensor._op_schema",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._functorch._aot_autograd.schemas",
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
    "torch._subclasses.schema_check_mode",
)
"""Modules that the first traceback, DDP, FSDP2 or optimizer of a process imports.

The first two are for tracebacks.  Some modules that torch._dynamo needs are listed before it, so
that no single import takes long.  A module that is not installed is skipped.
"""

UNDISTURBED, AFTER_FORK = 0.1, 1.5
"""Seconds without a request before idle imports begin: after the start, and after a fork."""

FIT_FOR_FORKS = {
    # OpenBLAS starts its threads when numpy is imported, and a process with threads is unsafe to
    # fork.
    "OPENBLAS_NUM_THREADS": "1",
    # With this, torch asks NVML for the number of GPUs, and does not initialise the CUDA driver,
    # which forked processes could not use any more.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment variables that the fork server gets if the agent's environment does not have them.

Forked workers do not keep these variables: a worker gets the variables of its world."""


def import_all() -> None:
    """Import the modules that each worker needs; turn off garbage collection, which takes time."""
    # Imports leave little garbage, and collections would take a tenth of the imports' time.
    gc.disable()
    for name in IMPORTED_AT_START:
        import_module(name)
    import_module("nbdist.worker.namespace").import_ops()


def import_if_possible(name: str) -> None:
    """Import a module before it is needed; print errors, but ignore that a module is missing.

    If the import fails, workers that need the module import it themselves.
    """
    try:
        import_module(name)
    except ModuleNotFoundError:
        pass
    except Exception:  # noqa: BLE001 (a module may raise anything; workers do not depend on it)
        import traceback

        traceback.print_exc()


def makes_idle_imports() -> bool:
    """Return False if NBDIST_IDLE_IMPORTS=0 tells the fork server not to import while idle."""
    return os.environ.get("NBDIST_IDLE_IMPORTS") != "0"


class ForkServer:
    """Forks workers for one agent, which becomes the parent of the workers and watches them.

    The process has one thread, no event loop, and no context of zmq or CUDA, so that its forks are
    safe.  The process exits when the agent's end of the socket closes.  While idle, the process
    imports `IMPORTED_WHEN_IDLE`, unless NBDIST_IDLE_IMPORTS=0; workers that are forked later share
    these modules.
    """

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._requests = FrameCutter()
        self._descriptors: deque[int] = deque()  # received for requests that are not yet served
        self._to_import = deque(IMPORTED_WHEN_IDLE if makes_idle_imports() else ())
        self._idle_from = time.monotonic() + UNDISTURBED

    def serve(self) -> WorkerStart | None:
        """Serve requests until the agent has exited, then return None.

        In each worker that is forked meanwhile, return the `WorkerStart` of that worker instead.
        """
        while True:
            idle = max(0.0, self._idle_from - time.monotonic()) if self._to_import else None
            if not select.select([self._agent], [], [], idle)[0]:
                # Import only one module, because requests wait until the import is done.  An import
                # soon after a fork would slow down the start of the workers, so `idle` is longer
                # after a fork.
                import_if_possible(self._to_import.popleft())
            elif (requests := self._receive()) is None:
                return None
            elif start := self._fork_all(requests):
                return start

    def send(self, message: FromForkServer) -> None:
        """Send a message to the agent; raises ConnectionError if the agent has exited."""
        self._agent.sendall(framed(pack(message)))

    def _receive(self) -> list[Fork] | None:
        """Return requests that arrive within `TOGETHER` of each other; None if the agent exited.

        The agent sends the requests for a world's ranks one after the other.  One intermediate
        process can fork all workers whose requests are returned together (`_fork_all`).  An
        intermediate process for each rank would take 10 ms more for each rank.
        """
        requests: list[Fork] = []
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._agent, REQUEST_READ_SIZE, DESCRIPTORS)
            self._descriptors.extend(descriptors)
            requests += map(unpack, self._requests.feed(data))
            if not data:
                return None
            if not select.select([self._agent], [], [], TOGETHER)[0]:
                return requests

    def _fork_all(self, requests: list[Fork]) -> WorkerStart | None:
        """Fork a worker for each request; return None, or in a worker its `WorkerStart`.

        An intermediate process forks the workers and exits.  The agent, which adopts orphans, then
        becomes the workers' parent, as if it had spawned them.  Of the descriptors that came with
        requests, a worker keeps only those of its own request open.
        """
        given = [[self._descriptors.popleft() for _ in range(DESCRIPTORS)] for _ in requests]
        if any(request.start.world.for_training for request in requests):
            # Import the modules here once: workers that all import them compete for the cores.
            while self._to_import:
                import_if_possible(self._to_import.popleft())
        # A garbage collection writes into the objects that it looks at, and so copies memory that a
        # worker shares with the fork server.  It skips frozen objects.
        gc.freeze()
        if requests and (intermediate := self._fork(requests)) is not None:
            if not intermediate:
                return self._fork_each(requests, given)
            os.waitpid(intermediate, 0)
            self._idle_from = time.monotonic() + AFTER_FORK
        for fd in chain(*given):
            os.close(fd)
        return None

    def _fork_each(self, requests: list[Fork], given: list[list[int]]) -> WorkerStart:
        """Fork a worker for each request, then exit; return only in a worker: its `WorkerStart`.

        Runs in the intermediate process.  `given` has the descriptors of each request.
        """
        for request, descriptors in zip(requests, given, strict=True):
            if pid := self._fork([request]):
                self.send(Forked(request.number, pid))
            elif pid == 0:
                self._become_leader(descriptors, {*chain(*given), *self._descriptors})
                return request.start
        os._exit(0)

    def _fork(self, requests: list[Fork]) -> int | None:
        """Return the result of `os.fork`; if it fails, send the agent `ForkFailed` and return None.

        `requests` are the requests that fail if the fork fails.
        """
        try:
            return os.fork()
        except OSError as error:
            for request in requests:
                self.send(ForkFailed(request.number, error.errno or 0))
        return None

    def _become_leader(self, outputs: list[int], all_given: set[int]) -> None:
        """Make this worker the leader of a new session, with `outputs` as its stdout and stderr.

        Closes `all_given`, the descriptors of all workers' requests.
        """
        gc.enable()
        # The worker also leads a process group of Unix, to which the agent can send signals.
        os.setsid()
        self._agent.close()
        null = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((null, *outputs)):
            os.dup2(fd, number)
        for fd in (null, *all_given):
            os.close(fd)


def main() -> None:
    """Run the fork server until its agent exits; in each forked worker, run the worker instead."""
    agent, agent_pid = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    import_all()
    fork_server = ForkServer(agent)
    try:
        fork_server.send(Imported())
        start = fork_server.serve()
    except ConnectionError:  # the agent has exited
        start = None
    if start is None:
        # The agent and its guard remove the runtime folder too, unless both were killed.
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        return
    from nbdist.worker.main import become_worker

    become_worker(start, agent_pid)


if __name__ == "__main__":
    # Import this module by its name: the agent cannot unpickle classes of `__main__`.
    from nbdist.agent import fork_server

    fork_server.main()
