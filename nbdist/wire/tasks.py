"""Tasks on their way from an agent to a worker, and what became of them on the way back.

Over a unix socket of each worker, in the folder that only this user can open: a task goes
down as the very bytes in which the notebook has sent it, so that an agent packs it for no
rank anew.  `Finished` comes up; its mark in the worker's stdout says where it belongs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from nbdist.wire.messages import RankStart
from nbdist.wire.outputs import Done

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class Finished:
    """Worker to agent: the end of a cell, and its number among the messages with marks."""

    number: int
    cell_id: str
    done: Done


def task_socket(orders: RankStart) -> str:
    """On which the worker waits for its agent's tasks."""
    return orders.connection_file.removesuffix(".json") + ".tasks"


def framed(data: bytes) -> bytes:
    """The bytes with their length before them."""
    return _LENGTH.pack(len(data)) + data


class FrameCutter:
    """Cuts what is read from a stream into the frames that were written."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __repr__(self) -> str:
        return f"<FrameCutter {len(self._data)} bytes of the next>"

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are complete by now."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            frame = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield frame
