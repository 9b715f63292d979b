"""Tests of `World.map` with real workers: results, order, failures, deaths, Stop, big items."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from nbdist.errors import NbdistError, UsageError, WorkerDied, WorkerError, WorldBusy
from nbdist.world import dispatch, inbox
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.waiting import once, press_stop, wait_until

pytestmark = pytest.mark.shared_world(3)

SIZE = 1 << 20
"""Bytes of an item that needs shared memory, because it is too big for a message."""


def square(number: int) -> int:
    return number * number


def odd_is_wrong(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


def rank_of(_: object) -> int:
    return int(os.environ["RANK"])


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_results_have_the_order_of_the_items(world: World) -> None:
    """Results have the order of the items; all ranks run items, or only the selected ranks."""
    assert world.map(square, range(1000)) == [each * each for each in range(1000)]
    assert world.map(square, iter([3, 1, 2])) == [9, 1, 4]
    assert world.map(square, []) == []
    assert {*world.map(lambda _: (time.sleep(0.02), rank_of(0))[1], range(30))} == {0, 1, 2}
    assert {*world.map(rank_of, range(30), ranks="1")} == {1}
    assert {*world.map(rank_of, range(30), rank=2)} == {2}


def test_results_come_as_they_are_done(world: World) -> None:
    """With `as_completed` a short item's result comes before that of a long item begun earlier."""
    values = world.map(sleep, [1.0, 0.01, 0.02], as_completed=True)
    assert [*values] == [0.01, 0.02, 1.0]


def test_the_function_and_the_items_bring_the_names_that_they_use(world: World) -> None:
    """Names of `__main__` that the function or the items use are sent, for the map only."""
    names = world.engine.names.namespace
    source = "FACTOR = 3\ndef times(x): return x * FACTOR\ndef two(): return FACTOR - 1\n"
    source += "class Item:\n    def times(self, x): return x * FACTOR\n"
    exec(source, names)
    try:
        assert world.map(names["times"], [1, 2]) == [3, 6]
        assert world.map(lambda each: each(), [names["two"], names["two"]]) == [2, 2]
        assert world.map(lambda each: each.times(2), [names["Item"]()]) == [6]
    finally:
        for name in ("FACTOR", "times", "two", "Item"):
            del names[name]
    assert world.execute("'FACTOR' in globals()").by_rank == dict.fromkeys(range(3), False)


def test_an_item_is_a_copy(world: World) -> None:
    """If one object is several items, each item is a copy: no change reaches another item."""
    shared = [0]

    def add(item: list[int]) -> int:
        item[0] += 1
        return item[0]

    assert world.map(add, [shared] * 20) == [1] * 20
    assert shared == [0]


def test_an_exception_names_its_item_and_keeps_the_other_results(world: World) -> None:
    """The first exception ends the map; its `results` has the other items' results by index."""
    with pytest.raises(ValueError, match="3 is odd") as caught:
        world.map(odd_is_wrong, [0, 2, 3, *range(4, 1000, 2)])
    assert "It had item 2 of 501 (3)" in str(caught.value)
    assert isinstance(caught.value, WorkerError)
    results: dict[int, int] = caught.value.results  # type: ignore[attr-defined]
    assert results[0] == 0
    assert 2 not in results
    assert len(results) < 500
    assert world.map(square, [5]) == [25]


def test_exceptions_can_be_returned_among_the_results(world: World) -> None:
    """With `on_error="return"` the result of each failed item is its exception."""
    results: list[Any] = world.map(odd_is_wrong, range(7), on_error="return")
    assert results[::2] == [0, 2, 4, 6]
    for number, error in zip((1, 3, 5), results[1::2], strict=True):
        assert isinstance(error, ValueError)
        assert isinstance(error, WorkerError)
        assert f"{number} is odd" in str(error)
    assert world.state is WorldState.READY


def test_an_item_of_a_dead_rank_goes_to_another(world: World, tmp_path: Path) -> None:
    """An item whose rank was killed runs again; all results come, and the rank is replaced."""
    mark = tmp_path / "died"

    def die_once(number: int) -> int:
        if number == 4 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    pids = dict(world.pids)
    assert world.map(die_once, range(12)) == [*range(12)]
    assert len(pids.items() - world.pids.items()) == 1
    assert world.execute("rank").by_rank == {0: 0, 1: 1, 2: 2}


