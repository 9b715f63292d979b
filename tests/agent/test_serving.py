"""Tests of `nbdist.agent.serving`: calls one at a time, other things beside, until it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from nbdist.agent.serving import Serving
from nbdist.wire.messages import Answer, Ask, GetStatus, Kill, Reply, Request


def test_calls_wait_for_one_another_and_other_things_do_not() -> None:
    """Each is answered under its number; what is under way when it leaves is cancelled."""
    answers: list[Answer] = []
    said: list[str] = []

    async def serve() -> None:
        released = asyncio.Event()

        async def answer(request: Request) -> Reply:
            if isinstance(request, Kill):
                await released.wait()
            return ()

        async def beside() -> None:
            said.append("beside")
            assert answers == []
            released.set()
            try:
                await asyncio.Event().wait()
            finally:
                said.append("cancelled")

        def send(answer: Answer) -> None:
            answers.append(answer)
            if len(answers) == 2:
                serving.leave()

        serving = Serving(answer, send)
        serving.call(Ask(1, Kill((0,))))
        serving.call(Ask(2, GetStatus()))
        assert repr(serving) == "<Serving serves, 2 calls wait>"
        working = asyncio.create_task(serving.until_left())
        await asyncio.sleep(0)
        serving.do(beside())
        async with asyncio.timeout(20):
            await working
        assert repr(serving) == "<Serving leaves, 0 calls wait>"
        serving.do(beside())  # it is closed, not begun

    asyncio.run(serve())
    assert answers == [Answer(1, ()), Answer(2, ())]
    assert said == ["beside", "cancelled"]


@pytest.mark.parametrize(
    "fail",
    [
        lambda serving: serving.do(_raise()),
        lambda serving: asyncio.get_running_loop().call_soon(_raise_now),
    ],
    ids=["a task", "a callback"],
)
def test_a_fault_of_ours(fail: Callable[[Serving], object]) -> None:
    """It ends all, and is raised: the process exits with its line as the last of the log."""

    async def serve() -> None:
        async def answer(_: Request) -> Reply:
            return ()

        serving = Serving(answer, lambda _: None)
        asyncio.get_running_loop().set_exception_handler(serving.fail)
        working = asyncio.create_task(serving.until_left())
        await asyncio.sleep(0)
        fail(serving)
        async with asyncio.timeout(20):
            await working

    with pytest.raises(KeyError, match="17"):
        asyncio.run(serve())


async def _raise() -> None:
    _raise_now()


def _raise_now() -> None:
    raise KeyError(17)
