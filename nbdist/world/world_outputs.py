"""The output of ranks that belongs to no single task: late output, curves and widgets.

Runs in the notebook's process and does no I/O.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from nbdist.output.curves import Curves
from nbdist.output.events import Comm, Output
from nbdist.wire.world_facts import Renumbering

if TYPE_CHECKING:
    from nbdist.world.widgets import Widgets

LATE_KEPT = 1000  # the most outputs that are kept if no cell shows them when they come


class WorldOutputs:
    """The output of ranks outside of tasks, the curves of all tasks, and the widgets of ranks.

    `curves` also has the curves of tasks before a restart.  The owner sets `shows_widgets` to True
    if the notebook has a page that can show widgets.  `widgets` is made at the first message of a
    widget, and only if `shows_widgets` is True; it is None before.
    """

    def __init__(self) -> None:
        self.curves = Curves()
        self.widgets: Widgets | None = None
        self.shows_widgets = False
        self._late: deque[tuple[int, Any]] = deque(maxlen=LATE_KEPT)

    def add_late(self, rank: int, output: Any) -> None:
        """Keep an output that belongs to no running task, until `pop_late` returns the output."""
        self._late.append((rank, output))

    def pop_late(self) -> list[tuple[int, Any]]:
        """Return the outputs of `add_late` since the last call, as pairs of rank and output."""
        outputs = [*self._late]
        self._late.clear()
        return outputs

    def pass_to_widgets(self, rank: int, output: Output) -> Output | None:
        """Pass a rank's output to `Widgets`; return the output that the cell shows, None if none.

        Without widgets the output is returned unchanged.  A widget's message is dropped if
        `shows_widgets` is False.
        """
        if self.widgets is None:
            if not isinstance(output, Comm):
                return output
            if not self.shows_widgets:
                return None
            # Not imported at the top of the file, since most worlds have no widgets.
            from nbdist.world.widgets import Widgets

            self.widgets = Widgets()
        return self.widgets.handle_output(rank, output)

    def renumber(self, change: Renumbering) -> None:
        """Update the widgets after ranks have got new numbers."""
        if self.widgets is not None:
            self.widgets.renumber(change.became)

    def end_widgets(self) -> None:
        """Close the widgets, because the workers that have made them have ended."""
        if self.widgets is not None:
            self.widgets.end()
