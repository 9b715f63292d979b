"""Finds the worlds of this user on this machine, and looks at them through their windows."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nbdist import folders
from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.seen import LOOK, MOST_BYTES, WINDOW, WorldSeen, seen_from, user_at
from nbdist.world.launchers import PREFIX, places

ANSWER_TIMEOUT = 3.0
READ_SIZE = 1 << 18

AGENT = b"nbdist.node"
"""In the command line of each agent, before its runtime folder."""


class Look:
    """A connection to one world's window."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._cutter = FrameCutter(MOST_BYTES)
        try:
            self._socket.settimeout(ANSWER_TIMEOUT)
            self._socket.connect(os.fsencode(folder / WINDOW))
            if user_at(self._socket) != os.geteuid():
                raise PermissionError(f"{folder / WINDOW} is another user's")
        except BaseException:
            self._socket.close()
            raise

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
        for folder in runtime_folders():
            try:
                if folder not in self._looks:
                    self._looks[folder] = Look(folder)
                found.append(self._looks[folder].seen())
            except (OSError, BadFrame):  # it has ended, or is about to
                self._drop(folder)
        for folder in self._looks.keys() - {*runtime_folders()}:
            self._drop(folder)
        return sorted(found, key=lambda seen: (seen.notebook_pid, seen.pool))

    def close(self) -> None:
        """End all connections."""
        for folder in [*self._looks]:
            self._drop(folder)

    def _drop(self, folder: Path) -> None:
        if (look := self._looks.pop(folder, None)) is not None:
            look.close()


def runtime_folders() -> list[Path]:
    """Find those of worlds that run; none that another user could have put there."""
    candidates = {*_in_places(), *_of_agents()}
    return sorted(folder for folder in candidates if _is_window_of_user(folder))


def _is_window_of_user(folder: Path) -> bool:
    with suppress(OSError):
        folders.check_private(folder)
        return (folder / WINDOW).is_socket()
    return False


def _in_places() -> Iterator[Path]:
    """Look where this terminal's environment would have them."""
    for place in (Path(f"/run/user/{os.geteuid()}"), *places()):
        with suppress(OSError):
            yield from place.glob(f"{PREFIX}*")


def _of_agents() -> Iterator[Path]:
    """Look at the processes of this user: a notebook can have another environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.stat().st_uid == os.geteuid():
                words = (process / "cmdline").read_bytes().split(b"\0")
                if AGENT in words[:-2]:
                    yield Path(os.fsdecode(words[words.index(AGENT) + 1]))
