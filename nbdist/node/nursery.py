"""A process that has torch imported and forks workers on request.

Started by `nbdist.node.birth` with one end of a socket pair and the runtime folder.
It has one thread, no event loop, no zmq context and no CUDA context, so that its forks
are safe; the agent does the talking.  When its socket ends, so does it, and it takes its
workers along.

While nothing is asked of it, it imports on, a module at a time: what the first step of a
training needs, so that workers forked from then on have it, and share its memory.  A
request waits for the module at hand and for no other.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module

from nbdist.node.birth import LENGTH, Exited, Forked, Imported, adopt_orphans, end_group
from nbdist.wire.messages import RankStart

END_TIMEOUT, END_STEP = 2.0, 0.005
"""Seconds for killed workers to be gone, and between two looks."""

IMPORTED_AT_START = (
    "nbdist.worker.process",
    "nbdist.worker.run",
    "nbdist.worker.forked",
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

READ_ON_IMPORT = re.compile(
    r"TORCH_?(DYNAMO|INDUCTOR|COMPILE|CACHING|FAKE_TENSOR|FX|LOGS)\w*|TORCH_CPP_LOG_LEVEL"
    r"|TORCH_SHOW_CPP_STACKTRACES"
)
"""Variables that torch reads when it is imported, so that a fork's own come too late."""

UNDISTURBED, AFTER_FORK = 0.1, 1.5
"""Seconds without a request before it imports on: at first, and while new workers start."""

DURING_IMPORTS = {
    # BLAS starts its threads when numpy is imported; a fork must find none.
    "OPENBLAS_NUM_THREADS": "1",
    # Whoever asks for GPUs is told by NVML: the driver, once initialised, is of no use to forks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def has_imported_for(environ: Mapping[str, str]) -> bool:
    """Whether a worker with this environment can be forked.

    Called by the agent, whose own environment the nursery has.
    """
    ours, theirs = (
        {name: value for name, value in each.items() if READ_ON_IMPORT.fullmatch(name)}
        for each in (os.environ, environ)
    )
    return ours == theirs


@contextmanager
def fit_for_forks() -> Iterator[None]:
    """Have what is imported start no threads and leave the GPU's driver alone."""
    ours = {name: value for name, value in DURING_IMPORTS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def import_all() -> None:
    """Import once what every worker needs."""
    # Nothing that is imported goes away again, and looking for it takes a tenth of the time.
    gc.disable()
    with fit_for_forks():
        for name in IMPORTED_AT_START:
            import_module(name)


def import_if_possible(name: str) -> None:
    """Import it; what fails will, if at all, fail again where it is used."""
    with fit_for_forks():
        try:
            import_module(name)
        except ModuleNotFoundError:
            pass
        except Exception:  # noqa: BLE001 (other people's modules; workers can be forked without)
            traceback.print_exc()


class Nursery:
    """Serves one agent: forks, and tells of exits."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._workers: set[int] = set()
        self._to_import = deque(IMPORTED_WHEN_IDLE)
        self._idle_from = time.monotonic() + UNDISTURBED

    def serve(self) -> RankStart | None:
        """Work until the agent is gone: returns None; in a forked child, its orders."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._agent, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while True:
                events = selector.select(self._idle_in())
                if not events:
                    self._import_on()
                for key, _ in events:
                    if key.fd == wake_read:
                        os.read(wake_read, 4096)
                        self._tell_exits()
                    elif not (request := self._receive()):
                        return None
                    elif orders := self._fork(*request):
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        os.close(wake_read)
                        os.close(wake_write)
                        return orders

    def _idle_in(self) -> float | None:
        """Seconds to wait for a request before there is time to import on; None: no end."""
        return max(0.0, self._idle_from - time.monotonic()) if self._to_import else None

    def _import_on(self) -> None:
        import_if_possible(self._to_import.popleft())
        if not self._to_import:
            self.tell(Imported(more=False))

    def _receive(self) -> tuple[RankStart, list[int]] | None:
        """The next request with the descriptors for stdout and stderr; None at the end."""
        head, fds, _, _ = socket.recv_fds(self._agent, LENGTH.size, 2)
        if not head:
            return None
        head += _read_exactly(self._agent, LENGTH.size - len(head))
        body = _read_exactly(self._agent, LENGTH.unpack(head)[0])
        return (pickle.loads(body), fds) if body else None

    def _fork(self, orders: RankStart, fds: list[int]) -> RankStart | None:
        # What is frozen is not touched by the workers' garbage collections, so it stays shared.
        gc.freeze()
        pid = os.fork()
        if pid:
            self._idle_from = time.monotonic() + AFTER_FORK
            for fd in fds:
                os.close(fd)
            self._workers.add(pid)
            self.tell(Forked(pid))
            return None
        gc.enable()
        # A session of its own, or the Stop button's SIGINT would reach it.
        os.setsid()
        self._agent.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, fd in enumerate((nothing, *fds)):
            os.dup2(fd, number)
            os.close(fd)
        return orders

    def tell(self, message: Imported | Forked | Exited) -> None:
        body = pickle.dumps(message)
        self._agent.sendall(LENGTH.pack(len(body)) + body)

    def _tell_exits(self) -> None:
        """Reap every child; orphans that were adopted are reaped in silence."""
        while True:
            try:
                child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if child is None:
                return
            if child.si_pid in self._workers:
                # Before it is reaped: until then no other group can have its number.
                end_group(child.si_pid)
            _, status = os.waitpid(child.si_pid, 0)
            if child.si_pid in self._workers:
                self._workers.discard(child.si_pid)
                self.tell(Exited(child.si_pid, os.waitstatus_to_exitcode(status)))

    def end_workers(self) -> None:
        """Kill what is left, with all that it started; on return no worker makes files any more."""
        for pid in self._workers:
            end_group(pid)
            with suppress(ProcessLookupError):  # one that has only been forked leads no group yet
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + END_TIMEOUT
        while self._workers and time.monotonic() < deadline:
            self._workers -= {pid for pid in self._workers if _has_ended(pid)}
            time.sleep(END_STEP)


def _has_ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _read_exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            return b""
        data += more
    return data


def main() -> None:
    """Import, then serve; a forked child falls out of `serve` and becomes a worker."""
    agent = socket.socket(fileno=int(sys.argv[1]))
    adopt_orphans()
    import_all()
    nursery = Nursery(agent)
    nursery_pid = os.getpid()
    try:
        nursery.tell(Imported())
        orders = nursery.serve()
    except BrokenPipeError:  # the agent ended while it was being told something
        orders = None
    if orders is None:
        nursery.end_workers()
        # The agent does this too, unless it was killed.
        shutil.rmtree(sys.argv[2], ignore_errors=True)
        return
    from nbdist.worker.process import become_worker

    become_worker(orders, parent_pid=nursery_pid, forked=True)


if __name__ == "__main__":
    main()
