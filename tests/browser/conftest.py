"""A real JupyterLab, or Notebook 7, in a real browser, and what one does with a notebook there.

Every wait has a bound; every process ends with its fixture.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "google-chrome")
# Headless as root in a container, and no traffic of its own.
BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTH, HEIGHT = 1000, 1200
TALLEST = 12_000

SERVER_START_TIMEOUT = 40.0
SERVER_STOP_TIMEOUT = 15.0
READY_TIMEOUT = 60.0
RUN_TIMEOUT = 120.0
# Commands sent while JupyterLab is still at work have run nothing: what is asked for has
# to be true this many times running.
TIMES_RUNNING = 3

SETTINGS = {
    # Nothing is fetched, and no question comes up in mid-test.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # All cells are in the page, wherever it is scrolled to.
    "notebook-extension/tracker": {"windowingMode": "none"},
}

# What the page is doing, from the application's own objects.
STATE = """() => {
    const widget = window.jupyterapp?.shell.currentWidget;
    const session = widget?.context?.sessionContext;
    const kernel = session?.session?.kernel;
    return {
        open: Boolean(widget?.context?.isReady && session?.isReady),
        kernel: kernel ? kernel.status : null,
        dialog: document.querySelector(".jp-Dialog")?.innerText ?? null,
    };
}"""

# Started, not awaited: evaluate() has no bound of its own.
RUN_ALL = """() => {
    window.nbdistRan = null;
    window.jupyterapp.commands.execute("notebook:run-all-cells").then(
        () => { window.nbdistRan = "done"; },
        error => { window.nbdistRan = String(error); },
    );
}"""

CELLS = """() => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    return cells.filter(cell => cell.model.type === "code").map(cell => ({
        prompt: cell.node.querySelector(".jp-InputPrompt")?.innerText ?? "",
        shown: cell.node.querySelector(".jp-Cell-outputArea")?.innerText ?? "",
        images: cell.node.querySelectorAll(".jp-Cell-outputArea img").length,
        errors: cell.model.outputs.toJSON()
            .filter(output => output.output_type === "error")
            .map(output => `${output.ename}: ${output.evalue}`),
    }));
}"""

TRUSTED = """() => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    const shown = cells.filter(cell => cell.model.type === "code" && cell.model.outputs.length);
    return shown.every(cell => cell.model.trusted);
}"""

# How many pixels the page has too few (or too many) for all cells.
HIDDEN_HEIGHT = """() => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    const first = cells[0].node.getBoundingClientRect();
    const last = cells.at(-1).node.getBoundingClientRect();
    const room = document.querySelector(".jp-WindowedPanel-outer").clientHeight;
    return Math.ceil(last.bottom - first.top - room) + 40;
}"""

SCROLL = """number => window.jupyterapp.shell.currentWidget.content.widgets[number]
    .node.scrollIntoView()"""


# Whether the notebook is about as wide as the page, without what is on its sides.
LAID_OUT = """width => {
    const {right} = document.querySelector(".jp-Notebook").getBoundingClientRect();
    return right <= width && right > width - 120;
}"""


@dataclass(frozen=True)
class FrontEnd:
    """A server's module, the path of a notebook's page, and whose option shows the application."""

    module: str
    page: str
    application: str


JUPYTERLAB = FrontEnd("jupyterlab", "lab/tree/{}?reset", "LabApp")
NOTEBOOK_7 = FrontEnd("notebook", "notebooks/{}", "JupyterNotebookApp")


@dataclass(frozen=True)
class ShownCell:
    """A code cell as a reader sees it; `errors` are those that make it a failed cell."""

    prompt: str
    shown: str
    images: int
    errors: list[str]


class Notebook:
    """A notebook that is open in JupyterLab."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def wait_until_ready(self, kernel: str = "idle") -> None:
        """The kernel is idle, or what else it is to be, and no dialog is open."""
        deadline = time.monotonic() + READY_TIMEOUT
        ready = {"open": True, "kernel": kernel, "dialog": None}
        times = 0
        while times < TIMES_RUNNING:
            state = self.page.evaluate(STATE)
            times = times + 1 if state == ready else 0
            if time.monotonic() > deadline:
                pytest.fail(f"JupyterLab was not ready after {READY_TIMEOUT:.0f} s: {state}")
            self.page.wait_for_timeout(150)

    def run_all(self) -> list[ShownCell]:
        """What every code cell shows after all of them have run, or the first has failed."""
        self.wait_until_ready()
        self.page.evaluate(RUN_ALL)
        self.page.wait_for_function("window.nbdistRan !== null", timeout=RUN_TIMEOUT * 1000)
        assert self.page.evaluate("window.nbdistRan") == "done"
        self.wait_until_ready()
        return self.cells()

    def cells(self) -> list[ShownCell]:
        """What every code cell shows now."""
        return [ShownCell(**cell) for cell in self.page.evaluate(CELLS)]

    def is_trusted(self) -> bool:
        """Whether JupyterLab shows what is in the outputs as it is, and not sanitised."""
        return bool(self.page.evaluate(TRUSTED))

    def save(self) -> None:
        """Write the notebook file."""
        self.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")

    def screenshot(self, name: str) -> Path:
        """A picture of the whole notebook, in $NBDIST_SHOTS or else tests/browser/shots."""
        height = min(HEIGHT + self.page.evaluate(HIDDEN_HEIGHT), TALLEST)
        self.page.set_viewport_size({"width": WIDTH, "height": height})
        # The last cell is the active one, and JupyterLab scrolls beyond the end.
        self.page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")
        self.page.wait_for_timeout(300)
        path = shots_folder() / f"{name}.png"
        self.page.screenshot(path=path)
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        return path

    def resize(self, width: int) -> None:
        """Make the page so wide; JupyterLab follows some time later."""
        self.page.set_viewport_size({"width": width, "height": 1000})
        self.page.wait_for_function(LAID_OUT, arg=width)

    def picture_from(self, cell: int, name: str, width: int = WIDTH) -> None:
        """A picture of the page from one cell on, where the page has this width."""
        self.resize(width)
        self.page.evaluate(SCROLL, cell)
        self.page.wait_for_timeout(300)
        self.page.screenshot(path=shots_folder() / f"{name}.png")


