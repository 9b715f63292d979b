"""The stacks of all ranks, equal ones once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from nbdist.notebook.command import Line, command
from nbdist.notebook.options import ranks_option
from nbdist.notebook.tables import Shown
from nbdist.output.fingerprint import normal
from nbdist.output.markup import (
    AMBER,
    BLUE,
    GREEN,
    LINES,
    RED,
    barred,
    bold,
    details,
    dim,
    line,
    panel,
)
from nbdist.topology import parse_ranks
from nbdist.wire.messages import GetStacks
from nbdist.wire.places import Stack
from nbdist.words import name_ranks
from nbdist.world.hangs import doing_of

if TYPE_CHECKING:
    from nbdist.notebook.pool import Pool

OPEN_LINES = 60

Who = Callable[[Iterable[int]], str]
"""Names ranks, and their machines where there are several."""


@command(ranks_option, looks=True, short_for="`%dist_status --stack`")
def dist_stack(line: Line) -> Shown:
    """Show the Python stack of each rank, equal stacks once.

    It works while they compute, wait in a collective or hold the GIL in C code.
    """
    return stacks_of(line, line.pool)


def stacks_of(line: Line, pool: Pool) -> Shown:
    """Draw the stacks of a pool's ranks, of those that `-r` names."""
    if pool.world is None:
        return Shown(stacks_html(pool.headline, ()), stacks_text(pool.headline, ()))
    ranks = parse_ranks(line.options.ranks or "all", pool.world.size)
    stacks = line.look(pool, GetStacks(ranks))
    # Read after the stacks: asking for them is how a lost agent is noticed.
    head, who = pool.headline, pool.world.session.machines.who
    return Shown(stacks_html(head, stacks, who), stacks_text(head, stacks, who))


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose stacks are equal but for addresses; `stack` is the first one's."""

    ranks: tuple[int, ...]
    stack: Stack

    @property
    def title(self) -> str:
        """`wait in all_reduce, line 7`."""
        stack = self.stack
        if stack.state == "busy" or stack.place.is_stopped or stack.place.holds_gil:
            code = stack.frames[0].code if stack.frames and stack.frames[0].is_cell else ""
            return doing_of(self.ranks, stack.place, code)
        return stack.state

    @property
    def lines(self) -> list[str]:
        """The calls as Python's tracebacks show them, the innermost last."""
        stack = self.stack
        lines = [line for frame in stack.frames for line in frame.lines]
        if stack.place.is_stopped:
            lines.append(f"  `kill -CONT {stack.pid}` resumes it")
        return [*lines, *([f"  {stack.problem}"] if stack.problem else [])]


def grouped(stacks: Iterable[Stack]) -> list[StackGroup]:
    """Put equal stacks together, in the order of their first ranks."""
    found: dict[str, list[Stack]] = {}
    for stack in sorted(stacks, key=lambda stack: stack.rank):
        one = StackGroup((stack.rank,), stack)
        text = "\n".join([one.title, *one.lines]).replace(str(stack.pid), "<pid>")
        found.setdefault(normal(text), []).append(stack)
    return [StackGroup(tuple(stack.rank for stack in same), same[0]) for same in found.values()]


def stacks_text(head: str, stacks: Iterable[Stack], who: Who = name_ranks) -> str:
    """Write a header for each group, and its calls."""
    parts = [head]
    for group in grouped(stacks):
        parts.append(f"── {_who(group, who)} · {group.title} ──")
        parts.extend(group.lines)
    return "\n".join(parts)


def stacks_html(head: str, stacks: Iterable[Stack], who: Who = name_ranks) -> str:
    """Draw each group behind its header, open as long as that is not too much."""
    parts, shown = [line(bold(head))], 0
    for index, group in enumerate(grouped(stacks)):
        shown += len(group.lines)
        parts.append(_block(group, _who(group, who), is_open=index == 0 or shown <= OPEN_LINES))
    return panel(*parts)


def _block(group: StackGroup, whose: str, *, is_open: bool) -> str:
    title = f"{bold(whose)} {dim(group.title)}"
    if not group.lines:
        return barred(title, _colour(group.stack))
    body = escape("\n".join(group.lines), quote=False)
    box = f'<div style="{LINES};max-height:546px;overflow:auto">{body}</div>'
    return details(title, box, _colour(group.stack), is_open=is_open)


def _who(group: StackGroup, who: Who) -> str:
    """Write `ranks 0-2,3 same`."""
    return who(group.ranks) + (" same" if len(group.ranks) > 1 else "")


def _colour(stack: Stack) -> str:
    if stack.state == "dead" or stack.place.is_stopped:
        return RED
    if stack.place.operation or stack.place.holds_gil:
        return AMBER
    return BLUE if stack.state == "busy" else GREEN
