"""Jobs: `Job` stands for a cell that was sent with `--no-wait`, and `PoolJobs` has a pool's jobs.

Runs in the notebook's process, on IPython's main thread.  A job makes progress in steps.  Between
cells the event loop runs the steps (`PoolJobs.step_between_cells`).  In a plain cell, methods such
as `Job.wait` run them.  During another distributed cell, the loop that follows that cell runs them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

from IPython.core.interactiveshell import InteractiveShell
from IPython.lib.pretty import RepresentationPrinter

from nbdist.errors import (
    CellTimeout,
    Interrupted,
    JobCancelled,
    JobLost,
    JobTimeout,
    NbdistError,
    WorkerError,
)
from nbdist.notebook.cell_text import is_attended, request_of
from nbdist.notebook.display import CellDisplay
from nbdist.notebook.idle import (
    IdleStop,
    IdleWatch,
    Stops,
    delay_stops,
    is_in_subshell,
    is_main_thread,
    raise_stops,
)
from nbdist.notebook.late_output import LateOutput
from nbdist.output.wording import ranks_text, seconds_text
from nbdist.words import one_line
from nbdist.world import inbox
from nbdist.world.recovery import CELL_TICK
from nbdist.world.result import CellResult, raised
from nbdist.world.task_run import TaskRun
from nbdist.world.wait_texts import activity_text, waiting_text
from nbdist.world.world import World

log = logging.getLogger("nbdist.notebook")

CellSteps: TypeAlias = Generator[TaskRun, float | None, CellResult[Any] | BaseException]
"""A generator that runs a cell on ranks in steps.

