"""What `%dist_stack` shows: the stacks of all ranks, equal ones once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from nbdist.errors import name_ranks
from nbdist.notebook.draw.blocks import AMBER, BLUE, GREEN, LINES, RED, bold, dim, panel
from nbdist.wire.looks import Stack
from nbdist.world.sameness import normal
from nbdist.world.watch import doing_of

OPEN_LINES = 60


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose stacks are equal but for addresses; `stack` is the first one's."""

    ranks: tuple[int, ...]
    stack: Stack

    @property
    def title(self) -> str:
        """`wait in all_reduce, line 7`."""
        stack = self.stack
        if stack.state == "busy" or stack.place.is_stopped or stack.place.is_deaf:
            code = stack.frames[0].code if stack.frames and stack.frames[0].is_cell else ""
            return doing_of(self.ranks, stack.place, code)
        return stack.state

    @property
    def lines(self) -> list[str]:
        """The calls as Python's tracebacks show them, the innermost last."""
        stack = self.stack
        lines = [line for frame in stack.frames for line in frame.lines]
        if stack.place.is_stopped:
            lines.append(f"  `kill -CONT {stack.pid}` lets it go on")
        return [*lines, *([f"  {stack.problem}"] if stack.problem else [])]


def grouped(stacks: Iterable[Stack]) -> list[StackGroup]:
    """Equal ones together, in the order of their first ranks."""
    found: dict[str, list[Stack]] = {}
    for stack in sorted(stacks, key=lambda stack: stack.rank):
        one = StackGroup((stack.rank,), stack)
        said = "\n".join([one.title, *one.lines]).replace(str(stack.pid), "<pid>")
        found.setdefault(normal(said), []).append(stack)
    return [StackGroup(tuple(stack.rank for stack in same), same[0]) for same in found.values()]


def stacks_text(head: str, stacks: Iterable[Stack]) -> str:
    """A header for each group, and its calls."""
    parts = [head]
    for group in grouped(stacks):
        parts.append(f"── {_who(group)} · {group.title} ──")
        parts.extend(group.lines)
    return "\n".join(parts)


def stacks_html(head: str, stacks: Iterable[Stack]) -> str:
    """The same, each group behind its header, open as long as that is not too much."""
    parts, shown = [f"<div>{bold(head)}</div>"], 0
    for index, group in enumerate(grouped(stacks)):
        shown += len(group.lines)
        parts.append(_block(group, is_open=index == 0 or shown <= OPEN_LINES))
    return panel(*parts)


def _block(group: StackGroup, *, is_open: bool) -> str:
    style = f"border-left:3px solid {_colour(group.stack)};padding-left:8px;margin:3px 0"
    title = f"{bold(_who(group))} {dim(group.title)}"
    if not group.lines:
        return f'<div style="{style}">{title}</div>'
    body = escape("\n".join(group.lines), quote=False)
    return (
        f'<details{" open" if is_open else ""} style="{style}">'
        f'<summary style="cursor:pointer">{title}</summary>'
        f'<div style="{LINES};max-height:546px;overflow:auto">{body}</div></details>'
    )


def _who(group: StackGroup) -> str:
    """`ranks 0-2,3 same`."""
    return name_ranks(group.ranks) + (" same" if len(group.ranks) > 1 else "")


def _colour(stack: Stack) -> str:
    if stack.state == "dead" or stack.place.is_stopped:
        return RED
    if stack.place.operation or stack.place.is_deaf:
        return AMBER
    return BLUE if stack.state == "busy" else GREEN
