"""Ends the main thread's wait in a TCPStore that user code has made, when the rank is stopped.

C++ waits there for a key, or in the constructor for the other workers, and ignores signals.  The
wait raises DistNetworkError if the connection to the store's server is shut down, also if the
server is in the same process.  Importing this file replaces `TCPStore.__init__` by a function
that records the stores' ports.  Runs in each rank: `end_wait` on the control thread.
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
    POLLS, RECEIVES = {7, 271}, {45}  # system calls: poll, ppoll; recvfrom
else:
    POLLS, RECEIVES = {73}, {207}

_ports = set[int]()
"""Ports of the servers of the TCPStores that this process has made."""


def end_wait(frame: FrameType | None) -> None:
    """End the main thread's wait in a store of user code, if it waits in one.

    `frame` is the innermost frame of the main thread.  The store cannot be used afterwards.
    """
    if frame is None or frame.f_code.co_filename == stores.__file__:
        return  # the world's own store may be a TCPStore too; its waits are aborted
    if frame.f_code is _init.__code__:
        # The constructor asks the server every 10 ms, and sleeps in between.
        port = frame.f_locals["port"]
        matches = [each for each in sockets() if _port_of(*each) == port]
    else:
        fd = _awaited_descriptor()
        matches = [each for each in sockets() if each[0] == fd and _port_of(*each) in _ports]
    for each in matches:
        with suppress(OSError), borrowed(*each) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _init(self: TCPStore, *args: Any, **options: Any) -> None:
    """Make a store, instead of `TCPStore.__init__`, and record its port."""
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
    """Return the descriptor that the main thread's system call waits for; None without one."""
    try:
        number, *arguments = system_call()
        if int(number) in RECEIVES:
            return int(arguments[0], 16)
        if int(number) in POLLS and int(arguments[1], 16) == 1:
            # Not by ctypes, which would crash: the call may have ended, and its memory may be gone.
            with open("/proc/self/mem", mode="rb", buffering=0) as memory:
                memory.seek(int(arguments[0], 16))
                return int(struct.unpack("i", memory.read(4))[0])
    except (OSError, ValueError, struct.error):  # no system call, or a call that has ended
        pass
    return None
