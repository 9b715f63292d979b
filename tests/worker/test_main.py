"""Tests of `nbdist.worker.main`: how a worker begins, and how it ends when it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worlds import NewWorld

LAST = """
import atexit, ctypes
from pathlib import Path

libc = ctypes.CDLL(None)
libc.fopen.restype, libc.fputs.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_void_p)

def last():
    Path(f"{folder}/{rank}.txt").write_text(f"in a group: {dist.is_initialized()}")
    libc.fputs(b"not flushed", libc.fopen(f"{folder}/{rank}.c".encode(), b"w"))

_ = atexit.register(last)
"""


@pytest.mark.parametrize("backend", ["gloo", "none"])
def test_exit_handlers_run(new_world: NewWorld, tmp_path: Path, backend: str) -> None:
    """After the group has been left, also one that user code has made; C code's output too."""
    with new_world(2, backend=backend) as world:
        world.execute(f"folder = {str(tmp_path)!r}\n{LAST}")
        if backend == "none":
            world.execute("dist.init_process_group('gloo')")
        world.execute("dist.all_reduce(torch.ones(1))")
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == "in a group: False"
        assert (tmp_path / f"{rank}.c").read_text() == "not flushed"


def test_nobody_sits_at_a_terminal(new_world: NewWorld) -> None:
    """Libraries that look for a prompt find none, and nobody is told how to leave."""
    with new_world(1) as world:
        world.execute("import sys, warnings")
        assert world.gather("[hasattr(sys, name) for name in ('ps1', 'ps2')]") == [[False, False]]
        running = world.submit(world.task("warnings.warn('To exit: use quit', stacklevel=1)"))
        world.session.wait(running)
        assert running.transcript[0].line_count == 0
