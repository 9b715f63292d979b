"""Ends the main thread's wait in a TCPStore that user code has made, so that Stop has an effect.

A TCPStore waits in C++ for a key, or in its constructor for the other workers, and ignores signals.
The wait raises DistNetworkError if the connection to the store's server is shut down, even if the
server is in the same process. Importing this file replaces `TCPStore.__init__` by a function that
records the stores' ports. When Stop should end such a wait, the control thread calls `end_wait`.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from types import FrameType
from typing import Any

from nbdist.worker.compat.torch import TCPStore, when_tcp_store_is_made
from nbdist.worker.group import stores
from nbdist.worker.group.gloo import borrowed, sockets
from nbdist.worker.process import system_call

if os.uname().machine == "x86_64":
    POLLS, RECEIVES = {7, 271}, {45}  # numbers of the system calls poll and ppoll, and recvfrom
else:
    POLLS, RECEIVES = {73}, {207}

_ports = set[int]()
"""Ports of the servers of the TCPStores that this process has made."""


def end_wait(frame: FrameType | None) -> None:
    """If the main thread waits in a TCPStore of user code, end the wait.

    `frame` is the innermost frame of the main thread. The store cannot be used afterwards.
    """
    if frame is None or frame.f_code.co_filename == stores.__file__:
        return  # the thread waits in the world's own store, whose waits are aborted in another way
    if frame.f_code is _init.__code__:
        # The constructor asks the server every 10 ms, and sleeps in between. So no system call
        # shows the connection: find the connection by its port.
        port = frame.f_locals["port"]
        matches = [each for each in sockets() if _port_of(*each) == port]
    else:
        fd = _awaited_descriptor()
        matches = [each for each in sockets() if each[0] == fd and _port_of(*each) in _ports]
    for each in matches:
        with suppress(OSError), borrowed(*each) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _init(self: TCPStore, *args: Any, **options: Any) -> None:
    """Make a store and record its port; called in place of `TCPStore.__init__`."""
    port = options.get("port", args[1] if len(args) > 1 else 0)  # noqa: F841 (for `end_wait`)
    _make(self, *args, **options)
    _ports.add(self.port)


_make = when_tcp_store_is_made(_init)


def _port_of(fd: int, inode: int) -> int | None:
    """Return the port at the other end of an internet connection; None for other sockets."""
    with suppress(OSError), borrowed(fd, inode) as connection:
        return int(connection.getpeername()[1])
    return None


def _awaited_descriptor() -> int | None:
    """Return the descriptor for which the main thread waits in poll, ppoll or recvfrom.

    Returns None if the thread is in no such system call, or waits for several descriptors.
    """
    try:
        number, *arguments = system_call()
        if int(number) in RECEIVES:
            return int(arguments[0], 16)
        if int(number) in POLLS and int(arguments[1], 16) == 1:
            # Read the argument by /proc. Reading the address by ctypes could crash the process, as
            # the call may have ended, and its memory may be gone.
            with open("/proc/self/mem", mode="rb", buffering=0) as memory:
                memory.seek(int(arguments[0], 16))
                return int(struct.unpack("i", memory.read(4))[0])
    except (OSError, ValueError, struct.error):  # the thread is in no system call any more
        pass
    return None
