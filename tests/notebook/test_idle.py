"""Tests of `nbdist.notebook.idle`: between cells the notebook's event loop learns of news."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from nbdist.notebook.idle import PAUSE, IdleWatch


@dataclass
class Pipe:
    """As much of a link as is watched: where it writes a byte for each piece of news."""

    asides: int
    end: int
    tells_all: bool = False


@pytest.fixture
def link() -> Iterator[Any]:
    pipe = Pipe(*os.pipe2(os.O_NONBLOCK))
    yield pipe
    for each in (pipe.asides, pipe.end):
        if each >= 0:
            os.close(each)


def close_end(link: Any) -> None:
    os.close(link.end)
    link.end = -1


def test_many_bytes_are_one_notice(link: Any):
    """A rank may talk without end: the second notice waits."""
    noticed: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        watch = IdleWatch(lambda: noticed.append(loop.time()))
        watch.follow(link)
        while len(noticed) < 2:
            os.write(link.end, b"x")
            await asyncio.sleep(0.01)
        watch.stop()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert noticed[1] - noticed[0] >= PAUSE


def test_the_end_is_noticed_once(link: Any):
    """When the link is closed, it is watched no more."""
    noticed: list[str] = []

    async def main() -> None:
        ended = asyncio.Event()

        def notice() -> None:
            noticed.append(repr(watch))
            ended.set()

        watch = IdleWatch(notice)
        watch.follow(link)
        close_end(link)
        await ended.wait()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert noticed == ["<IdleWatch of None>"]


def test_what_is_watched_no_more(link: Any):
    """Nothing is called after `stop`, and no descriptor is left."""
    before = os.listdir("/proc/self/fd")

    async def main() -> None:
        watch = IdleWatch(lambda: pytest.fail("noticed"))
        watch.follow(link)
        watch.follow(link)
        watch.stop()
        os.write(link.end, b"x")
        await asyncio.sleep(0)

    asyncio.run(main())
    assert os.listdir("/proc/self/fd") == before


def test_what_goes_on(link: Any):
    """It is called again and again, at once where there is news, until it goes on no more."""
    noticed: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        third = asyncio.Event()

        def notice() -> None:
            noticed.append(loop.time())
            if len(noticed) == 3:
                third.set()

        watch = IdleWatch(notice)
        watch.follow(link)
        watch.goes_on = True
        assert link.tells_all
        await third.wait()
        os.write(link.end, b"x")
        await asyncio.sleep(0.01)
        assert len(noticed) == 4
        watch.goes_on = False
        assert not link.tells_all
        await asyncio.sleep(2.5 * PAUSE)
        watch.stop()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert noticed[2] - noticed[0] >= 2 * PAUSE
    assert len(noticed) <= 5


def test_without_a_loop(link: Any):
    """In a terminal nothing is watched: the next cell looks."""
    watch = IdleWatch(lambda: pytest.fail("noticed"))
    watch.follow(link)
    assert repr(watch) == "<IdleWatch of None>"
