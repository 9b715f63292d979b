"""Runs cells in a world, waits for them or stops them, and reads their output and errors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.agent.interrupts import C_GRACE
from nbdist.agent.step_stops import STEP_ANSWER_TIMEOUT
from nbdist.config import Patience
from nbdist.errors import NbdistError
from nbdist.output.ansi import strip
from nbdist.output.events import Failure, Output, Skipped
from nbdist.output.rank_transcript import RichDisplay
from nbdist.output.screen import ScreenLine
from nbdist.world import dispatch, inbox
from nbdist.world.result import CellResult
from nbdist.world.states import WorldState
from nbdist.world.task_error import error_of, not_stopped
from nbdist.world.task_run import TaskRun
from nbdist.world.world import World
from tests.waiting import SOON, wait_until


@dataclass(frozen=True)
class Ran:
    """A cell that has ended, with its error, and its outputs in `news` with their ranks."""

    running: TaskRun
    error: NbdistError | None
    news: list[tuple[int, Output]]

    def lines(self, rank: int = 0) -> list[str]:
        """Return the lines on a rank's screen, with displays in angle brackets."""
        found = []
        for item in self.running.transcript[rank].tail(10_000):
            match item:
                case ScreenLine(text=text):
                    found.append(text)
                case RichDisplay(display=display):
                    found.append(f"<{display.data['text/plain']}>")
                case Skipped(lines=number):
                    found.append(f"({number} lines skipped)")
        return found

    def stderr(self, rank: int = 0) -> list[str]:
        """Return the lines on a rank's screen that the rank wrote to stderr."""
        items = self.running.transcript[rank].tail(10_000)
        return [item.text for item in items if isinstance(item, ScreenLine) and item.stderr]

    def failure(self, rank: int = 0) -> Failure:
        """Return the failure that ended the cell on a rank."""
        failure = self.running.transcript[rank].failure
        assert failure is not None
        return failure

    def traceback(self, rank: int = 0) -> str:
        """Return the traceback of a rank's failure without colours."""
        return strip("\n".join(self.failure(rank).traceback))


def follow(world: World, running: TaskRun) -> Ran:
    """Follow a running cell until it ends."""
    news = list(itertools.chain.from_iterable(world.follow(running)))
    return Ran(running, error_of(running), news)


def run(world: World, source: str, ranks: tuple[int, ...] | None = None, count: int = 7) -> Ran:
    """Run a cell to its end, whether the cell succeeds or fails."""
    return follow(world, world.submit(world.task(source, ranks=ranks, execution_count=count)))


def run_well(world: World, source: str, ranks: tuple[int, ...] | None = None) -> Ran:
    """Run a cell that must succeed."""
    ran = run(world, source, ranks)
    assert ran.error is None, ran.running.transcript.errors
    return ran


IN_C = """
import time
print("runs")
until = time.monotonic() + {seconds}
if rank == {rank}: any(map(until.__lt__, iter(time.monotonic, None)))
"""
"""Keeps a rank for some seconds in C code that holds the GIL and handles no signal."""


def give_up_on_c_code(world: World, rank: int, control_timeout: float) -> None:
    """Stop a rank in C code; control is back before the rank stops, and no variable is lost."""
    world.execute("kept = rank")
    seconds = C_GRACE + STEP_ANSWER_TIMEOUT + 2.0
    task = world.task(IN_C.format(rank=rank, seconds=seconds))
    running = world.submit(task, Patience(control_timeout=control_timeout))
    for _ in world.follow(running):
        if all(track.line_count for track in running.transcript):
            break
    world.interrupt()
    dispatch.wait(world.engine, running)
    assert running.unfinished == (rank,)
    assert "no variables were lost" in str(error_of(running))
    while running.unfinished:
        dispatch.wait_for_stop(world.engine)
    assert world.gather("kept") == [*range(world.size)]


def begin(world: World, source: str) -> TaskRun:
    """Submit a cell, and return when all ranks have begun to run it."""
    running = world.submit(world.task(f"print('begun')\n{source}"))

    def all_have_begun() -> bool:
        inbox.receive(world.engine, 0.05)
        return all(track.line_count for track in running.transcript)

    wait_until(all_have_begun, "all ranks have begun")
    return running


def run_for(world: World, source: str, seconds: float) -> TaskRun:
    """Submit a cell that goes on for ever, and return when it has run for some seconds."""
    running = world.submit(world.task(source))
    for _ in world.follow(running):
        if running.age > seconds:
            break
    return running


def press_stop(world: World, running: TaskRun) -> None:
    """Press Stop, and wait until control is back."""
    world.interrupt()
    dispatch.wait(world.engine, running)


def stop(world: World, running: TaskRun) -> None:
    """Press Stop, and wait until all ranks have left the cell, as the next cell would do."""
    press_stop(world, running)
    if running.unfinished:  # on a very busy machine
        sys.stdout.write(f"Control is back, but {not_stopped(running)}\n")
        dispatch.wait_for_stop(world.engine)


def ends(
    world: World, source: str, within: float = SOON, **cell: Any
) -> tuple[TaskRun, NbdistError]:
    """Run a cell that must fail and end by itself on all ranks; the world is ready then."""
    running = world.submit(world.task(source, **cell))
    stopped = False
    for _ in world.follow(running):
        if running.age > within and not stopped:
            stopped = True
            world.interrupt()
    dispatch.wait(world.engine, running)
    error = error_of(running)
    assert not stopped, f"it did not end by itself within {within:.0f} s; Stop: {error}"
    assert error is not None, "nothing failed"
    assert world.state is WorldState.READY
    return running, error


Write = Callable[..., Path]


def said(result: CellResult | TaskRun) -> list[str]:
    """Return the text that each rank has written."""
    return [
        "\n".join(strip(line.text) for piece in track.pieces for line in piece.tail(1000))
        for track in result.transcript
    ]
