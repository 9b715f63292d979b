"""Finds the worlds of this user on this machine, and looks at them through their windows."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from pathlib import Path

from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.seen import LOOK, MOST_BYTES, WINDOW, WorldSeen, connect_to, seen_from
from nbdist.world.agents import runtime_folders

ANSWER_TIMEOUT = 3.0
READ_SIZE = 1 << 18


class Look:
    """A connection to one world's window."""

    def __init__(self, folder: Path) -> None:
        self._socket = connect_to(folder / WINDOW, ANSWER_TIMEOUT)
        self._cutter = FrameCutter(MOST_BYTES)
        self._is_asked = False
        self.is_prompt = True
        """Whether it answered in time when it was last asked."""

    def __repr__(self) -> str:
        return f"<Look {self._cutter}>"

    def fileno(self) -> int:
        """Return what can be read as soon as there is an answer."""
        return self._socket.fileno()

    def ask(self) -> None:
        """Ask for it, unless it still owes an answer; raises OSError where the world has ended."""
        if not self._is_asked:
            self._socket.sendall(LOOK)
            self._is_asked = True

    def take(self) -> WorldSeen | None:
        """Read the answer, None while it is not whole; raises as `ask` does, BadFrame for none."""
        data = self._socket.recv(READ_SIZE)
        if not data:
            raise ConnectionResetError("it has closed the connection")
        for frame in self._cutter.feed(data):
            self._is_asked, self.is_prompt = False, True
            return seen_from(frame)
        return None

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


class Worlds:
    """All worlds that there are now: those that have ended go, new ones come."""

    def __init__(self) -> None:
        self._looks: dict[Path, Look] = {}

    def __repr__(self) -> str:
        silent = [str(folder) for folder, look in self._looks.items() if not look.is_prompt]
        return f"<Worlds {sorted(map(str, self._looks))}, silent {silent}>"

    def seen(self) -> list[WorldSeen]:
        """Look at each of them, in the order of their notebooks.

        One that is silent, since its agent is stopped, is waited for once, for `ANSWER_TIMEOUT`
        together with all others, and comes back as soon as it answers.
        """
        folders = runtime_folders(WINDOW)
        for folder in self._looks.keys() - {*folders}:
            self._drop(folder)
        for folder in folders:
            self._ask(folder)
        return sorted(self._answers(), key=lambda seen: (seen.notebook_pid, seen.pool))

    def close(self) -> None:
        """End all connections."""
        for folder in [*self._looks]:
            self._drop(folder)

    def _ask(self, folder: Path) -> None:
        try:
            if folder not in self._looks:
                self._looks[folder] = Look(folder)
            self._looks[folder].ask()
        except OSError:  # it has ended, or is about to
            self._drop(folder)

    def _answers(self) -> Iterator[WorldSeen]:
        silent = {look.fileno(): (look, folder) for folder, look in self._looks.items()}
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while silent:
            is_worth_it = any(look.is_prompt for look, _ in silent.values())
            longest = max(0.0, deadline - time.monotonic()) if is_worth_it else 0.0
            if not (ready := select.select([*silent], [], [], longest)[0]):
                break
            for number in ready:
                look, folder = silent[number]
                try:
                    seen = look.take()
                except (OSError, BadFrame):
                    self._drop(folder)
                    del silent[number]
                    continue
                if seen is not None:
                    del silent[number]
                    yield seen
        for look, _ in silent.values():
            look.is_prompt = False

    def _drop(self, folder: Path) -> None:
        if (look := self._looks.pop(folder, None)) is not None:
            look.close()
