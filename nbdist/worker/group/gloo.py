"""The gloo backends of a worker: makes, connects and aborts them.  `Group` uses this file.

Gloo has no abort: a rank in a collective ignores signals until the timeout, and `abort` of
ProcessGroupGloo ends no wait (torch 2.13 and later). But if the connections of a backend are shut
down, each waiting rank gets an error within milliseconds. nbdist has to find these connections
among the process's sockets. So all backends that are made without options of user code share one
network device of gloo: the connections that gloo has accepted belong to the device's port.

From torch 2.14 on, a backend can be connected again after an abort. In a test, 260 such connections
in a row (torch 2.15, two ranks) left no further thread or descriptor. Before ranks connect a
backend, they find each other in a store; this store and its time limit are a `Meeting`.

Shutting down connections does not end a `recv` that accepts a message from any rank. So importing
this file replaces `Work.wait` by `wait`, which keeps a list of all waits, so that `Gloo.abort` can
end them. `wait` also measures how long a rank waits.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from nbdist.output.events import ConnectionLoss
from nbdist.words import one_line
from nbdist.worker.compat import torch as seam
from nbdist.worker.group import gloo_loop
from nbdist.worker.group.stores import AbortableStore, Meeting, run_with_timeout
from nbdist.worker.process import CELL_TIMES, BadEnvironment

COLLECTIVE_TIMEOUT = 24 * 60 * 60.0
"""The timeout in seconds of a collective and of `new_group`, unless user code sets another one.

It is long because ranks wait for a rank that is in the debugger. torch's 30 minutes are a guard
against hangs, which `nbdist.world.hangs` finds within seconds.
"""

GLOO_RENEWAL_TIMEOUT = 5.0
"""The timeout in seconds for a backend to connect again, once all ranks have come to the store.

gloo can take five times as long, which is still less than the 30 s that agents wait.
"""

GLOO_THREADS = 2  # for each backend, as in torch; with 1 a small all_reduce takes 1.7 times as long

CONNECTION_CLOSED = re.compile(
    r"gloo/\S+\] .*(Connection (closed|reset) by peer|Broken pipe)"
    r"|waited (in the store|for a message) and was released"
)
"""Matches messages of gloo about closed connections, and of nbdist about an aborted wait."""

LACKS = re.compile(
    "out of memory|bad_alloc|"
    + "|".join(map(os.strerror, (errno.EMFILE, errno.ENFILE, errno.ENOMEM)))
)
"""Matches messages of C code and Python which say that memory or file descriptors have run out."""

NO_THREAD = re.compile(f"can't start new thread|{os.strerror(errno.EAGAIN)}")

TIMED_OUT = re.compile(
    r"gloo/transport/.* Timed out waiting|timeout caused pair closure"
    r"|gloo/\S+\] .*(Connection timed out|No route to host|Network is unreachable)"
)
"""Matches messages of gloo which say that a collective took too long or a connection was lost.

