"""Shows the output that ranks send after their cell has ended, and later changes of its displays.

Runs in the notebook's process, on IPython's main thread.  Each `Pool` owns a `LateOutput`, which
has the pool's `FinishedCells`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from IPython.core.interactiveshell import InteractiveShell

from nbdist.notebook.display import MAX_LATE_LENGTH, REDRAW_INTERVAL, CellDisplay
from nbdist.notebook.rich_output import WidgetRelay
from nbdist.output.ansi import strip
from nbdist.output.events import Display, DisplayUpdate, Failure, Output, Text, Visible, plain_of
from nbdist.output.transcript import Transcript
from nbdist.output.wording import fold_ranks, traceback_text
from nbdist.words import name_ranks
from nbdist.world import inbox
from nbdist.world.task_run import RankOutputs, TaskRun
from nbdist.world.world import World


class LateOutput:
    """Shows what the ranks of a pool send outside of a cell: late output, and widgets' messages.

    Late output is added to the display of the cell that it belongs to.  `cells.py` and jobs call
    the methods while they follow a cell.  `Pool` and `Healer` call them between cells.
    """

    def __init__(self, shell: InteractiveShell, find_world: Callable[[], World | None]) -> None:
        """`find_world` returns the pool's present world, or None if the pool has no world."""
        self.cells = FinishedCells()
        self._shell = shell
        self._find_world = find_world
        self._relay: WidgetRelay | None = None  # between the world's widgets and the pages

    def __repr__(self) -> str:
        return f"<LateOutput of {self._find_world()}>"

    def show(self, *, at_once: bool = True, running: CellDisplay | None = None) -> None:
        """Add late output to the cells that it belongs to, and update widgets.

        `running` is the display of the cell that runs now.  Before the late output of other cells
        is shown, this display is paused: in a terminal it removes its progress bar, because the
        late lines are printed at the same place.
        """
        if (world := self._find_world()) is not None:
            self.show_widgets()
            self.cells.receive(world.engine.outputs.pop_late())
            if running is not None and self.cells.has_changes:
                running.pause()
            self.cells.show(world.engine.rank_table.log_files, at_once=at_once)

    def show_stopped(self, world: World, stopped: TaskRun) -> None:
        """Redraw a cell that Stop has ended in the notebook although ranks still ran it."""
        inbox.receive_waiting(world.engine)
        self.cells.add_to_display(stopped.transcript, stopped.pop_outputs())
        self.cells.update(stopped.transcript)
        self.cells.show(world.engine.rank_table.log_files, at_once=not stopped.unfinished)

    def redraw(self, transcript: Transcript) -> None:
        """Redraw a cell that has ended, and show all late output."""
        self.cells.mark_changed(transcript)
        self.show()

    def show_widgets(self) -> None:
        """Pass the new messages of the ranks' widgets to the page, and mark lost widgets."""
        world = self._find_world()
        if world is None or (widgets := world.engine.outputs.widgets) is None:
            return
        if self._relay is None or self._relay.widgets is not widgets:
            if self._relay is not None:
                self._relay.close()
            self._relay = WidgetRelay(self._shell, widgets, world.engine)
        self._relay.show()
        if widgets.ended_widgets:
            lost, widgets.ended_widgets = widgets.ended_widgets, {}
            self.cells.lose_widgets(lost)

    def end_widgets(self) -> None:
        """Mark all widgets as lost, in the cells that show them: their workers will end."""
        world = self._find_world()
        if world is not None and (widgets := world.engine.outputs.widgets) is not None:
            widgets.end()
            self.show()

    def close(self) -> None:
        """Close the connections between widgets and the page."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None


OUTPUTS_KEPT = 1000  # the most late outputs that are kept if no cell can show them

CELLS_KEPT = 20  # past cells that are kept, for late output and `%dist_output`


class FinishedCells:
    """The last cells that have ended, newest last, each with its display."""

    def __init__(self) -> None:
        # The display is None for cells of former workers, which send no output any more.
        self._cells: deque[tuple[Transcript, CellDisplay | None]] = deque(maxlen=CELLS_KEPT)
        self._without_cell: deque[tuple[int, Output]] = deque(maxlen=OUTPUTS_KEPT)
        self._changed = set[Transcript]()
        self._last_update: tuple[Transcript, int] | None = None
        self._show_at = 0.0

    def add(self, transcript: Transcript, display: CellDisplay) -> None:
        """Add a cell that has ended; the oldest cell is dropped if there are too many."""
        self._cells.append((transcript, display))

    def past(self, last: Transcript) -> list[Transcript]:
        """Return the transcripts of past cells, also of former workers, and then `last`."""
        return [*(each for each, _ in self._cells if each is not last), last]

    def forget(self) -> None:
        """Keep the transcripts but forget the displays, because the workers are new.

        The former workers send no more output, so no display has to be redrawn.
        """
        self._cells = deque([(each, None) for each, _ in self._cells], CELLS_KEPT)
        self._changed.clear()
        self._last_update = None
        self._without_cell.clear()

    def receive(self, outputs: Iterable[tuple[int, Output]]) -> None:
        """Add late output to the last cell of its rank, or keep it for `pop_texts`.

        An update of a display is added to the cell that has the display.  Output is kept if no cell
        can show it.  Output that users could not see is dropped.
        """
        for rank, output in outputs:
            if not isinstance(output, Visible):
                continue
            if (cell := self._cell_of(rank, output)) is None:
                self._without_cell.append((rank, output))
            else:
                cell.receive(rank, output, time.monotonic())
                self.add_to_display(cell, [(rank, output)])
                self._changed.add(cell)

    def add_to_display(self, transcript: Transcript, outputs: RankOutputs) -> None:
        """Pass late outputs, which the transcript already has, to the display of its cell.

        The next `show` after `mark_changed` draws them.
        """
        for each, display in self._cells:
            if each is transcript and display is not None:
                display.add_late(transcript, outputs)

    def finish_lines(self) -> None:
        """Let the next `show` also show lines of late output that are not complete."""
        for transcript, display in self._cells:
            if display is not None and display.finish_late():
                self._changed.add(transcript)

    def lose_widgets(self, rank_by_id: Mapping[str, int]) -> None:
        """Replace widgets of lost ranks by lines of text; `rank_by_id` maps widget ids to ranks."""
        for transcript, _ in self._cells:
            lost = [each.replace_lost_widgets(rank_by_id) for each in transcript]
            if any(lost):
                self._changed.add(transcript)

    def mark_changed(self, transcript: Transcript) -> None:
        """Redraw this cell at the next `show`."""
        self._changed.add(transcript)

    def update(self, transcript: Transcript) -> None:
        """Redraw this cell at the next `show` if it has new output since the last `update`."""
        state = transcript, sum(each.version for each in transcript)
        if state != self._last_update:
            self._last_update = state
            self._changed.add(transcript)

    @property
    def has_changes(self) -> bool:
        """Whether the next `show` has a cell to redraw."""
        return bool(self._changed)

    def show(self, logs: Mapping[int, str], *, at_once: bool = True) -> None:
        """Redraw the cells that have changed; without `at_once`, at most a few times a second."""
        if self._changed and (at_once or time.monotonic() >= self._show_at):
            for transcript, display in self._cells:
                if transcript in self._changed and display is not None:
                    display.redraw_ended(transcript, logs)
            self._changed.clear()
            self._show_at = time.monotonic() + REDRAW_INTERVAL

    def pop_texts(self) -> list[str]:
        """Return lines with the late output that no cell could show, and forget that output.

        Ranks with equal output share a line.
        """
        outputs = [*self._without_cell]
        self._without_cell.clear()
        return late_texts(outputs)

    def _cell_of(self, rank: int, output: Output) -> Transcript | None:
        for transcript, display in reversed(self._cells):
            if rank not in transcript.by_rank or display is None:
                continue
            if not isinstance(output, DisplayUpdate) or transcript[rank].has_display(
                output.display_id
            ):
                return transcript
        return None


def late_texts(outputs: Iterable[tuple[int, Output]]) -> list[str]:
    """Return a line for each different output: `ranks 0-1 printed after their last cell: bye`."""
    text_by_rank: dict[int, str] = {}
    for rank, output in outputs:
        text_by_rank[rank] = text_by_rank.get(rank, "") + _text_of(output)
    lines = {rank: map(str.strip, strip(text).splitlines()) for rank, text in text_by_rank.items()}
    same = fold_ranks({rank: " / ".join(filter(None, parts)) for rank, parts in lines.items()})
    texts: list[str] = []
    for text, ranks in same.items():
        if text:
            whose = "its" if len(ranks) == 1 else "their"
            more = len(text) - MAX_LATE_LENGTH
            shown = text if more <= 0 else f"{text[:MAX_LATE_LENGTH]} … {more:,} more characters"
            texts.append(f"{name_ranks(ranks)} printed after {whose} last cell: {shown}")
    return texts


def _text_of(output: Output) -> str:
    match output:
        case Text(text=text):
            return text
        case Display(data=data):
            return f"{plain_of(data)}\n"
        case Failure():
            return f"{traceback_text(output)}\n"
    return ""