The generator yields the task after each step, and returns the cell's result or error.  A number
that the caller sends into the generator is the limit for the next step, in seconds.
"""


LONGEST_LOOK = 2.0
"""Seconds after which `Job.done` returns although new output comes all the time."""

JOB_STEP_SECONDS = 0.05  # seconds for which each step of `done` waits for more output
AWAITED_EVERY = 0.05  # seconds between two steps while code awaits the job


class Job:
    """A cell that the workers run while the notebook goes on.

        %%distributed --no-wait -o job
        loss = train(model, data)

        job                      # <Job running · 4 ranks · 12.3 s · ...>
        job.done()               # whether the job has ended
        job.result()[0]          # waits; the last value of the cell on rank 0
        (await job)[0]           # the same, while other coroutines go on
        job.add_done_callback(print)  # `print(job)` when the job has ended
        job.interrupt()          # what Stop does to a cell that is waited for
        job.cancel()             # the same, but then `result` raises CancelledError

    Its methods are those of `concurrent.futures.Future`, and asyncio can await it.  The job's
    output stays under its cell, live while the notebook is idle or waits for the job.
    """

    def __init__(self, steps: CellSteps, running: TaskRun, name: str, place: CellPlace) -> None:
        """Take over the cell `running`, which was sent to the workers.

        The generator `steps` follows the cell from now on; its first step has run already.  `name`
        is the user's variable for the job, "" for none.  `place` is the notebook cell below which
        the job's output is shown.
        """
        self._steps = steps
        self.task_run = running  # the newest attempt of the cell
        self.title = f"`{name}`" if name else "the cell sent with --no-wait"
        self._place = place
        self.step_others: Callable[[], None] = lambda: None  # shows the output of the pool's jobs
        self._result: CellResult[Any] | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Job], object]] = []
        self._is_cancelling = False
        self._is_stepping = False
        self._was_waited_for = self._was_drawn_between = False

    def __repr__(self) -> str:
        if not self.has_ended:
            word = "stopping" if self.task_run.stop.is_stopping else "running"
            detail = self._activity
        elif self._error is not None:
            was_stopped = isinstance(self._error, Interrupted | JobCancelled)
            word = "stopped" if was_stopped else "failed"
            detail = str(self._error)
        else:
            word, detail = "done", ""
        ranks = ranks_text(self.task_run.transcript.ranks)
        parts = [f"Job {word}", ranks, seconds_text(self.seconds), detail]
        return f"<{' · '.join(filter(None, parts))}>"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:  # noqa: FBT001
        self.done()  # draws new output, so that the text agrees with the panel
        printer.text("<Job ...>" if cycle else repr(self))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a job belongs to the notebook; what it returns can be sent: job.result()")

    # --- for users ------------------------------------------------------------------------

    def done(self) -> bool:
        """Show new output of the job's ranks, and return True if the job has ended.

        A job has also ended if it has failed or was interrupted.  Only the main thread shows
        output.
        """

        def version() -> int:  # grows with each output
            return sum(track.version for track in self.task_run.transcript)

        deadline, before = time.monotonic() + LONGEST_LOOK, version()
        self.step()
        # Go on while output comes, because a rank reports its end after its output.  Go on too once
        # all ranks have ended, because the job needs some more steps to end itself.
        while self._can_step and time.monotonic() < deadline:
            now = version()
            if now == before and self.task_run.unfinished:
                break
            before = now
            self.step(JOB_STEP_SECONDS)
        return self.has_ended

    def running(self) -> bool:
        """Return True if the job has not ended; first show new output, as `done` does."""
        return not self.done()

    def __await__(self) -> Generator[Any, None, CellResult[Any]]:
        """Wait as `result` does, while the event loop goes on: `await job`, `asyncio.gather`.

        If Stop, `interrupt` or `cancel` has ended the job, raises asyncio's CancelledError.  If the
        awaiting itself is cancelled, as `asyncio.wait_for` does after its timeout, the job runs on.
        """
        self._was_waited_for = True
        return self._awaited().__await__()

    async def _awaited(self) -> CellResult[Any]:
        self.step()
        while not self.has_ended:
            await asyncio.sleep(AWAITED_EVERY)
            self.step()
        try:
            return self.result()
        except (Interrupted, JobCancelled) as error:
            # A KeyboardInterrupt in a task of asyncio would end the loop, and so the kernel.
            raise asyncio.CancelledError(str(error)) from None
        except StopIteration as error:  # a coroutine cannot raise StopIteration
            raise NbdistError(str(error)) from None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the job has ended, for `timeout` seconds at most.

        Raises the error of a job that has failed, such as WorkerError, WorkerDied, CellTimeout or
        JobLost.  Raises KeyboardInterrupt after `interrupt`, and CancelledError after `cancel`.  If
        the job still runs after `timeout` seconds, raises JobTimeout, which is a TimeoutError.

        If the user presses Stop, the waiting ends with KeyboardInterrupt, and the job runs on.
        """
        if (error := self._wait(timeout)) is not None:
            raise error

    def _wait(self, timeout: float | None) -> BaseException | None:
        """Wait as `wait` does, and return the job's error, None if it has none.

        Raises JobTimeout after `timeout` seconds, and Interrupted if Stop has ended the waiting.
        """
        stops = self._run_until(float("inf") if timeout is None else timeout)
        self._was_waited_for |= self.has_ended
        if not self.has_ended:
            if stops:
                raise Interrupted((), outcome=self.keeps_running_text)
            raise JobTimeout(self.title, timeout or 0.0, self._activity)
        error = raised(self._error) if isinstance(self._error, WorkerError) else self._error
        return None if error is None else error.with_traceback(None)

    def _run_until(self, timeout: float, show: Callable[[], None] = lambda: None) -> int:
        """Wait until the job has ended, for `timeout` seconds at most, or until Stop is pressed.

        On the main thread, runs the job's steps; on another thread, waits while the main thread
        runs them.  `show` is called before each step or check.  Returns how often Stop was pressed.
        """
        deadline = time.monotonic() + timeout
        with Stops() as stops:
            while not (self.has_ended or stops.count) and time.monotonic() < deadline:
                show()
                longest = max(0.0, min(CELL_TICK, deadline - time.monotonic()))
                if is_main_thread():
                    self.step(longest)
                    self.step_others()
                else:  # as in a subshell: only the main thread runs the job
                    self._ended.wait(longest)
        return stops.count

    def result(self, timeout: float | None = None) -> CellResult[Any]:
        """Wait as `wait` does, then return the cell's last value on each rank, by rank.

        `job.result()[0]` is the last value on rank 0.
        """
        self.wait(timeout)
        assert self._result is not None
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `wait` does, then return the job's error, or None if the job has succeeded.

        Raises CancelledError if `cancel` has ended the job.
        """
        if isinstance(error := self._wait(timeout), JobCancelled):
            raise error
        return error

    def add_done_callback(self, function: Callable[[Job], object]) -> None:
        """Call a function with the job once it has ended, or now if it has ended already.

            job.add_done_callback(lambda job: print(job.exception() or job.result()[0]))

        The function is called once: in the cell that waits for the job, or between cells, or while
        another distributed cell runs.  In the last two cases a page shows the function's output
        below the job's cell.  In a notebook the function is called on the main thread.  An
        exception of the function is logged, and changes nothing else.
        """
        self._callbacks.append(function)
        if not self.has_ended:
            return
        if is_main_thread() or self._place.loop is None:
            self._call_back()
        else:
            self._place.loop.call_soon_threadsafe(self._call_back)

    def _call_back(self) -> None:
        while self._callbacks:
            function = self._callbacks.pop(0)
            try:
                function(self)
            except Exception:
                log.exception("exception calling callback for %r", self)

    def cancel(self) -> bool:
        """Interrupt the job as `interrupt` does; return False if the job has ended already.

        Once the ranks have stopped, `cancelled` is True, and `wait`, `result` and `exception` raise
        CancelledError of `concurrent.futures`.  A job that had ended keeps its result.
        """
        if self.done():
            return False
        self._is_cancelling = True
        self.interrupt()
        return True

    def cancelled(self) -> bool:
        """Return True if the job has ended because of `cancel`."""
        return isinstance(self._error, JobCancelled)

    def interrupt(self) -> None:
        """Interrupt the job's ranks, as Stop does in a cell, and return at once.

        Each further call is like a further Stop: ranks that ignore Stop are given less time.
        """
        if not self.has_ended:
            self.task_run.stop.presses += 1
            self.step()

    # --- for the notebook -----------------------------------------------------------------

    @property
    def _activity(self) -> str:
        return waiting_text(self.task_run) or activity_text(self.task_run)

    @property
    def keeps_running_text(self) -> str:
        """A text for the error of an interrupted wait: the job runs on, and how to stop it."""
        again = "Stop again, or " if self._place.is_known else ""
        return f"{self.title} keeps running: {again}`%dist_interrupt` stops it"

    def wait_with_status(self, display: CellDisplay, why: str = "") -> None:
        """Wait until the job has ended, with a line on the display of the cell that waits.

        `why` is a further sentence of the line.  Stop raises Interrupted and ends only the waiting.
        """
        shown = ""

        def show() -> None:
            nonlocal shown
            text = (
                f"Waiting for {self.title} (running for {self.seconds:.0f} s). "
                f"{why}Stop cancels this cell only; that one keeps running."
            )
            if not shown or (display.can_change and shown != text):
                shown = text
                display.show_status(text)

        if self._run_until(float("inf"), show) and not self.has_ended:
            raise Interrupted((), outcome=f"This cell has not run; {self.keeps_running_text}")

    @property
    def seconds(self) -> float:
        """The seconds for which the job has run."""
        return self.task_run.transcript.elapsed(time.monotonic())

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks on which the job was started."""
        return self.task_run.task.ranks

    @property
    def is_stepping(self) -> bool:
        """Whether a step of this job runs now.

        Steps run only on the main thread.  So code on the main thread that finds True here was
        called by the step, and must not wait for the job.
        """
        return self._is_stepping

    @property
    def has_ended(self) -> bool:
        """True if the job has a result or an error."""
        return self._ended.is_set()

    @property
    def _can_step(self) -> bool:
        return not (self.has_ended or self._is_stepping) and is_main_thread()

    def pop_failure_note(self) -> str:
        """Return a line on the failure of the job's cell, once; "" if there is nothing to tell.

        There is nothing to tell if the cell has not failed, or if the user has waited for the job's
        end by `wait`, `result`, `exception` or `await`.
        """
        is_heard, self._was_waited_for = self._was_waited_for, True
        if is_heard or not isinstance(self._error, WorkerError | CellTimeout):
            return ""
        return f"{self.title} has failed: {one_line(str(self._error))}"

    def pop_drawn_between(self) -> bool:
        """Return True if since the last call output may have been drawn below the job's own cell.

        This is so if a step ran with `in_its_cell`, even if the step had nothing new to draw.
        """
        was_drawn, self._was_drawn_between = self._was_drawn_between, False
        return was_drawn

    def step(self, longest: float = 0.0, *, in_its_cell: bool = False) -> None:
        """Receive and show the job's new output, waiting `longest` seconds at most for output.

        If `in_its_cell`, new displays and texts are shown below the cell that sent the job, and
        otherwise below the cell that runs now.  Once the job has ended, also calls the functions of
        `add_done_callback`.  Does nothing on other threads than the main thread.
        """
        if self._can_step:
            self._run_step(longest, in_its_cell=in_its_cell)
        if self.has_ended and self._callbacks and is_main_thread():
            with self._place.show_in_cell(in_its_cell), raise_stops():
                self._call_back()

    def _run_step(self, longest: float, *, in_its_cell: bool) -> None:
        with delay_stops():  # a KeyboardInterrupt could leave `_is_stepping` True for ever
            self._is_stepping = True
            self._was_drawn_between |= in_its_cell
            try:
                with self._place.show_in_cell(in_its_cell):
                    self.task_run = self._steps.send(longest)
            except StopIteration as end:
                self._end(end.value)
            except BaseException as error:
                self._end(error)
                if not isinstance(error, NbdistError | Interrupted):  # a fault of nbdist
                    raise
            finally:
                self._is_stepping = False

    def end_as_lost(self, why: str) -> None:
        """End the job with JobLost if it still runs: its workers have ended, as `why` says."""
        if not self.has_ended:
            self._end(JobLost(self.title, self.seconds, why))
            self._steps.close()
            self._call_back()

    def _end(self, outcome: CellResult[Any] | BaseException) -> None:
        if isinstance(outcome, Interrupted) and self._is_cancelling:
            outcome = JobCancelled(self.title, str(outcome))
        if isinstance(outcome, BaseException):
            self._error = outcome
        else:
            self._result = outcome
        self._ended.set()


