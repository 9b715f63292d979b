"""A real JupyterLab in a real browser, and the actions of a user in a notebook.

All tests of this folder share a server and a page, since loading JupyterLab takes longer than most
tests.  A folder and its kernels end with their test, or with a module whose tests share the folder.
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
PICTURE_WIDTHS = (700, 900, 1280)
TALLEST = 12_000
SHOTS = os.environ.get("NBDIST_SHOTS")
"""The folder for pictures, which are made only if the variable is set."""

SERVER_OPTIONS = (
    "--no-browser",
    "--allow-root",
    "--ServerApp.ip=127.0.0.1",
    "--ServerApp.port=0",
    "--IdentityProvider.token=",
    "--LabApp.expose_app_in_browser=True",
    "--JupyterNotebookApp.expose_app_in_browser=True",
)

# Seconds for Run All of a notebook.
RUN_TIMEOUT = 3 * SOON

# Milliseconds between two looks at a page; by default playwright looks at each drawn frame.
LOOK_MS = 100

NO_IDLE_IMPORTS = f"import os\nos.environ[{IDLE_IMPORTS!r}] = '0'\n"
"""The first lines of a notebook that trains nothing."""

SETTINGS = {
    # Nothing is fetched, and no question comes up in mid-test.
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    # All cells are in the page, wherever the page is scrolled to.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyter-widgets/jupyterlab-manager/plugin": {"saveState": True},
    # By default JupyterLab leaves out completions that take over 1 s, as on a busy machine.
    "@jupyterlab/completer-extension/manager": {"providerTimeout": 1000 * SOON},
}

# The state of the page, from the application's own objects.
STATE = """() => {
    const widget = window.jupyterapp?.shell.currentWidget;
    const session = widget?.context?.sessionContext;
    return {
        open: Boolean(widget?.context?.isReady && session?.isReady) && widget.context.path,
        kernel: session?.session?.kernel?.status ?? null,
        dialog: document.querySelector(".jp-Dialog")?.innerText ?? null,
    };
}"""

# Commands sent while JupyterLab is still at work have run nothing: the page has to be ready at
# several looks in a row.
IS_READY = f"""([path, kernel]) => {{
    const state = ({STATE})();
    const ready = state.open === path && state.kernel === kernel && !state.dialog;
    window.nbdistReady = ready ? (window.nbdistReady ?? 0) + 1 : 0;
    return window.nbdistReady > 3;
}}"""

# Close all notebooks, without a question, and end their kernels; close the debugger's side bar.
CLOSE = """async () => {
    const {shell, serviceManager} = window.jupyterapp;
    [...shell.widgets("main")].forEach(each => each.dispose());
    shell.collapseRight?.();
    await serviceManager.sessions.shutdownAll();
}"""

OPEN = "path => { window.jupyterapp.commands.execute('docmanager:open', {path}); }"

# Replaces all cells.
FILL = """sources => {
    const model = window.jupyterapp.shell.currentWidget.content.model.sharedModel;
    model.transact(() => {
        model.deleteCellRange(0, model.cells.length);
        model.insertCells(0, sources.map(source => ({cell_type: "code", source, metadata: {}})));
    });
}"""

# Starts a command without waiting for its end: evaluate() has no timeout of its own. JupyterLab
# ends a command at the first cell that fails, also if this cell is tagged `raises-exception` and
# the kernel runs the cells below: all cells' requests have to be answered, too.
RUN = """([command, number]) => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    if (number !== null) notebook.activeCellIndex = number;
    window.nbdistRan = null;
    window.jupyterapp.commands.execute(command)
        .then(() => Promise.allSettled(notebook.widgets.map(cell => cell.outputArea?.future?.done)))
        .then(
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

# How many pixels the page lacks (or has too many) to show all cells.
HIDDEN_HEIGHT = """() => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    const first = cells[0].node.getBoundingClientRect();
    const last = cells.at(-1).node.getBoundingClientRect();
    const room = document.querySelector(".jp-WindowedPanel-outer").clientHeight;
    return Math.ceil(last.bottom - first.top - room) + 40;
}"""

# Whether the notebook is about as wide as the page without its sidebars.
LAID_OUT = """width => {
    const {right} = document.querySelector(".jp-Notebook").getBoundingClientRect();
    return right <= width && right > width - 120;
}"""


# Resolves once the page has drawn everything.
PAINTED = """() => new Promise(
    done => requestAnimationFrame(() => requestAnimationFrame(() => done()))
)"""


@dataclass(frozen=True)
class ShownCell:
    """A code cell as a reader sees it; `errors` are its outputs of type error."""

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
        """Wait until the kernel has this state, by default idle, and no dialog is open."""
        from playwright.sync_api import TimeoutError as TooLong

        try:
            self.page.wait_for_function(IS_READY, arg=[self.path, kernel], polling=50)
        except TooLong:
            pytest.fail(f"not ready after {SOON} s: {self.page.evaluate(STATE)}")

    def fill(self, cells: Sequence[str]) -> None:
        """Replace all cells by cells with these texts, which do not run."""
        self.page.evaluate(FILL, [*cells])

    def start(self, number: int) -> None:
        """Start a cell, and do not wait for its end."""
        self.page.evaluate(RUN, ["notebook:run-cell", number])

    def start_all(self, below: int | None = None) -> None:
        """Start all cells, or all from a cell on, and do not wait for their end."""
        self.wait_until_ready()
        command = "notebook:run-all-cells" if below is None else "notebook:run-all-below"
        self.page.evaluate(RUN, [command, below])

    def ended(self) -> list[ShownCell]:
        """Wait until the started cells have ended, and return all code cells."""
        has_ended = "window.nbdistRan !== null"
        self.page.wait_for_function(has_ended, timeout=RUN_TIMEOUT * 1000, polling=LOOK_MS)
        assert self.page.evaluate("window.nbdistRan") == "done"
        self.wait_until_ready()
        return self.cells()

    def run_all(self, below: int | None = None) -> list[ShownCell]:
        """Run all cells, up to the first that fails, and return all code cells."""
        self.start_all(below)
        return self.ended()

    def wait_for(self, number: int, text: str) -> str:
        """Wait until a cell shows the text, and return all text of the cell's output."""
        self.page.wait_for_function(SAYS, arg=[number, text], polling=LOOK_MS)
        return self.cells()[number].shown

    def cells(self) -> list[ShownCell]:
        """Return all code cells as they are now."""
        return [ShownCell(**cell) for cell in self.page.evaluate(CELLS)]

    def is_trusted(self) -> bool:
        """Return True if JupyterLab trusts all outputs, and shows them without sanitising."""
        return bool(self.page.evaluate(TRUSTED))

    def save(self) -> None:
        """Write the notebook file."""
        self.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")

    def screenshot(self, name: str, width: int = WIDTH, theme: str = "") -> None:
        """Save a picture of the whole notebook, on a page of this width."""
        if not SHOTS:
            return
        if theme:
            self.page.evaluate(CHANGE_THEME, theme)
        if width != WIDTH:
            self.resize(width)
        height = min(HEIGHT + self.page.evaluate(HIDDEN_HEIGHT), TALLEST)
        self.page.set_viewport_size({"width": width, "height": height})
        # The last cell is active, and JupyterLab scrolls beyond the end.
        self.page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")
        self.picture(name)
        if theme:
            self.page.evaluate(CHANGE_THEME, LIGHT)
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})

    def screenshots(self, name: str) -> None:
        """Save pictures of the whole notebook at the widths of common windows, light and dark."""
        for theme in ("Light", "Dark"):
            for width in PICTURE_WIDTHS:
                self.screenshot(f"{name}-{width}-{theme.lower()}", width, f"JupyterLab {theme}")

    def picture(self, name: str) -> None:
        """Save a picture of the page as it is."""
        if SHOTS:
            self.page.evaluate(PAINTED)
            Path(SHOTS, f"{name}.png").write_bytes(self.page.screenshot())

    def resize(self, width: int) -> None:
        """Set the width of the page, and wait until JupyterLab follows."""
        self.page.set_viewport_size({"width": width, "height": HEIGHT})
        self.page.wait_for_function(LAID_OUT, arg=width, polling=LOOK_MS)


