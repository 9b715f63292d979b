"""Whoever is killed, and whenever: no process, socket, segment or folder stays behind.

The guard in `tests/conftest.py` does the counting, after each test.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import start_new_kernel
from jupyter_core.utils import ensure_event_loop

from tests.waiting import SOON, wait_until

# jupyter_client's blocking calls run on a loop that lives as long as the process.
ensure_event_loop()


STARTED = "%%distributed -n 2\nimport subprocess; child = subprocess.Popen(['sleep', '1000'])"
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


class Notebook:
    """A real notebook kernel, and the processes that hang on it."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3")
        assert isinstance(self.client, BlockingKernelClient)
        self.run("%load_ext nbdist")
        self.run(STARTED)
        (self.fork_server,) = self.agent.children()

    def run(self, source: str) -> None:
        reply = self.client.execute_interactive(source, timeout=SOON, output_hook=lambda _: None)
        assert reply["content"]["status"] == "ok", reply

    def begin(self, source: str) -> None:
        """Start a cell that will not end by itself, and wait until the workers have it."""
        if source:
            self.client.execute(source)
            time.sleep(
                1.0 if "Timer" in source else 0.5
            )  # there is no fact to wait for: the moment is arbitrary anyway

    @property
    def kernel(self) -> psutil.Process:
        return psutil.Process(self.manager.provisioner.process.pid)  # type: ignore[union-attr]

    def find(self, part: str) -> list[psutil.Process]:
        """The kernel's descendants whose command line holds `part`."""
        return [
            process
            for process in self.kernel.children(recursive=True)
            if process.status() != psutil.STATUS_ZOMBIE and part in " ".join(process.cmdline())
        ]

    @property
    def guard(self) -> psutil.Process:
        return self.find("nbdist.node /")[0]

    @property
    def agent(self) -> psutil.Process:
        return self.guard.children()[0]

    @property
    def workers(self) -> list[psutil.Process]:
        forked = self.find("nbdist.node.fork_server /")
        return [process for process in forked if process != self.fork_server]

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    notebook = Notebook()
    try:
        yield notebook
    finally:
        notebook.close()


def kill_kernel(notebook: Notebook) -> None:
    notebook.kernel.kill()


def kill_agent(notebook: Notebook) -> None:
    notebook.agent.kill()


def stop_agent(notebook: Notebook) -> None:
    notebook.agent.send_signal(signal.SIGTERM)


def kill_fork_server(notebook: Notebook) -> None:
    notebook.fork_server.kill()


def kill_guard(notebook: Notebook) -> None:
    notebook.guard.kill()


def kill_one_worker(notebook: Notebook) -> None:
    for worker in notebook.workers[-1:]:  # none, where they are just being started
        worker.kill()


def kill_all_workers(notebook: Notebook) -> None:
    for worker in notebook.workers:
        worker.kill()


def kill_kernel_and_agent(notebook: Notebook) -> None:
    agent = notebook.agent
    notebook.kernel.kill()
    agent.kill()


def restart_kernel(notebook: Notebook) -> None:
    notebook.manager.restart_kernel(now=False)


def shut_down_kernel(notebook: Notebook) -> None:
    notebook.manager.shutdown_kernel(now=False)


ALWAYS = (kill_kernel, kill_agent, kill_fork_server, kill_one_worker, kill_all_workers)
DEATHS = (
    kill_guard,
    stop_agent,
    kill_kernel_and_agent,
    restart_kernel,
    shut_down_kernel,
)


OFTEN = ("in a collective", "while healing")

MATRIX = [
    pytest.param(death, moment, id=f"{death.__name__}-{moment}")
    for deaths, moments in ((ALWAYS, tuple(MOMENTS)), (DEATHS, OFTEN))
    for death in deaths
    for moment in moments
]


@pytest.mark.parametrize(("death", "moment"), MATRIX)
def test_nothing_is_left(
    notebook: Notebook, death: Callable[[Notebook], None], moment: str
) -> None:
    """Whoever dies, everything that hung on it is gone within seconds, children included."""
    notebook.begin(MOMENTS[moment])
    death(notebook)


SECOND = (*(death for death in (*ALWAYS, *DEATHS) if death is not kill_fork_server),)


@pytest.mark.parametrize("death", SECOND, ids=lambda death: death.__name__)
def test_nothing_is_left_after_the_fork_server(
    notebook: Notebook, death: Callable[[Notebook], None]
) -> None:
    """The fork server is killed, its workers live on; whoever dies next, nothing stays behind."""
    workers = notebook.workers
    kill_fork_server(notebook)
    notebook.fork_server.wait(SOON)
    assert notebook.workers == workers
    death(notebook)


def test_a_daemon_of_a_worker_ends_with_a_killed_agent(notebook: Notebook) -> None:
    """What has left its session and its parent is ended by the guard, fork server or not."""
    notebook.run(
        "%%distributed -r 0\nimport subprocess\n"
        "subprocess.Popen(['setsid', '--fork', 'sleep', '1002'])"
    )
    wait_until(lambda: notebook.find("1002"), "the daemon runs")
    kill_fork_server(notebook)
    kill_agent(notebook)


def test_shutdown_leaves_nothing_while_the_notebook_goes_on(notebook: Notebook) -> None:
    """After `%dist_shutdown` the notebook has no process of nbdist's, and no runtime folder."""
    notebook.run("%dist_shutdown")
    assert notebook.kernel.children(recursive=True) == []
    folder = Path(os.environ["XDG_RUNTIME_DIR"])
    assert not [found for found in folder.iterdir() if found.name.startswith("nbdist-")]


def test_a_daemon_started_in_a_cell_ends_with_the_workers(notebook: Notebook) -> None:
    """A process that left its session and its parent is ended too."""
    notebook.run(
        "%%distributed -r 0\nimport os\nif os.fork() == 0:\n    os.setsid()\n"
        "    os.execvp('sleep', ['sleep', '1001']) if os.fork() == 0 else os._exit(0)"
    )
    wait_until(lambda: notebook.find("1001"), "the daemon runs")  # after the cell
    notebook.run("%dist_shutdown")
    assert not notebook.find("1001")
