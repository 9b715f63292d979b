"""`World.map`: a function is called with many items, each on a rank that is free.

Runs in the notebook's process, on the thread that made the world.  The ranks run a task, in which
they ask for items until none is left; `nbdist.world.item_queue` decides which rank gets an item.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from html import escape
from typing import Any, Literal, get_args

from nbdist.errors import Blame, NbdistError, UsageError, WorkerDied, WorkerError
from nbdist.output.ansi import strip
from nbdist.output.events import Died, ItemOutcome, RankError
from nbdist.output.wording import seconds_text
from nbdist.wire.work import OpCall
from nbdist.words import count
from nbdist.world import dispatch, recovery, remote_call
from nbdist.world.engine import Engine
from nbdist.world.item_queue import ItemQueue
from nbdist.world.moving_line import MovingLine
from nbdist.world.result import Contents, as_raised, raised
from nbdist.world.task_run import TaskRun

log = logging.getLogger("nbdist.world")

OnError = Literal["raise", "return"]

WORKERS_GONE = (
    "the workers that had the items of this World.map have ended or were restarted meanwhile; "
    "`results` of this error has the results that came before."
)

BAR_AFTER = 0.5  # seconds; a shorter map shows no bar
BAR_EVERY = 0.25  # seconds between two drawings of the bar


class ItemMap:
    """A `World.map` in progress; `steps` runs it."""

    def __init__(
        self,
        engine: Engine,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        ranks: Sequence[int] | None,
        on_error: OnError,
    ) -> None:
        """Check the arguments, and that the function can be pickled; nothing is sent yet.

        Without `ranks` the map uses all ranks that the world has when a task of the map begins.
        """
        if on_error not in get_args(OnError):
            raise UsageError(f'`on_error={on_error!r}`: use "raise" or "return".')
        if not callable(function):
            raise UsageError(f"`map` takes a function and its items, not {function!r:.60}.")
        if not hasattr(items, "__iter__") and not hasattr(items, "__getitem__"):
            raise UsageError(f"`map`: {items!r:.60} has no items.")
        self._engine, self._function = engine, function
        self._ranks = ranks
        self._returns_errors = on_error == "return"
        # Items can be functions, or instances of classes, of `__main__`.  Ranks also need the names
        # of `__main__` that these functions and classes use.
        functions: tuple[Any, ...] = ()
        if isinstance(items, list | tuple):
            kinds = {kind for kind in map(type, items) if kind.__module__ == "__main__"}
            functions = (*filter(callable, items), *kinds)
        names = remote_call.names_of_call(engine.names.namespace, function, functions, {})
        self._values: dict[str, Any] = {"call": (function, (), {}), "names": names}
        self._queue = ItemQueue(
            items,
            engine.names.namespace,
            returns_errors=self._returns_errors,
            is_elsewhere=engine.rank_table.is_elsewhere,
        )
        self._errors: dict[int, BaseException] = {}  # by index: the exception in place of a result

    def results(self) -> list[Any]:
        """Run the map to its end, and return the results in the order of the items."""
        for _ in self.steps():
            pass
        return [self._result(index) for index in range(self._queue.done)]

    def as_completed(self) -> Iterator[Any]:
        """Run the map, and yield each result as it comes, in any order."""
        with closing(self.steps()) as steps:
            for index in steps:
                yield self._result(index)

    def _result(self, index: int) -> Any:
        return self._errors[index] if index in self._errors else self._queue.results[index]

    def steps(self) -> Generator[int, None, None]:
        """Run the map, and yield the index of each item that has a result.

        With the option `on_error="return"` an exception counts as a result.  If a rank has died, or
        if ranks ended their task while the caller handled an index, a further task runs the items
        that are left.  Raises the first error, whose attribute `results` has by index the results
        so far.  If the generator is closed before its end, the ranks are interrupted.
        """
        queue = self._queue
        bar = MapProgress(remote_call.title_of(self._function), is_shown=self._engine.config.show)
        try:
            while not queue.is_done:
                queue.begin_round()
                count_before = queue.done + queue.deaths
                running = yield from self._run_task(bar)
                self._check(running, has_progress=queue.done + queue.deaths > count_before)
        except GeneratorExit:
            raise
        except BaseException as error:  # also KeyboardInterrupt by Stop
            shown: BaseException = error
            if isinstance(error, StopIteration):  # a generator cannot raise StopIteration
                shown = NbdistError(str(error))
                shown.__notes__ = getattr(error, "__notes__", [])
            with suppress(AttributeError, TypeError):  # a user's class can refuse attributes
                shown.results = {**queue.results}  # type: ignore[attr-defined]
            if shown is not error:
                raise shown from None
            raise
        finally:
            queue.end()
            bar.close(queue)

    def _run_task(self, bar: MapProgress) -> Generator[int, None, TaskRun]:
        """Send a task to all ranks of the map and follow it to its end; return the task.

        Yields the indices of items as `steps` does.
        """
        engine, queue = self._engine, self._queue
        on = engine.rank_table.everyone if self._ranks is None else self._ranks
        queue.ranks = len(on)
        sending = remote_call.sending(engine, self._values, on, are_lent=True)
        with sending as (payloads, parcels):
            arguments = {
                "title": remote_call.title_of(self._function),
                "packed": payloads,
                "outdated": remote_call.outdated_names(engine, self._values["names"]),
                "returns_errors": self._returns_errors,
                "is_elsewhere": engine.rank_table.is_elsewhere,
            }
            task = engine.task(OpCall("run.map_items", arguments), ranks=self._ranks)
            running = dispatch.submit(engine, task, shipped=parcels)
            running.answer_items = queue.answer
            try:
                for _ in remote_call.following(engine, running):
                    yield from self._pop_done(running)
                    self._check_has_workers(running)
                    bar.show(queue)
                yield from self._pop_done(running)
            except BaseException:  # such as GeneratorExit: the caller has left its loop
                queue.end()
                if engine.is_running(running):  # False if the task or the workers have ended
                    recovery.interrupt(engine, running)
                    dispatch.wait(engine, running)
                raise
        return running

    def _check_has_workers(self, running: TaskRun) -> None:
        """Raise UsageError if the workers ended or restarted while the caller handled an index."""
        if running.unfinished and not self._engine.is_running(running):
            raise UsageError(WORKERS_GONE)

    def _pop_done(self, running: TaskRun) -> Iterator[int]:
        """Yield the indices of items that were done since the last call, as `steps` does.

        While the caller handles an index, ranks that ask for items get none, and end their task.
        They must not wait, because the caller may never ask for the next index.
        """
        queue = self._queue
        queue.lose(running.transcript.deaths)
        queue.is_paused = True
        for index in queue.pop_new():
            if index in queue.failures:
                self._errors[index] = self._error_of(running, index, *queue.failures[index])
            elif index in queue.gave_up:
                self._errors[index] = self._death_of(running, index, queue.gave_up[index])
            if self._returns_errors or index not in self._errors:
                yield index
        queue.is_paused = False

    def _check(self, running: TaskRun, *, has_progress: bool) -> None:
        """Raise the error of a task if it ends the map; return if the map can go on.

        A death alone does not end the map, if the task has made progress (`has_progress`): other
        ranks then get the items of the dead rank.
        """
        engine, queue = self._engine, self._queue
        if queue.problem is not None:
            raise queue.problem
        index = next(iter(queue.failures if not self._returns_errors else ()), None)
        if index is None and not self._returns_errors:
            index = next(iter(queue.gave_up), None)
        errors = running.transcript.errors.values()
        are_deaths = bool(errors) and all(isinstance(each, Died) for each in errors)
        can_go_on = index is None and has_progress and engine.state.has_workers
        if are_deaths and can_go_on and not running.stop.was_pressed:
            engine.rank_table.mark_reported(running.ending.recovered_ranks)
            log.warning("%s Its items were given to other ranks.", running.ending.recovery_text)
            return
        if index is not None:
            items = count(len(queue.results), "item")
            item_text = f"It had {queue.name_of(index)}; `results` of the error has {items}"
            running.ending = replace(running.ending, item_text=item_text)
        remote_call.check(engine, running)

    def _error_of(
        self, running: TaskRun, index: int, rank: int, outcome: ItemOutcome
    ) -> BaseException:
        """Return the exception about an item that has failed on `rank`, as `outcome` says."""
        failure, members = outcome.failure, running.members
        assert failure is not None
        blame = self._blame(running, rank, failure)
        seconds, who = running.clock.seconds_until(failure.time_ns), members.machines.who([rank])
        error = WorkerError(blame, 1, seconds, (failure.name, failure.message), who)
        error.add(f"It had {self._queue.name_of(index)}")
        contents = Contents.read(outcome.values, members.namespace)
        error = as_raised(error, failure.kinds, contents)
        error.show(f"rank {rank}:", *strip("\n".join(failure.traceback)).splitlines())
        return raised(error)

    def _death_of(self, running: TaskRun, index: int, rank: int) -> WorkerDied:
        """Return the error about an item that two ranks had when they died."""
        died = running.transcript.deaths[rank]
        seconds = running.clock.seconds_until(died.time_ns)
        blame = self._blame(running, rank, died)
        error = WorkerDied(blame, seconds, died.exit_code, died.end)
        error.add(f"It had {self._queue.name_of(index)}, as another rank that died before")
        return error

    def _blame(self, running: TaskRun, rank: int, error: RankError) -> Blame:
        members = running.members
        return Blame(rank, members.machines.name(rank), members.pids.get(rank, 0), {rank: error})


class MapProgress:
    """The progress of a map: a line of a terminal, or a display of the notebook.

    A map that ends within `BAR_AFTER` seconds shows nothing.
    """

    def __init__(self, title: str, *, is_shown: bool) -> None:
        self._title = title
        self._line = MovingLine(sys.stderr)
        self._is_shown = is_shown
        self._display: Any = None
        self._began = time.monotonic()
        self._draw_at = self._began + BAR_AFTER

    def show(self, queue: ItemQueue) -> None:
        """Draw the progress, at most every `BAR_EVERY` seconds."""
        now = time.monotonic()
        if self._is_shown and now >= self._draw_at:
            self._draw_at = now + BAR_EVERY
            self._draw(queue, now)

    def close(self, queue: ItemQueue) -> None:
        """Erase the line in a terminal; update the display in a notebook for the last time."""
        self._line.clear()
        if self._display is not None:
            self._draw(queue, time.monotonic())

    def _draw(self, queue: ItemQueue, now: float) -> None:
        text = progress_text(self._title, queue, now - self._began)
        shell = get_kernel_shell()
        if shell is None:
            self._line.show(text, now)
            return
        from IPython.display import display  # not imported in scripts

        share = f' value="{queue.done / queue.total}"' if queue.total else ""
        bar = f'<progress{share} style="width: 12em"></progress>'
        data = {"text/plain": text, "text/html": f"<div>{bar} {escape(text)}</div>"}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)


def get_kernel_shell() -> Any:
    """Return IPython's shell in the kernel of a notebook, None in a terminal or script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


def progress_text(title: str, queue: ItemQueue, seconds: float) -> str:
    """Write `score · 312 of 1,000 items · 2 failed · 12.5 s · 25 per s`.

    `seconds` is the time since the map began.
    """
    failed = len(queue.failures) + len(queue.gave_up)
    total = f"{queue.total:,}" if queue.total is not None else "many"
    parts = [
        title,
        f"{queue.done:,} of {total} items",
        f"{failed:,} failed" if failed else "",
        seconds_text(seconds),
        f"{queue.done / seconds:,.3g} per s" if seconds and queue.done else "",
    ]
    return " · ".join(filter(None, parts))