class Lab:
    """A folder of the server, and its notebooks in the page of all tests."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page = page
        self.folder = folder

    def write(self, name: str, cells: Sequence[str]) -> None:
        """Write a notebook with cells of these texts, which have not run, into the folder."""
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
    """The JupyterLab of all tests, which are skipped if no browser is installed."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not any(map(shutil.which, BROWSERS)):
        names = ", ".join(BROWSERS)
        pytest.skip(f"no browser: none of {names} is on PATH (apt-get install chromium)")
    # The quickstart trains on four ranks: modules for training are imported once, before the start.
    with jupyterlab(tmp_path_factory.mktemp("jupyter"), **{IDLE_IMPORTS: "1"}) as lab:
        yield lab


@contextmanager
def jupyterlab(place: Path, **variables: str) -> Iterator[Lab]:
    """Start a server with some variables, and JupyterLab in a page of headless Chromium."""
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
        # Hide the list of files, which takes a third of the width.
        page.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
        yield Lab(page, folder)


@contextmanager
def in_folder(jupyter: Lab, name: str) -> Iterator[Lab]:
    """Make a folder for notebooks; close all notebooks and end their kernels at the end."""
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
    """Return once the fork server rests after its imports; else each rank would import all."""
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
    """Start a server with its own settings and port, and yield its address and folder."""
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
    """Return an environment in which Jupyter writes only below this folder."""
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
    """Return the server's address from its runtime file; empty while the file has no address."""
    try:
        return str(json.loads(runtime.read_text())["url"])
    except (OSError, ValueError):
        return ""  # The file is missing, or is being written.


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server by SIGTERM, so that kernels end with the server, or else by SIGKILL."""
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(SOON)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(SOON)
