"""Notices that the page was reloaded: what ran meanwhile stands still there for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.world.running import RunningTask

LONG_CELL = 2.0
"""Seconds: in the middle of a shorter one hardly anybody reloads."""

RELOADED = "the page was reloaded: `%dist_output` shows the last cell again, if that stands still"


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


def session_of(shell: InteractiveShell) -> str:
    """Return the session of who has sent the cell that runs; "" in a terminal."""
    parent: Any = getattr(shell, "get_parent", dict)()
    return str(parent.get("header", {}).get("session", ""))
