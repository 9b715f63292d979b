"""How an agent begins, below a guard and beside a fork server; and the fork server itself.

What is imported here an agent has before it forks.  All else is imported once the fork server is
started: the start of a world waits longest for the fork server's import of torch.
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
from nbdist.system.limits import raise_file_limit, word_lack
from nbdist.system.processes import MODULE, Guard, go_below_guard
from nbdist.wire.frames import FrameCutter, framed, pack, unpack

if TYPE_CHECKING:
    from nbdist.wire.spec import WorkerStart

# --- the beginning ----------------------------------------------------------------------------


def begin(
    runtime: Path, notebook_pid: int | None, *, fork_server: bool, grace: float = 0.0
) -> tuple[Guard, ForkServerProcess | None]:
    """Go on below a guard (`go_below_guard`), beside a fork server; exits if there is no room."""
    raise_file_limit()
    try:
        guard = go_below_guard(runtime, notebook_pid, grace, _clean_up_after_kill)
        return guard, start_fork_server(runtime) if fork_server else None
    except OSError as error:
        sys.exit(f"nbdist: {word_lack(error.errno)}")


def _clean_up_after_kill(last_word: bytes) -> None:
    """Tell the head of a killed agent, and remove the notebook's files that it has left in /tmp."""
    # Imported here: an agent has next to nothing before it forks.
    if last_word.endswith(b"\n"):
        from nbdist.cluster.ticket import say_ended

        say_ended(last_word)
    import tempfile

    from nbdist.agent.code_folder import drop_dead

    with suppress(OSError):
        drop_dead(Path(tempfile.gettempdir()))


# --- what is said between agent and fork server -------------------------------------------------

TOGETHER = 0.001  # seconds for which another request is waited for
DESCRIPTORS = 2  # that come with each `Fork`: the worker's stdout and stderr


class Fork(NamedTuple):
    """Agent to fork server: fork a worker; it answers under the same number."""

    number: int
    start: WorkerStart


@dataclass(frozen=True, slots=True)
class Imported:
    """Fork server to agent: it can fork."""


class Forked(NamedTuple):
    """Fork server to agent: this is the worker; it becomes the agent's child in a moment."""

    number: int
    pid: int


class ForkFailed(NamedTuple):
    """Fork server to agent: there is no further process, for this errno."""

    number: int
    errno: int


FromForkServer = Imported | Forked | ForkFailed


class ForkServerProcess(NamedTuple):
    """A fork server that has been started, and the agent's end of the socket pair."""

    popen: subprocess.Popen[bytes]
    socket: socket.socket


LOG = "fork_server.log"
"""In the runtime folder: what the fork server itself writes, as why it could not import torch."""


def start_fork_server(runtime: Path) -> ForkServerProcess:
    """Start it, and return while it imports; raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs, (runtime / LOG).open("wb") as log:
        end = theirs.fileno()
        popen = subprocess.Popen(
            [sys.executable, *MODULE, "nbdist.agent.fork_server", str(end), str(runtime)],
            pass_fds=[end],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**FIT_FOR_FORKS, **os.environ},
            cwd=current_folder(),
            start_new_session=True,
        )
    return ForkServerProcess(popen, ours)


# --- the fork server ----------------------------------------------------------------------------

READ_SIZE = 1 << 16

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
"""What a worker imports until it has run a cell, found by comparing sys.modules."""

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
"""What the first traceback, DDP, FSDP2 and optimizer of a process import, found like those above.

The first two are the traceback's; nearly all others belong to torch._dynamo.  What that
needs and can be had without it comes first, so that no single step is long.  A torch or
IPython that lacks one of these does without it.
"""

UNDISTURBED, AFTER_FORK = 0.1, 1.5  # idle seconds before it imports on: at first, after a fork

FIT_FOR_FORKS = {
    # BLAS starts its threads when numpy is imported; a fork must find none.
    "OPENBLAS_NUM_THREADS": "1",
    # NVML counts the GPUs then: the driver, once initialised, is of no use to forks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The fork server's own environment, besides the agent's; a worker has its world's instead."""


def import_all() -> None:
    """Import once what every worker needs."""
    # Nothing that is imported goes away again, and looking for it takes a tenth of the time.
    gc.disable()
    for name in IMPORTED_AT_START:
        import_module(name)
    import_module("nbdist.worker.namespace").import_ops()


def import_if_possible(name: str) -> None:
    """Import it; what fails will, if at all, fail again where it is used."""
    try:
        import_module(name)
    except ModuleNotFoundError:
        pass
    except Exception:  # noqa: BLE001 (other people's modules; workers can be forked without)
        import traceback

        traceback.print_exc()


