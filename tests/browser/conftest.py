"""A real JupyterLab in a real browser, and what one does with a notebook there.

One server and one page are there for all tests of this folder: to load JupyterLab costs more than
most of them.  A test has a folder, and kernels that end with it, or, in a module whose tests share
one, with the module.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import psutil
import pytest

from tests.waiting import SOON, wait_until, wait_until_at_rest
from tests.worlds import IDLE_IMPORTS

if TYPE_CHECKING:
    from playwright.sync_api import Page

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
SHOTS = os.environ.get("NBDIST_SHOTS")
"""The folder for pictures, made only where it is said."""

SERVER_OPTIONS = (
    "--no-browser",
    "--allow-root",
    "--ServerApp.ip=127.0.0.1",
    "--ServerApp.port=0",
    "--IdentityProvider.token=",
    "--LabApp.expose_app_in_browser=True",
    "--JupyterNotebookApp.expose_app_in_browser=True",
)

# Run All of a notebook.
RUN_TIMEOUT = 3 * SOON

# Between two looks at a page: by default they are at each frame, which is drawn for that.
LOOK_MS = 100

NO_IDLE_IMPORTS = f"import os\nos.environ[{IDLE_IMPORTS!r}] = '0'\n"
"""Begins a notebook that trains nothing."""

SETTINGS = {
    # Nothing is fetched, and no question comes up in mid-test.
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # All cells are in the page, wherever it is scrolled to.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyter-widgets/jupyterlab-manager/plugin": {"saveState": True},
    # By default completions that come after 1 s are left out, as on a machine that stands still.
    "@jupyterlab/completer-extension/manager": {"providerTimeout": 1000 * SOON},
}

# What the page is doing, from the application's own objects.
STATE = """() => {
    const widget = window.jupyterapp?.shell.currentWidget;
    const session = widget?.context?.sessionContext;
    return {
        open: Boolean(widget?.context?.isReady && session?.isReady) && widget.context.path,
        kernel: session?.session?.kernel?.status ?? null,
        dialog: document.querySelector(".jp-Dialog")?.innerText ?? null,
    };
}"""

# Commands sent while JupyterLab is still at work have run nothing: all has to be in order several
# times running.
IS_READY = f"""([path, kernel]) => {{
    const state = ({STATE})();
    const ready = state.open === path && state.kernel === kernel && !state.dialog;
    window.nbdistReady = ready ? (window.nbdistReady ?? 0) + 1 : 0;
    return window.nbdistReady > 3;
}}"""

# Close all, without a question, and end their kernels.
CLOSE = """async () => {
    const {shell, serviceManager} = window.jupyterapp;
    [...shell.widgets("main")].forEach(each => each.dispose());
    await serviceManager.sessions.shutdownAll();
}"""

OPEN = "path => { window.jupyterapp.commands.execute('docmanager:open', {path}); }"

# Cells in the place of those that there are.
FILL = """sources => {
    const model = window.jupyterapp.shell.currentWidget.content.model.sharedModel;
    model.transact(() => {
        model.deleteCellRange(0, model.cells.length);
        model.insertCells(0, sources.map(source => ({cell_type: "code", source, metadata: {}})));
    });
}"""

# Started, not awaited: evaluate() has no bound of its own.
RUN = """([command, number]) => {
    if (number !== null) window.jupyterapp.shell.currentWidget.content.activeCellIndex = number;
    window.nbdistRan = null;
    window.jupyterapp.commands.execute(command).then(
        () => { window.nbdistRan = "done"; },
        error => { window.nbdistRan = String(error); },
    );
}"""

SAYS = """([number, text]) => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    return cells[number].node.querySelector(".jp-Cell-outputArea")?.innerText.includes(text);
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

LIGHT = "JupyterLab Light"
CHANGE_THEME = "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"

# How many pixels the page has too few (or too many) for all cells.
HIDDEN_HEIGHT = """() => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    const first = cells[0].node.getBoundingClientRect();
    const last = cells.at(-1).node.getBoundingClientRect();
    const room = document.querySelector(".jp-WindowedPanel-outer").clientHeight;
    return Math.ceil(last.bottom - first.top - room) + 40;
}"""

