"""The Jupyter server ends, by whatever: its kernels' workers end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_core.utils import ensure_event_loop

from tests.faults.test_nothing_left import MOMENTS, STARTED
from tests.waiting import SOON

# jupyter_client's blocking calls run on a loop that lives as long as the process.
ensure_event_loop()


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
                request = urllib.request.Request(
                    f"{self._url()}api/{path}", json.dumps(body).encode(), method="POST"
                )
                with urllib.request.urlopen(request, timeout=SOON) as answer:
                    return json.load(answer)
            except (urllib.error.URLError, StopIteration, json.JSONDecodeError):
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


@pytest.mark.parametrize(
    ("end", "moments"),
    [
        (signal.SIGKILL, ("idle", "while healing")),
        (signal.SIGTERM, ("in a collective",)),
    ],
)
def test_nothing_is_left(server: Server, end: signal.Signals, moments: tuple[str, ...]) -> None:
    """No process, socket or folder; the guard in `tests/conftest.py` does the counting."""
    clients = [server.start_kernel() for _ in moments]
    for client, moment in zip(clients, moments, strict=True):
        client.execute(MOMENTS[moment] or "pass")
    time.sleep(1.0)  # there is no fact to wait for: the moment is arbitrary anyway
    server.process.send_signal(end)
    server.process.wait(SOON)