def test_an_item_that_kills_two_ranks_is_given_up(world: World) -> None:
    """An item with which two ranks have died goes to no third rank; the error names the item."""

    def die(number: int) -> int:
        if number == 4:
            os._exit(3)
        return number

    with pytest.raises(WorkerDied, match=r"It had item 4 of 12 \(4\)") as caught:
        world.map(die, range(12))
    results: dict[int, int] = caught.value.results  # type: ignore[attr-defined]
    assert results == {number: number for number in range(12) if number != 4}
    returned: list[Any] = world.map(die, range(12), on_error="return")
    assert isinstance(returned[4], WorkerDied)
    assert returned[:4] + returned[5:] == [*range(4), *range(5, 12)]


def test_ranks_that_die_without_an_item_end_the_map(world: World) -> None:
    """A function that kills every rank that unpickles it is not sent again and again."""

    class Deadly:
        def __reduce__(self) -> Any:
            return os._exit, (7,)

    deadly = Deadly()
    with pytest.raises(WorkerDied, match="exited with code 7"):
        world.map(lambda _: deadly, range(3))


def test_stop_ends_a_map(world: World, tmp_path: Path) -> None:
    """Stop interrupts all ranks; the exception has the results so far, and the world is ready."""

    def work(number: int) -> int:
        if number > 2:
            (tmp_path / str(number)).touch()
            time.sleep(600)
        return number

    all_sleep = lambda: len([*tmp_path.iterdir()]) == 3  # noqa: E731
    with pytest.raises(KeyboardInterrupt) as caught, once(all_sleep, press_stop):
        world.map(work, range(6))
    results: dict[int, float] = caught.value.results  # type: ignore[attr-defined]
    assert results == {0: 0, 1: 1, 2: 2}
    assert world.map(square, [5]) == [25]


def test_leaving_the_loop_interrupts_the_ranks(world: World) -> None:
    """A loop over `as_completed` that is left early leaves no rank at work."""
    for value in world.map(sleep, [0.01, 600.0, 600.0, 600.0], as_completed=True):
        assert value == 0.01
        with pytest.raises(WorldBusy):
            world.execute("1")
        break
    assert world.map(square, [5]) == [25]


def test_a_forgotten_iterator_gives_no_more_items(world: World, tmp_path: Path) -> None:
    """While nobody reads the iterator, ranks get no more items, and end their task."""

    def work(number: int) -> int:
        (tmp_path / str(number)).touch()
        time.sleep(0.01)
        return number

    values = world.map(work, range(1000), as_completed=True)
    first = next(values)
    wait_until(
        lambda: inbox.receive_waiting(world.engine) or not world.engine.task_table.unfinished
    )
    assert len([*tmp_path.iterdir()]) < 500
    assert world.execute("rank").by_rank == {0: 0, 1: 1, 2: 2}
    assert first + sum(values) == sum(range(1000))


def test_an_iterable_that_fails_ends_the_map(world: World) -> None:
    """If the iterable raises, so does the map, with the results of the items that came before."""

    def two() -> Iterator[int]:
        yield 1
        yield 2
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more") as caught:
        world.map(square, two())
    assert caught.value.results == {0: 1, 1: 4}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda world: world.map(3, [1]), "takes a function"),
        (lambda world: world.map(square, 3), "has no items"),
        (lambda world: world.map(square, [1], on_error="ignore"), '"raise" or "return"'),
        (lambda world: world.map(square, [1, threading.Lock()]), "item 1 of 2 cannot be sent"),
    ],
)
def test_nonsense_has_one_line(world: World, call: Any, words: str) -> None:
    """Arguments of the wrong kind, and items that cannot be pickled, raise an error of one line."""
    with pytest.raises(UsageError, match=words) as caught:
        call(world)
    assert "\n" not in str(caught.value)
    assert world.state is WorldState.READY


