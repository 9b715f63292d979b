"""Keeps the cores busy, as other people's work does on shared machines and laptops."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPIN = "import os\nparent = {parent}\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"


@contextmanager
def spinning(processes: int) -> Iterator[None]:
    """So many processes that never rest; they end with this one at the latest."""
    command = [sys.executable, "-c", SPIN.format(parent=os.getpid())]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
