"""After Stop, a timeout, a failure or a death in a training, replicas are equal or a line warns."""

from __future__ import annotations

import operator
import random
import re
import time
from collections.abc import Iterable

import pytest

from nbdist.agent.step_stops import STEP_TIMEOUT
from nbdist.config import Patience
from nbdist.errors import CellTimeout, WorkerDied, WorkerError
from nbdist.words import name_ranks
from nbdist.world import dispatch, inbox
from nbdist.world.task_run import TaskRun
from nbdist.world.world import World
from tests.cells import ends, follow, press_stop, run_for, stop
from tests.faults.step_stops import ADAM, BEGIN, PLAIN, SCENARIOS
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world(4)

AT_STEP_5 = PLAIN.replace(
    "    optimizer.step()",
    "    if {when} and STEPS.begun == 4:\n        {do}\n    optimizer.step()",
)
"""`do` happens in the fifth step, between the backward pass and the optimizer's step."""


SAYS_STEPS = """
from nbdist.worker.steps import STEPS
from torch.optim.optimizer import register_optimizer_step_post_hook
if "says_steps" not in globals():
    says_steps = register_optimizer_step_post_hook(
        lambda *_: print(STEPS.begun) if STEPS.begun <= 5 else None
    )
"""


@pytest.fixture
def world(world: World) -> World:
    """Four ranks with a new DDP model, which print the numbers of their first steps."""
    world.execute(f"{SAYS_STEPS}{BEGIN}{ADAM}")
    return world


def train(world: World, cell: str, *made: int, seconds: float = 0.0) -> TaskRun:
    """Run a training until each rank has printed as many lines as `made`, and `seconds` more.

    Ranks print a line for each of their first five steps. Return the task, which still runs.
    """
    running, until = world.submit(world.task(cell)), float("inf")
    for _ in world.follow(running):
        lines = [track.line_count for track in running.transcript]
        if until == float("inf") and all(map(operator.ge, lines, made)):
            until = running.age + seconds
        if running.age >= until:
            break
    return running


def are_equal(world: World) -> bool:
    """Whether all ranks have the same sums of parameters and the same steps of optimizers."""
    first, *others = world.gather("replicas()")
    return all(each == first for each in others)


def steps(running: TaskRun) -> list[int]:
    """Return how many steps each living rank has begun in the cell."""
    return [track.done.steps for track in running.transcript if track.done is not None]


@pytest.mark.smoke
def test_stop_ends_all_ranks_at_the_same_step(world: World) -> None:
    """Whenever Stop is pressed, all ranks end at the beginning of the same step."""
    for _ in range(10):
        running = train(world, PLAIN, 1, 1, 1, 1, seconds=random.uniform(0, 0.3))
        stop(world, running)
        assert len({*steps(running)}) == 1
        assert steps(running)[0] > 0
        assert are_equal(world)
        assert running.ending.replicas_text == ""
        assert {each.name for each in running.transcript.errors.values()} == {"KeyboardInterrupt"}


def seconds_to_stop(world: World, running: TaskRun) -> float:
    """Press Stop and wait; return the seconds until control is back."""
    began = time.monotonic()
    press_stop(world, running)
    return time.monotonic() - began


def waits_for_steps(seconds: Iterable[float]) -> bool:
    """Return True if even the fastest of these Stops waited for a step that never came.

    A Stop that waits takes STEP_TIMEOUT each time.  The fastest of several Stops tells it from a
    Stop that a busy machine has slowed down.
    """
    return min(seconds) > STEP_TIMEOUT - 0.3


OTHERS = ("DDP, slow ranks", "accumulation", "two optimizers", "FSDP2", "ZeRO", "AMP")


@pytest.mark.parametrize("name", OTHERS)
def test_stop_keeps_replicas_equal_in_other_trainings(world: World, name: str) -> None:
    """Stop ends all ranks at the same step, whatever a training does between two steps."""
    setup, cell = SCENARIOS[name]
    world.execute(BEGIN + setup)
    for _ in range(3):
        running = train(world, cell, 1, 1, 1, 1, seconds=random.uniform(0, 0.3))
        stop(world, running)
        assert are_equal(world)
        assert len({*steps(running)}) == 1
        assert running.ending.replicas_text == ""


def test_a_line_says_how_to_mend_replicas(world: World) -> None:
    """Stop waits two seconds for a stuck rank; then a line says how to mend the replicas."""
    cell = AT_STEP_5.format(when="rank == 2", do="time.sleep(600)")
    running = train(world, cell, 5, 5, 4, 5)
    assert waits_for_steps([seconds_to_stop(world, running)])
    assert running.transcript.deaths == {}
    assert steps(running) == [5, 5, 4, 5]
    assert running.ending.replicas_text == (
        "Replicas may differ: ranks 0-1,3 ended after optimizer step 5, rank 2 after step 4. "
        "`%dist_diff model` shows the differences, `%dist_sync model optimizer --from 0 -r all` "
        "copies from rank 0."
    )
    assert not are_equal(world)
    world.sync(["model", "optimizer"], source=0, ranks=range(4))
    world.execute("net, optimizers = model.module, [optimizer]")
    assert are_equal(world)
    stop(world, train(world, PLAIN, 1, 1, 1, 1))
    assert are_equal(world)