# Whether the notebook is about as wide as the page, without what is on its sides.
LAID_OUT = """width => {
    const {right} = document.querySelector(".jp-Notebook").getBoundingClientRect();
    return right <= width && right > width - 120;
}"""


# All that was asked of it is on the screen.
PAINTED = """() => new Promise(
    done => requestAnimationFrame(() => requestAnimationFrame(() => done()))
)"""


@dataclass(frozen=True)
class ShownCell:
    """A code cell as a reader sees it; `errors` are those that make it a failed cell."""

    prompt: str
    shown: str
    images: int
    errors: list[str]


class Notebook:
    """A notebook that is open in JupyterLab, or in Notebook 7."""

    def __init__(self, page: Page, path: str) -> None:
        self.page = page
        self.path = path

    def wait_until_ready(self, kernel: str = "idle") -> None:
        """The kernel is idle, or what else it is to be, and no dialog is open."""
        from playwright.sync_api import TimeoutError as TooLong

        try:
            self.page.wait_for_function(IS_READY, arg=[self.path, kernel], polling=50)
        except TooLong:
            pytest.fail(f"not ready after {SOON} s: {self.page.evaluate(STATE)}")

    def fill(self, cells: Sequence[str]) -> None:
        """Have these cells, not run yet, in place of all that there are."""
        self.page.evaluate(FILL, [*cells])

    def start(self, number: int) -> None:
        """Run a cell, and do not wait for it."""
        self.page.evaluate(RUN, ["notebook:run-cell", number])

    def start_all(self, below: int | None = None) -> None:
        """Run all cells, or those from one on, and do not wait for them."""
        self.wait_until_ready()
        command = "notebook:run-all-cells" if below is None else "notebook:run-all-below"
        self.page.evaluate(RUN, [command, below])

    def ended(self) -> list[ShownCell]:
        """What every code cell shows once what was started has ended."""
        has_ended = "window.nbdistRan !== null"
        self.page.wait_for_function(has_ended, timeout=RUN_TIMEOUT * 1000, polling=LOOK_MS)
        assert self.page.evaluate("window.nbdistRan") == "done"
        self.wait_until_ready()
        return self.cells()

    def run_all(self, below: int | None = None) -> list[ShownCell]:
        """What every code cell shows after all of them have run, or the first has failed."""
        self.start_all(below)
        return self.ended()

    def wait_for(self, number: int, text: str) -> str:
        """What a cell shows once it shows this."""
        self.page.wait_for_function(SAYS, arg=[number, text], polling=LOOK_MS)
        return self.cells()[number].shown

    def cells(self) -> list[ShownCell]:
        """What every code cell shows now."""
        return [ShownCell(**cell) for cell in self.page.evaluate(CELLS)]

    def is_trusted(self) -> bool:
        """Whether JupyterLab shows what is in the outputs as it is, and not sanitised."""
        return bool(self.page.evaluate(TRUSTED))

    def save(self) -> None:
        """Write the notebook file."""
        self.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")

    def screenshot(self, name: str, width: int = WIDTH, theme: str = "") -> None:
        """A picture of the whole notebook, on a page of this width."""
        if not SHOTS:
            return
        if theme:
            self.page.evaluate(CHANGE_THEME, theme)
        if width != WIDTH:
            self.resize(width)
        height = min(HEIGHT + self.page.evaluate(HIDDEN_HEIGHT), TALLEST)
        self.page.set_viewport_size({"width": width, "height": height})
        # The last cell is the active one, and JupyterLab scrolls beyond the end.
        self.page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")
        self.picture(name)
        if theme:
            self.page.evaluate(CHANGE_THEME, LIGHT)
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})

    def picture(self, name: str) -> None:
        """A picture of the page as it is."""
        if SHOTS:
            self.page.evaluate(PAINTED)
            Path(SHOTS, f"{name}.png").write_bytes(self.page.screenshot())

    def resize(self, width: int) -> None:
        """Make the page so wide; JupyterLab follows some time later."""
        self.page.set_viewport_size({"width": width, "height": HEIGHT})
        self.page.wait_for_function(LAID_OUT, arg=width, polling=LOOK_MS)


