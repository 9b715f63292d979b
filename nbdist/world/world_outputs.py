"""What ranks show that belongs to no single task: late output, curves and widgets.

Runs in the notebook's process and does no I/O.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from nbdist.output.curves import Curves
from nbdist.output.events import Comm, Output
from nbdist.world.states import Renumbering

if TYPE_CHECKING:
    from nbdist.world.widgets import Widgets

LATE_KEPT = 1000  # the most outputs outside of tasks that are kept, such as output of threads


class WorldOutputs:
    """The output of ranks outside of tasks, the curves of all tasks, and the widgets of ranks.

    `curves` has also curves of tasks before a restart.  `widgets` is None until a rank sends the
    first message of a widget and `shows_widgets` is True, because a page can show widgets.
    """

    def __init__(self) -> None:
        self.curves = Curves()
        self.widgets: Widgets | None = None
        self.shows_widgets = False
        self._late: deque[tuple[int, Any]] = deque(maxlen=LATE_KEPT)

    def add_late(self, rank: int, output: Any) -> None:
        """Keep an output of a rank outside of tasks, until `pop_late`."""
        self._late.append((rank, output))

    def pop_late(self) -> list[tuple[int, Any]]:
        """Return pairs of rank and output, for outputs outside of tasks since the last call."""
        outputs = [*self._late]
        self._late.clear()
        return outputs

    def pass_to_widgets(self, rank: int, output: Output) -> Output | None:
        """Pass an output to `Widgets`; return the output that the cell shows, or None."""
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
        """Give the ranks of widgets their new numbers."""
        if self.widgets is not None:
            self.widgets.renumber(change.became)

    def end_widgets(self) -> None:
        """Record that the workers that have made the widgets have ended."""
        if self.widgets is not None:
            self.widgets.end()