def test_a_copy_is_not_advised_for_shards(world: World) -> None:
    """For a sharded model the line does not advise a copy from one rank, which has a shard."""
    world.execute(BEGIN + SCENARIOS["FSDP2"][0])
    cell = AT_STEP_5.format(when="rank == 2", do="time.sleep(600)")
    running = train(world, cell, 5, 5, 4, 5)
    stop(world, running)
    assert running.ending.replicas_text == (
        "Replicas may differ: ranks 0-1,3 ended after optimizer step 5, rank 2 after step 4. "
        "Shards of `model` cannot be copied from one rank: restore a snapshot or a checkpoint, or "
        "run again the cells that make them."
    )


def test_a_second_stop_interrupts_at_once(world: World) -> None:
    """A second Stop does not wait for a step."""
    cell = AT_STEP_5.format(when="rank == 2", do="time.sleep(600)")
    seconds = []
    for _ in range(3):
        world.execute(BEGIN + ADAM)
        running = train(world, cell, 5, 5, 4, 5)
        world.interrupt()
        inbox.receive(world.engine, 0.2)
        seconds.append(seconds_to_stop(world, running))
        dispatch.wait_for_stop(world.engine)
        assert "rank 2 after step 4" in running.ending.replicas_text
    assert not waits_for_steps(seconds)


def test_a_line_names_ranks_ahead_of_slow_ones(world: World) -> None:
    """If the next step would come too late, a line says which ranks are ahead."""
    cell = PLAIN.replace(
        "    optimizer.step()", "    time.sleep(3 * (rank == 1))\n    optimizer.step()"
    )
    running = train(world, cell, 3, 2, 3, 3)  # the next step of rank 1 begins 3 s later
    stop(world, running)
    assert "Replicas may differ: rank 0,2-3" in running.ending.replicas_text.replace(
        "ranks", "rank"
    )


@pytest.mark.parametrize("when", ["while it cleans up", "afterwards"])
def test_a_late_rank_is_reported_with_the_next_task(world: World, when: str) -> None:
    """If a rank ends after control is back, the next task warns that replicas may differ."""
    do = "try:\n            time.sleep(600)\n        finally:\n            time.sleep(6)"
    running = train(world, AT_STEP_5.format(when="rank == 2", do=do), 5, 5, 4, 5)
    press_stop(world, running)
    assert (running.unfinished, running.ending.replicas_text) == ((2,), "")
    if when == "afterwards":
        wait_until(
            lambda: inbox.receive(world.engine, 0.1) or not running.unfinished, "it has left"
        )
    with pytest.warns(UserWarning, match="stopped late.*Replicas may differ: .* rank 2 after"):
        world.execute("pass")
    world.execute("pass")


def test_stop_is_fast_once_steps_are_over(world: World) -> None:
    """Stop waits for no step in a cell that makes none now, even after earlier steps."""
    seconds = []
    for _ in range(3):
        running = run_for(world, "for _ in range(9): optimizer.step()\ntime.sleep(600)", 2.5)
        seconds.append(seconds_to_stop(world, running))
        assert running.ending.replicas_text == ""
    assert not waits_for_steps(seconds)


def test_a_rank_without_the_model_is_not_named(world: World) -> None:
    """A rank without the model has no replica: only ranks that have the model are named."""
    cell = "if rank != 2: optimizer.step()\nprint('done')\ntime.sleep(600)"
    for has_model in (True, False):
        running = train(world, cell, 1, 1, 1, 1)
        stop(world, running)
        assert steps(running) == [1, 1, 0, 1]
        assert ("rank 2 after step 0" in running.ending.replicas_text) == has_model
        world.execute("if rank == 2: globals().pop('optimizer', None)")


def test_code_that_cleans_up_is_not_interrupted_again(world: World) -> None:
    """Code that handles the interrupt may take seconds, and then ends well."""
    loop = PLAIN.replace("\n", "\n    ")
    cell = (
        f"try:\n    {loop}\nexcept KeyboardInterrupt:\n    time.sleep(3)\n    saved = STEPS.begun"
    )
    running = train(world, cell, 1, 1, 1, 1)
    stop(world, running)
    assert running.transcript.errors == {}
    assert {*world.gather("saved")} == {*steps(running)}
    assert are_equal(world)