def test_a_result_that_cannot_be_sent_names_its_item(world: World) -> None:
    """A function that returns a lock fails with a line that names the item."""
    with pytest.raises(WorkerError, match=r"the result of item 0 .* cannot be sent"):
        world.map(lambda _: threading.Lock(), [1])


def test_big_items_and_results_leave_no_memory(world: World) -> None:
    """Items and results of a mebibyte arrive whole; afterwards no process holds their memory."""

    def segments() -> int:
        this = psutil.Process()
        processes = [this, *this.children(recursive=True)]
        links = [link for each in processes for link in Path(f"/proc/{each.pid}/fd").glob("*")]
        return sum("memfd:nbdist " in _target(link) for link in links)

    before = segments()
    items = [np.full(SIZE, number, np.uint8) for number in range(20)]
    results = world.map(lambda item: item + 1, items)
    for number, result in enumerate(results):
        assert result.shape == (SIZE,)
        assert {*np.unique(result)} == {number + 1}
    assert segments() == before


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def test_items_can_come_from_an_iterable_without_a_length(world: World) -> None:
    """Items can have a `__len__` that raises TypeError, such as `tqdm` around a generator."""

    class Stream:
        def __len__(self) -> int:
            raise TypeError("no length")

        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    assert world.map(square, Stream()) == [0, 1, 4, 9, 16]


def test_items_that_come_from_the_world_itself_are_refused(world: World) -> None:
    """An iterable that uses the world itself, while the world runs the map, is refused."""
    first = world.map(square, range(3), as_completed=True)
    with pytest.raises(UsageError, match=r"make a list of the items first"):
        world.map(square, first)
    with pytest.raises(UsageError, match=r"make a list of the items first"):
        world.map(square, (world.run(rank_of, 0)[0] for _ in range(3)))
    assert world.map(square, [5]) == [25]


def test_a_stop_iteration_of_the_function_names_its_item(world: World) -> None:
    """If the function raises StopIteration, which no generator can raise, NbdistError is raised."""

    def end(number: int) -> int:
        if number == 1:
            next(iter(()))
        return number

    for as_completed in (True, False):
        with pytest.raises(NbdistError, match=r"StopIteration\. It had item 1 of 3") as caught:
            list(world.map(end, range(3), as_completed=as_completed))  # type: ignore[call-overload]
        assert 1 not in caught.value.results  # type: ignore[attr-defined]


def test_items_that_kill_all_ranks_at_once_are_tried_again(world: World) -> None:
    """If the first items kill all ranks, the other items still run, and the errors are returned."""
    die = lambda number: os._exit(3) if number < 3 else number  # noqa: E731
    returned: list[Any] = world.map(die, range(6), on_error="return")
    assert [type(each) for each in returned[:3]] == [WorkerDied] * 3
    assert returned[3:] == [3, 4, 5]


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "closed"])
def test_an_iterator_ends_when_the_workers_have_ended(world: World, is_read: bool) -> None:  # noqa: FBT001
    """After a restart or shutdown, an open iterator raises; closing it does not wait for ranks."""
    for end in (world.restart, world.shutdown):
        values: Any = world.map(sleep, itertools.repeat(0.01), as_completed=True)
        assert next(values) == 0.01
        end()
        if is_read:
            with pytest.raises(UsageError, match="have ended or were restarted meanwhile"):
                list(values)
        values.close()
    world.start()
    assert world.map(square, [5]) == [25]


def test_closing_an_iterator_leaves_another_task_alone(world: World) -> None:
    """If the ranks have left the map, closing its iterator does not interrupt their next task."""
    values: Any = world.map(sleep, itertools.repeat(0.01), as_completed=True)
    assert next(values) == 0.01
    wait_until(
        lambda: inbox.receive_waiting(world.engine) or not world.engine.task_table.unfinished
    )
    running = dispatch.submit(world.engine, world.engine.task("import time; time.sleep(1)"))
    values.close()
    dispatch.wait(world.engine, running)
    dispatch.check(world.engine, running)


@pytest.mark.world
def test_a_map_starts_the_workers() -> None:
    """A map starts the workers of a world that has none yet, as any other call does."""
    world = World(n=1)
    try:
        assert world.map(square, [5]) == [25]
    finally:
        world.shutdown()
