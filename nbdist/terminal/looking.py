"""Finds the worlds of this user on this machine, and looks at them through their windows."""

from __future__ import annotations

from pathlib import Path

from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.seen import LOOK, MOST_BYTES, WINDOW, WorldSeen, connect_to, seen_from
from nbdist.world.registry import runtime_folders

ANSWER_TIMEOUT = 3.0
READ_SIZE = 1 << 18


class Look:
    """A connection to one world's window."""

    def __init__(self, folder: Path) -> None:
        self._socket = connect_to(folder / WINDOW, ANSWER_TIMEOUT)
        self._cutter = FrameCutter(MOST_BYTES)

    def __repr__(self) -> str:
        return f"<Look {self._cutter}>"

    def seen(self) -> WorldSeen:
        """Ask for it; raises OSError where the world has ended, BadFrame for what is no answer."""
        self._socket.sendall(LOOK)
        while True:
            data = self._socket.recv(READ_SIZE)
            if not data:
                raise ConnectionResetError("it has closed the connection")
            for frame in self._cutter.feed(data):
                return seen_from(frame)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


class Worlds:
    """All worlds that there are now: those that have ended go, new ones come."""

    def __init__(self) -> None:
        self._looks: dict[Path, Look] = {}

    def __repr__(self) -> str:
        return f"<Worlds {sorted(map(str, self._looks))}>"

    def seen(self) -> list[WorldSeen]:
        """Look at each of them, in the order of their notebooks."""
        found = []
        for folder in runtime_folders(WINDOW):
            try:
                if folder not in self._looks:
                    self._looks[folder] = Look(folder)
                found.append(self._looks[folder].seen())
            except (OSError, BadFrame):  # it has ended, or is about to
                self._drop(folder)
        for folder in self._looks.keys() - {*runtime_folders(WINDOW)}:
            self._drop(folder)
        return sorted(found, key=lambda seen: (seen.notebook_pid, seen.pool))

    def close(self) -> None:
        """End all connections."""
        for folder in [*self._looks]:
            self._drop(folder)

    def _drop(self, folder: Path) -> None:
        if (look := self._looks.pop(folder, None)) is not None:
            look.close()
