"""A cell's output while it runs and when it has ended, and tables; on IPython's own thread."""

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
from nbdist.notebook.rich_output import EMPTY, NOTHING, Below, save_figures
from nbdist.output.bars import merged_line
from nbdist.output.events import MimeBundle
from nbdist.output.html import MOST_LIVE_BYTES, all_show_widgets, figures, panel_html
from nbdist.output.layout import final_layout, live_layout
from nbdist.output.tabs import final_tabs, live_by_rank
from nbdist.output.text import PlainLines, curves_lines, failures_text, head_text, panel_text
from nbdist.output.transcript import Transcript
from nbdist.output.wording import INDENT, dim, panel
from nbdist.values.payload import Made, Steps
from nbdist.words import aligned, in_pool, size_text
from nbdist.world.running import News
from nbdist.world.workers import MovingLine

FIRST_DRAWING = 0.15  # seconds before anything is drawn, so that a fast cell does not flash
REDRAW = 0.25  # seconds between drawings: the page rebuilds the whole panel at each


class PanelDisplay:
    """One display that is redrawn a few times a second and replaced at the end.

    `can_change`: what has been shown can still be shown otherwise.
    `is_alone` says whether its cell is one magic, and `is_page` whether a page shows the cell.  A
    page redraws displays; other clients may show new ones alone, so the last drawing is a new one.
    `place` returns the request of the cell in which something is shown now.  `notes` stand with
    what it shows; `seconds` is the setting of this name: with "none" it is drawn at the end alone.
    The head of a panel names the `pool`, as do magics in notes, unless it is the default one: "".
    With `tabs`, a name for this cell, each rank has a tab.
    """

    can_change = True

    def __init__(
        self,
        notes: Sequence[str] = (),
        *,
        is_alone: bool = False,
        is_page: bool = True,
        place: Callable[[], object] = lambda: None,
        seconds: str = "page",
        pool: str = "",
        tabs: str = "",
    ) -> None:
        self._pool = pool
        self._tabs = tabs
        self._is_alone, self._is_page = is_alone, is_page
        self._find_place, self._place = place, place()
        self._seconds = seconds
        self._shown: MimeBundle = {}
        self._is_redrawn = False  # what is shown last went only to clients that redraw displays
        self._displays = 0  # that it has made and that are there
        self._begin()
        self._above = ""  # the one that stands above what was typed last
        self._below = Below(pool)
        self._draw_at = time.monotonic() + FIRST_DRAWING
        self._notes, self._passing = [*notes], list[str]()

    def note(self, text: str, *, at_once: bool = True, stays: bool = True) -> None:
        """Show a line beside the output; unless it `stays`, only while the cell runs."""
        (self._notes if stays else self._passing).append(in_pool(text, self._pool))
        if at_once:
            self.wait_for("")

    def wait_for(self, text: str) -> None:
        """Show a line until there is something else."""
        if not (text and self._seconds == "none"):
            said = " · ".join(filter(None, [*self._notes, *self._passing, text]))
            self._draw(panel(dim(said)), self._passing_text(said) if text else said)

    def say(self, text: str, html: str = "") -> None:
        """Show a line, or lines that look otherwise on a page, as all the output there is."""
        self._draw(html or panel(dim(text)), text)

    def answer(self, text: str, html: str = "") -> None:
        """Show what a command has to say at its end, with the notes below."""
        notes = " · ".join([*self._notes, *self._passing])
        below = panel(dim(notes)) if notes else ""
        self._draw((html or panel(dim(text))) + below, "\n".join(filter(None, [text, notes])))

    def show(self, transcript: Transcript, news: News, waits: str = "", usage: str = "") -> None:
        """Show what has changed; called whenever ranks have said something, and every so often.

        `waits` is a line on ranks that wait for others, as long as they do; `usage` is what
        memory and GPUs they use.
        """
        now = time.monotonic()
        if now < self._draw_at or self._seconds == "none":
            return
        self._draw_live(transcript, now, waits, usage)

    def show_all(
        self, transcript: Transcript, asks: str, turn: int, *, is_here: bool = True
    ) -> None:
        """Show all that there is, now: an input box comes, for the rank whose `turn` it is.

        Below, if `is_here`, and not in a later cell.  `asks` says which ranks wait for one.
        """
        self._draw_live(transcript, time.monotonic(), asks, turn=turn)

    def typed(self) -> None:
        """Go on after input was typed there."""
        # A page leaves there what was typed, which the panel says too: it goes on below that.
        self._above = self._id
        self._begin()

    def _begin(self) -> None:
        """Begin a display of its own with the next drawing."""
        self._id = f"nbdist-{uuid.uuid4().hex}"
        self._is_there = False

    def _draw_live(
        self,
        transcript: Transcript,
        now: float,
        waits: str,
        usage: str = "",
        turn: int | None = None,
    ) -> None:
        waits, note = " · ".join(filter(None, [*self._passing, waits])), " · ".join(self._notes)
        clock = time.strftime("%H:%M:%S")
        shown = live_layout(transcript, now, waits, usage, clock, turn, note, pool=self._pool)
        shown = live_by_rank(shown, transcript, turn) if self._tabs else shown
        html = panel_html(shown)
        # With figures as seldom as it takes for no more bytes a second than without.
        self._draw_at = now + REDRAW * max(1.0, len(html) / MOST_LIVE_BYTES)
        self._draw(html, self._passing_text(panel_text(shown)))
        if all_show_widgets(transcript):  # what moves is to be seen while it does
            self._below.add(transcript)

    def end(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        """Show it as it stays; called once, last."""
        self._begin_last()
        self._draw_final(transcript, logs)
        self._below.end(transcript)
        # Pages show them in the panel; converters and other programs look for images.
        for caption, figure in figures(transcript):
            text = f"figure of {caption}, shown above"
            data = {**figure.data, "text/html": NOTHING, "text/plain": text}
            display(data, raw=True, metadata=dict(figure.metadata))

    again = end

    def close(self) -> None:
        """Show once more what only clients that redraw displays have; later changes are for these.

        Called when its magic has ended.
        """
        if self._is_redrawn and self._begin_last():
            self._draw(self._shown["text/html"], self._shown["text/plain"])
        self._is_alone, self._is_page = False, True

    def _begin_last(self) -> bool:
        """Make the next drawing a new display that takes the place of the one that is there.

        Return False if that is redrawn instead: on a page, if its cell shows something else too.
        A page on which somebody has cleared the cell's output shows new displays alone.
        """
        if not (self._is_there or self._above) or self._find_place() != self._place:
            return False
        is_alone = self._is_alone and OUTPUTS.number == self._displays + self._below.count
        if is_alone and not (self._is_page and self._below.count):  # a page may draw in these
            # What was typed goes too, and after Stop the box, which a page leaves there.  Not
            # before: a box that waits would go.
            clear_output(wait=True)
            self._above, self._below = "", Below(self._pool)
            self._displays = OUTPUTS.number = 0
        elif self._is_page:
            return False
        elif self._is_there:
            self._above = self._id
        self._begin()
        return True

    def pause(self) -> None:
        """Leave room for other output below it."""

    def end_again(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        """Show what a rank has printed after the end, if it can change."""
        self._draw_final(transcript, logs)
        self._is_redrawn = False  # clients that redraw nothing have the cell as it was at its end
        self._below.change(transcript)

    def _draw_final(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        note = " · ".join(self._notes)
        shown = final_layout(transcript, logs, note, time.monotonic(), pool=self._pool)
        shown = final_tabs(shown, transcript, logs, self._tabs) if self._tabs else shown
        timeless = shown._replace(seconds="", pace="")
        html = panel_html(timeless if self._seconds == "none" else shown)
        self._draw(html, panel_text(shown if self._seconds == "all" else timeless))

    def _passing_text(self, text: str) -> str:
        """End a text that is not the last: a client that redraws nothing shows the next behind."""
        return text if self._is_page else f"{text}\n"

    def _draw(self, html: str, text: str) -> None:
        bundle = self._shown = {"text/html": _encodable(html), "text/plain": _encodable(text)}
        self._is_redrawn = self._is_there
        if self._is_there:
            update_display(bundle, display_id=self._id, raw=True)
        else:
            display(bundle, display_id=self._id, raw=True)
            self._is_there = True
            self._displays += 1
            OUTPUTS.number += 1
        if self._above:
            update_display(EMPTY.data, display_id=self._above, raw=True)
            self._above = ""


def _encodable(text: str) -> str:
    """Escape halves of surrogate pairs, which cannot be sent to a page as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


class PlainDisplay:
    """Lines as they come, for terminals and logs; called as a `PanelDisplay` is."""

    can_change = False

    def __init__(self, notes: Sequence[str] = (), *, colours: bool = False, pool: str = "") -> None:
        self._pool = pool
        self._notes = notes
        self._colours = colours
        self._lines: PlainLines | None = None
        self._waits = ""
        self._warned = 0
        self._stream = sys.stdout
        self._bars = MovingLine(self._stream)

    def note(self, text: str, *, at_once: bool = True, stays: bool = True) -> None:
        self.say(in_pool(text, self._pool))

    def wait_for(self, text: str) -> None:
        self.say(text)

    def say(self, text: str, html: str = "") -> None:
        self._bars.clear()
        sys.stdout.write(f"{text}\n")

    answer = say

    def show(self, transcript: Transcript, news: News, waits: str = "", usage: str = "") -> None:
        now = time.monotonic()
        if self._lines is None:
            self._lines = PlainLines(transcript.ranks)
        for rank, output in news:
            self._write(self._lines.receive(rank, output, now))
        self._write(self._lines.due(now))
        self._warn(transcript)
        if waits and waits != self._waits:
            self.note(waits)
        self._waits = waits
        # Else a prompt is open, which is drawn below all lines.
        if sys.stdout is self._stream and self._bars.is_due(now):
            self._bars.show(merged_line(transcript), now)

    def show_all(
        self, transcript: Transcript, asks: str, turn: int, *, is_here: bool = True
    ) -> None:
        self._bars.clear()
        if self._lines is not None:
            self._write(self._lines.flush())
        sys.stdout.flush()

    def typed(self) -> None:
        """Say nothing: the terminal shows what was typed."""

    def pause(self) -> None:
        self._bars.clear()
        sys.stdout.flush()

    def end(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        self._bars.clear()
        if self._lines is not None:
            self._write(self._lines.finish(time.monotonic()))
        self._warn(transcript)
        shown = final_layout(transcript, logs, now=time.monotonic(), pool=self._pool)
        self._write(failures_text(shown, colours=self._colours))
        self._write(curves_lines(shown.curves) if shown.curves else ())
        self._write(save_figures(transcript, logs))
        is_silent = transcript.is_finished and not shown.states
        done = f"✓ {len(transcript.ranks)}" if is_silent else ""
        self.say(" · ".join(filter(None, [head_text(shown), done, *self._notes])))
        sys.stdout.flush()

    def again(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        now = time.monotonic()
        shown = final_layout(transcript, logs, now=now, is_on_page=False, pool=self._pool)
        self.say(panel_text(shown))
        self._write(save_figures(transcript, logs))

    def end_again(self, transcript: Transcript, logs: Mapping[int, str]) -> None:
        pass

    def close(self) -> None:
        pass

    def _warn(self, transcript: Transcript) -> None:
        for text in transcript.warnings[self._warned :]:
            self.say(text)
        self._warned = len(transcript.warnings)

    def _write(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._bars.clear()
            sys.stdout.write(f"{line}\n")


CellDisplay: TypeAlias = PanelDisplay | PlainDisplay
"""Where the output of one cell, or of one magic, appears."""


def make_display(
    shell: InteractiveShell,
    settings: NbDist,
    cell: str = "",
    notes: Sequence[str] = (),
    pool: str = "",
) -> CellDisplay:
    """Return a panel where the shell is a kernel that a page draws for, else plain lines."""
    if has_panels(shell, settings):
        tabs = f"nbdist-{shell.execution_count}" if settings.layout == "tabs" else ""
        return PanelDisplay(
            notes,
            is_alone=is_of_magic(cell),
            is_page=bool(cell_id(shell)),
            place=partial(request_of, shell),
            seconds=settings.seconds,
            pool=pool,
            tabs=tabs,
        )
    is_coloured = sys.stdout.isatty() and str(getattr(shell, "colors", "")).lower() != "nocolor"
    return PlainDisplay(notes, colours=is_coloured, pool=pool)


def has_panels(shell: InteractiveShell, settings: NbDist) -> bool:
    """Return True if cells are shown as panels: on a page, as far as is known."""
    chosen = settings.display
    return chosen == "panel" or (chosen == "auto" and hasattr(shell, "kernel"))


_PANELS_OF = (*CELL_MAGICS, "debug")  # IPython's `%debug` leads to `%dist_debug`


def is_of_magic(cell: str) -> bool:
    """Return True if a cell is one magic of nbdist's: the magic shows all that the cell shows."""
    text = cell.strip()
    found = cell_magic(text) or (magic_at(text, 0) if "\n" not in text else None)
    return found is not None and (found.name.startswith("dist_") or found.name in _PANELS_OF)


# --- what commands show that is more than a line ----------------------------------------------

_CELL = "padding:0 16px 0 0;text-align:left;border:none;font-family:monospace"
_SHORT = 24  # characters that stay in one line, such as `busy 7.5 s`, also on a narrow page
_BLOCK = (
    f"font-family:monospace;font-size:13px;white-space:pre-wrap;margin:0;padding:0 0 0 {INDENT}"
)


@dataclass(frozen=True, slots=True)
class Shown:
    """One output in both of its forms."""

    html: str
    text: str

    def on(self, display: CellDisplay) -> None:
        """Show it there."""
        display.answer(self.text, self.html)


def table(
    head: str,
    rows: Sequence[Sequence[str]],
    colours: Mapping[str, str] | None = None,
    first_width: int = 0,
) -> Shown:
    """Draw rows, headings first, below a line; `colours` are of cells by their first words.

    The first column has room for at least `first_width` characters.
    """
    html = f"<div><b>{escape(head)}</b></div>"
    if rows:
        first, *others = rows
        headings = "".join(f'<th style="{_CELL}">{heading}</th>' for heading in first)
        wide = f"{_CELL};min-width:{0.62 * first_width:.1f}em"  # JupyterLab allows no `ch`
        headings = headings.replace(_CELL, wide, bool(first_width))
        body = "".join(
            f"<tr>{''.join(_cell(text, colours or {}) for text in row)}</tr>" for row in others
        )
        html += f'<table style="border:none;margin:4px 0"><tr>{headings}</tr>{body}</table>'
        rows = [(first[0].ljust(first_width), *first[1:]), *others]
    return Shown(panel(html), "\n".join([head, *aligned(rows)]))


def block(text: str) -> Shown:
    """Show lines as they are."""
    return Shown(f'<pre style="{_BLOCK}">{escape(text)}</pre>', text)


def below(parts: Iterable[Shown]) -> Shown:
    """Show several one below the other."""
    parts = [*parts]
    html, text = "".join(part.html for part in parts), "\n".join(part.text for part in parts)
    return Shown(html, text)


def _cell(text: str, colours: Mapping[str, str]) -> str:
    colour = colours.get(text.partition(" ")[0], "")
    style = f"{_CELL};color:{colour}" if colour else _CELL
    if len(text) <= _SHORT:
        style += ";white-space:nowrap"
    return f'<td style="{style}">{escape(text)}</td>'


# --- how far values have come on their way, shown where it takes longer than a moment ---------

FIRST_SHOWN = 1.0  # seconds that a transfer has taken before anything is said of it


def progress(display: CellDisplay, what: str) -> Callable[[int, int], None]:
    """Return what shows how many bytes of how many have come, and how fast, if it is time."""
    started = time.monotonic()
    due = started + FIRST_SHOWN

    def show(done: int, total: int) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due:
            # Where lines cannot take one another's place the time doubles.
            due = now + (REDRAW if display.can_change else now - started)
            display.wait_for(progress_text(what, done, total, now - started))

    return show


def progress_text(what: str, done: int, total: int, seconds: float) -> str:
    """Write `shipping data: 1.2 GiB of 4 GiB · 1.1 GiB/s`."""
    return f"{what}: {size_text(done)} of {size_text(total)} · {size_text(done / seconds)}/s"


def moved(steps: Generator[int, None, Made], total: int, display: CellDisplay, what: str) -> Made:
    """Take all steps of something that yields how many bytes are done, and return what it makes.

    Stop ends it between two of them, and what it has made so far is released.
    """
    show = progress(display, what)
    with closing(Steps(steps)) as found:
        for done in found:
            show(done, total)
    return found.made
