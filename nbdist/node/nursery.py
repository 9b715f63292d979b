"""A process that has torch imported and forks workers on request.

Started by `nbdist.node.processes` with one end of a socket pair and the runtime folder.
It has one thread, no event loop, no zmq context and no CUDA context, so that its forks
are safe; the agent does the talking.  When its socket ends, so does it, and it takes its
workers along.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module

from nbdist.node.birth import LENGTH, Exited, Forked, Imported, adopt_orphans, end_group
from nbdist.wire.messages import RankStart

END_TIMEOUT, END_STEP = 2.0, 0.005
"""Seconds for killed workers to be gone, and between two looks."""

IMPORTED_AT_START = (
    "IPython.core.debugger",
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.extensions.storemagic",
    "tornado.locks",
    "tornado.platform.asyncio",
    "tornado.queues",
)
"""What a kernel imports when it starts, found by comparing sys.modules before and after."""


def import_all() -> None:
    """Import once what every worker needs."""
    # BLAS starts its threads when numpy is imported; a fork must find none.
    unset = "OPENBLAS_NUM_THREADS" not in os.environ
    if unset:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in ("nbdist.worker.run", *IMPORTED_AT_START):
        import_module(name)
    if unset:
        del os.environ["OPENBLAS_NUM_THREADS"]
    # What is frozen is not touched by the workers' garbage collections, so it stays shared.
    gc.collect()
    gc.freeze()


class Nursery:
    """Serves one agent: forks, and tells of exits."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._workers: set[int] = set()

    def serve(self) -> RankStart | None:
        """Work until the agent is gone: returns None; in a forked child, its orders."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._agent, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
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

    def _receive(self) -> tuple[RankStart, list[int]] | None:
        """The next request with the descriptors for stdout and stderr; None at the end."""
        head, fds, _, _ = socket.recv_fds(self._agent, LENGTH.size, 2)
        if not head:
            return None
        head += _read_exactly(self._agent, LENGTH.size - len(head))
        body = _read_exactly(self._agent, LENGTH.unpack(head)[0])
        return (pickle.loads(body), fds) if body else None

    def _fork(self, orders: RankStart, fds: list[int]) -> RankStart | None:
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            self._workers.add(pid)
            self.tell(Forked(pid))
            return None
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
