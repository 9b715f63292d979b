"""A program that carries frames between two interfaces, later, and not all of them.

`python slow_link.py INTERFACE INTERFACE DELAY LOSS`: seconds and a fraction, in each direction.
What the kernel's netem does, for kernels that have none.  Frames are passed on with what the
kernel noted about them (checksums and segments that are still to be made), as a switch of
virtual machines does; so a frame can be 64 KiB, and is lost or delayed as one.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque

ALL_PROTOCOLS = socket.htons(0x0003)
SOL_PACKET = 263
# Each frame has a header of the kernel's before it, as tun devices and virtio have.
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BUFFER = 64 << 20
LONGEST_FRAME = 1 << 17


def opened(interface: str) -> socket.socket:
    """A socket that gets what others send to an interface, and sends through it."""
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, ALL_PROTOCOLS)
    link.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    link.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    link.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    link.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER)
    link.bind((interface, 0))
    link.settimeout(0)
    return link


def carry(links: list[socket.socket], delay: float, loss: float) -> None:
    """Pass frames on until the process is ended."""
    chance = random.Random(0)
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    other = {links[0]: links[1], links[1]: links[0]}
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for link in select.select(links, [], [], timeout)[0]:
            for frame in _received(link):
                if chance.random() >= loss:
                    waiting.append((time.monotonic() + delay, other[link], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, link, frame = waiting.popleft()
            try:
                link.send(frame)
            except OSError:
                continue  # The interface is down, or has no room: the frame is lost.


def _received(link: socket.socket) -> list[bytes]:
    frames = []
    while len(frames) < 64:
        try:
            frames.append(link.recv(LONGEST_FRAME))
        except OSError:  # there are no more, or the interface is down
            break
    return frames


if __name__ == "__main__":
    interfaces = [opened(name) for name in sys.argv[1:3]]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(interfaces, float(sys.argv[3]), float(sys.argv[4]))
