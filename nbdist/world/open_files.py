"""Refuses to begin where zmq would end the notebook's process for lack of open files."""

from __future__ import annotations

import os
import resource

from nbdist.errors import UsageError

NEEDED = 20
"""What a link opens in the notebook's process, 16, and what is read now and then."""


def require_open_files() -> None:
    """Raise UsageError if this process cannot open `NEEDED` more files."""
    opened: list[int] = []
    try:
        while len(opened) < NEEDED:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise UsageError(
            "nbdist cannot be used here, neither its magics nor workers: this process can open "
            f"{len(opened)} more files, and {NEEDED} are needed ({error.strerror}; `ulimit -n` is "
            f"{most}). Start the notebook after `ulimit -n 1024`."
        ) from None
    finally:
        for each in opened:
            os.close(each)