def shots_folder() -> Path:
    """Where pictures are put: $NBDIST_SHOTS or else tests/browser/shots."""
    folder = Path(os.environ.get("NBDIST_SHOTS") or Path(__file__).parent / "shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Lab:
    """A server with a folder of its own, and pages on it."""

    def __init__(self, url: str, folder: Path, browser: Browser, front_end: FrontEnd) -> None:
        self.url = url
        self.folder = folder
        self._browser = browser
        self._front_end = front_end

    def write(self, name: str, cells: Sequence[str]) -> None:
        """Write a notebook of these cells, not run yet, into the folder."""
        content = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
        content.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(content, self.folder / name)

    def open(self, name: str) -> Notebook:
        """Open a notebook of the folder in a fresh browser profile, and wait for its cells."""
        context = self._browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
        page = context.new_page()
        page.set_default_timeout(READY_TIMEOUT * 1000)
        page.goto(self.url + self._front_end.page.format(name))
        notebook = Notebook(page)
        notebook.wait_until_ready()
        if self._front_end is JUPYTERLAB:  # the list of files, which takes a third of the width
            page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        return notebook


@pytest.fixture(scope="session")
def browser_path() -> str:
    """The browser's program; tests that need it are skipped where there is none."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH (apt-get install chromium)")


@pytest.fixture
def browser(browser_path: str) -> Iterator[Browser]:
    """Headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=list(BROWSER_FLAGS), timeout=30_000
        )
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture
def lab(tmp_path: Path, browser: Browser) -> Iterator[Lab]:
    """JupyterLab on an empty folder."""
    with serving(JUPYTERLAB, tmp_path, browser) as lab:
        yield lab


@pytest.fixture
def notebook_7(tmp_path: Path, browser: Browser) -> Iterator[Lab]:
    """Notebook 7 on an empty folder."""
    with serving(NOTEBOOK_7, tmp_path, browser) as lab:
        yield lab


@contextmanager
def serving(
    front_end: FrontEnd, tmp_path: Path, browser: Browser, **variables: str
) -> Iterator[Lab]:
    """Have a server with settings, runtime files and a port of its own."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    environ = _environment(tmp_path) | variables
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", front_end.module, *_server_options(front_end, folder)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = _url(server, Path(environ["JUPYTER_RUNTIME_DIR"]), log)
        yield Lab(url, folder, browser, front_end)
    finally:
        _stop(server)


def _environment(folder: Path) -> dict[str, str]:
    """An environment in which Jupyter writes below this folder and nowhere else."""
    folders = {
        name: str(folder / name.lower())
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    settings = Path(folder, "lab-settings")
    for name, values in SETTINGS.items():
        file = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    return kept | folders | {
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "lab-workspaces"),
    }  # fmt: skip


def _server_options(front_end: FrontEnd, folder: Path) -> list[str]:
    return [
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder}",
        f"--{front_end.application}.expose_app_in_browser=True",
    ]


def _url(server: subprocess.Popen[bytes], runtime: Path, log: Path) -> str:
    """Where the server listens, from the file in which it says so."""
    deadline = time.monotonic() + SERVER_START_TIMEOUT
    while time.monotonic() < deadline and server.poll() is None:
        for file in runtime.glob("jpserver-*.json"):
            try:
                return str(json.loads(file.read_text())["url"])
            except ValueError:
                continue  # It is still being written.
        time.sleep(0.05)
    tail = log.read_text(errors="replace")[-3000:]
    pytest.fail(f"the server did not start in {SERVER_START_TIMEOUT:.0f} s:\n{tail}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Politely, so that it ends its kernels; then not."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(SERVER_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(SERVER_STOP_TIMEOUT)
