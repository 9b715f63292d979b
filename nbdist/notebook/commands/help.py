"""All magics, a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.notebook.command import Line, command, find_commands
from nbdist.notebook.tables import Shown, table

if TYPE_CHECKING:
    from nbdist.notebook.command import Command

EVERYDAY = ("distributed", "rank", "dist_gather", "dist_status", "dist_restart", "dist_run")
"""What is used every day; it comes first."""


@command(looks=True)
def dist_help(_: Line) -> Shown:
    """List all magics, a line each. A `?` after the name of one shows its options."""
    commands = sorted(find_commands(), key=_place)
    rows = [("magic", "what it does"), *((each.shown_name, summary(each)) for each in commands)]
    return table("`%%distributed?`, `%dist_gather?` and so on show options and examples", rows)


def summary(command: Command) -> str:
    """Give the first sentence of its help."""
    return command.summary.partition(". ")[0].rstrip(".")


def _place(command: Command) -> tuple[int, str]:
    is_rare = command.name not in EVERYDAY
    return (len(EVERYDAY), command.name) if is_rare else (EVERYDAY.index(command.name), "")
