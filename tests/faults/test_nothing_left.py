"""Whoever is killed, and whenever: no process, socket, segment or folder stays behind.

The guard in `tests/conftest.py` does the counting, after each test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jupyter_client.blocking import BlockingKernelClient

from tests.notebook import front_end
from tests.waiting import SOON, wait_until

STARTED = """%%distributed -n 2
import subprocess
child = subprocess.Popen(['sleep', '1000'])
subprocess.run(['setsid', '--fork', 'sleep', '1002'])"""
MOMENTS = {
    "idle": "",
    "in a cell": "%%distributed\nimport time; time.sleep(1000)",
    "in a collective": "%%distributed\ndist.barrier() if rank else __import__('time').sleep(1000)",
    "in a loop": "%%distributed\nwhile True: pass",
    "while starting": "%dist_restart",
    # Rank 0 is stopped, so that the agent waits for its part in a new group; rank 1 is dead.
    "while healing": "%%distributed\nimport os, signal, threading\n"
    "end = (signal.SIGSTOP, signal.SIGKILL)[rank]\n"
    "threading.Timer(0.2, os.kill, (os.getpid(), end)).start()",
}


def runtime_folders() -> set[Path]:
    return {*Path(os.environ["XDG_RUNTIME_DIR"]).glob("nbdist-*")}


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Notebook(front_end.Notebook):
    """A real notebook kernel, and the processes that hang on it."""

    def __init__(self) -> None:
        self.before = runtime_folders()
        super().__init__("%load_ext nbdist")
        self.start_workers()

    def start_workers(self) -> None:
        """Two, each with a child, and one more that has left its session and its parent."""
        assert not self.run(STARTED).errors
        forked = self.find("nbdist.agent.fork_server ")
        (self.fork_server,) = (each for each in forked if each.parent() == self.agent)
        assert len(self.workers) == 2
        # Of killed workers that one stays until the agent ends.
        wait_until(lambda: len(self.find("sleep 1002")) > 1, "the daemons run")
        wait_until(lambda: len(self.find("sleep 1000")) == 2, "there is a child of each")

    def begin(self, moment: str, *deaths: str) -> None:
        """Start a cell that will not end by itself; these die once the workers have it."""
        if source := MOMENTS[moment]:
            self.client.execute(source, stop_on_error=False)
            # There is no fact to wait for: the moment is arbitrary anyway.
            time.sleep(1.0 if "Timer" in source else 0.5)
        for death in deaths:
            DEATHS[death](self)

    def find(self, part: str) -> list[psutil.Process]:
        """The kernel's descendants whose command line holds `part`."""
        found = []
        for process in self.process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if is_alive(process) and part in " ".join(process.cmdline()):
                    found.append(process)
        return found

    @property
    def guard(self) -> psutil.Process:
        return self.find("nbdist.agent /")[0]

    @property
    def agent(self) -> psutil.Process:
        return self.guard.children()[0]

    @property
    def workers(self) -> list[psutil.Process]:
        forked = self.find("nbdist.agent.fork_server ")
        return [process for process in forked if process != self.fork_server]

    def has_nothing(self, when: str) -> None:
        """Wait until it has no process of nbdist's, and no runtime folder."""
        deadline = time.monotonic() + SOON
        while left := [*self.find(""), *(runtime_folders() - self.before)]:
            assert time.monotonic() < deadline, f"left {when}: {left}"
            time.sleep(0.1)  # each look takes as long as ten steps of other tests


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    try:
        yield notebook
    finally:
        notebook.close()


def kill(*processes: psutil.Process) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


DEATHS: dict[str, Callable[[Notebook], object]] = {
    "kernel and agent": lambda notebook: kill(notebook.process, notebook.agent),
    "agent": lambda notebook: notebook.agent.kill(),
    "agent, by SIGTERM": lambda notebook: notebook.agent.send_signal(signal.SIGTERM),
    "fork server": lambda notebook: notebook.fork_server.kill(),
    "guard": lambda notebook: notebook.guard.kill(),
    "a worker": lambda notebook: kill(*notebook.workers[-1:]),  # none, where they just start
    "workers": lambda notebook: kill(*notebook.workers),
}


def test_nothing_is_left_of_the_kernel(notebook: Notebook) -> None:
    """It dies with its agent, after the fork server: all that hung on them goes within seconds."""
    notebook.begin("in a collective", "fork server", "kernel and agent")


def test_nothing_is_left_of_kernels_that_are_ended(notebook: Notebook) -> None:
    """One is restarted, though its fork server is dead, and the one after it shut down."""
    notebook.begin("while healing", "fork server")
    notebook.manager.restart_kernel(now=False)
    notebook.client.wait_for_ready(timeout=SOON)
    assert not notebook.run("%load_ext nbdist").errors
    notebook.start_workers()
    notebook.begin("in a collective")
    notebook.manager.shutdown_kernel(now=False)


def test_nothing_is_left_of_workers_and_agents(notebook: Notebook) -> None:
    """Children end with their worker, all with guard, agent or kernel; a notebook can go on.

    The kernel is killed at the end, while workers start.
    """

    def go_on() -> None:
        assert not notebook.run("%dist_restart").errors
        notebook.start_workers()

    for moment, deaths in (
        ("idle", ["workers"]),
        ("in a cell", ["fork server", "a worker"]),
        ("while starting", ["workers"]),
    ):
        children = {child: child.parent() for child in notebook.find("sleep 1000")}
        notebook.begin(moment, *deaths)
        for child, worker in children.items():
            if worker and not is_alive(worker):
                wait_until(lambda child=child: not is_alive(child), f"{child} ends {moment}")
        notebook.manager.interrupt_kernel()
        go_on()
    for moment, deaths in (
        ("while starting", ["agent"]),
        ("while healing", ["fork server", "agent, by SIGTERM"]),
        ("in a loop", ["fork server", "guard"]),
    ):
        notebook.begin(moment, *deaths)
        notebook.has_nothing(f"after {deaths} {moment}")
        go_on()
    notebook.begin("while starting")
    notebook.process.kill()


SERVER = """
import sys
from jupyter_client.manager import KernelManager

manager = KernelManager(kernel_name="python3", transport="ipc", ip=f"{sys.argv[1]}/kernel")
manager.start_kernel()
print(manager.connection_file, flush=True)
sys.stdin.read()
"""
"""Starts a kernel as Jupyter's server does."""


def test_nothing_is_left_of_the_server(runtime: Path) -> None:
    """Killed, it takes its kernel along, and all that hangs on that."""
    environ = {**os.environ, "JUPYTER_RUNTIME_DIR": str(runtime), "NBDIST_LOG_DIR": ""}
    command = [sys.executable, "-c", SERVER, str(runtime)]
    client = BlockingKernelClient()
    with subprocess.Popen(command, env=environ, stdin=-1, stdout=-1, text=True) as server:
        try:
            client.load_connection_file(server.stdout.readline().strip())
            # Without the heartbeat, by which a kernel is dead that is busy for a second.
            client.start_channels(hb=False)
            client.wait_for_ready(timeout=SOON)
            for source in ("%load_ext nbdist", STARTED):
                reply = client.execute_interactive(source, timeout=SOON, output_hook=lambda _: None)
                assert reply["content"]["status"] == "ok", reply
            client.execute(MOMENTS["while healing"])
            time.sleep(1.0)  # there is no fact to wait for: the moment is arbitrary anyway
        finally:
            server.kill()
            client.stop_channels()
