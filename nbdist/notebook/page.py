"""Notices that the page was reloaded: what ran meanwhile stands still there for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.notebook.tables import Shown
from nbdist.output.final import final_layout
from nbdist.output.html import panel_html
from nbdist.output.markup import GREY, details, dim, panel
from nbdist.output.text import panel_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.world.running import RunningTask

LONG_CELL = 2.0
"""Seconds: in the middle of a shorter one hardly anybody reloads."""

RELOADED = "The page was reloaded while{} ran. Its complete output:"


class Page:
    """Remembers which page has run the last distributed cell; each has a session of its own."""

    def __init__(self) -> None:
        self._session = ""

    def __repr__(self) -> str:
        return f"<Page {self._session}>"

    def has_missed(self, shell: InteractiveShell, last: RunningTask | None) -> bool:
        """Say whether the page that runs this cell was loaded after `last` had begun, a long one.

        Once for each page.
        """
        before, self._session = self._session, session_of(shell)
        is_another = bool(before and self._session) and before != self._session
        return is_another and last is not None and last.transcript.elapsed() >= LONG_CELL


def missed(last: RunningTask, logs: Mapping[int, str]) -> Shown:
    """Draw what that cell has shown, closed: whoever reloaded after its end has it already."""
    shown, number = final_layout(last.transcript, logs), last.task.execution_count
    title = RELOADED.format(" the last cell" if number is None else f" cell [{number}]")
    html = panel(details(dim(title), panel_html(shown), GREY, is_open=False))
    return Shown(html, f"{title}\n{panel_text(shown)}")


def session_of(shell: InteractiveShell) -> str:
    """Return the session of who has sent the cell that runs; "" in a terminal."""
    parent: Any = getattr(shell, "get_parent", dict)()
    return str(parent.get("header", {}).get("session", ""))
