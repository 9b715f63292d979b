"""The magics that start, restart, scale, interrupt, end and attach to workers.

They run in the notebook's process when a user calls them.
"""

from __future__ import annotations

import time

from IPython.core.magic_arguments import argument

from nbdist.config import CONTROL_TIMEOUT, DEFAULT_POOL, OPTIONS
from nbdist.errors import Interrupted, NbdistError, UsageError, WorldBroken
from nbdist.notebook.cells import check_end, follow_steps, outcome_of, run_steps
from nbdist.notebook.command import MagicCall, command
from nbdist.notebook.commands.cells import send, sending_options
from nbdist.notebook.display import CellDisplay
from nbdist.notebook.jobs import CellPlace, CellSteps, Job
from nbdist.notebook.options import (
    JoinRanks,
    immediate_options,
    ranks_option,
    typed_options,
    world_options,
)
from nbdist.notebook.pool import Pool
from nbdist.output.transcript import is_consequence
from nbdist.output.wording import seconds_text
from nbdist.words import count, name_ranks
from nbdist.world import recovery
from nbdist.world.agents import RunningWorld, find_attachable, worlds
from nbdist.world.outcome_texts import healing_text, scaled_text
from nbdist.world.spec import parse_size
from nbdist.world.task_run import TaskRun
from nbdist.world.world import take_over


@command(world_options)
def dist_init(line: MagicCall) -> str:
    """Start workers now, as the first `%%distributed` cell would."""
    world = line.pool.ensure(line.options, line.display)
    world.engine.config = world.engine.config.with_changes(**immediate_options(line.options))
    return line.pool.ready_text


@command(
    argument("size", nargs="?", metavar="N", type=OPTIONS["n"].read, help="number of workers: 4"),
    ranks_option,
    argument("--keep", metavar="NAMES", help="variables to keep: --keep step,history"),
    world_options,
)
def dist_restart(line: MagicCall) -> str:
    """Restart all workers. Worker variables are lost, except those after `--keep`.

    The notebook keeps its variables.  With `-r 2` only that rank is restarted, and the
    other ranks keep their variables.
    """
    options, hint = line.options, line.pool.routine.hint
    keep = [name for each in (options.keep or "").split(",") if (name := each.strip())]
    if not all(map(str.isidentifier, keep)):
        raise UsageError(
            f"`--keep {options.keep}`: names separated by commas, such as `step,history`."
        )
    if options.size is not None and options.n is not None:
        raise UsageError("`%dist_restart`: give the number of workers once.")
    options.n = options.n if options.size is None else options.size
    if options.ranks is not None:
        return " ".join(filter(None, [_replace(line, keep), hint]))
    kept = line.pool.restart(typed_options(options), keep, line.display)
    new = "worker variables cleared" + (f" except {', '.join(kept)}" if kept else "")
    return " · ".join(filter(None, [line.pool.ready_text, new, hint]))


@command(ranks_option)
def dist_interrupt(line: MagicCall) -> str:
    """Interrupt the cells that run on the workers, also those sent with `--no-wait`.

    With `-r 0`, interrupt only the cells that run on rank 0.
    """
    pool, chosen = line.pool, None if line.options.ranks is None else {*line.ranks}
    jobs = [job for job in pool.jobs.running if chosen is None or not chosen.isdisjoint(job.ranks)]
    for job in jobs:
        job.interrupt()
    ends = dict.fromkeys(_end_of(job) for job in jobs)
    others = [
        run
        for run in (pool.world.engine.task_table.runs if pool.world is not None else ())
        if run.unfinished and (chosen is None or not chosen.isdisjoint(run.unfinished))
    ]
    if jobs or pool.world is None or not others:
        where = "the workers" if chosen is None else name_ranks(chosen)
        return "; ".join(ends) or f"no cell is running on {where}"
    running = others[-1]
    recovery.interrupt(pool.world.engine, running)
    run_steps(follow_steps(pool, pool.world, running, pool.display()))
    if running.unfinished or not all(map(is_consequence, running.transcript.errors.values())):
        check_end(pool, pool.world, running, stopped=False)
    return str(Interrupted(running.task.ranks, damage=running.ending.damage))


def _end_of(job: Job) -> str:
    """Wait for an interrupted job, at most `CONTROL_TIMEOUT` seconds; return a text for the user.

    The text says how the job has ended, or that the job still runs.
    """
    try:
        job.wait(CONTROL_TIMEOUT)
    except (NbdistError, Interrupted) as end:
        return str(end)
    return f"{job.title} had ended"


@command()
def dist_shutdown(line: MagicCall) -> str:
    """Shut down all workers, or those of one pool."""
    results = dict.fromkeys(pool.shutdown() for pool in line.pools)
    return "; ".join(filter(None, results)) or "no workers were running"