def makes_idle_imports() -> bool:
    """Whether it imports on while idle; not with NBDIST_IDLE_IMPORTS=0 in its environment."""
    return os.environ.get("NBDIST_IDLE_IMPORTS") != "0"


class ForkServer:
    """Forks workers for one agent, whose children they are: it has no more to do with them.

    One thread, no event loop, no zmq and no CUDA context, so that its forks are safe.  It ends
    when the agent's end of the socket closes.  While idle it imports on, what the first step of a
    training needs: workers forked from then on share that.
    """

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._requests = FrameCutter()
        self._descriptors: deque[int] = deque()  # of requests that have yet to be read in full
        self._to_import = deque(IMPORTED_WHEN_IDLE if makes_idle_imports() else ())
        self._idle_from = time.monotonic() + UNDISTURBED

    def serve(self) -> WorkerStart | None:
        """Work until the agent is gone, and return None; in a forked child, what it starts with."""
        while True:
            idle = max(0.0, self._idle_from - time.monotonic()) if self._to_import else None
            if not select.select([self._agent], [], [], idle)[0]:
                # One module: a request waits for it.  None is begun while workers start,
                # which would take turns with it on the cores.
                import_if_possible(self._to_import.popleft())
            elif (requests := self._receive()) is None:
                return None
            elif start := self._fork_all(requests):
                return start

    def send(self, message: FromForkServer) -> None:
        """Send it to the agent."""
        self._agent.sendall(framed(pack(message)))

    def _receive(self) -> list[Fork] | None:
        """Return all requests that are complete by now; None at the end.

        The requests of a world's ranks come together, each in a piece of its own.  One process
        between serves all of them; one for each would take 10 ms more a rank.
        """
        requests: list[Fork] = []
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._agent, READ_SIZE, DESCRIPTORS)
            self._descriptors.extend(descriptors)
            requests += map(unpack, self._requests.feed(data))
            if not data:
                return None
            if not select.select([self._agent], [], [], TOGETHER)[0]:
                return requests

    def _fork_all(self, requests: list[Fork]) -> WorkerStart | None:
        """Fork a worker for each; return None, and in a worker what it starts with.

        A process between forks them and ends, so that they become the agent's children, as those
        that are spawned.  A worker falls out of the loop, with the descriptors of its request and
        no others, and becomes one where `serve` was called.
        """
        given = [[self._descriptors.popleft() for _ in range(DESCRIPTORS)] for _ in requests]
        # What is frozen is not touched by the workers' garbage collections, so it stays shared.
        gc.freeze()
        if requests and (between := self._fork(requests)) is not None:
            if not between:
                return self._fork_each(requests, given)
            os.waitpid(between, 0)
            self._idle_from = time.monotonic() + AFTER_FORK
        for fd in chain(*given):
            os.close(fd)
        return None

    def _fork_each(self, requests: list[Fork], given: list[list[int]]) -> WorkerStart:
        """Fork them in the process between, and end it; return in a worker alone."""
        for request, descriptors in zip(requests, given, strict=True):
            if pid := self._fork([request]):
                self.send(Forked(request.number, pid))
            elif pid == 0:
                self._become_leader(descriptors, {*chain(*given), *self._descriptors})
                return request.start
        os._exit(0)

    def _fork(self, requests: list[Fork]) -> int | None:
        """Fork as `os.fork` does; where there can be no process, say so, and return None."""
        try:
            return os.fork()
        except OSError as error:
            for request in requests:
                self.send(ForkFailed(request.number, error.errno or 0))
        return None

    def _become_leader(self, own: list[int], all_given: set[int]) -> None:
        """Make a fork a process of its own, with its stdout and stderr."""
        gc.enable()
        # A session of its own, or the Stop button's SIGINT would reach it.
        os.setsid()
        self._agent.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((nothing, *own)):
            os.dup2(fd, number)
        for fd in (nothing, *all_given):
            os.close(fd)


def main() -> None:
    """Import, then serve; a forked child falls out of `serve` and becomes a worker."""
    agent, agent_pid = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    import_all()
    fork_server = ForkServer(agent)
    try:
        fork_server.send(Imported())
        start = fork_server.serve()
    except ConnectionError:  # the agent ended while something was sent to it
        start = None
    if start is None:
        # The agent and its guard do this too, unless both were killed.
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        return
    from nbdist.worker.main import become_worker

    become_worker(start, agent_pid)


if __name__ == "__main__":
    # By its name: what is pickled here is read in the agent.
    from nbdist.agent import fork_server

    fork_server.main()
