"""Shows the output of cells and magics in the notebook: panels, plain lines, tables, progress.

Runs in the notebook's process: on IPython's main thread, or on the thread of a subshell for a magic
that runs there.  `make_display` chooses between a panel and plain lines; cells and commands then
draw on the display that it returns.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TypeAlias

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import clear_output, display, update_display

from nbdist.notebook.cell_text import CELL_MAGICS, cell_id, cell_magic, magic_at, request_of
from nbdist.notebook.options import NbDist
from nbdist.notebook.output_count import OUTPUTS
from nbdist.notebook.rich_output import EMPTY, EMPTY_HTML, Below, save_figures
from nbdist.output.bars import merged_line
from nbdist.output.events import MimeBundle
from nbdist.output.html import all_show_widgets, figures, panel_html
from nbdist.output.html_parts import INDENT, dim, panel
from nbdist.output.layout import final_layout, layout_without_output, live_layout
from nbdist.output.panel import MAX_LIVE_PANEL_BYTES
from nbdist.output.tabs import final_tabs, live_by_rank
from nbdist.output.text import PlainLines, curves_lines, failures_text, head_text, panel_text
from nbdist.output.transcript import Transcript
from nbdist.output.wording import clip
from nbdist.values.payload import StepwiseValue, T
from nbdist.words import aligned, in_pool, size_text
from nbdist.world.moving_line import MovingLine
from nbdist.world.task_run import RankOutputs

FIRST_DRAWING = 0.15  # seconds before a running cell is drawn, so that a fast cell does not flash
REDRAW_INTERVAL = 0.25  # least seconds between drawings, as a page rebuilds the whole panel

MAX_LATE_LINES, MAX_LATE_LENGTH = 40, 300
"""The most lines of late output that a terminal prints at once, and the most characters of a
line."""


class PanelDisplay:
    """The panel with a cell's output, redrawn a few times a second while the cell runs.

    A page in a browser redraws displays.  Other clients may show only new displays, so for them
    the last drawing is a new display.

    Args:
        notes: lines that are shown below the output, also of the finished cell.
        is_alone: whether the cell is a single magic, so that the panel may be its only output.
        is_page: whether a page in a browser shows the cell.
        find_request: returns the request of the cell that runs now.
        seconds: the setting `NbDist.seconds`; with "none" new output is drawn only at the end.
        pool: named in the head of the panel and in the magics that notes advise; "" for the
            default pool.
        tabs: an id for this cell; if it is given, each rank has a tab.
        is_quiet: whether to hide the output of a cell that succeeds.  A running cell is then drawn
            only once ranks wait for one another or for input.
    """

    can_change = True  # a panel that was drawn can be drawn again, with other content

    def __init__(
        self,
        notes: Sequence[str] = (),
        *,
        is_alone: bool = False,
        is_page: bool = True,
        find_request: Callable[[], object] = lambda: None,
        seconds: str = "page",
        pool: str = "",
        tabs: str = "",
        is_quiet: bool = False,
    ) -> None:
        self.is_quiet = is_quiet
        self._is_live = False  # whether the running cell was drawn
        self._own_notes = len(notes)
        self._pool = pool
        self._tabs = tabs
        self._is_alone, self._is_page = is_alone, is_page
        self._find_request, self._request = find_request, find_request()
        self._seconds = seconds
        self._shown: MimeBundle = {}
        self._is_redrawn = False  # whether `close` may show the last drawing as a new display
        self._displays = 0  # number of this panel's own displays below the cell
        self._begin()
        self._id_above = ""  # id of the old display, which the next drawing empties; "" if none
        self._below = Below(pool)
        self._draw_at = time.monotonic() + FIRST_DRAWING
        self._notes, self._passing = [*notes], list[str]()

    def add_note(self, text: str, *, at_once: bool = True, stays: bool = True) -> None:
        """Add a note below the output, and draw all notes now if `at_once`.

        Without `stays`, the final panel of a cell leaves the note out, and a quiet display drops
        it.
        """
        if self.is_quiet and not stays:
            return
        (self._notes if stays else self._passing).append(in_pool(text, self._pool))
        if at_once:
            self.show_status("")

    def show_status(self, text: str, *, in_background: bool = False) -> None:
        """Draw the notes and `text` in one line, which the next drawing replaces.

        With "" for `text`, the notes are always drawn.  Otherwise nothing is drawn if the setting
        `seconds` is "none", or if the display is quiet.  But for a cell that will run
        `in_background`, a quiet display must draw now: a page shows later drawings of that cell
        only in a display that exists already.
        """
        is_hidden = self._seconds == "none" or (self.is_quiet and not in_background)
        if not (text and is_hidden):
            lines = " · ".join(filter(None, [*self._notes, *self._passing, text]))
            self._draw(panel(dim(lines)), self._passing_text(lines) if text else lines)

    def show_text(self, text: str, html: str = "") -> None:
        """Show this text as the whole output, with `html` as its form on a page."""
        self._draw(html or panel(dim(text)), text)

    def answer(self, text: str, html: str = "") -> None:
        """Show the final output of a command, with the notes below."""
        notes = " · ".join([*self._notes, *self._passing])
        below = panel(dim(notes)) if notes else ""
        self._draw((html or panel(dim(text))) + below, "\n".join(filter(None, [text, notes])))

    def show(
        self, transcript: Transcript, outputs: RankOutputs, waits: str = "", usage: str = ""
    ) -> None:
        """Redraw the running cell's panel, but not too often, and not if `seconds` is "none".

        Called after new output of ranks (`outputs`, which `transcript` has too), and periodically
        without output.  `waits` is a line on what ranks wait for; `usage` is a line on the memory
        and GPUs in use.  A quiet display draws nothing until `waits` has a text.
        """
        now = time.monotonic()
        if now < self._draw_at or self._seconds == "none":
            return
        if self.is_quiet and not (waits or self._is_live):
            return
        self._draw_live(transcript, now, waits, usage)

    def show_all(self, transcript: Transcript, asks: str, turn: int) -> None:
        """Redraw the panel at once, because an input box for the rank `turn` will open.

        `asks` names the ranks that wait for input.
        """
        self._draw_live(transcript, time.monotonic(), asks, turn=turn)

    def continue_below_input(self) -> None:
        """Continue in a new display, after input was typed below the present display."""
        # A page keeps the typed text as output, so the panel moves below it.
        self._id_above = self._id
        self._begin()

    def _begin(self) -> None:
        """Let the next drawing create a new display."""
        self._id = f"nbdist-{uuid.uuid4().hex}"
        self._is_drawn = False

    def _draw_live(
        self,
        transcript: Transcript,
        now: float,
        waits: str,
        usage: str = "",
        turn: int | None = None,
    ) -> None:
        self._is_live = True
        waits, note = " · ".join(filter(None, [*self._passing, waits])), " · ".join(self._notes)
        clock = time.strftime("%H:%M:%S")
        shown = live_layout(transcript, now, waits, usage, clock, turn, note, pool=self._pool)
        shown = live_by_rank(shown, transcript, turn) if self._tabs else shown
        html = panel_html(shown)
        # A panel with figures is big: redraw less often, which bounds the bytes per second.
        self._draw_at = now + REDRAW_INTERVAL * max(1.0, len(html) / MAX_LIVE_PANEL_BYTES)
        self._draw(html, self._passing_text(panel_text(shown)))
        # Widgets, such as progress bars, must be seen while the cell runs.  Wait until each running
        # rank shows a widget: before, a widget of a lower rank could still come above the others.
        if all_show_widgets(transcript):
            self._below.add(transcript)

    def end(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        """Draw the final panel of a cell that has ended, then the displays below, and its figures.

        A quiet display shows no output of a cell that has succeeded.
        """
        if not self._has_panel(transcript):
            return
        self._begin_last()
        self._draw_final(transcript, logs)
        if self._hides_output(transcript):
            return
        self._below.end(transcript)
        # A page shows figures in the panel; converters and other programs search for images.
        for caption, figure in figures(transcript):
            text = f"figure of {caption}, shown above"
            data = {**figure.data, "text/html": EMPTY_HTML, "text/plain": text}
            display(data, raw=True, metadata=dict(figure.metadata))

    show_again = end

    def _hides_output(self, transcript: Transcript) -> bool:
        return self.is_quiet and transcript.has_succeeded

    def _has_panel(self, transcript: Transcript) -> bool:
        """Return True if a cell that has ended needs a panel.

        Each cell needs one, unless the cell is quiet (`--quiet`) and has succeeded.  Such a cell
        needs a panel only if a panel was drawn while it ran, if there are notes or warnings for the
        user, or if it has tracked numbers that are NaN or infinite.
        """
        is_drawn = self._is_drawn or bool(self._id_above)
        return (
            not self._hides_output(transcript)
            or is_drawn
            or len(self._notes) > self._own_notes
            or must_be_told(transcript)
        )

    def close(self) -> None:
        """Show the last drawing as a new display too, for clients that cannot redraw a display.

        Called when the magic has ended.  Makes no new display if the last drawing was one already,
        or if the old display must be kept (`_begin_last`).  Clients that cannot redraw displays
        will not see later changes.
        """
        if self._is_redrawn and self._begin_last():
            self._draw(self._shown["text/html"], self._shown["text/plain"])
        self._is_alone, self._is_page = False, True

    def _begin_last(self) -> bool:
        """Let the last drawing create a new display if possible, and return whether it will.

        All clients show a new display, even if the user has cleared the cell's output on a page.
        If all output of the cell is from this panel, that output is cleared first.  Otherwise a
        page keeps the old display, because clearing would remove other output too, and other
        clients show the new display below.  A page also keeps it if displays are below the panel.
        Returns False, too, if nothing was drawn yet, or if another cell runs now.
        """
        if not (self._is_drawn or self._id_above) or self._find_request() != self._request:
            return False
        is_alone = self._is_alone and OUTPUTS.number == self._displays + self._below.count
        # On a page, displays below the panel may be widgets, whose state would be lost.
        if is_alone and not (self._is_page and self._below.count):
            # This also removes the text that a user has typed, and the input box that a page keeps
            # after Stop.  So clear the output only now, when no input box waits for the user.
            clear_output(wait=True)
            self._id_above, self._below = "", Below(self._pool)
            self._displays = OUTPUTS.number = 0
        elif self._is_page:
            return False
        elif self._is_drawn:
            self._id_above = self._id
        self._begin()
        return True

    def pause(self) -> None:
        """Prepare for output of another cell; a panel needs no preparation."""

    def add_late(self, transcript: Transcript, outputs: RankOutputs) -> None:
        """Do nothing: `redraw_ended` draws the whole transcript, and so also these late outputs."""

    def finish_late(self) -> bool:
        """Return False: no line waits to be shown, since a panel also shows incomplete lines."""
        return False

    def redraw_ended(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        """Redraw the panel of a cell that has ended, with output that came later."""
        if not self._has_panel(transcript):
            return
        self._draw_final(transcript, logs)
        # With False, `close` does not show the panel a second time as a new display.
        self._is_redrawn = False
        if not self._hides_output(transcript):
            self._below.change(transcript)

    def _draw_final(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        note, now = " · ".join(self._notes), time.monotonic()
        if self._hides_output(transcript):
            shown = layout_without_output(transcript, note, now, pool=self._pool)
        else:
            shown = final_layout(transcript, logs, note, now, pool=self._pool)
            shown = final_tabs(shown, transcript, logs, self._tabs) if self._tabs else shown
        timeless = shown._replace(seconds="", pace="")
        html = panel_html(timeless if self._seconds == "none" else shown)
        self._draw(html, panel_text(shown if self._seconds == "all" else timeless))

    def _passing_text(self, text: str) -> str:
        """Return the text of a drawing that is not the last one.

        Clients that are no pages append the text of the next drawing, so for them the text ends
        with a line break.
        """
        return text if self._is_page else f"{text}\n"

    def _draw(self, html: str, text: str) -> None:
        bundle = self._shown = {"text/html": _encodable(html), "text/plain": _encodable(text)}
        self._is_redrawn = self._is_drawn
        if self._is_drawn:
            update_display(bundle, display_id=self._id, raw=True)
        else:
            display(bundle, display_id=self._id, raw=True)
            self._is_drawn = True
            self._displays += 1
            OUTPUTS.number += 1
        if self._id_above:
            update_display(EMPTY.data, display_id=self._id_above, raw=True)
            self._id_above = ""


def _encodable(text: str) -> str:
    """Return the text with lone surrogates escaped, which cannot be sent to a page as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def must_be_told(transcript: Transcript) -> bool:
    """Return True if a quiet cell has warnings, or has tracked numbers that are NaN or infinite."""
    return bool(transcript.warnings) or transcript.curves.has_odd_numbers