def test_a_step_is_not_cut(world: World) -> None:
    """Ranks that are interrupted at once, since others do not train, end their step first."""
    world.execute(
        "class Slow(torch.optim.SGD):\n    def step(self):\n        global ended\n"
        "        print('begun')\n        ended = False\n"
        "        time.sleep(0.7)\n        ended = True\n"
        "slow, ended = Slow(model.parameters()), None"
    )
    running = train(world, "if rank: slow.step()\ntime.sleep(600)", 0, 1, 1, 1)
    stop(world, running)
    assert world.gather("ended") == [None, True, True, True]
    assert "rank 0 ended after optimizer step 0" in running.ending.replicas_text


FINISHES = """
from nbdist.worker.steps import STEPS
def end_late(**how):
    del STEPS.end_task
    STEPS.end_task(**how)
    time.sleep(1)
if rank == 0:
    STEPS.end_task = end_late
for _ in range(5):
    optimizer.zero_grad()
    loss_of(model).backward()
    if rank and STEPS.begun == 4:
        time.sleep(0.8)
    optimizer.step()
"""
"""Rank 0 ends long before the others make their last step, and its agent learns of it later."""


def test_ranks_catch_up_with_a_rank_that_has_finished(world: World) -> None:
    """Stop lets the others make a finished rank's last step, before the agent knows of the end."""
    running = train(world, FINISHES, 5, 4, 4, 4, seconds=0.2)
    stop(world, running)
    assert steps(running) == [5, 5, 5, 5]
    assert running.transcript.errors == {}
    assert running.ending.replicas_text == ""
    assert are_equal(world)


LATE_SIGINT = """
import signal
set_handler = signal.signal
def set_late(number, handler):
    global late
    if late and getattr(handler, "__name__", "") == "_keep_sigint":
        late -= 1
        signal.raise_signal(signal.SIGINT)
    return set_handler(number, handler)
late = {late} if rank == 0 else 0
signal.signal = set_late
"""
"""Rank 0 gets SIGINT `late` times, at the moment when its task has ended."""


@pytest.mark.parametrize("late", [1, 2])
def test_sigint_as_a_task_ends_hides_no_steps(world: World, late: int) -> None:
    """All steps of a task are counted even if SIGINT comes at the task's end.

    A single SIGINT there does not fail the task either, and its variables are known; a second one
    does fail the task.
    """
    trains = f"for _ in range(5): optimizer.step()\nmade{late} = rank"
    source = LATE_SIGINT.format(late=late) + trains
    running = world.submit(world.task(source))
    dispatch.wait(world.engine, running)
    assert steps(running) == [5, 5, 5, 5]
    assert [*running.transcript.errors] == ([] if late == 1 else [0])
    has_made = world.engine.names.ranks_with(f"made{late}")
    assert has_made == ((0, 1, 2, 3) if late == 1 else (1, 2, 3))
    world.execute("signal.signal = set_handler")
    cell = AT_STEP_5.format(when="rank", do="time.sleep(600)")
    running = train(world, LATE_SIGINT.format(late=late) + cell, 5, 4, 4, 4)
    stop(world, running)
    assert (
        "rank 0 ended after optimizer step 5, ranks 1-3 after step 4"
        in running.ending.replicas_text
    )
    world.execute("signal.signal = set_handler")


def test_a_timeout_keeps_replicas_equal(world: World) -> None:
    """A timeout stops a training as Stop does."""
    running = world.submit(world.task(PLAIN), Patience(timeout=0.5))
    error = follow(world, running).error
    assert isinstance(error, CellTimeout)
    assert str(error).endswith("no variables were lost.")
    assert are_equal(world)


def test_a_rank_behind_others_is_named_if_it_raises(world: World) -> None:
    """A rank that raises before a step that others make is named, but not if all ranks raise."""
    cell = AT_STEP_5.format(when="rank == 1", do="raise ValueError('bad')")
    _, error = ends(world, cell)
    assert isinstance(error, WorkerError)
    assert "Replicas may differ: ranks 0,2-3 ended after optimizer step 5, rank 1" in str(error)
    assert "no variables were lost" not in str(error)
    world.execute(BEGIN + ADAM)
    _, error = ends(world, AT_STEP_5.format(when="True", do="raise ValueError('bad')"))
    assert "Replicas" not in str(error)


def test_survivors_a_step_apart_are_named(world: World) -> None:
    """After a death survivors that are a step apart are named, but not a rank that is new."""
    do = "os.kill(os.getpid(), 9) if rank == 1 else dist.barrier()"
    _, error = ends(world, "import os\n" + AT_STEP_5.format(when="rank in (1, 3)", do=do))
    assert isinstance(error, WorkerDied)
    # In rare cases gloo does not wake a survivor, which is restarted then: see test_deaths.py.
    restarted = set(map(int, re.findall(r"Gloo did not wake rank (\d)", str(error))))
    ahead, behind = {0, 2} - restarted, {3} - restarted
    assert len(restarted) < 2
    steps_text = f"{name_ranks(ahead)} ended after optimizer step 5, rank 3 after step 4."
    assert (f"Replicas may differ: {steps_text}" in str(error)) == bool(behind)
