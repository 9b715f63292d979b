"""Runs a cell on a pool's workers: checks, sends and follows the cell, and may run it again.

Called by commands, on IPython's main thread.  A generator does the work: `run_steps` runs the
generator to its end, and a `Job` runs it step by step.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from nbdist.config import Patience
from nbdist.errors import CellTimeout, Interrupted, NbdistError, WorkerDied
from nbdist.notebook.cell_text import (
    as_magic,
    cell_file,
    cell_id,
    check_commands,
    check_source,
    execution_count,
    in_notebook_lines,
    names_training,
    page_of,
    request_of,
)
from nbdist.notebook.display import CellDisplay, progress
from nbdist.notebook.idle import raise_stops, redirect_stops
from nbdist.notebook.jobs import CellSteps
from nbdist.notebook.options import immediate_options
from nbdist.notebook.outcome import last_values
from nbdist.notebook.pool import Pool
from nbdist.notebook.shipment import Shipment
from nbdist.notebook.shipping import Plan, plan
from nbdist.output.transcript import Transcript
from nbdist.topology import parse_ranks
from nbdist.wire.work import CellCode, OpCall, Task, Work
from nbdist.words import in_pool, name_ranks, size_text
from nbdist.world import dispatch
from nbdist.world.name_table import WORKERS_MODULES, WORKERS_OWN, NameTable
from nbdist.world.outcome_texts import late_stop_text, stop_text, undefined_name
from nbdist.world.remote_call import ask
from nbdist.world.result import CellResult, usage_text
from nbdist.world.sent_objects import Parcel
from nbdist.world.task_error import error_of
from nbdist.world.task_run import RankOutputs, TaskRun
from nbdist.world.value_transfer import bind_steps
from nbdist.world.wait_texts import waiting_text
from nbdist.world.world import World

R = TypeVar("R")

LONG_CELL = 2.0  # seconds; users hardly ever reload the page during a shorter cell

Pack = Callable[[NameTable], Plan]
"""A function that gets a world's table of names, and plans what to send to the ranks.