class Lab:
    """A folder of the server's, and its notebooks in the one page."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page = page
        self.folder = folder

    def write(self, name: str, cells: Sequence[str]) -> None:
        """Write a notebook of these cells, not run yet, into the folder."""
        content = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
        content.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(content, self.folder / name)

    def open(self, name: str) -> Notebook:
        """Open a notebook of the folder, and wait for its cells."""
        notebook = Notebook(self.page, f"{self.folder.name}/{name}")
        self.page.evaluate(OPEN, notebook.path)
        notebook.wait_until_ready()
        return notebook

    def close(self) -> None:
        """Close all notebooks, and end their kernels."""
        self.page.evaluate(CLOSE)


@pytest.fixture(scope="package")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The one of all tests; those that need a browser are skipped where there is none."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not any(map(shutil.which, BROWSERS)):
        names = ", ".join(BROWSERS)
        pytest.skip(f"no browser: none of {names} is on PATH (apt-get install chromium)")
    # The quickstart trains on four ranks: what that needs is imported once, before they are there.
    with jupyterlab(tmp_path_factory.mktemp("jupyter"), **{IDLE_IMPORTS: "1"}) as lab:
        yield lab


@contextmanager
def jupyterlab(place: Path, **variables: str) -> Iterator[Lab]:
    """Have a server with these variables, and JupyterLab on it in a page of headless Chromium."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)))
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=[*BROWSER_FLAGS]) as browser,
        _serving(place, variables) as (url, folder),
    ):
        page = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}).new_page()
        page.set_default_timeout(SOON * 1000)
        page.goto(f"{url}lab?reset")
        page.wait_for_function("window.jupyterapp?.shell.currentWidget?.isVisible", polling=LOOK_MS)
        # The list of files, which takes a third of the width.
        page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        yield Lab(page, folder)


@contextmanager
def in_folder(jupyter: Lab, name: str) -> Iterator[Lab]:
    """Have a folder, and no notebook but those of it; kernels of it have ended at the end."""
    folder = jupyter.folder / name
    folder.mkdir()
    lab = Lab(jupyter.page, folder)
    yield lab
    lab.close()


@pytest.fixture
def lab(jupyter: Lab, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """JupyterLab on an empty folder."""
    with in_folder(jupyter, request.node.name) as lab:
        yield lab


def wait_for_idle_imports() -> None:
    """Return once the fork server rests, with what training needs; else each rank imports that."""
    found = list[psutil.Process]()

    def is_there() -> bool:
        ours = psutil.Process().children(recursive=True)
        for each in psutil.process_iter(["cmdline"]):
            if "nbdist.agent.fork_server" in (each.info["cmdline"] or ()) and each in ours:
                found.append(each)
        return bool(found)

    wait_until(is_there, "there is a fork server")
    wait_until_at_rest(found[0])


@contextmanager
def _serving(place: Path, variables: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """Have a server with settings and a port of its own: its address, and its folder."""
    folder = place / "notebooks"
    folder.mkdir()
    environ = _environment(place) | variables
    log = place / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *SERVER_OPTIONS, f"--ServerApp.root_dir={folder}"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    runtime = Path(environ["JUPYTER_RUNTIME_DIR"], f"jpserver-{server.pid}.json")
    try:
        wait_until(lambda: server.poll() is not None or _url(runtime), "the server has an address")
        yield _url(runtime) or pytest.fail(log.read_text(errors="replace")[-3000:]), folder
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
        file = settings / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    return kept | folders | {
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "lab-workspaces"),
    }  # fmt: skip


def _url(runtime: Path) -> str:
    """Where the server listens, from the file in which it says so; empty as long as it does not."""
    try:
        return str(json.loads(runtime.read_text())["url"])
    except (OSError, ValueError):
        return ""  # Not there, or still being written.


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Politely, so that it ends its kernels; then not."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(SOON)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(SOON)
