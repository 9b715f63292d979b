"""All magics, a line each, in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.notebook.command import Line, command, find_commands
from nbdist.notebook.tables import Shown, below, table

if TYPE_CHECKING:
    from nbdist.notebook.command import Command

GROUPS = {
    "everyday": (
        *("distributed", "dist_gather", "dist_status", "dist_output", "dist_run"),
        *("dist_restart", "dist_help"),
    ),
    "values": (
        *("dist_push", "dist_scatter", "dist_sync", "dist_diff", "dist_snapshot"),
        *("dist_restore", "dist_export"),
    ),
    "looking": ("dist_memory", "dist_timeline", "dist_debug"),
    "lifecycle": (
        *("dist_init", "dist_scale", "dist_interrupt", "dist_shutdown", "dist_auto"),
        *("rank", "local"),
    ),
    "many machines": ("dist_attach",),
}
"""Magics by what they are for: here, in the README and in the package's docstring."""

MACHINES = (
    ("%dist_init --hosts a,b", "Start workers on machines reached by ssh"),
    ("%dist_init --launcher join", "Wait for machines that run `nbdist join` or `nbdist k8s`"),
)
"""Ways to begin there, which are no magics of their own."""


@command(
    argument("--all", action="store_true", dest="everything", help="short forms too"),
    looks=True,
)
def dist_help(line: Line) -> Shown:
    """List all magics, a line each. A `?` after the name of one shows its options."""
    commands = {each.name: each for each in find_commands()}
    parts = [table("`%%distributed?`, `%dist_gather?` and so on show options and examples", [])]
    for title, names in GROUPS.items():
        rows = [(commands[name].shown_name, summary(commands[name])) for name in names]
        rows += MACHINES if title == "many machines" else ()
        parts.append(table(title, [("magic", "what it does"), *rows]))
    if line.options.everything:
        short = [each for each in commands.values() if each.short_for]
        rows = [(each.shown_name, each.short_for.strip("`")) for each in short]
        parts.append(table("short forms", [("magic", "what it is"), *rows]))
    return below(parts)


def summary(command: Command) -> str:
    """Give the first sentence of its help."""
    return command.summary.partition(". ")[0].rstrip(".")