It is called before each attempt of a cell: ranks may lack more variables after a failed attempt.
"""


def source_steps(
    pool: Pool,
    first_line: str,
    cell: str,
    display: CellDisplay,
    options: argparse.Namespace,
) -> CellSteps:
    """Run a cell on workers and show its output; if there are no workers, start them first.

    `first_line` is the line of the cell's magic, "" in auto mode.  `options` are the magic's
    options.  This is a generator, so that a cell can run step by step (`CellSteps`): it yields
    after each step, and returns the cell's result or error.  If the cell cannot be sent, the
    generator raises an error.
    """
    cell = as_magic(pool.shell, cell, pool.world if pool.has_workers else None)
    python = check_source(pool.shell, first_line, cell)
    source = in_notebook_lines(first_line, cell)
    code = CellCode(source, cell_file(pool.shell))
    task, world = prepare(pool, code, display, options)
    check_commands(python, world.engine.names, task.ranks, pool.shell.user_ns)
    setup = (cell_id(pool.shell) or source) if options.setup else ""
    pack = partial(
        plan,
        python,
        ranks=task.ranks,
        hidden=pool.shell.user_ns_hidden,
        gathered=pool.gathered,
        is_setup=options.setup,
    )
    return (yield from attempt_steps(pool, world, task, pack, display, options, setup))


def prepare(
    pool: Pool,
    work: Work,
    display: CellDisplay,
    options: argparse.Namespace,
) -> tuple[Task, World]:
    """Return a task for `work`, and the pool's world; start the world if there are no workers.

    A page misses output if it was opened or reloaded while the last distributed cell ran.  Then a
    note tells the user how to see that output, if the cell took at least `LONG_CELL` seconds.
    """
    for_training = isinstance(work, CellCode) and names_training(work.text)
    world = pool.ensure(options, display, for_training=for_training)
    last, page, pool.request = pool.last, page_of(pool.request), request_of(pool.shell)
    now = page_of(pool.request)
    is_long = last is not None and last.transcript.elapsed() >= LONG_CELL
    if last is not None and is_long and page not in ("", now) and pool.pages.has_missed(now, last):
        number = last.task.execution_count
        cell = f"cell [{number}]" if number else "the last cell"
        page_text = "this page was opened or reloaded"
        display.add_note(f"{page_text} before {cell} had ended: `%dist_output -2` shows its output")
    on = parse_ranks("all" if options.ranks is None else options.ranks, world.size)
    # With `--detach`, another notebook may attach and ask for the cell's last value.
    keeps = options.out is not None or world.engine.config.detach
    count, key = execution_count(pool.shell), cell_id(pool.shell)
    return world.engine.task(work, ranks=on, execution_count=count, key=key, keeps=keeps), world


def run_steps(
    steps: Generator[Any, Any, R | BaseException], take: Callable[[Any], object] = lambda _: None
) -> R:
    """Run a generator to its end, and return what it returns; if that is an exception, raise it.

    Calls `take` with each value that the generator yields.
    """
    while True:
        try:
            take(next(steps))
        except StopIteration as end:
            outcome: R | BaseException = end.value
            break
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


# --- sending, and running again ---------------------------------------------------------


def attempt_steps(
    pool: Pool,
    world: World,
    task: Task,
    pack: Pack,
    display: CellDisplay,
    options: argparse.Namespace,
    setup: str = "",
) -> CellSteps:
    """Run a cell and show its output; with `--max-restarts`, repeat a cell that has failed.

    This generator yields after each step (`CellSteps`), and returns the cell's result, or the error
    of the last attempt.  It does not raise that error: a rank may have raised StopIteration, which
    a generator cannot raise.  `pack` plans which variables are sent with the cell.  `setup` is the
    id or the text of a cell that new workers will run too, and "" for other cells.

    Each attempt gets the notebook's variables, as the first attempt did, even if a failed attempt
    has bound their names on the ranks.  Restarted ranks are sent the variables that they lack.
    """
    patience = world.engine.config.with_changes(**immediate_options(options)).patience
    patience = replace(patience, timeout=options.timeout)
    if options.no_wait:
        patience = replace(patience, control_timeout=None)
    names = world.engine.names
    names = names.copy() if options.max_restarts else names
    for attempt in dispatch.attempts(task, options.max_restarts):
        pids = world.pids  # the pids of all ranks before the attempt
        shipment = make_shipment(pool, world, names, pack)
        running = yield from _attempt(pool, world, attempt, shipment, display, patience, setup)
        if not running.ending.restart_text:
            break
        pool.failures.record_cell(world.engine, running)
        display = pool.display(is_quiet=options.quiet)
        display.add_note(running.ending.restart_text)
        new = [rank for rank, pid in world.pids.items() if pid != pids.get(rank)]
        names.copy_entries(new, world.engine.names)
        world.engine.rank_table.mark_reported(running.ending.recovered_ranks)
    return outcome_of(pool, world, running, display)


def outcome_of(
    pool: Pool, world: World, running: TaskRun, display: CellDisplay
) -> CellResult[Any] | BaseException:
    """Return the result or the error of a cell that has ended.

    The error of a job is also shown below the job's output, since the cell that sent the job does
    not raise the error.
    """
    try:
        check_end(pool, world, running)
    except (NbdistError, Interrupted) as error:
        if running.stop.is_of_job:
            display.add_note(str(error), at_once=False)
            display.redraw_ended(running.transcript, world.engine.rank_table.log_files)
        return error
    return result_of(pool, world, running)


def make_shipment(pool: Pool, world: World, names: NameTable, pack: Pack) -> Shipment:
    """Return the variables and changes to send with a cell, as a shipment.

    `pack` makes the plan, and the table `names` tells it which variables each rank has.  If the
    plan has a question, this function first asks the ranks which objects they have changed.  Ranks
    that run a job are not asked, because they could answer only after the job.
    """
    send_plan = pack(names)
    if (question := send_plan.question) is not None:
        on_jobs = {rank for job in pool.jobs.running for rank in job.task_run.unfinished}
        answers: Mapping[int, Any] = {}
        if ranks := [rank for rank in question.ranks if rank not in on_jobs]:
            task = world.task(OpCall("values.inspect", question.arguments), ranks=ranks)
            answers = fetch_results(pool, world, task)
        send_plan.answer(answers, on_jobs.intersection(question.ranks))
    return send_plan.shipment()


def _attempt(
    pool: Pool,
    world: World,
    task: Task,
    shipment: Shipment,
    display: CellDisplay,
    patience: Patience,
    setup: str,
) -> Generator[TaskRun, float | None, TaskRun]:
    packed = shipment.packed(display)
    task = replace(task, names=packed.payloads)
    try:
        # There is no link if the agent was lost.  Then `submit` below raises an error.
        debugger, link = pool.debugger, world.engine.connection.link_or_none
        if debugger and link and (note := debugger.prepare(link, task.ranks)):
            display.add_note(note)
        # Redirect Stop before the task is sent, since ranks may begin the task before
        # `follow_steps` redirects Stop.
        with redirect_stops(partial(world.engine.count_stop, task)):
            machines = world.engine.rank_table.machines
            running = dispatch.submit(world.engine, task, patience, shipment.parcels)
            # A job that runs again may not be the newest cell: the user can have run others since.
            if not (running.stop.is_of_job and task.attempt.number):
                pool.last = running
            pool.failures.note_deaths(world.engine, display, machines)
            history = pool.shell.history_manager
            cells = history.input_hist_raw if history is not None else []
            if note := world.engine.surroundings.pop_note(cells):
                display.add_note(note)
            yield from follow_steps(pool, world, running, display)
        if setup and not error_of(running):
            kept = packed.pop_setup()
            parcel = shipment.setup.parcel if shipment.setup else None
            world.engine.keep_setup(setup, task, kept[1], kept[0], parcel)
    finally:
        packed.close()
    return running


# --- following --------------------------------------------------------------------------


def follow_steps(
    pool: Pool, world: World, running: TaskRun, display: CellDisplay | None
) -> Generator[TaskRun, float | None, None]:
    """Follow a task step by step, until all its ranks have finished or Stop has ended the waiting.

    This generator yields `running` after each step.  The caller sends it the number of seconds for
    which the next step may wait for output, or None for the usual time.  For a job, a number above
    0 also means that a cell waits for the job now.

    The first Stop interrupts the ranks.  The waiting ends if the user presses Stop again, or if
    ranks have not reacted in time.  For a job, each Stop only interrupts the ranks.

    The task's output is shown in `display`, if there is one.  If a rank reads input, an input box
    opens below the output, but only while a cell waits for the task.
    """
    is_here = True  # whether a cell has waited for the task all the time
    with redirect_stops(partial(world.engine.count_stop, running.task)):
        following, longest = world.follow(running, answers=True), None
        try:
            while True:
                try:
                    outputs = following.send(longest)
                except StopIteration:
                    break
                is_attended = bool(longest) or not running.stop.is_of_job
                is_here = is_here and is_attended
                with running.stop.counting_presses():
                    if display:
                        # The page must have a widget's model before a display shows the widget.
                        pool.late.show_widgets()
                        _redraw(running, outputs, display, is_attended=is_attended)
                        pool.late.show(at_once=False, running=display)
                    rank = running.prompts.next(time.monotonic(), running.unfinished)
                    if is_attended and rank is not None:
                        with raise_stops():
                            if display:
                                asks = running.prompts.text
                                display.show_all(running.transcript, asks, rank)
                            ask(world.engine, running, rank)
                            if display and is_here:
                                display.continue_below_input()
                longest = yield running
        except GeneratorExit:  # `Job.end_as_lost`: the workers have ended
            if display:
                running.transcript.abort(time.monotonic())
                display.add_note("the workers ended before the cell had finished", at_once=False)
                display.end(running.transcript, world.engine.rank_table.log_files)
            raise
        if display:
            pool.late.show_widgets()
            for text in notes_on(running.transcript, world.engine.names):
                display.add_note(text, at_once=False)
            display.end(running.transcript, world.engine.rank_table.log_files)
            pool.end_cell(running, display)


def _redraw(
    running: TaskRun, outputs: RankOutputs, display: CellDisplay, *, is_attended: bool
) -> None:
    waits, asks = waiting_text(running), running.prompts.text
    done, total = running.reports.bytes_moved
    # Show the progress of packing only in a panel: a terminal would print a line per change.
    if not waits and display.can_change and done < total and not display.is_quiet:
        waits = f"big values are being packed: {size_text(done)} of {size_text(total)}"
    if asks and not is_attended:
        waits = f"{asks} · you will be asked when a cell waits for this one"
    display.show(running.transcript, outputs, waits, usage_text(running.reports.usage.values()))
    if not is_attended:
        display.pause()


def check_end(pool: Pool, world: World, running: TaskRun, *, stopped: bool | None = None) -> None:
    """Raise the error of a cell that failed or was stopped; return if the cell succeeded.

    The error also says what was done about dead ranks.  If ranks failed or the agent was lost, that
    is recorded for `%dist_why`.  `stopped` says whether the user has pressed Stop, by default as
    `running.stop` has recorded it.
    """
    if running.unfinished and world.engine.outlives_kernel():
        find = f"`%dist_attach {world.engine.rank_table.spec.name}` in the next one finds them"
        raise Interrupted((), outcome=f"the kernel ends, and the workers keep running: {find}")
    if cause := running.transcript.root_cause():
        pool.failures.record_first_error(*cause)
    killed = running.transcript.killed_by_stop
    stopped = running.stop.was_pressed if stopped is None else stopped
    if stopped and not running.unfinished and (killed or not running.transcript.deaths):
        world.engine.rank_table.mark_reported(killed)
        recovery = stop_text(world.engine, killed) if killed else late_stop_text(running)
        raise Interrupted(running.task.ranks, recovery, running.ending.damage)
    ending = running.ending
    lacking = ending.lacking_text
    if not lacking and cause and (name := undefined_name(cause[1])):
        lacking = _not_sent_text(pool, name)
    recovery = in_pool(ending.recovery_text, pool.own_name)
    lacking = in_pool(lacking, pool.own_name)
    running.ending = replace(ending, recovery_text=recovery, lacking_text=lacking)
    if error := error_of(running):
        world.engine.rank_table.mark_reported(running.ending.recovered_ranks)
        pool.failures.record_cell(world.engine, running)
        if isinstance(error, CellTimeout) and killed:
            error.add(stop_text(world.engine, killed))
        if pool.routine.hint and isinstance(error, WorkerDied):
            error.add(f"{pool.routine.hint}.")
        raise error


def _not_sent_text(pool: Pool, name: str) -> str:
    """Return why the cell did not get a variable of the notebook, and a magic that sends it.

    Returns "" if the notebook has no such variable to send.
    """
    if name in WORKERS_OWN or name in WORKERS_MODULES:
        return ""  # `%dist_push` refuses these names, because each worker has its own
    if name in pool.gathered:
        why = f"`{name}` was gathered from the ranks, so it is not sent by itself"
    elif name in pool.shell.user_ns:
        why = f"The notebook has `{name}`, which the cell does not name"
    else:
        return ""
    return f"{why}; `%dist_push {name}` sends it."


def fetch_results(
    pool: Pool, world: World, task: Task, display: CellDisplay | None = None, what: str = ""
) -> dict[int, Any]:
    """Run a task without showing its output, and return its results by rank.

    First waits for jobs on the task's ranks.  With a display, shows the progress of the transfer
    after the text `what`.  Raises the error of a task that fails or is stopped.
    """
    show = progress(display, what) if display else None
    with redirect_stops(partial(world.engine.count_stop, task)):
        machines = world.engine.rank_table.machines
        running = world.submit(task)
        pool.failures.note_deaths(world.engine, display or pool.display(), machines)
        for _ in follow_steps(pool, world, running, None):
            with running.stop.counting_presses():
                if show and running.reports.moved:
                    show(*running.reports.bytes_moved)
    check_end(pool, world, running)
    results = {**running.result().by_rank}
    world.engine.connection.release_values(running)
    return results


def bind(
    pool: Pool,
    world: World,
    task: Task,
    work: Work,
    display: CellDisplay | None = None,
    shipped: Mapping[int, Parcel] | None = None,
) -> TaskRun:
    """Run `task`, which brings values to ranks; if it succeeds, run `work`, which binds the values.

    So ranks bind the values only after all of them have received theirs.  Returns the run of
    `work`, or raises the error of the run that failed.  `display` shows the output of `task`.  If
    the values come from the notebook, `shipped` lists by rank the names and objects to be bound.
    """
    machines = world.engine.rank_table.machines
    for running in bind_steps(world.engine, task, work, shipped):
        pool.failures.note_deaths(world.engine, display or pool.display(), machines)
        if display:
            pool.last = running
        run_steps(follow_steps(pool, world, running, display))
        display = None
    check_end(pool, world, running)
    return running


def result_of(pool: Pool, world: World, running: TaskRun) -> CellResult[Any]:
    """Return a cell's result, with the last values of the ranks that succeeded.

    The notebook fetches a big value from its rank when the user first reads the value.
    """
    values = last_values(world.engine, running, partial(fetch_results, pool, world))
    return replace(running.result(), by_rank=values)


def notes_on(transcript: Transcript, table: NameTable) -> Iterator[str]:
    """Yield notes on a cell that has ended.

    A note warns of each file that was edited after ranks had imported it.  Another note says that
    the cell has given a new value to a name that nbdist itself sets, such as `rank`.  The latter
    note is shown only once for each name.
    """
    changed: dict[str, list[int]] = defaultdict(list)
    covered: dict[str, list[int]] = defaultdict(list)
    for track in transcript:
        if track.done is not None:
            for file in track.done.changed:
                changed[file].append(track.rank)
            for name in track.done.covered:
                covered[name].append(track.rank)
    for file, ranks in changed.items():
        yield (
            f"{file} changed after {name_ranks(ranks)} imported it: "
            "run `%distributed %autoreload 2` once, or `%dist_restart`"
        )
    for name in sorted(covered.keys() & (WORKERS_OWN | WORKERS_MODULES.keys())):
        if table.is_first_notice(f"{name} on the ranks"):
            was, who = WORKERS_MODULES.get(name, "each worker's own"), name_ranks(covered[name])
            yield f"`{name}` was {was}; this cell gave it another value on {who}"
