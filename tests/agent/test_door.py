"""Tests of `nbdist.agent.door`: who is answered, and when a notebook has let go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from nbdist.agent.door import Door
from nbdist.wire.door import DOOR, Admitted, Attach, Held, Refused, Said, Who, from_line, to_line
from tests.waiting import until

HELD = Held("1.0", "vm", "default", "exp", 2, "busy", "x = 1", 1.5, 0, 2.5, detach=True, guard=7)


class Lab:
    """A door, and what has come through it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / DOOR
        self.gone: list[int] = []
        self.door = Door(folder, lambda: HELD, self._admit, self.gone.append)

    async def _admit(self, wanted: Attach) -> Admitted | Refused:
        return Admitted(1, 2) if wanted.version == "1.0" else Refused("no")

    async def ask(self, said: bytes) -> tuple[Said | None, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(said)
        async with asyncio.timeout(20):
            line = await reader.readline()
        return (from_line(line) if line else None), writer

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            await self.door.open()
            try:
                await test()
            finally:
                await self.door.close()

        asyncio.run(whole())


def test_who(runtime: Path) -> None:
    """Anybody of this user may ask whose it is."""
    lab = Lab(runtime)

    async def test() -> None:
        answer, writer = await lab.ask(to_line(Who()))
        assert answer == HELD
        writer.close()

    lab.run(test)
    assert lab.gone == []


def test_a_notebook_that_is_admitted(runtime: Path) -> None:
    """Has the world until its connection ends; one that is refused never had it."""
    lab = Lab(runtime)

    async def test() -> None:
        answer, writer = await lab.ask(to_line(Attach("1.0", 5, "notebook-5.sock")))
        assert answer == Admitted(1, 2)
        refused, other = await lab.ask(to_line(Attach("2.0", 6, "notebook-6.sock")))
        assert refused == Refused("no")
        other.close()
        assert "1 ask" in repr(lab.door)
        assert lab.gone == []
        writer.close()
        await until(lambda: lab.gone == [5])

    lab.run(test)
    assert lab.gone == [5]


@pytest.mark.parametrize("said", [b"hello\n", to_line(Refused("me")), b"x" * (1 << 17) + b"\n"])
def test_what_is_no_question(runtime: Path, said: bytes) -> None:
    """Ends the connection, and the next one is answered."""
    lab = Lab(runtime)

    async def test() -> None:
        try:
            answer, writer = await lab.ask(said)
        except OSError:
            pass
        else:
            assert answer is None
            writer.close()
        answer, writer = await lab.ask(to_line(Who()))
        assert answer == HELD
        writer.close()

    lab.run(test)
