"""Whichever process is killed, and whenever: no process, socket, segment or folder stays behind.

The guard in `tests/conftest.py` does the counting, after each test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_core.utils import ensure_event_loop

from nbdist.system.processes import WORKER_PID
from tests.notebook import front_end
from tests.traces import command_line, environ_of
from tests.waiting import SOON, STEP, wait_until

# jupyter_client's blocking calls run on a loop that lives as long as the process.
ensure_event_loop()

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
    """A real notebook kernel, and the processes that depend on it."""

    def __init__(self) -> None:
        self.before = runtime_folders()
        super().__init__("%load_ext nbdist")
        self.start_workers()

    def start_workers(self) -> None:
        """Start two workers, each with a child and a daemon that has left its session."""
        assert not self.run(STARTED).errors
        forked, out = self.find("nbdist.agent.fork_server "), "/proc/{}/fd/1"
        (self.fork_server,) = (p for p in forked if "log" in os.readlink(out.format(p.pid)))
        assert len(self.workers) == 2
        for seconds in (1000, 1002):
            wait_until(lambda s=seconds: len(self.find(f"sleep {s}")) == 2, "each has one")

    def begin(self, source: str) -> None:
        """Send a cell, unless empty, and return at an arbitrary moment while it runs."""
        if source:
            self.client.execute(source, stop_on_error=False)
            # No event is waited for: any moment of the cell will do.
            time.sleep(1.0 if "Timer" in source else 0.5)

    def find(self, part: str) -> list[psutil.Process]:
        """Return the kernel's living descendants whose command line contains `part`."""
        there = self.process.children(recursive=True)
        return [each for each in there if part in " ".join(command_line(each)) and is_alive(each)]

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

    def end_by(self, deaths: Sequence[str], moment: str) -> None:
        """Cause `deaths` in turn during the cell of `moment`, and wait until nothing is left."""
        self.begin(MOMENTS[moment])
        there = self.find("")
        for death in deaths:
            DEATHS[death](self)
        self.has_nothing_of(there, f"after {deaths} {moment}")

    @property
    def has_ended(self) -> bool:
        """Whether the notebook's kernel was shut down."""
        provisioner = self.manager.provisioner
        return provisioner is None or provisioner.process is None  # type: ignore[attr-defined]

    def folders_left_by(self, there: Sequence[psutil.Process]) -> set[Path]:
        """Return the new runtime folders, except for folders of agents that are not in `there`."""
        used = set[Path]()
        with suppress(psutil.NoSuchProcess):  # its kernel has ended
            found = [] if self.has_ended else self.find("nbdist.agent /")
            others = (each for each in found if each not in there)
            used = {Path(part) for each in others for part in command_line(each)}
        return runtime_folders() - self.before - used

    def has_nothing_of(self, there: Iterable[psutil.Process], when: str) -> None:
        """Wait until the processes in `there` have ended, and their runtime folders are gone.

        A restart whose agent is killed early starts another agent, which has a folder of its own.
        """
        deadline, there = time.monotonic() + SOON, [*there]
        while left := [*filter(is_alive, there), *(self.folders_left_by(there))]:
            assert time.monotonic() < deadline, f"left {when}: {left}"
            time.sleep(STEP)


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
    "killed": lambda notebook: notebook.manager.restart_kernel(now=True),
    "restarted": lambda notebook: notebook.manager.restart_kernel(now=False),
    "shut down": lambda notebook: notebook.manager.shutdown_kernel(now=False),
    "agent": lambda notebook: notebook.agent.kill(),
    "agent, by SIGTERM": lambda notebook: notebook.agent.send_signal(signal.SIGTERM),
    "fork server": lambda notebook: notebook.fork_server.kill(),
    "guard": lambda notebook: notebook.guard.kill(),
    "a worker": lambda notebook: kill(*notebook.workers[-1:]),  # none, while workers start
    "workers": lambda notebook: kill(*notebook.workers),
}