class PlainDisplay:
    """Prints a cell's output line by line, for terminals and logs.

    Has the methods of `PanelDisplay`.  A quiet display prints the output only at the end of the
    cell, and only if the cell has not succeeded.
    """

    can_change = False

    def __init__(
        self,
        notes: Sequence[str] = (),
        *,
        colours: bool = False,
        pool: str = "",
        is_quiet: bool = False,
    ) -> None:
        self.is_quiet = is_quiet
        self._pool = pool
        self._notes = notes
        self._colours = colours
        self._lines: PlainLines | None = None
        self._late_lines = list[str]()  # lines that the next `redraw_ended` prints
        self._has_late_output = False  # whether `_lines` may have an incomplete late line
        self._waits = ""
        self._warned = 0
        self._stream = sys.stdout
        self._bars = MovingLine(self._stream)

    def add_note(self, text: str, *, at_once: bool = True, stays: bool = True) -> None:
        if stays or not self.is_quiet:
            self.show_text(in_pool(text, self._pool))

    def show_status(self, text: str, *, in_background: bool = False) -> None:
        if in_background or not self.is_quiet:
            self.show_text(text)

    def show_text(self, text: str, html: str = "") -> None:
        self._bars.clear()
        sys.stdout.write(f"{text}\n")

    answer = show_text

    def show(
        self, transcript: Transcript, outputs: RankOutputs, waits: str = "", usage: str = ""
    ) -> None:
        now = time.monotonic()
        if not self.is_quiet:
            if self._lines is None:
                self._lines = PlainLines(transcript.ranks)
            for rank, output in outputs:
                self._write(self._lines.receive(rank, output, now))
            self._write(self._lines.due(now))
            self._warn(transcript)
        if waits and waits != self._waits:
            self.add_note(waits)
        self._waits = waits
        # While a prompt is open, IPython has replaced `sys.stdout`.  Show no bar then, because the
        # prompt would overwrite it.
        if not self.is_quiet and sys.stdout is self._stream and self._bars.is_due(now):
            self._bars.show(merged_line(transcript), now)

    def show_all(self, transcript: Transcript, asks: str, turn: int) -> None:
        self._bars.clear()
        if self._lines is not None:
            self._write(self._lines.flush())
        sys.stdout.flush()

    def continue_below_input(self) -> None:
        """Do nothing, as the terminal itself shows the typed text."""

    def pause(self) -> None:
        self._bars.clear()
        sys.stdout.flush()

    def end(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        if self.is_quiet:
            if not transcript.has_succeeded:
                self.show_again(transcript, logs)
            elif must_be_told(transcript):
                self.show_text(panel_text(layout_without_output(transcript, pool=self._pool)))
            return
        self._bars.clear()
        if self._lines is not None:
            self._write(self._lines.finish(time.monotonic()))
        self._warn(transcript)
        shown = final_layout(transcript, logs, now=time.monotonic(), pool=self._pool)
        self._write(failures_text(shown, colours=self._colours))
        self._write(curves_lines(shown.curves) if shown.curves else ())
        self._write(save_figures(transcript, logs))
        if transcript.is_finished and not shown.states:  # no output: say that the cell succeeded
            shown = shown._replace(states=(("ok", f"✓ {len(transcript.ranks)}"),))
        self.show_text(" · ".join([head_text(shown), *self._notes]))
        sys.stdout.flush()

    def show_again(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        now = time.monotonic()
        shown = final_layout(transcript, logs, now=now, is_on_page=False, pool=self._pool)
        self.show_text(panel_text(shown))
        self._write(save_figures(transcript, logs))

    def add_late(self, transcript: Transcript, outputs: RankOutputs) -> None:
        """Keep the lines of outputs that arrived after the end of the cell, for `redraw_ended`.

        A quiet display drops them.
        """
        if self.is_quiet:
            return
        if self._lines is None:
            self._lines = PlainLines(transcript.ranks)
        for rank, output in outputs:
            self._late_lines += self._lines.receive(rank, output, time.monotonic())
            self._has_late_output = True

    def finish_late(self) -> bool:
        """Let `redraw_ended` print incomplete late lines too.

        Returns True if late output has come since the last call.
        """
        had_late, self._has_late_output = self._has_late_output, False
        if had_late and self._lines is not None:
            self._late_lines += self._lines.finish(time.monotonic())
        return had_late

    def redraw_ended(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        """Print the complete lines of late output, at most the last `MAX_LATE_LINES`.

        After `finish_late`, incomplete lines are printed too.  If there are more lines, a line
        before them says how many are left out.  While a prompt is open, IPython prints the lines
        above the prompt.
        """
        if self._lines is not None:
            self._late_lines += self._lines.flush()
        lines, self._late_lines = self._late_lines, []
        if hidden_count := len(lines[:-MAX_LATE_LINES]):
            hint = in_pool("rest: `%dist_output --all`", self._pool)
            noun = "line" if hidden_count == 1 else "lines"
            self._write([f"… {hidden_count:,} {noun} more after the cell · {hint}"])
        self._write(clip(line, MAX_LATE_LENGTH) for line in lines[-MAX_LATE_LINES:])
        if lines:
            sys.stdout.flush()

    def close(self) -> None:
        pass

    def _warn(self, transcript: Transcript) -> None:
        for text in transcript.warnings[self._warned :]:
            self.show_text(text)
        self._warned = len(transcript.warnings)

    def _write(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._bars.clear()
            sys.stdout.write(f"{line}\n")


CellDisplay: TypeAlias = PanelDisplay | PlainDisplay
"""A display for the output of one cell, or of one magic."""


def make_display(
    shell: InteractiveShell,
    settings: NbDist,
    cell: str = "",
    notes: Sequence[str] = (),
    pool: str = "",
    *,
    is_quiet: bool = False,
) -> CellDisplay:
    """Return a panel if cells are shown as panels (`has_panels`), else a display of plain lines.

    `cell` is the source of the cell that runs.  If the source is a single magic (`is_of_magic`),
    the panel may replace all output of the cell at the end.  `notes` are lines that are shown below
    the cell's output.
    """
    if has_panels(shell, settings):
        tabs = f"nbdist-{shell.execution_count}" if settings.layout == "tabs" else ""
        return PanelDisplay(
            notes,
            is_alone=is_of_magic(cell),
            is_page=bool(cell_id(shell)),
            find_request=partial(request_of, shell),
            seconds=settings.seconds,
            pool=pool,
            tabs=tabs,
            is_quiet=is_quiet,
        )
    is_coloured = sys.stdout.isatty() and str(getattr(shell, "colors", "")).lower() != "nocolor"
    return PlainDisplay(notes, colours=is_coloured, pool=pool, is_quiet=is_quiet)


def has_panels(shell: InteractiveShell, settings: NbDist) -> bool:
    """Return True if cells are shown as panels: by default in kernels, not in terminals."""
    chosen = settings.display
    return chosen == "panel" or (chosen == "auto" and hasattr(shell, "kernel"))


_PANELS_OF = (*CELL_MAGICS, "debug")  # `%debug` of IPython can call `%dist_debug`


def is_of_magic(cell: str) -> bool:
    """Return True if a cell is a single magic, of nbdist or `%debug`, that can show a panel."""
    text = cell.strip()
    magic = cell_magic(text) or (magic_at(text, 0) if "\n" not in text else None)
    return magic is not None and (magic.name.startswith("dist_") or magic.name in _PANELS_OF)


# --- tables and blocks of text that commands show ---------------------------------------------

_TABLE_CELL = "padding:0 16px 0 0;text-align:left;border:none;font-family:monospace"
_UNWRAPPED_LENGTH = (
    24  # characters; a table's cell up to this length, such as `busy 7.5 s`, is not wrapped
)
_BLOCK = (
    f"font-family:monospace;font-size:13px;white-space:pre-wrap;margin:0;padding:0 0 0 {INDENT}"
)


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """An output of a command, as HTML for pages and as text for terminals."""

    html: str
    text: str

    def show_on(self, display: CellDisplay) -> None:
        """Show this output on the display of the command, with the display's notes below it."""
        display.answer(self.text, self.html)


def table(
    head: str,
    rows: Sequence[Sequence[str]],
    colours: Mapping[str, str] | None = None,
    first_width: int = 0,
) -> CommandOutput:
    """Return a table below the line `head`; the first of the `rows` has the headings.

    `colours` maps the first word of a table's cell to the colour of the cell.  The first column is
    at least `first_width` characters wide.
    """
    html = f"<div><b>{escape(head)}</b></div>"
    if rows:
        first, *others = rows
        headings = "".join(f'<th style="{_TABLE_CELL}">{heading}</th>' for heading in first)
        # The width is in `em`: JupyterLab does not allow the unit `ch`, the width of a character.
        wide = f"{_TABLE_CELL};min-width:{0.62 * first_width:.1f}em"
        headings = headings.replace(_TABLE_CELL, wide, bool(first_width))
        body = "".join(
            f"<tr>{''.join(_cell(text, colours or {}) for text in row)}</tr>" for row in others
        )
        html += f'<table style="border:none;margin:4px 0"><tr>{headings}</tr>{body}</table>'
        rows = [(first[0].ljust(first_width), *first[1:]), *others]
    return CommandOutput(panel(html), "\n".join([head, *aligned(rows)]))


def block(text: str) -> CommandOutput:
    """Return a text in a monospaced font, with its spaces and line breaks."""
    return CommandOutput(f'<pre style="{_BLOCK}">{escape(text)}</pre>', text)


def below(parts: Iterable[CommandOutput]) -> CommandOutput:
    """Return a single output that shows several outputs from top to bottom."""
    parts = [*parts]
    html, text = "".join(part.html for part in parts), "\n".join(part.text for part in parts)
    return CommandOutput(html, text)


def _cell(text: str, colours: Mapping[str, str]) -> str:
    colour = colours.get(text.partition(" ")[0], "")
    style = f"{_TABLE_CELL};color:{colour}" if colour else _TABLE_CELL
    if len(text) <= _UNWRAPPED_LENGTH:
        style += ";white-space:nowrap"
    return f'<td style="{style}">{escape(text)}</td>'


# --- progress of transfers that take longer than a moment -------------------------------------

FIRST_SHOWN = 1.0  # seconds that a transfer takes before its progress is shown


def progress(display: CellDisplay, what: str) -> Callable[[int, int], None]:
    """Return a function that shows the progress of a transfer, a few times a second at most.

    The function is called with the number of bytes done, and the total.
    """
    started = time.monotonic()
    due = started + FIRST_SHOWN

    def show(done: int, total: int) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            # A terminal gets a new line each time, so double the time between lines.
            due = now + (REDRAW_INTERVAL if display.can_change else now - started)
            display.show_status(progress_text(what, done, total, now - started))

    return show


def progress_text(what: str, done: int, total: int, seconds: float) -> str:
    """Return a line such as `sending data: 1.2 GiB of 4 GiB · 1.1 GiB/s`.

    `what` is the text before the colon.  `done` of `total` bytes were moved in `seconds`.
    """
    return f"{what}: {size_text(done)} of {size_text(total)} · {size_text(done / seconds)}/s"


def moved(steps: Generator[int, None, T], total: int, display: CellDisplay, what: str) -> T:
    """Run a generator to its end, show its progress after the text `what`, and return its result.

    The generator yields the number of bytes that are done.  If Stop interrupts the run, the
    generator is closed, which must release a partial result.
    """
    show = progress(display, what)
    with closing(StepwiseValue(steps)) as running:
        for done in running:
            show(done, total)
    return running.made
