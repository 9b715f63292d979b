"""When a cell that has failed is run again: torchrun's `--max-restarts`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import RanksFreed, UsageError, WorkerError, one_line, word_exit
from nbdist.wire.outputs import NAME_PROBLEM, SCRIPT_FAILED, Died, Failure

if TYPE_CHECKING:
    from nbdist.world.running import RunningCell
    from nbdist.world.world import World

LASTING = (NAME_PROBLEM, "KeyboardInterrupt", "SyntaxError", "IndentationError", "TabError")
"""Failures that another attempt would meet again, or that somebody wanted."""


def parse_most(text: str | None) -> int:
    """The number after `--max-restarts`, 0 where there is none; UsageError for what is none."""
    try:
        return check_most(int(text or "0"))
    except ValueError:
        raise UsageError(_wrong(text)) from None


def check_most(most: int) -> int:
    """UsageError where it cannot be."""
    if most < 0:
        raise UsageError(_wrong(most))
    return most


def restart_text(world: World, running: RunningCell) -> str | None:
    """`rank 2 was killed by SIGKILL: restart 1 of 3`; None where there is no further attempt.

    Asked once the cell has ended and the world is healed.
    """
    done, most = running.cell.restarts
    cause = running.transcript.root_cause()
    error = running.error()
    if done >= most or cause is None or not world.state.takes_cells:
        return None
    if not isinstance(error, WorkerError) or isinstance(error, RanksFreed):
        return None
    rank, first = cause
    if isinstance(first, Failure) and first.name in LASTING:
        return None
    return f"rank {rank} {_did(first)}: restart {done + 1} of {most}"


def _did(error: Failure | Died) -> str:
    """`was killed by SIGKILL`, `raised ValueError: bad shard`, `failed: x.py exited with ...`."""
    if isinstance(error, Died):
        return word_exit(error.exit_code)
    said = one_line(error.message)
    if error.name == SCRIPT_FAILED:
        return f"failed: {said}"
    return f"raised {error.name}: {said}" if said else f"raised {error.name}"


def _wrong(given: object) -> str:
    return f"`--max-restarts {given}`: a number of attempts after the first, such as 3, or 0."