def test_nothing_is_left_of_agent_and_kernel(notebook: Notebook) -> None:
    """If guard, agent or fork server die while the notebook goes on, nothing is left of the world.

    Nor is anything left if the notebook's kernel is restarted or dies.
    """
    for deaths, moment in (
        (["agent"], "while starting"),
        (["fork server", "agent"], "in a cell"),
        (["agent, by SIGTERM"], "in a collective"),
        (["fork server", "agent, by SIGTERM"], "while healing"),
        (["fork server", "guard"], "in a loop"),
    ):
        notebook.end_by(deaths, moment)
        assert not notebook.run("%dist_restart").errors
        notebook.start_workers()
    for deaths, moment in (
        (["fork server", "killed"], "while starting"),
        (["fork server", "restarted"], "while healing"),
    ):
        notebook.end_by(deaths, moment)
        notebook.client.wait_for_ready(timeout=SOON)
        assert not notebook.run("%load_ext nbdist").errors
        notebook.start_workers()
    notebook.end_by(["fork server", "kernel and agent"], "in a collective")


def test_nothing_is_left_of_workers(notebook: Notebook) -> None:
    """Children end with their worker, even without a fork server; a world leaves no process."""
    for number, moment in enumerate(MOMENTS):
        notebook.begin(MOMENTS[moment])
        started = [*notebook.find("sleep 1000"), *notebook.find("sleep 1002")]
        by_pid = {worker.pid: worker for worker in notebook.workers}
        children = {each: by_pid.get(int(environ_of(each).get(WORKER_PID, 0))) for each in started}
        if moment == "in a cell":
            DEATHS["fork server"](notebook)
        DEATHS[("workers", "a worker")[number % 2]](notebook)
        for child, worker in children.items():
            if worker and not is_alive(worker):
                wait_until(lambda child=child: not is_alive(child), f"{child} ends {moment}")
        if moment == "while healing":  # the notebook waits for a rank that is stopped
            break
        notebook.manager.interrupt_kernel()
        if moment == "in a cell":  # another fork server has to be started anyway
            there = notebook.find("")
            assert not notebook.run("%dist_shutdown").errors
            notebook.has_nothing_of(there, "after %dist_shutdown")
        else:
            assert not notebook.run("%dist_restart").errors
        notebook.start_workers()
    notebook.end_by(["shut down"], "idle")


SHARED = {
    # An array so big that joblib passes it in a file.
    "joblib": "import numpy\narray = numpy.zeros(1 << 18)\n"
    "joblib.Parallel(n_jobs=2)(joblib.delayed(numpy.sum)(array) for _ in range(2));",
    "torch.multiprocessing": "torch.multiprocessing.set_sharing_strategy('file_system')\n"
    "shared = torch.zeros(9).share_memory_()",
}


@pytest.mark.parametrize("library", SHARED)
def test_no_shared_memory_is_left_of_libraries(notebook: Notebook, library: str) -> None:
    """The library's own process removes shared memory if a rank is killed or the kernel ends."""
    pytest.importorskip(library)

    def shared(worker: psutil.Process) -> list[Path]:
        return [each for each in Path("/dev/shm").iterdir() if f"{worker.pid}" in each.name]

    ran = notebook.run(f"%%distributed\nimport {library}\n{SHARED[library]}")
    assert not ran.errors
    workers = notebook.workers
    assert all(map(shared, workers))
    kill(workers[0])
    wait_until(lambda: not shared(workers[0]), "that of the killed rank is removed")
    assert shared(workers[1])
    notebook.end_by(["shut down"], "idle")
    assert not shared(workers[1])


SERVER = """
import sys
from jupyter_client.manager import KernelManager
manager = KernelManager(kernel_name="python3", connection_file=sys.argv[1])
manager.start_kernel()
sys.stdin.read()
"""
"""Starts a kernel as a Jupyter server does."""


def test_nothing_is_left_of_a_server(tmp_path: Path) -> None:
    """If a server is killed, its kernels and their workers end, which the guard checks."""
    file, client = tmp_path / "kernel.json", BlockingKernelClient()
    command = [sys.executable, "-c", SERVER, str(file)]
    environ = {**os.environ, "NBDIST_LOG_DIR": ""}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ) as server:
        try:
            wait_until(lambda: file.exists() and file.read_text().endswith("}"), "it has a kernel")
            client.load_connection_file(str(file))
            # Without the heartbeat, which takes a kernel for dead that is busy for a second.
            client.start_channels(hb=False)
            client.wait_for_ready(timeout=SOON)
            for source in ("%load_ext nbdist", STARTED):
                reply = client.execute_interactive(source, timeout=SOON, output_hook=lambda _: None)
                assert reply["content"]["status"] == "ok", reply
            client.execute(MOMENTS["while healing"])
            time.sleep(1.0)  # no event is waited for: any moment will do
        finally:
            server.kill()
            client.stop_channels()
