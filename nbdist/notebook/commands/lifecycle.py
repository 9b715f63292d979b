"""Starting, interrupting and ending workers."""

from __future__ import annotations

from IPython.core.magic_arguments import argument

from nbdist.config import CONTROL_TIMEOUT, OPTIONS
from nbdist.errors import Interrupted, NbdistError, UsageError
from nbdist.notebook.cells import check_end, follow
from nbdist.notebook.command import Line, command
from nbdist.notebook.job import Job
from nbdist.notebook.options import at_once, given, ranks_option, world_options
from nbdist.output.transcript import follows
from nbdist.words import name_ranks
from nbdist.world.recovery import healing_text


@command(world_options)
def dist_init(line: Line) -> str:
    """Start workers now, as the first `%%distributed` cell would."""
    world = line.pool.ensure(line.options, line.display)
    world.session.config = world.session.config.but(**at_once(line.options))
    return line.pool.ready_text


@command(
    argument("size", nargs="?", metavar="N", type=OPTIONS["n"].read, help="number of workers: 4"),
    ranks_option,
    argument("--keep", metavar="NAMES", help="variables to keep: --keep step,history"),
    world_options,
)
def dist_restart(line: Line) -> str:
    """Restart all workers. Always works; worker variables are lost.

    The notebook keeps its variables.  With `-r 2` only that rank is restarted, and the
    other ranks keep their variables.
    """
    options, keep, hint = line.options, _names(line.options.keep), line.pool.routine.hint
    if options.size is not None and options.n is not None:
        raise UsageError("`%dist_restart`: give the number of workers once.")
    options.n = options.n if options.size is None else options.size
    if options.ranks is not None:
        return " ".join(filter(None, [_replace(line, keep), hint]))
    line.pool.restart(options, keep, line.display)
    new = "worker variables cleared" + (f" except {', '.join(keep)}" if keep else "")
    return " · ".join(filter(None, [line.pool.ready_text, new, hint]))


@command()
def dist_interrupt(line: Line) -> str:
    """Stop what the workers run, as the Stop button does, also a `--no-wait` cell."""
    pool = line.pool
    if (job := pool.background.job) is not None:
        return _interrupt_job(job)
    running = pool.world.session.running if pool.world is not None else None
    if pool.world is None or running is None or not running.unfinished:
        return "no cell is running on the workers"
    pool.world.interrupt()
    follow(pool, pool.world, running, pool.display())
    if running.unfinished or not all(map(follows, running.transcript.errors.values())):
        check_end(pool, pool.world, running, stopped=False)
    return str(Interrupted(running.task.ranks))


def _interrupt_job(job: Job) -> str:
    """Stop a cell that nobody waits for; as long as a Stop lasts, wait for it."""
    job.interrupt()
    try:
        job.wait(CONTROL_TIMEOUT)
    except (NbdistError, Interrupted) as end:
        return str(end)
    return f"{job.title} had ended"


@command()
def dist_shutdown(line: Line) -> str:
    """Shut down all workers, or those of one pool."""
    said = dict.fromkeys(pool.shutdown() for pool in line.pools)
    return "; ".join(filter(None, said)) or "no workers were running"


def _replace(line: Line, keep: list[str]) -> str:
    """Start some ranks anew in their places."""
    if given(line.options):
        raise UsageError(
            "`%dist_restart -r`: the options of workers can only be changed for all of them."
        )
    world, ranks = line.busy_world, line.ranks
    line.display.wait_for(f"restarting {name_ranks(ranks)}")
    world.replace(ranks, keep)
    world.session.take_replaced()
    return healing_text(world.session, ranks)


def _names(text: str | None) -> list[str]:
    """Split `a,b`; UsageError for what is no name."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"`--keep {text}`: names separated by commas, such as `step,history`.")
    return names
