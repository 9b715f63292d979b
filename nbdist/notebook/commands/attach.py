"""Taking over a world whose notebook has gone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.config import DEFAULT_POOL
from nbdist.errors import Interrupted, NbdistError, UsageError
from nbdist.notebook.cells import check_end, follow_steps, result_of
from nbdist.notebook.command import Line, command
from nbdist.notebook.sending import send, sending_options
from nbdist.output.wording import seconds_text
from nbdist.world.attaching import take_over
from nbdist.world.registry import to_attach, worlds

if TYPE_CHECKING:
    from nbdist.notebook.job import Steps
    from nbdist.world.registry import Found


@command(
    argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="the world's --name, pool or agent process; by default the only world without a "
        "notebook"
        "",
    ),
    sending_options,
)
def dist_attach(line: Line) -> str | None:
    """Connect to workers that were started with `--detach` and whose notebook has ended.

    Shows what their cell has printed meanwhile and follows it while it runs; variables and
    everything else are as before.
    """
    pool, options = line.options.pool, line.options
    known = [each for each in worlds() if pool in (None, each.held.pool)]
    found = to_attach(known, options.name)
    line.pool = line.pool_of(found.held.pool)
    if line.pool.has_workers:
        said = "" if found.held.pool == DEFAULT_POOL else f" --pool {found.held.pool}"
        raise UsageError(
            f"`%dist_attach`: this notebook already has workers in the place of those of "
            f"{found.name}."
            f" `%dist_shutdown{said}` ends them."
        )
    world = take_over(found, line.pool.shell.user_ns)
    line.pool.attach(world)
    running = world.session.running
    if running is None:
        return f"{_title(found)} · no cell has run meanwhile"
    line.display.note(f"{_title(found)} · {running.task.title}")
    send(line, _steps(line))
    return None


def _title(found: Found) -> str:
    if not found.held.since or not found.is_detached:
        return f"attached to {found.held.name}"
    ago = seconds_text(max(0.0, time.time() - found.held.since))
    return f"attached to {found.held.name}, {ago} without a notebook"


def _steps(line: Line) -> Steps:
    """Follow what runs, as the cell that has sent it would."""
    pool = line.pool
    assert pool.world is not None
    running = pool.world.session.running
    assert running is not None
    world, pool.last = pool.world, running
    yield from follow_steps(pool, world, running, line.display)
    try:
        check_end(pool, world, running)
    except (NbdistError, Interrupted) as error:
        return error
    finally:
        world.session.let_go(running)
    return result_of(pool, world, running)
