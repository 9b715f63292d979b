"""Tests of `nbdist.worker.probe`: where the main thread is, asked from another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.wire.places import Place
from nbdist.world.world import World
from tests.waiting import wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

SETUP = """
import threading, time
from nbdist.worker.probe import Probe
probe = Probe(get_ipython().kernel.group)
store = dist.group.WORLD.get_group_store()

def sample(is_so, go):
    '''Keep the first place of the main thread that is so, then have it go on.'''
    def run():
        global place, brief, calls
        deadline = time.monotonic() + 20
        while not is_so(place := probe.locate()) and time.monotonic() < deadline:
            time.sleep(0.01)
        brief, calls = probe.locate_briefly(), probe.trace().frames
        go()
    thread = threading.Thread(target=run)
    thread.start()
    return thread
"""


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as world:
        world.execute(SETUP)
        yield world


def test_a_line_of_a_cell(world: World) -> None:
    """It waits for no rank, and the calls lead from the cell inwards."""
    world.execute(
        "over = threading.Event()\n"
        "def wait(): over.wait(20)\n"
        "sampling = sample(lambda place: place.line == 4, over.set)\n"
        "wait()\n"
        "sampling.join()"
    )
    for place, brief, calls in world.gather("place, brief, calls"):
        assert (place.line, place.operation, place.is_cleaning_up) == (4, "", False)
        assert brief == Place(line=4)
        own = [(frame.function, frame.line) for frame in calls if frame.is_cell]
        assert own == [("wait", 2), ("<module>", 4)]


def test_a_collective_that_a_rank_waits_in(world: World) -> None:
    """Its name and line, and what it has begun; all is calm, and only ranks can help."""
    world.execute(
        "if rank == 0:\n"
        "    go = lambda: store.set('in all_reduce', '')\n"
        "    sampling = sample(lambda place: place.operation and place.is_calm, go)\n"
        "else:\n"
        "    store.wait(['in all_reduce'])\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if rank == 0: sampling.join()"
    )
    ((place, brief),) = world.gather("place, brief", ranks=[0])
    assert (place.operation, place.line) == ("all_reduce", 6)
    assert brief == Place(line=6, operation="all_reduce")
    assert place.is_calm


def test_a_rank_that_waits_to_make_a_group(world: World) -> None:
    """In the store, for the others."""
    world.execute(
        "if rank == 0:\n"
        "    sampling = sample(lambda place: place.operation, lambda: store.set('meet', ''))\n"
        "else:\n"
        "    store.wait(['meet'])\n"
        "dist.new_group([0, 1])\n"
        "if rank == 0: sampling.join()"
    )
    (place,) = world.gather("place", ranks=[0])
    assert (place.operation, place.line) == ("new_group", 5)


def test_cleaning_up(world: World) -> None:
    """An `except` or `finally` that Stop has led to is known for one."""
    world.execute(
        "over = threading.Event()\n"
        "try:\n"
        "    raise KeyboardInterrupt\n"
        "except KeyboardInterrupt:\n"
        "    sampling = sample(lambda place: place.line == 6, over.set)\n"
        "    over.wait(20)\n"
        "sampling.join()"
    )
    assert world.gather("place.is_cleaning_up") == [True, True]


def test_no_task(world: World, tmp_path: Path) -> None:
    """Between tasks it is in no line, and in nothing that ranks wait for."""
    go = f"lambda: open(f'{tmp_path}/{{rank}}', 'x').close()"
    world.execute(f"sampling = sample(lambda place: not place.line, {go})")
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks were idle")
    for place in world.gather("place"):
        assert not place.is_in_code
        assert (place.operation, place.has_help) == ("", False)
