"""Tests of `nbdist.world.calling`: what ranks ask for is typed where the world was made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbdist.errors import WorkerError
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

Enter = Callable[..., None]


def test_each_rank_is_asked(world: World, enter: Enter, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, below what it has printed, with its number in the prompt."""
    enter("ada", "bob", "cy", "dan")
    world.execute("print('who?')\nname = input('name? '), input('next? ')")
    assert world.gather("name") == [("ada", "bob"), ("cy", "dan")]
    said = capsys.readouterr().out
    prompts = "[rank 0] name? [rank 0] next? [rank 1] name? [rank 1] next? "
    assert said == f"[0-1] who?\n{prompts}"


def test_functions_and_threads_ask_too(world: World, enter: Enter) -> None:
    """A function of the caller's, and a thread of a cell while its main thread waits for that."""

    def ask() -> str:
        from threading import Thread

        found: list[str] = []
        thread = Thread(target=lambda: found.append(input()))
        thread.start()
        thread.join()
        return found[0] + input()

    enter("a", "b", "c", "d")
    assert sorted(world.run(ask)) == ["ab", "cd"]  # whichever rank comes first


def test_the_end_of_all_input(world: World, enter: Enter) -> None:
    """It is EOFError in the rank, as it is anywhere."""
    enter("only one")
    world.execute("try:\n    said = input()\nexcept EOFError:\n    said = 'end'")
    assert world.gather("said") == ["only one", "end"]


def test_nobody_can_type(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is told so, with the remedy, and nothing waits."""
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(WorkerError, match=r"need JupyterLab or a terminal.*variable"):
        world.execute("input('name? ')")
    with pytest.raises(WorkerError, match="need JupyterLab or a terminal"):
        world.execute("breakpoint()\nx = 1")


def test_who_does_not_answer_refuses(world: World) -> None:
    """A task that nobody looks at does not wait for ever."""
    session = world.session
    running = session.submit(world.task("import getpass\ngetpass.getpass()", ranks=(1,)))
    session.wait(running)
    assert "need JupyterLab or a terminal" in str(running.error())


def test_a_forked_child_asks_nobody(world: World, enter: Enter) -> None:
    """Its parent's connection is not its own."""
    enter("for the rank")
    world.execute(
        "import os\n"
        "r, w = os.pipe()\n"
        "if (child := os.fork()) == 0:\n"
        "    try:\n"
        "        input()\n"
        "    except BaseException as error:\n"
        "        os.write(w, str(error).encode())\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "told, mine = os.read(r, 999).decode(), input()",
        ranks=[0],
    )
    told = "a process forked by the rank cannot read input"
    assert world.gather("told", ranks=[0])[0].startswith(told)
    assert world.gather("mine", ranks=[0]) == ["for the rank"]
