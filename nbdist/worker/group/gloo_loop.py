"""Keeps gloo's thread for connections from using a whole processor after an abort.

Runs in a worker; `Gloo.abort` is the caller. The thread (`gloo_tcp_loop`) waits by epoll(7) for
messages on all connections of gloo. If a collective fails after the head of a message has arrived,
gloo frees the buffer into which the rest of the message belongs. From then on gloo neither reads
that connection nor closes it (`Pair::prepareRead` in gloo/transport/tcp/pair.cc). Once such a
connection is shut down, epoll reports that at once each time gloo asks, without end.

`report_once` makes epoll report such connections only once.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import select
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

CLOSE_SECONDS = 0.1  # seconds to wait until gloo has closed connections that were shut down
CHECK_EVERY = 0.005  # seconds between checks whether gloo has closed all connections

_EPOLL = "anon_inode:[eventpoll]"
_ENTRY = re.compile(r"tfd: *(\d+) events: *([0-9a-f]+) data: *([0-9a-f]+) .*?ino:([0-9a-f]+)")
# Linux packs `struct epoll_event` on x86-64 only.
_EVENT = struct.Struct("=IQ" if platform.machine() == "x86_64" else "@IQ")
_libc = ctypes.CDLL(None, use_errno=True)
_EPOLL_CTL_MOD = 3


class WatchedSocket(NamedTuple):
    """A descriptor that an epoll object of this process watches, as /proc/PID/fdinfo shows it.

    `data` identifies the descriptor to the owner of the epoll object; for gloo it is a pointer.
    """

    epoll: int
    fd: int
    events: int
    data: int
    inode: int

    @property
    def is_reported_once(self) -> bool:
        """Whether epoll reports each event of the descriptor only once."""
        return bool(self.events & select.EPOLLET)

    @property
    def is_shut_down(self) -> bool:
        """Whether the descriptor is a connection that is shut down in both directions."""
        poll = select.poll()
        poll.register(self.fd, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def report_once(self) -> None:
        """Make epoll report each event of the descriptor only once, also an event of the past.

        Does nothing if gloo has closed the descriptor meanwhile.
        """
        event = _EVENT.pack((self.events | select.EPOLLET) & 0xFFFFFFFF, self.data)
        with suppress(OSError):
            if os.fstat(self.fd).st_ino == self.inode:
                _libc.epoll_ctl(self.epoll, _EPOLL_CTL_MOD, self.fd, event)


def report_once(listener: int) -> None:
    """Make epoll report only once each connection that is shut down but that gloo does not close.

    `listener` is the inode of gloo's listening socket, by which gloo's epoll object is found. Waits
    at most `CLOSE_SECONDS` for gloo to close the connections itself.
    """
    deadline = time.monotonic() + CLOSE_SECONDS
    while left := [each for each in watched_with(listener) if each.is_shut_down]:
        is_late = time.monotonic() >= deadline
        for each in left:
            # If an earlier abort has done this, do it again: epoll then reports the connection once
            # more, in case another thread had locked gloo's connection at the first report.
            if each.is_reported_once or is_late:
                each.report_once()
        if is_late or all(each.is_reported_once for each in left):
            break
        time.sleep(CHECK_EVERY)


def watched_with(listener: int) -> list[WatchedSocket]:
    """Return the descriptors that gloo's epoll object watches, without its listening socket.

    `listener` is the inode of this socket, by which the epoll object is found. Returns [] if it is
    not found, for example in gVisor, which does not list what an epoll object watches.
    """
    for watched in _watched_by_each():
        if any(each.inode == listener for each in watched):
            return [each for each in watched if each.inode != listener]
    return []


def _watched_by_each() -> Iterator[list[WatchedSocket]]:
    """Yield, for each epoll object of this process, the descriptors that it watches."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # another thread has closed the descriptor
            if os.readlink(f"/proc/self/fd/{name}") != _EPOLL:
                continue
            with open(f"/proc/self/fdinfo/{name}") as file:
                found = _ENTRY.findall(file.read())
            yield [
                WatchedSocket(int(name), int(fd), int(events, 16), int(data, 16), int(inode, 16))
                for fd, events, data, inode in found
            ]
