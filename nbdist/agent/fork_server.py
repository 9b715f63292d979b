"""How an agent begins, below a guard and beside a fork server; and the fork server itself.

What is imported here an agent has before it forks.  All else is imported once the fork server is
started: the start of a world waits longest for the fork server's import of torch.
"""

from __future__ import annotations

import gc
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nbdist.system.limits import raise_file_limit, word_lack
from nbdist.system.processes import (
    MODULE,
    Guard,
    adopt_orphans,
    end_descendants,
    go_below_guard,
    reap,
)
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


# --- what is said between agent, fork server and workers ----------------------------------------

DESCRIPTORS = 2  # that come with each `Fork`: the worker's stdout and stderr


class Fork(NamedTuple):
    """Agent to fork server: fork a worker, which answers itself, under the same number."""

    number: int
    start: WorkerStart


@dataclass(frozen=True, slots=True)
class Imported:
    """Fork server to agent: it can fork."""


class Forked(NamedTuple):
    """Worker to agent, over the fork server's socket: it is the one that was asked for."""

    number: int
    pid: int


class ForkFailed(NamedTuple):
    """Fork server to agent: there is no further process, for this errno."""

    number: int
    errno: int


class WorkerExited(NamedTuple):
    """Fork server to agent: a worker has ended; the code is negative for a signal."""

    number: int
    pid: int
    exit_code: int


FromForkServer = Imported | Forked | ForkFailed | WorkerExited


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
    """Serves one agent: forks workers, and reports their ends.

    One thread, no event loop, no zmq and no CUDA context, so that its forks are safe.  When the
    agent's end of the socket closes it ends, and its workers with it; when it is killed, they
    live on as the agent's children.  While idle it imports on, what the first step of a training
    needs: workers forked from then on share that.
    """

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._requests = FrameCutter()
        self._descriptors: deque[int] = deque()  # of requests that have yet to be read in full
        self._workers: dict[int, int] = {}  # the number of the request, by process
        self._to_import = deque(IMPORTED_WHEN_IDLE if makes_idle_imports() else ())
        self._idle_from = time.monotonic() + UNDISTURBED

    def serve(self) -> WorkerStart | None:
        """Work until the agent is gone, and return None; in a forked child, what it starts with."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._agent, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while True:
                idle = max(0.0, self._idle_from - time.monotonic()) if self._to_import else None
                events = selector.select(idle)
                if not events:
                    # One module: a request waits for it.  None is begun while workers start,
                    # which would take turns with it on the cores.
                    import_if_possible(self._to_import.popleft())
                for key, _ in events:
                    if key.fd == wake_read:
                        os.read(wake_read, 4096)
                        self._report_exits()
                    elif (requests := self._receive()) is None:
                        return None
                    elif start := self._fork_all(requests):
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        os.close(wake_read)
                        os.close(wake_write)
                        return start

    def send(self, message: FromForkServer) -> None:
        """Send it in one piece: new workers write to the same socket."""
        self._agent.sendall(framed(pack(message)))

    def _receive(self) -> list[Fork] | None:
        """Return the requests that are complete by now; None at the end."""
        data, descriptors, _, _ = socket.recv_fds(self._agent, READ_SIZE, DESCRIPTORS)
        self._descriptors.extend(descriptors)
        return [*map(unpack, self._requests.feed(data))] if data else None

    # The child falls out of the loop, with the descriptors of its request and no others, and
    # becomes a worker where `serve` was called.

    def _fork_all(self, requests: list[Fork]) -> WorkerStart | None:
        """Fork a worker for each: returns None; in a forked child, what it starts with."""
        for request in requests:
            descriptors = [self._descriptors.popleft() for _ in range(DESCRIPTORS)]
            if self._fork(request) is None:
                self._become_leader(request, descriptors)
                return request.start
            for fd in descriptors:
                os.close(fd)
        return None

    def _fork(self, request: Fork) -> int | None:
        """Fork; return the process, 0 where there can be none, None in the child."""
        # What is frozen is not touched by the workers' garbage collections, so it stays shared.
        gc.freeze()
        try:
            pid = os.fork()
        except OSError as error:
            self.send(ForkFailed(request.number, error.errno or 0))
            pid = 0
        else:
            if not pid:
                return None
            self._workers[pid] = request.number
        self._idle_from = time.monotonic() + AFTER_FORK
        return pid

    def _become_leader(self, request: Fork, descriptors: list[int]) -> None:
        """Make a child of the fork a process of its own, with its stdout and stderr."""
        gc.enable()
        # A session of its own, or the Stop button's SIGINT would reach it.
        os.setsid()
        self.send(Forked(request.number, os.getpid()))
        self._agent.close()
        for fd in self._descriptors:  # other workers'
            os.close(fd)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((nothing, *descriptors)):
            os.dup2(fd, number)
            os.close(fd)

    def _report_exits(self) -> None:
        for pid, exit_code in reap(self._workers):
            if (number := self._workers.pop(pid, None)) is not None:  # else an adopted orphan
                self.send(WorkerExited(number, pid, exit_code))


def main() -> None:
    """Import, then serve; a forked child falls out of `serve` and becomes a worker."""
    agent = socket.socket(fileno=int(sys.argv[1]))
    adopt_orphans()
    import_all()
    fork_server = ForkServer(agent)
    try:
        fork_server.send(Imported())
        start = fork_server.serve()
    except ConnectionError:  # the agent ended while something was sent to it
        start = None
    if start is None:
        end_descendants()  # no worker makes files from here on
        # The agent and its guard do this too, unless both were killed.
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        return
    from nbdist.worker.main import become_worker

    become_worker(start, forked=True)


if __name__ == "__main__":
    # By its name: what is pickled here is read in the agent.
    from nbdist.agent import fork_server

    fork_server.main()