def _replace(line: MagicCall, keep: list[str]) -> str:
    if typed_options(line.options):
        raise UsageError(
            "`%dist_restart -r`: the options of workers can only be changed for all of them."
        )
    world, ranks = line.busy_world, line.ranks
    engine, machines, hint = world.engine, world.engine.rank_table.machines, line.pool.routine.hint
    line.display.show_status(f"restarting {name_ranks(ranks)}")
    try:
        world.replace(ranks, keep)
    except WorldBroken as error:
        if hint:
            error.add(f"{hint}.")
        raise
    engine.rank_table.mark_reported(ranks)
    others = engine.rank_table.pop_replaced()  # further ranks, which had died and were restarted
    line.pool.failures.note_ends(engine, line.display, machines, others)
    return healing_text(engine, {*ranks, *others})


@command(
    argument("size", nargs="?", metavar="N", help="number of workers: 4; or more or fewer: +2, -1"),
    argument("-n", dest="number", metavar="N", help="the same: -n 4"),
    argument("-r", "--ranks", action=JoinRanks, help="or the ranks to keep: 0,2-3"),
)
def dist_scale(line: MagicCall) -> str:
    """Change the number of workers; the remaining ones keep their variables.

    With a number, the first ranks remain and keep their numbers.  With `-r 0,2-3` only these
    ranks remain, and become ranks 0, 1 and 2.  DDP models continue with the new number of ranks;
    recreate FSDP2 models, meshes and subgroups.  New ranks run the `--setup` cells.
    """
    world, size, ranks = line.world, line.options.size, line.options.ranks
    if size is not None and line.options.number is not None:
        raise UsageError("`%dist_scale`: give the number of workers once.")
    size = line.options.number if size is None else size
    before = world.size
    if size is not None and ranks is not None:
        raise UsageError("`%dist_scale`: give a number of workers or `-r`, not both.")
    keep = None if ranks is None else line.ranks
    if size is not None or keep:
        after = len(keep) if keep else parse_size(size, before)
        line.display.show_status(f"scaling from {before} to {count(after, 'worker')} …")
    machines = world.engine.rank_table.machines
    try:
        world.scale(size, ranks=keep)
    finally:
        line.pool.failures.note_deaths(world.engine, line.display, machines)
    if world.size == before:
        return f"already {count(before, 'worker')}"
    if warning := world.engine.start_notes.warning:
        line.display.add_note(warning)
    line.pool.healer.shown_size = world.size
    return scaled_text(world.engine)


@command(
    argument("name", nargs="?", metavar="NAME", help="the world's --name, pool or agent process;"
             " by default the only world without a notebook"),
    *sending_options,
)  # fmt: skip
def dist_attach(line: MagicCall) -> str | None:
    """Connect to workers that were started with `--detach` and whose notebook has ended.

    Shows the output that their cells have printed meanwhile.  The newest cell is followed while
    it runs; older cells run on as with `--no-wait`.  Variables are as before.
    """
    pool, options = line.options.pool, line.options
    candidates = [each for each in worlds() if pool in (None, each.info.pool)]
    chosen = find_attachable(candidates, options.name)
    line.pool = line.pool_of(chosen.info.pool)
    if line.pool.has_workers:
        pool_option = "" if chosen.info.pool == DEFAULT_POOL else f" --pool {chosen.info.pool}"
        raise UsageError(
            f"`%dist_attach`: this notebook already has workers in the place of those of "
            f"{chosen.name}."
            f" `%dist_shutdown{pool_option}` ends them."
        )
    world = take_over(chosen, line.pool.shell.user_ns)
    line.pool.attach(world)
    if not world.engine.task_table.runs:
        return f"{_title(chosen)} · no cell has run meanwhile"
    *others, running = world.engine.task_table.runs
    line.display.add_note(f"{_title(chosen)} · {running.task.title}")
    for each in others:
        each.stop.make_job()  # `%dist_attach` waits only for the newest task, not for this one
        display = line.pool.display()
        display.add_note(each.task.title)
        steps = _steps(line.pool, each, display)
        job = Job(steps, next(steps), "", CellPlace(line.pool.shell))
        line.pool.jobs.begin(job)
    send(line, _steps(line.pool, running, line.display))
    return None


def _title(world: RunningWorld) -> str:
    if not world.info.since or not world.is_detached:
        return f"attached to {world.info.name}"
    ago = seconds_text(max(0.0, time.time() - world.info.since))
    return f"attached to {world.info.name}, {ago} without a notebook"


def _steps(pool: Pool, running: TaskRun, display: CellDisplay) -> CellSteps:
    assert pool.world is not None
    world, pool.last = pool.world, running
    yield from follow_steps(pool, world, running, display)
    try:
        return outcome_of(pool, world, running, display)
    finally:
        world.engine.connection.release_values(running)
