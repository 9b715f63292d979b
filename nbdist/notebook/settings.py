"""What a user can set: `%config NbDist`, or the environment before the notebook starts."""

from __future__ import annotations

import os

from traitlets import Bool, Enum, default
from traitlets.config import Configurable


class NbDist(Configurable):
    """Settings of nbdist in this notebook."""

    display = Enum(
        ["auto", "panel", "plain"],
        help="How cells show their output: a panel that is redrawn, or plain lines as they come."
        " auto: a panel in a notebook, plain lines in a terminal. NBDIST_DISPLAY sets it too.",
    ).tag(config=True)

    seconds = Enum(
        ["page", "all", "none"],
        help="Where a finished cell's panel says how long it took. page: on the page, not in its"
        " text/plain, so that outputs that are the same stay the same in a diff. none: nowhere,"
        " and the panel is drawn once, at the end, which nbval compares. NBDIST_SECONDS sets it"
        " too.",
    ).tag(config=True)

    prestart = Bool(
        help="Import torch in the background as soon as the extension is loaded, so that the"
        " first cell starts at once. NBDIST_PRESTART=0 turns it off.",
    ).tag(config=True)

    @default("display")
    def _display_from_environment(self) -> str:
        chosen = os.environ.get("NBDIST_DISPLAY", "auto")
        return chosen if chosen in ("panel", "plain") else "auto"

    @default("seconds")
    def _seconds_from_environment(self) -> str:
        chosen = os.environ.get("NBDIST_SECONDS", "page")
        return chosen if chosen in ("all", "none") else "page"

    @default("prestart")
    def _prestart_from_environment(self) -> bool:
        return os.environ.get("NBDIST_PRESTART", "1") != "0"
