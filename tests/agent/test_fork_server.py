"""Tests of `nbdist.agent.fork_server`: a real one, asked over its socket as an agent asks it."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.agent import fork_server
from nbdist.wire.frames import FrameCutter, framed, pack
from tests.agent.sources import worker_start
from tests.waiting import SOON

pytestmark = pytest.mark.own_agent


class Agent:
    """The agent's end of the socket pair."""

    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self._server = fork_server.start_fork_server(runtime)
        self._server.socket.settimeout(SOON)
        self._cutter = FrameCutter()
        self._messages: deque[Any] = deque()
        self.process = psutil.Process(self._server.popen.pid)

    def receive(self) -> Any:
        """The next message."""
        while not self._messages:
            data = self._server.socket.recv(1 << 16)
            assert data, "the fork server has ended"
            self._messages.extend(map(pickle.loads, self._cutter.feed(data)))
        return self._messages.popleft()

    def ask(self, number: int) -> int:
        """Ask for a worker; the read end of its stdout."""
        read, write = os.pipe()
        frame = framed(pack(fork_server.Fork(number, worker_start(self.runtime, number))))
        sent = socket.send_fds(self._server.socket, [frame], [write, write])
        self._server.socket.sendall(frame[sent:])
        os.close(write)
        return read

    def leave(self) -> None:
        """Close this end."""
        self._server.socket.close()

    def close(self) -> None:
        self._server.popen.kill()
        self._server.popen.wait()
        self.leave()


@pytest.fixture
def agent(runtime: Path) -> Iterator[Agent]:
    agent = Agent(runtime)
    try:
        yield agent
    finally:
        agent.close()


def test_requests_and_the_end(agent: Agent) -> None:
    """Each worker has its own descriptors, and none of the others', also where all come at once.

    It has a session of its own.  Once the agent has closed its end it ends, its workers too, and
    the folder is gone.
    """
    assert os.getsid(agent.process.pid) == agent.process.pid
    assert agent.receive() == fork_server.Imported()
    agent.process.suspend()  # so that all of them are there when it reads
    outputs = [agent.ask(number) for number in range(3)]
    agent.process.resume()
    *forked, last = sorted((agent.receive() for _ in outputs), key=lambda each: each.number)
    assert {*map(type, forked)} == {fork_server.Forked}
    for each in forked:
        assert os.getsid(each.pid) == each.pid
        os.kill(each.pid, signal.SIGKILL)
        assert agent.receive() == fork_server.WorkerExited(each.number, each.pid, -signal.SIGKILL)
        while os.read(outputs[each.number], 1 << 16):
            pass  # its end is here: no other worker has that pipe
    worker = psutil.Process(last.pid)
    agent.leave()
    agent.process.wait(SOON)
    assert not worker.is_running()
    assert not agent.runtime.exists()
    agent.runtime.mkdir()  # for the one that has made it
    for output in outputs:
        os.close(output)
