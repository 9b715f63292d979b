"""Tests of `nbdist.node.pipes`: what a real process writes arrives on a real event loop."""

from __future__ import annotations

import asyncio
import subprocess

from nbdist.node.pipes import OutputPipe
from tests.waiting import until


def test_all_that_a_process_writes() -> None:
    """It arrives in order, and at its end nothing more."""

    async def main() -> bytes:
        found: list[bytes] = []
        pipe = OutputPipe(found.append)
        command = ["sh", "-c", "yes hello | head -n 100000; echo bye"]
        with subprocess.Popen(command, stdout=pipe.write_end):  # noqa: ASYNC220 (it is the writer)
            pipe.close_write_end()
            await until(lambda: b"bye" in found[-1] if found else False)
        assert not pipe.read()
        pipe.close()
        return b"".join(found)

    assert asyncio.run(main()) == b"hello\n" * 100_000 + b"bye\n"


def test_what_is_there_when_a_process_has_ended() -> None:
    """It is read at once, without waiting for the loop; what comes after the close is lost."""

    async def main() -> list[bytes]:
        found: list[bytes] = []
        pipe = OutputPipe(found.append)
        subprocess.run(["echo", "last words"], stdout=pipe.write_end, check=True)  # noqa: ASYNC221
        pipe.drain()
        pipe.close()
        pipe.close()
        assert not pipe.read()
        pipe.close_write_end()
        return found

    assert asyncio.run(main()) == [b"last words\n"]
