"""Tests of `nbdist.system.wake_pipe`."""

from __future__ import annotations

import select

from nbdist.system.wake_pipe import WakePipe


def is_readable(pipe: WakePipe) -> bool:
    return bool(select.select([pipe.fileno()], [], [], 0.0)[0])


def test_a_pipe_is_readable_from_wake_until_clear() -> None:
    """Several calls of `wake` need one `clear`, and a full pipe blocks nobody."""
    pipe = WakePipe()
    pipe.clear()
    assert not is_readable(pipe)
    for _ in range(2):
        pipe.wake()
    assert is_readable(pipe)
    pipe.clear()
    assert not is_readable(pipe)
    for _ in range(1 << 17):
        pipe.wake()
    assert is_readable(pipe)
    pipe.close()


def test_a_closed_pipe_writes_to_no_other_file() -> None:
    """After `close`, `wake` does not write to a file that has got the descriptor's number."""
    pipe = WakePipe()
    assert repr(pipe) == f"<WakePipe {pipe.fileno()}>"
    pipe.close()
    other = WakePipe()  # Linux gives it the lowest numbers that are free, those of `pipe`
    pipe.wake()
    pipe.close()
    assert not is_readable(other)
    other.wake()
    assert is_readable(other)
    other.close()
    assert repr(pipe) == "<WakePipe closed>"