In both cases gloo closes its connections.
"""

RECEIVE_ABORTED = "Connection closed by peer: it waited for a message and was released"
_OF_GLOO = (RuntimeError, dist.DistBackendError, dist.DistNetworkError)
_SOURCE_FOLDER = re.compile(r"/\S*/gloo/")  # gloo's messages name the folder where gloo was built


def connections_after(message: str) -> ConnectionLoss:
    """Return how connections to other ranks have ended, according to an error message.

    The result is "ended" or "timed out", or "" if the message is about something else.
    """
    if CONNECTION_CLOSED.search(message):
        return "ended"
    return "timed out" if TIMED_OUT.search(message) else ""


def is_between_ranks(error: Exception) -> bool:
    """Return True if an error may come from other ranks or the connections to them.

    Return False if its cause is in this process alone.
    """
    text = str(error)
    if NO_THREAD.search(text):
        # No thread could be started. If this process has a limit on address space (`ulimit -v`),
        # it may have reached that limit. Otherwise the cause is the limit on the number of threads,
        # which ranks of one machine share.
        return resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    is_between = isinstance(error, ConnectionError | dist.DistError | BadEnvironment)
    return (is_between or "gloo/" in text) and not LACKS.search(text)


def reword(error: BaseException) -> None:
    """If an exception has a message of gloo, replace the message by a plainer text."""
    # Call `str` only for the types of gloo's errors: `str` of a user's type can raise anything.
    text = str(error) if type(error) in _OF_GLOO else ""
    if "gloo/" in text:
        error.args = (
            RECEIVE_ABORTED
            if CONNECTION_CLOSED.search(text)
            else _SOURCE_FOLDER.sub("gloo/", text),
        )


class Gloo:
    """Makes and reconnects gloo backends, and aborts their collectives."""

    def __init__(self) -> None:
        self._device, self._port, self._listener = _make_device()
        self._opened: set[int] = set()  # inodes of connections that gloo has opened
        # Where the next new backend meets the other ranks. This is None if user code makes the
        # group: the ranks then meet in the store that torch passes to the backend.
        self.next_meeting: Meeting | None = None
        # A backend that can connect again always uses the store with which it was made. So such
        # backends get this store, unless user code sets their options. Whenever one of them
        # connects, `leading_to` makes this store pass calls to the store where the ranks meet now.
        self.store = AbortableStore(Meeting(None))
        # With TORCH_GLOO_LAZY_INIT ranks connect only in the first collective. By then `self.store`
        # no longer passes calls to the right store, so backends cannot connect again.
        lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "").lower()
        is_lazy = lazy in ("1", "y", "yes", "t", "true")  # as torch reads the variable
        self.renews = seam.RENEWS_GLOO and not is_lazy
        self._init = seam.when_gloo_is_made(self._make)

    def __repr__(self) -> str:
        return f"<Gloo on port {self._port}, {self.store}>"

    def new(self, meeting: Meeting, rank: int, size: int, timeout: timedelta) -> Any:
        """Make a gloo backend that belongs to no group yet, and connect it to the other ranks."""
        self.next_meeting = meeting
        return ProcessGroupGloo(meeting.store, rank, size, timeout)

    def renew(self, backend: Any, meeting: Meeting, rank: int, size: int) -> None:
        """Connect a backend to the other ranks again, as torch 2.14 and later allow.

        Raises RuntimeError if other ranks do not come in time, and ConnectionResetError if the wait
        is aborted or the meeting called off.
        """
        seconds = meeting.timeout if meeting.cancel_path is None else GLOO_RENEWAL_TIMEOUT
        timeout = timedelta(seconds=seconds)
        with self.store.leading_to(meeting), self._recording_opened():
            seam.renew(backend, self.store, rank, size, meeting.number, timeout)

    def _make(
        self,
        backend: ProcessGroupGloo,
        store: Any,
        rank: int,
        size: int,
        timeout: Any = None,
        *,
        options: Any = None,
        enable_reconfigure: bool = False,  # from torch 2.14 on
    ) -> None:
        """Initialise `backend` and connect it; called in place of `ProcessGroupGloo.__init__`.

        With `enable_reconfigure`, user code itself connects the backend afterwards.
        """
        # Use `next_meeting` only once: with debug level DETAIL torch makes a second backend.
        meeting, self.next_meeting = self.next_meeting, None
        if timeout is not None and not isinstance(timeout, timedelta):
            options = timeout
        if options is not None:  # made by user code: pass these options to torch as they are
            self._init(backend, store, rank, size, options)
            return
        if meeting is None:
            seconds = COLLECTIVE_TIMEOUT if timeout is None else timeout.total_seconds()
            meeting = Meeting(store, timeout=seconds)
        renewable = self.renews or enable_reconfigure
        options = seam.gloo_options(self._device, GLOO_THREADS, timeout, renewable=renewable)
        if not renewable or enable_reconfigure:
            self._connect(lambda at: self._init(backend, at, rank, size, options), meeting)
            return
        with self.store.leading_to(meeting):
            self._init(backend, self.store, rank, size, options)
        self.renew(backend, meeting, rank, size)

    def _connect(self, connect: Callable[[Any], None], meeting: Meeting) -> None:
        """Connect a backend by calling `connect` with a store that leads to the meeting's store.

        Raises ConnectionResetError if the meeting is called off meanwhile.
        """
        # If the agent can call the meeting off, connect in another thread, for which this thread
        # can stop waiting. gloo itself would go on waiting for a rank that has written its address
        # to the store and has failed afterwards.
        with self._recording_opened():
            if meeting.cancel_path is None:
                connect(meeting.store)
            else:
                store = AbortableStore(meeting)
                run_with_timeout(
                    lambda: connect(store), "connecting gloo", meeting.timeout, store.check_abort
                )

    @contextmanager
    def _recording_opened(self) -> Iterator[None]:
        """Record the connections that gloo opens within this context, for `connections`.

        Each internet connection that appears meanwhile counts as opened by gloo, except for
        connections at gloo's own port, which gloo has accepted. So the context should be short.
        """
        before = {*sockets()}
        self._opened &= {inode for _, inode in before}
        try:
            yield
        finally:
            for fd, inode in {*sockets()} - before:
                with suppress(OSError), borrowed(fd, inode) as connection:
                    if connection.getpeername() and connection.getsockname()[1] != self._port:
                        self._opened.add(inode)

    def abort(self) -> int:
        """End the waits of this rank in gloo; return the number of connections that were shut down.

        Any thread may call this.
        """
        self.store.abort()
        ended = 0
        for connection in self.connections():
            with suppress(OSError):  # raised if the other rank has closed the connection
                connection.shutdown(socket.SHUT_RDWR)
                ended += 1
        # A `recv` that accepts a message from any rank has not ended with the connections.
        for each in tuple(_waits):
            each.is_over = True
            seam.end_receive(each.work)
        gloo_loop.report_once(self._listener)
        return ended

    def abandon_in_child(self) -> None:
        """In a forked child, close the inherited listener and accepted connections of gloo.

        From then on the child makes gloo backends as torch itself does.
        """
        seam.when_gloo_is_made(self._init)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd, inode in [*sockets()]:
            with suppress(OSError), borrowed(fd, inode) as listener:
                if listener.getsockname()[1] == self._port:
                    # Replace the socket, and do not close it: gloo's objects use its number, which
                    # Linux would otherwise give to another file.
                    os.dup2(nothing, fd)
        os.close(nothing)

    def connections(self) -> Iterator[socket.socket]:
        """Yield gloo's connections to other ranks, each as a duplicate that is closed afterwards.

        Both the connections that this rank has accepted and those that it has opened are yielded.
        `abort` shuts down both kinds, because the rank at the other end may be unable to: one of
        its threads may hold the GIL, or its machine may be lost.
        """
        for fd, inode in sockets():
            with suppress(OSError), borrowed(fd, inode) as connection:
                is_accepted = connection.getsockname()[1] == self._port and not _listens(connection)
                if is_accepted or inode in self._opened:
                    yield connection


def _make_device() -> tuple[Any, int, int]:
    """Make gloo's network device, on the first interface that GLOO_SOCKET_IFNAME names, if any.

    Returns the device, the port on which it listens, and the inode of the listening socket. Raises
    BadEnvironment if gloo cannot make the device.
    """
    before = set(sockets())
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    try:
        if interface:
            device = ProcessGroupGloo.create_device(interface=interface)
        else:
            device = ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        interfaces = sorted(name for _, name in socket.if_nameindex())
        why = f"gloo cannot use it ({one_line(str(error))})"
        if interface and interface not in interfaces:
            why = "this network interface does not exist"
        # Name the variable, as gloo's own message does not.
        raise BadEnvironment(
            f"GLOO_SOCKET_IFNAME={interface}: {why}. This machine has {', '.join(interfaces)}; "
            "without the variable workers use lo."
        ) from error
    for fd, inode in set(sockets()) - before:
        with suppress(OSError), borrowed(fd, inode) as listener:
            if _listens(listener):
                return device, int(listener.getsockname()[1]), inode
    raise RuntimeError("gloo's listening socket was not found")


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def sockets() -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of each socket of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield int(name), status.st_ino


@contextmanager
def borrowed(fd: int, inode: int) -> Iterator[socket.socket]:
    """Return a context manager that gives a duplicate of a socket of this process, and closes it.

    `fd` and `inode` are from `sockets`. Raises OSError if the socket is no internet socket, or if
    it was closed meanwhile.
    """
    with socket.socket(fileno=os.dup(fd)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError("no internet socket")
        if os.fstat(connection.fileno()).st_ino != inode:
            raise OSError("closed meanwhile")
        yield connection


# --- waits for asynchronous operations --------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Wait:
    work: dist.Work
    is_over: bool = False


_wait_for_work = dist.Work.wait
_waits: list[_Wait] = []


def wait(self: dist.Work, *args: Any, **options: Any) -> Any:
    """Wait as `Work.wait` does; an error of gloo gets a plainer message (`reword`).

    Raises ConnectionResetError if `Gloo.abort` has ended a wait for a message from any rank.
    """
    entry, began = _Wait(self), time.time_ns()
    _waits.append(entry)
    try:
        is_done = _wait_for_work(self, *args, **options)
    except RuntimeError as error:
        reword(error)
        raise
    finally:
        _waits.remove(entry)
        CELL_TIMES.record_wait(began)
    if entry.is_over and not is_done:
        raise ConnectionResetError(RECEIVE_ABORTED)
    return is_done


dist.Work.wait = wait  # type: ignore[method-assign]
