"""Stacks of a worker that nobody can ask: C code holds the GIL, or it crashes.

Python's faulthandler writes them, in a signal handler, without the GIL.
"""

from __future__ import annotations

import faulthandler
import threading
from typing import IO

from nbdist.wire.looks import STACK_SIGNAL

_open: list[IO[bytes]] = []
"""faulthandler has the descriptor alone; it must not be closed."""


def write_stacks_to(path: str, control: threading.Thread) -> None:
    """Have crashes, and `STACK_SIGNAL`, append stacks to a new file.

    Its first line has what its reader needs to know: the main thread, as faulthandler names
    it, and the number of the control thread, which is the one to be signalled where the main
    thread must not be woken up.
    """
    file = open(path, "ab", buffering=0)  # noqa: SIM115 (for as long as the process lives)
    _open.append(file)
    main = threading.main_thread().ident or 0
    file.write(b"%x %d\n" % (main, control.native_id or 0))
    keep_crashes()
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)


def keep_crashes() -> None:
    """Have crashes go there again: torch's `@record`, for one, has them go to stderr."""
    if _open:
        faulthandler.enable(file=_open[-1], all_threads=False)
