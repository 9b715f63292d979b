"""Whether enough machines have come, and what is said while others are waited for; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.words import count


@dataclass(frozen=True, slots=True)
class Awaited:
    """So many nodes, and where nobody knows how many will come, room for so many workers.

    `invitation` is the command that has another one come, "" where a launcher does that.  Of
    the nodes `least` are enough, where the others do not come at the same time.
    """

    nodes: int
    workers: int | None = None
    invitation: str = ""
    least: int = 0

    def will_do(self, room: Mapping[str, int]) -> bool:
        """Say whether it can be begun without the others."""
        return 0 < self.least <= len(room) and not self.invitation

    def have_come(self, room: Mapping[str, int]) -> bool:
        """Say whether these are enough; `room` is for how many workers each has it, by name."""
        if len(room) < self.nodes:
            return False
        return not self.invitation or self.workers is None or sum(room.values()) >= self.workers

    def text(self, room: Mapping[str, int]) -> str:
        """Write `1 of 2 nodes: a (4)`, and what to do for the others."""
        hosts = ", ".join(f"{name} ({number})" for name, number in room.items())
        text = f"{len(room)} of {count(self.nodes, 'node')}"
        if self.invitation and self.workers is not None:
            text = f"{sum(room.values())} of {count(self.workers, 'worker')}"
        text += f": {hosts}" if hosts else ""
        if self.invitation and not self.have_come(room):
            return f"run `{self.invitation}` on each machine · {text}"
        return text
