"""Auto mode: whether it is on, and what it has made of the cell that runs."""

from __future__ import annotations

NOTE = "auto mode: `%%local` on the first line runs a cell here"
"""What every panel says while it is on."""


class AutoMode:
    """Whether it is on, and for which pool.

    `running` is what the kernel runs in place of the last cell, and `typed` what that was;
    `ran` is what it has run in place of those in the history, by their numbers.  `loaded` are the
    packages of extensions that the ranks have loaded.
    """

    def __init__(self) -> None:
        self.pool: str | None = None
        self.running = self.typed = ""
        self.ran: dict[int, str] = {}
        self.loaded: set[str] = set()

    def __repr__(self) -> str:
        return f"<AutoMode {'off' if self.pool is None else f'on for {self.pool}'}>"

    @property
    def is_on(self) -> bool:
        """Whether plain cells run on the workers."""
        return self.pool is not None
