"""Tests of `nbdist.world.recovery`: Ctrl-C, wherever it comes while a task runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from nbdist.config import Patience
from nbdist.world import recovery
from nbdist.world.states import State
from nbdist.world.world import World
from tests.waiting import SOON, once, press_stop

N = 2

pytestmark = pytest.mark.shared_world(N)

SLEEPS = "from pathlib import Path; import os, time\nPath(os.environ['RANK']).touch()\n"
SLEEPS += "time.sleep(600)\n"


@pytest.fixture
def world(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Ready ranks with `kept`, in a folder where they say that they have begun."""
    monkeypatch.chdir(tmp_path)
    world.execute(f"import os; os.chdir({str(tmp_path)!r}); kept = rank")
    return world


def have_begun(folder: Path) -> bool:
    return len([each for each in folder.iterdir() if each.name.isdigit()]) == N


def test_a_script_is_stopped(world: World, tmp_path: Path) -> None:
    """Ctrl-C ends it on all ranks, though it could be run again; the next cell runs."""
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with once(lambda: have_begun(tmp_path), press_stop), pytest.raises(KeyboardInterrupt):
        world.run_script("sleeps.py", max_restarts=3)
    assert world.gather("kept") == [0, 1]


@pytest.mark.parametrize("which", ["all", "one"])
def test_what_brings_values_to_keep_is_stopped(world: World, tmp_path: Path, which: str) -> None:
    """Ctrl-C while values are fetched for `keep` leaves all workers as they were."""
    world.execute(
        "class Slow:\n"
        "    def __reduce__(self):\n"
        "        from pathlib import Path; import time\n"
        "        (Path(str(rank)).touch(), time.sleep(600))\n"
        "slow = Slow()"
    )
    before = dict(world.pids)
    if which == "one":
        (tmp_path / "1").touch()
    with once(lambda: have_begun(tmp_path), press_stop), pytest.raises(KeyboardInterrupt):
        world.restart(keep=["slow"]) if which == "all" else world.replace([0], keep=["slow"])
    assert world.pids == before
    assert world.gather("kept") == [0, 1]


def test_a_stop_while_news_is_drawn(world: World, tmp_path: Path) -> None:
    """It counts as one that comes while the ranks are waited for."""
    running = world.submit(world.task(f"print('begun')\n{SLEEPS}"))
    drawn = 0
    for news in world.follow(running):
        with running.counting_stops():
            drawn += bool(news)
            if have_begun(tmp_path) and not running.stops:
                raise KeyboardInterrupt
    assert (running.stops, running.unfinished, bool(drawn)) == (1, (), True)
    assert "KeyboardInterrupt" in str(running.error())
    assert world.gather("kept") == [0, 1]


def test_a_second_stop_gives_control_back(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that catch the first one still run then; the next cell waits for them."""
    monkeypatch.setattr("nbdist.world.running.CONTROL_TIMEOUT", 2 * SOON)  # after one Stop
    leave = threading.Timer(SOON, (tmp_path / "open").touch)
    running = world.submit(
        world.task(
            "import time\nfrom pathlib import Path\n"
            "try:\n    Path(str(rank)).touch(); time.sleep(600)\n"
            "except KeyboardInterrupt:\n"
            "    while not Path('open').exists(): time.sleep(0.01)"
        )
    )
    pressed = 0.0
    for _ in world.follow(running):
        with running.counting_stops():
            if have_begun(tmp_path) and running.stops < 2 and time.monotonic() > pressed + 0.5:
                if not pressed:
                    leave.start()
                pressed = time.monotonic()
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
    leave.cancel()
    leave.join()
    assert running.stops == 2
    assert running.unfinished == (0, 1)
    assert world.state is State.STUCK
    (tmp_path / "open").touch()
    assert world.gather("kept") == [0, 1]
    assert not running.unfinished


def test_a_stop_while_a_rank_is_silent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives control back though the group cannot be formed yet; the next cell does that."""
    monkeypatch.setattr(recovery, "HEAL_AFTER_STOP", 0.2)
    world.execute(
        "import nbdist.worker.group.group as group_module, time\n"
        "if rank == 0: group_module.Group.regroup = lambda *_: time.sleep(600)"
    )
    heals = once(lambda: world.state is State.HEALING, press_stop)
    with heals, pytest.raises(KeyboardInterrupt):
        world.execute("if rank == 1: raise ValueError\ntorch.distributed.barrier()")
    assert world.state is State.BROKEN
    os.kill(world.pids[0], signal.SIGKILL)  # else its agent does so after half a minute
    world.execute("torch.distributed.barrier()")
    assert world.gather("globals().get('kept')") == [None, 1]


def test_it_comes_round_at_once_for_who_cannot_wait(world: World) -> None:
    """Where nothing has come yet either: the notebook's event loop has more to do."""
    running = world.submit(world.task("import time; time.sleep(1)"))
    following = world.follow(running)
    next(following)
    rounds = 0
    with suppress(StopIteration):
        while True:
            following.send(0.0)
            rounds += 1
    assert rounds > 100  # at its own pace it would be five
    assert (running.unfinished, running.error()) == ((), None)


@pytest.mark.parametrize("stops", [1, 2])
def test_a_task_that_holds_stop(world: World, tmp_path: Path, stops: int) -> None:
    """The first one waits for it to end, the second gives control back; neither interrupts."""
    waits = "from pathlib import Path; import time\nPath(str(rank)).touch()\n"
    waits += "while not Path('open').exists(): time.sleep(0.01)\nheld = True"
    running = world.submit(world.task(waits), Patience(holds_stop=True))
    for _ in world.follow(running):
        with running.counting_stops():
            if have_begun(tmp_path) and running.stops < stops:
                raise KeyboardInterrupt
            if running.is_stopping and stops == 1:
                (tmp_path / "open").touch()
    assert running.unfinished == (() if stops == 1 else (0, 1))
    (tmp_path / "open").touch()
    assert world.gather("held") == [True, True]


def test_a_task_that_holds_stop_for_ever(world: World, tmp_path: Path) -> None:
    """It is interrupted when it is stopped again later."""
    running = world.submit(world.task(SLEEPS), Patience(holds_stop=True, control_timeout=0.1))
    for _ in world.follow(running):
        with running.counting_stops():
            if have_begun(tmp_path) and not running.stops:
                raise KeyboardInterrupt
    assert (running.unfinished, world.state) == ((0, 1), State.STUCK)
    world.interrupt()
    assert world.gather("kept") == [0, 1]
