"""Somebody on the way between agents and head: sees all bytes, keeps them, and can change one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nbdist.wire.ticket import Ticket, ticket_from

READ_SIZE = 1 << 16

LAUNCHER = """
import dataclasses, os
from nbdist.cluster.ssh import SshLauncher

class SpyLauncher:
    def launch(self, wanted, ticket, folder):
        place, address, port = os.environ["NBDIST_TEST_SPY"].split(",")
        with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(ticket.to_line())
        ticket = dataclasses.replace(ticket, addresses=(address,), port=int(port))
        return SshLauncher().launch(wanted, ticket, folder)
"""
"""ssh's, but that agents are sent to the spy, who is told where the head is."""


def install(folder: Path) -> None:
    """Have `--launcher spy` where this folder is on the path."""
    (folder / "spy_launcher.py").write_text(LAUNCHER)
    metadata = folder / "spy_launcher-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: spy_launcher\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[nbdist.launchers]\nspy = spy_launcher:SpyLauncher\n"
    )


class Spy:
    """Passes each connection on to the head, and keeps what agents have sent; in threads."""

    def __init__(self, folder: Path, address: str) -> None:
        self.sent: list[bytearray] = []
        """By agents, in each connection."""
        self.changes = False
        """Whether the next bytes of an agent get one wrong."""
        self._place = folder / "ticket"
        self._listener = socket.create_server((address, 0))
        self.environ = f"{self._place},{address},{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def ticket(self) -> Ticket:
        """What agents really need."""
        return ticket_from(self._place.read_bytes())

    def close(self) -> None:
        """End all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._open):
            each.close()

    def _start(self, work: Callable[..., None], *what: object) -> None:
        self._threads.append(threading.Thread(target=work, args=what))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                agent, _ = self._listener.accept()
                head = socket.create_connection(("127.0.0.1", self.ticket.port))
                self._open += [agent, head]
                self.sent.append(bytearray())
                self._start(self._pass_on, agent, head, self.sent[-1])
                self._start(self._pass_on, head, agent, None)

    def _pass_on(
        self, source: socket.socket, target: socket.socket, kept: bytearray | None
    ) -> None:
        with suppress(OSError):
            while data := source.recv(READ_SIZE):
                if kept is not None:
                    kept += data
                    if self.changes:
                        self.changes = False
                        data = data[:-1] + bytes([data[-1] ^ 1])
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
