"""Whoever is killed, and whenever: no process, socket, segment or folder stays behind.

The guard in `tests/conftest.py` does the counting, after each test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_core.utils import ensure_event_loop

from tests.notebook import front_end
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
    """A real notebook kernel, and the processes that hang on it."""

    def __init__(self) -> None:
        self.before = runtime_folders()
        super().__init__("%load_ext nbdist")
        self.start_workers()

    def start_workers(self) -> None:
        """Two, each with a child, and one more that has left its session and its parent."""
        assert not self.run(STARTED).errors
        forked, out = self.find("nbdist.agent.fork_server "), "/proc/{}/fd/1"
        (self.fork_server,) = (p for p in forked if "log" in os.readlink(out.format(p.pid)))
        assert len(self.workers) == 2
        # Of killed workers that one stays until the agent ends.
        wait_until(lambda: len(self.find("sleep 1002")) > 1, "the daemons run")
        wait_until(lambda: len(self.find("sleep 1000")) == 2, "there is a child of each")

    def begin(self, source: str) -> None:
        """Start a cell that will not end by itself, and wait until the workers have it."""
        if source:
            self.client.execute(source, stop_on_error=False)
            # There is no fact to wait for: the moment is arbitrary anyway.
            time.sleep(1.0 if "Timer" in source else 0.5)

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

    def end_by(self, deaths: Sequence[str], moment: str) -> None:
        """Have these die one after the other in that moment, and wait until nothing is left."""
        self.begin(MOMENTS[moment])
        there = self.find("")
        for death in deaths:
            DEATHS[death](self)
        self.has_nothing_of(there, f"after {deaths} {moment}")

    def has_nothing_of(self, there: Iterable[psutil.Process], when: str) -> None:
        """Wait until these processes have ended, and it has no runtime folder."""
        deadline = time.monotonic() + SOON
        while left := [*filter(is_alive, there), *(runtime_folders() - self.before)]:
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
    "restarted": lambda notebook: notebook.manager.restart_kernel(now=False),
    "shut down": lambda notebook: notebook.manager.shutdown_kernel(now=False),
    "agent": lambda notebook: notebook.agent.kill(),
    "agent, by SIGTERM": lambda notebook: notebook.agent.send_signal(signal.SIGTERM),
    "fork server": lambda notebook: notebook.fork_server.kill(),
    "guard": lambda notebook: notebook.guard.kill(),
    "a worker": lambda notebook: kill(*notebook.workers[-1:]),  # none, where they just start
    "workers": lambda notebook: kill(*notebook.workers),
}


def test_nothing_is_left_of_agent_and_kernel(notebook: Notebook) -> None:
    """Whoever dies of guard, agent and fork server: the notebook that goes on has nothing left.

    Nor has one that is started again, or whose kernel dies.
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
    notebook.end_by(["fork server", "restarted"], "while healing")
    notebook.client.wait_for_ready(timeout=SOON)
    assert not notebook.run("%load_ext nbdist").errors
    notebook.start_workers()
    notebook.end_by(["fork server", "kernel and agent"], "in a collective")


def test_nothing_is_left_of_workers(notebook: Notebook) -> None:
    """Their children end with them, also where the fork server has gone; all ends with a world."""
    for number, moment in enumerate(MOMENTS):
        notebook.begin(MOMENTS[moment])
        children = {child: child.parent() for child in notebook.find("sleep 1000")}
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


class Server:
    """A Jupyter server of its own, and kernels that it has started."""

    def __init__(self, folder: Path) -> None:
        self._runtime = folder / "runtime"
        names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        places = dict(zip(names, ("config", "data", "runtime", "ipython"), strict=True))
        folders = {name: str(folder / place) for name, place in places.items()}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyter_server", "--no-browser", "--port=0"),
                *("--allow-root", "--IdentityProvider.token=", f"--ServerApp.root_dir={folder}"),
                "--ServerApp.disable_check_xsrf=True",
            ],
            env={**os.environ, **folders, "NBDIST_LOG_DIR": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._clients: list[BlockingKernelClient] = []

    def start_kernel(self) -> BlockingKernelClient:
        """Have the server start one, as JupyterLab does, and load nbdist in it."""
        kernel = self._ask("kernels", {"name": "python3"})["id"]
        client = BlockingKernelClient()
        client.load_connection_file(str(self._runtime / f"kernel-{kernel}.json"))
        # Without the heartbeat, by which a kernel is dead that is busy for a second.
        client.start_channels(hb=False)
        self._clients.append(client)
        client.wait_for_ready(timeout=SOON)
        for source in ("%load_ext nbdist", STARTED):
            reply = client.execute_interactive(source, timeout=SOON, output_hook=lambda _: None)
            assert reply["content"]["status"] == "ok", reply
        return client

    def close(self) -> None:
        for client in self._clients:
            client.stop_channels()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SOON)

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        """Ask until the server listens, which it writes down somewhat earlier."""
        deadline = time.monotonic() + SOON
        while True:
            assert self.process.poll() is None, "the server did not start"
            try:
                request = Request(
                    f"{self._url()}api/{path}", json.dumps(body).encode(), method="POST"
                )
                with urlopen(request, timeout=SOON) as answer:
                    return json.load(answer)
            except (URLError, StopIteration, json.JSONDecodeError):
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.05)

    def _url(self) -> str:
        return str(json.loads(next(self._runtime.glob("jpserver-*.json")).read_text())["url"])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        yield server
    finally:
        server.close()


def test_nothing_is_left_of_a_server(server: Server) -> None:
    """No process, socket or folder; the guard in `tests/conftest.py` does the counting."""
    server.start_kernel().execute(MOMENTS["while healing"])
    time.sleep(1.0)  # there is no fact to wait for: the moment is arbitrary anyway
    server.process.kill()
    server.process.wait(SOON)
