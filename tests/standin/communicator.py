"""What connects the ranks of a backend: unix sockets, a message for each rank and collective.

A collective that the others do not come to, or come to with another one, never ends; nor does
one with a rank that has died, as with NCCL on one machine.  `abort` ends them all.
"""

from __future__ import annotations

import io
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

Message = tuple[str, list[torch.Tensor]]
"""Of which collective, and with which tensors."""

LENGTH = struct.Struct("!Q")
READY = "ready"


class Aborted(Exception):
    """The communicator was aborted meanwhile."""


class Communicator:
    """Connects to the others, all or none, within the time."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size, self.made = rank, size, time.monotonic()
        self._inbox: dict[tuple[int, str], Message] = {}
        self._changed = threading.Condition()
        self._over = False
        self._sockets: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            self._connect(store, timeout)
            threading.Thread(target=self._read, name="communicator", daemon=True).start()
            others = self.others
            self.exchange(READY, READY, dict.fromkeys(others, ()), others, deadline)
        except BaseException:
            self.abort()
            raise

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def exchange(
        self,
        key: str,
        call: str,
        sent: Mapping[int, Iterable[torch.Tensor]],
        wanted: Iterable[int],
        deadline: float = float("inf"),
    ) -> dict[int, list[torch.Tensor]]:
        """Send to some ranks, and return what the wanted ones send under the same key.

        Raises TimeoutError, and Aborted.  Who sends for another call never meets this rank.
        """
        for rank, tensors in sent.items():
            self._send(rank, key, (call, [each.detach().clone() for each in tensors]))
        found = {}
        with self._changed:
            for rank in wanted:
                while self._inbox.get((rank, key), ("", []))[0] != call:
                    if self._over:
                        raise Aborted
                    if (left := deadline - time.monotonic()) <= 0:
                        raise TimeoutError(f"rank {rank} did not come to {call}")
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                found[rank] = self._inbox.pop((rank, key))[1]
        return found

    def abort(self) -> None:
        """End all that waits in it, from any thread."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for each in self._sockets.values():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _connect(self, store: Any, timeout: timedelta) -> None:
        with socket.socket(socket.AF_UNIX) as door:
            address = f"\0standin-{secrets.token_hex(8)}"
            door.bind(address)
            door.listen(self.size)
            door.settimeout(timeout.total_seconds())
            store.set(f"address/{self.rank}", address[1:])
            for rank in range(self.rank):
                store.wait([f"address/{rank}"], timeout)
                self._sockets[rank] = found = socket.socket(socket.AF_UNIX)
                found.settimeout(timeout.total_seconds())
                found.connect(f"\0{store.get(f'address/{rank}').decode()}")
                found.sendall(LENGTH.pack(self.rank))
            for _ in range(self.rank + 1, self.size):
                found = door.accept()[0]
                self._sockets[LENGTH.unpack(found.recv(LENGTH.size, socket.MSG_WAITALL))[0]] = found
        for each in self._sockets.values():
            each.settimeout(None)

    def _send(self, rank: int, key: str, message: Message) -> None:
        buffer = io.BytesIO()
        torch.save((key, message), buffer)
        data = buffer.getvalue()
        with suppress(OSError):  # it has died, of which nobody tells
            self._sockets[rank].sendall(LENGTH.pack(len(data)) + data)

    def _read(self) -> None:
        """Take in what comes, so that nobody waits to send."""
        poll, ranks = select.poll(), {}
        for rank, each in self._sockets.items():
            ranks[each.fileno()] = rank
            poll.register(each, select.POLLIN)
        while not self._over and ranks:
            for number, _ in poll.poll():
                if not self._take(ranks[number]):
                    poll.unregister(number)
                    del ranks[number]
        self._over or self._wait_for_abort()
        for each in self._sockets.values():
            each.close()

    def _wait_for_abort(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._over)

    def _take(self, rank: int) -> bool:
        """Read one message; False where there will be no more."""
        length = self._receive(rank, LENGTH.size)
        data = self._receive(rank, LENGTH.unpack(length)[0]) if length else b""
        if not data:
            return False
        key, message = torch.load(io.BytesIO(data))
        with self._changed:
            self._inbox[rank, key] = message
            self._changed.notify_all()
        return True

    def _receive(self, rank: int, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._sockets[rank].recv(min(size - len(data), 1 << 20))
            except OSError:
                part = b""
            if not part:
                return b""
            data += part
        return bytes(data)
