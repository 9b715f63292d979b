"""Tests of `nbdist.agent.fork_messages`: a fork server that is started, and what is sent to it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from nbdist.agent.fork_messages import Fork, Forked, Imported, log_file, start_fork_server, to_frame
from nbdist.wire.frames import FrameCutter
from tests.agent.sources import worker_start


def test_messages_arrive_as_they_were_sent(runtime: Path) -> None:
    """Each in a frame of its own."""
    messages = [Fork(1, worker_start(runtime)), Imported(more=False), Forked(7, 4711)]
    frames = FrameCutter().feed(b"".join(map(to_frame, messages)))
    assert [pickle.loads(frame) for frame in frames] == messages


@pytest.mark.own_agent
def test_it_is_started_beside_the_agent(runtime: Path) -> None:
    """It has a session of its own, and a log, and the start does not wait for its imports."""
    started = start_fork_server(runtime)
    try:
        assert os.getsid(started.popen.pid) == started.popen.pid
        assert log_file(runtime).read_text() == ""
    finally:
        started.popen.kill()
        started.popen.wait()
        started.socket.close()