class CellPlace:
    """The notebook cell that ran when this object was made; later output can be shown below it.

    `is_known` is False in a terminal, where output can only be added at the end.  `loop` is the
    event loop in which cells run, None in a terminal.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        self._parent = request_of(shell)
        self.is_known = bool(self._parent)
        try:
            self.loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # in a terminal
            self.loop = None

    @contextmanager
    def show_in_cell(self, is_wanted: bool) -> Iterator[None]:  # noqa: FBT001
        """Show output of this context below the remembered cell, if `is_wanted` and `is_known`."""
        if not (is_wanted and self.is_known):
            yield
            return
        before = self._shell.get_parent()
        sys.stdout.flush()  # text of a cell that runs now belongs below that cell
        self._shell.set_parent(self._parent)
        try:
            yield
            sys.stdout.flush()
        finally:
            self._shell.set_parent(before)


# --- all jobs of a pool -------------------------------------------------------------------------

GROUP_IS_BROKEN = "All ranks must be free, so that they can form their process group again."


class PoolJobs:
    """The jobs of a pool: lets them make progress, and lets tasks wait for jobs on their ranks.

    Each `Pool` owns a `PoolJobs`.  The loop that follows another cell calls `step_beside_cell`, the
    event loop calls `step_between_cells`, and `Pools` calls `show_output` at the end of each cell.
    """

    def __init__(
        self,
        late: LateOutput,
        idle: IdleWatch,
        idle_stop: IdleStop,
        make_display: Callable[[], CellDisplay],
        *,
        shell: InteractiveShell,
        find_world: Callable[[], World | None],
    ) -> None:
        """Belong to the pool that has these objects.

        `idle` calls a function of the pool between cells, and `idle_stop` handles Stop there.
        `make_display` returns a display below the notebook cell that runs now.  `find_world`
        returns the pool's present world, or None if the pool has no world.
        """
        self._late = late
        self._idle = idle
        self._idle_stop = idle_stop
        self._make_display = make_display
        self._shell = shell
        self._find_world = find_world
        self._jobs: list[Job] = []  # in the order in which they were sent
        self._is_stepping = False

    def __repr__(self) -> str:
        return f"<PoolJobs {self._jobs}>"

    @property
    def running(self) -> list[Job]:
        """The cells in the background that have not ended; no two of them share a rank."""
        return [job for job in self._jobs if not job.has_ended]

    def begin(self, job: Job) -> None:
        """Let the event loop run steps of this job between cells, from now on.

        Stop between cells then interrupts the job.
        """
        self._jobs.append(job)
        job.step_others = self.step_beside_cell
        self._idle.update()

    def pop_failure_notes(self) -> list[str]:
        """Forget the jobs that have ended; return a line for each failure that no user has seen."""
        ended, self._jobs = [job for job in self._jobs if job.has_ended], self.running
        return [note for job in ended if (note := job.pop_failure_note())]

    # --- waiting for jobs ---------------------------------------------------------------------

    def wait(self, display: CellDisplay, ranks: Collection[int] | None = None) -> None:
        """Wait until no job runs on `ranks`, by default on any rank.

        If the process group must be formed again, waits for all jobs.  Stop ends only the waiting,
        not the jobs.
        """
        while (job := self._job_before(ranks)) is not None:
            is_apart = ranks is not None and {*job.ranks}.isdisjoint(ranks)
            job.wait_with_status(display, f"{GROUP_IS_BROKEN} " if is_apart else "")

    def _job_before(self, ranks: Collection[int] | None) -> Job | None:
        """Return a job that must end before a task on `ranks` can be sent; None if there is none.

        `ranks` is None for all ranks.  If the process group is broken, each job must end first:
        only idle ranks can form the group again.
        """
        if (world := self._find_world()) is not None:
            inbox.receive_waiting(world.engine)
            if world.engine.is_broken:
                ranks = None
        for job in self.running:
            if ranks is None or not {*job.ranks}.isdisjoint(ranks):
                return job
        return None

    def wait_until_free(self, ranks: Collection[int]) -> None:
        """Wait for jobs on these ranks before a task is sent there (`dispatch.submit`)."""
        # The step of a job can send a task.  A wait in that step would never end, because the job
        # makes no progress until the step returns.
        if not self.running or any(job.is_stepping for job in self._jobs):
            return
        display = self._make_display()
        try:
            self.wait(display, ranks)
        finally:
            display.close()

    # --- progress and end ---------------------------------------------------------------------

    def step_beside_cell(self) -> None:
        """Show the new output of all jobs, while another cell runs or waits for a job."""
        if self._is_stepping or not self._jobs:
            return
        self._is_stepping = True
        # Widgets of a job are new displays, which belong below the job's cell.  Programs that run
        # notebooks drop output for other cells than the running one.
        in_its_cell = is_attended(self._shell)
        try:
            for job in self.running:
                job.step(in_its_cell=in_its_cell)
        finally:
            self._is_stepping = False

    def step_between_cells(self) -> None:
        """Run a step of each job between cells, and let Stop interrupt jobs while no cell runs.

        Once no job runs, Stop has no effect between cells again.
        """
        if self.running and self._idle.loop is not None:
            self._idle_stop.update(self._idle.loop)
            for job in self.running:
                job.step(in_its_cell=True)
        if not self.running:
            self._idle_stop.update()

    def show_output(self) -> None:
        """Show the jobs' new output; called at the end of each notebook cell."""
        if is_in_subshell(self._shell):  # on another thread; only the main thread may run jobs
            return
        for job in self._jobs:
            job.step()
            if job.has_ended and job.pop_drawn_between():
                # Redraw the job's panel now, during a cell: nbclient, which runs notebooks as a
                # program, has ignored the updates that came between cells.
                self._late.redraw(job.task_run.transcript)

    def interrupt(self) -> None:
        """Interrupt all jobs, as Stop does between cells."""
        for job in self.running:
            job.task_run.stop.presses += 1
        self.step_between_cells()

    def end_as_lost(self, why: str) -> None:
        """End all jobs with JobLost: their workers have ended, as `why` says."""
        for job in self._jobs:
            job.end_as_lost(why)
        if self._jobs:
            self._idle_stop.update()
