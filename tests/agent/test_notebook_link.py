"""Tests of `nbdist.agent.notebook_link`: an agent whose notebook goes, and the next one that comes.

Calls are answered one at a time, other things beside, until it leaves.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from nbdist import __version__
from nbdist.agent.notebook_link import Serving
from nbdist.output.events import Text
from nbdist.wire import messages
from nbdist.wire.messages import Answer, Ask, GetStatus, Kill
from nbdist.wire.views import Accepted, Attach, Describe, Refused, Said, WorldInfo
from nbdist.world.agents import Asking
from tests.agent.test_agent import Notebook, close_stdin, end_notebook
from tests.waiting import SOON, wait_until

NAME = "notebook-1.sock"
NEXT = Attach(__version__, 1, NAME)


def ask(notebook: Notebook, question: Said) -> Said:
    """Ask its agent, as another process."""
    with closing(Asking(notebook.runtime, question)) as asking:
        return asking.answer(SOON)


def state_of(notebook: Notebook) -> tuple[str, int]:
    """What its world does, and which notebook has it."""
    info = ask(notebook, Describe())
    assert isinstance(info, WorldInfo)
    return info.state, info.notebook


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    """One whose world is to outlive it, without a group."""
    made = Notebook(fork=True, grace=0.2)
    made.send(messages.Remember({"detach": True}))
    assert isinstance(made.start(), messages.WorldStarted)
    yield made
    made.close()


@pytest.mark.own_agent
def test_the_next_notebook_gets_all(notebook: Notebook) -> None:
    """What a cell has said since it began, though nobody was there; then what it says next.

    Other versions are refused in a sentence, and so is whoever comes while one is there.
    """
    wrong = Refused(f"it is of nbdist {__version__}, and this is 0.0")
    assert ask(notebook, Attach("0.0", 1, NAME)) == wrong
    whose = Refused(f"the notebook of process {notebook.life.pid} uses it")
    assert ask(notebook, NEXT) == whose
    slow = "print('before', rank)\nimport time\nwhile not stop: time.sleep(0.01)\nprint('after')"
    notebook.run("stop = False")
    notebook.send_task("slow", slow)
    while len({rank for rank, name, _ in notebook.outputs if name == "slow"}) < 2:
        notebook.take_one()
    close_stdin(notebook)
    wait_until(lambda: state_of(notebook)[1] == 0, "the notebook is gone")
    end_notebook(notebook)
    with pytest.raises(subprocess.TimeoutExpired):  # the guard ends no agent that stays
        notebook.agent.wait(0.5)
    # The same socket will do: whoever attaches has bound it.
    notebook.bind(NAME)
    with closing(Asking(notebook.runtime, NEXT)) as asking:
        assert isinstance(asking.answer(SOON), Accepted)
        refused = ask(notebook, Attach(__version__, 2, NAME))
        assert refused == Refused("the notebook of process 1 uses it")
        assert isinstance(notebook.receive_anew(), messages.Hello)
        there = notebook.receive_next()
        assert isinstance(there, messages.Attached)
        assert there.run is not None
        assert there.run.id == "slow"
        assert there.bound[0].keys() >= {"stop"}
        again = notebook.receive_next()
        assert isinstance(again, messages.Outputs)
        for rank in (0, 1):
            said = [o.text for on, _, o in again.items if on == rank and isinstance(o, Text)]
            assert "".join(said) == f"before {rank}\n"
        notebook.send(messages.Received())
        notebook.call(messages.StopWorld(0.0))
    # Nothing is kept that nobody can want: a world without workers.
    assert notebook.agent.wait(SOON) == 0


async def test_calls_wait_for_one_another_and_other_things_do_not() -> None:
    """Each is answered under its number; what is under way when it leaves is cancelled."""
    answers, said, released = list[Answer](), list[str](), asyncio.Event()

    async def answer(request: messages.Request) -> messages.Reply:
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
    working = asyncio.create_task(serving.until_left())
    await asyncio.sleep(0)
    serving.do(beside())
    await working
    serving.do(beside())  # it is closed, not begun
    assert answers == [Answer(1, ()), Answer(2, ())]
    assert said == ["beside", "cancelled"]


async def _raise() -> None:
    raise KeyError(17)


@pytest.mark.parametrize(
    "fail",
    [
        lambda serving: serving.do(_raise()),
        lambda serving: asyncio.get_running_loop().call_soon({}.__getitem__, 17),
    ],
    ids=["a task", "a callback"],
)
async def test_a_fault_of_ours(fail: Callable[[Serving], object]) -> None:
    """It ends all, and is raised: the process exits with its line as the last of the log."""

    async def answer(_: messages.Request) -> messages.Reply:
        return ()

    serving = Serving(answer, lambda _: None)
    asyncio.get_running_loop().set_exception_handler(serving.fail)
    working = asyncio.create_task(serving.until_left())
    await asyncio.sleep(0)
    fail(serving)
    with pytest.raises(KeyError, match="17"):
        await working
