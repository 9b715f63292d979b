"""Output is shown truly, whatever cells show and when: folds, figures, floods, late output."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter, LatexExporter

from nbdist.output.rank_transcript import SHOWN_AT_MOST
from tests.notebook.front_end import INSIDES, Notebook, body
from tests.notebook.test_first_contact import AHEAD, MISTAKES
from tests.notebook.test_front_ends import Terminal
from tests.waiting import SOON, once

pytestmark = [pytest.mark.shared_world, pytest.mark.kernel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


PATIENCE = f"""
from dataclasses import astuple
from unittest.mock import patch
from nbdist.config import Patience
longer = astuple(Patience(control_timeout={SOON}))
patch.object(Patience.__init__, "__defaults__", longer).start()
"""
"""Makes the notebook wait until all ranks have left; undone before the next module's tests."""


@pytest.fixture(scope="module")
def notebook(folder: Path) -> Iterator[Notebook]:
    """A notebook with three workers for all tests of the module."""
    with closing(Notebook("%load_ext nbdist", env={"NBDIST_LOG_DIR": str(folder)})) as notebook:
        assert notebook.run(f"{PATIENCE}%dist_init -n 3").errors == []
        yield notebook


def test_errors_that_name_their_rank_are_not_the_same(notebook: Notebook) -> None:
    """`%dist_why` does not call errors the same that differ in the number of their rank."""
    outcome = notebook.run("%%distributed\nif rank: raise KeyError(f'missing {rank}')")
    assert "── ranks 1-2 (same except for {…}) ✗ ──" in outcome.panel["text/plain"]
    first = 1 if "first: rank 1" in outcome.error else 2
    assert f"KeyError: 'missing {first}'" in outcome.error
    why = notebook.run("%dist_why").text
    assert f"rank {3 - first}: KeyError: 'missing {3 - first}'" in why
    assert "the same" not in why


FIGURES = """%%distributed
print("before")
for number in range(rank):
    import matplotlib.pyplot as plt
    plt.plot([1, rank, number]); plt.show()
"""


def test_each_figure_is_an_image_for_converters(notebook: Notebook) -> None:
    """Each figure is in the panel once, and is an image for programs that look for images."""
    outcome = notebook.run(FIGURES)
    assert str(outcome.panel["text/html"]).count("<img ") == 3
    pngs = [base64.b64decode(shown["data"]["image/png"]) for shown in outcome.figures]
    assert len(pngs) == 3
    assert all(png.startswith(b"\x89PNG") for png in pngs)
    last = {**outcome.displays[0], "data": outcome.panel}
    outputs = [
        nbformat.v4.new_output("display_data", data=shown["data"], metadata=shown["metadata"])
        for shown in (last, *outcome.figures)
    ]
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(FIGURES, outputs=outputs)])
    latex, resources = LatexExporter().from_notebook_node(document)
    assert latex.count("\\adjustimage") == 3 == len(resources["outputs"])
    assert "before" in latex
    html, _ = HTMLExporter().from_notebook_node(document)
    assert html.count('src="data:image/png') == 3


def test_the_module_of_a_cell_is_known_to_inspect(notebook: Notebook) -> None:
    """After a traceback `inspect` knows a cell's module, for which IPython asks at each frame."""
    source = "%%distributed -r 0\ndef again(n):\n    return again(n + 1)\nagain(0)"
    assert "RecursionError: maximum recursion depth exceeded" in notebook.run(source).error
    found = notebook.run(
        "%%distributed -r 0\nimport inspect, sys\ninspect.getmodule(sys.last_traceback.tb_next)"
        ".__name__"
    )
    assert body(found)[-1] == "'__main__'"


def test_a_long_message_is_whole_in_its_file(notebook: Notebook, folder: Path) -> None:
    """Of a message of megabytes a readable part is passed on; a private file has the whole."""
    source = "%%distributed -r 0\nraise ValueError('begin' + 'x' * 3_000_000 + 'end')"
    outcome = notebook.run(source)
    assert "ValueError: begin" in outcome.error
    (file,) = folder.rglob("0/error-*.txt")
    assert f"begin{'x' * 3_000_000}end" in file.read_text()
    assert str(file) in outcome.panel["text/plain"]
    assert file.stat().st_mode & 0o077 == 0


def test_stop_ends_a_flood_of_displays(notebook: Notebook, tmp_path: Path) -> None:
    """In a flood of displays Stop ends all ranks, and no variable is lost."""
    assert notebook.run("%%distributed\nkept = rank").errors == []
    full = tmp_path / "full"
    press = partial(notebook.process.send_signal, signal.SIGINT)
    with once(full.exists, press, "a rank has shown more than is kept"):
        outcome = notebook.run(
            "%%distributed\nfrom itertools import count\nfrom pathlib import Path\n"
            "for number in count():\n    display({'application/x': [0.5] * 30_000}, raw=True)\n"
            f"    if number * 900_000 > {SHOWN_AT_MOST}: Path({str(full)!r}).touch()"
        )
    assert outcome.error == "KeyboardInterrupt: Stopped on ranks 0-2. No variables were lost."
    assert body(notebook.run("%%distributed -r 0\nkept"))[-1] == "0"


TOLD = (
    "import asyncio, os, threading, time\n"
    "def be_told():\n"
    "    while not os.path.exists(sign): time.sleep(0.02)\n"
)
"""Late output of ranks begins when the test creates the file `sign`, after the cell's end."""

LATER = {
    "asyncio task": (
        "async def say():\n"
        "    await asyncio.to_thread(be_told)\n"
        "    print('said late by', rank)\n"
        "task = asyncio.ensure_future(say()); None"
    ),
    "thread that displays": (
        "def say(): be_told(); display({'text/plain': f'said late by {rank}'}, raw=True)\n"
        "threading.Thread(target=say).start()"
    ),
}


@pytest.mark.parametrize("later", LATER)
def test_late_output_is_shown_under_its_cell(
    notebook: Notebook, later: str, tmp_path: Path
) -> None:
    """Late output is shown while no cell runs, in the panel of its cell, below earlier output."""
    sign = tmp_path / "sign"
    cell = f"{TOLD}sign = {str(sign)!r}\nprint('said in time')\n{LATER[later]}"
    outcome = notebook.run(f"%%distributed\n{cell}")
    assert outcome.errors == []
    sign.touch()
    # Wait for all ranks: later output would be in the cell of another test.
    said = notebook.next_shown("said late by 0", "said late by 1")
    assert said["transient"] == outcome.displays[0]["transient"]
    assert "said in time" in said["data"]["text/plain"]
    assert notebook.run("%%distributed\npass").errors == []


def test_late_output_is_printed_between_cells(notebook: Notebook, tmp_path: Path) -> None:
    """Plain late output comes before the next cell; a running cell has its ranks' output."""
    outcome = notebook.run(
        "%%distributed\nimport threading, time\n"
        "if rank == 0: threading.Timer(0.2, print, ['said late']).start()\nelse: time.sleep(1.5)"
    )
    assert "said late" in outcome.text
    notebook.run('%config NbDist.display = "plain"')
    sign = tmp_path / "sign"
    say = f"until [ -e {sign} ]; do sleep 0.02; done; echo said late"
    try:
        start = "import subprocess\nchild = subprocess.Popen"
        notebook.run(f"%%rank 1\n{start}(['sh', '-c', {say!r}])")
        sign.touch()
        assert notebook.next_printed("said late") == "[1] said late\n"
    finally:
        notebook.run('%config NbDist.display = "auto"')


def test_a_flood_after_a_cell_is_drawn_seldom(notebook: Notebook) -> None:
    """Output of a thread that never stops to print is drawn only a few times a second."""
    notebook.run(
        "%%distributed\nimport threading\nover = threading.Event()\n"
        "def talk():\n    while not over.wait(0.001): print('talks')\n"
        "talker = threading.Thread(target=talk)\ntalker.start()"
    )
    drawn, until = 0, time.monotonic() + 2.0
    while time.monotonic() < until:
        notebook.next_shown("talks")
        drawn += 1
    assert drawn <= 12
    outcome = notebook.run("%%distributed\nover.set()\ntalker.join()")
    assert outcome.errors == []


BEGIN, END = "\x1b[200~", "\x1b[201~"
"""The marks that a terminal puts around pasted text."""

EVERY = 4
"""Only every fourth mistake is tried, since the list has more than forty."""


def test_mistakes_read_alike_in_a_terminal(tmp_path: Path, empty_snapshot_folder: None) -> None:
    """A terminal shows the same words as a notebook, and no line of nbdist's insides.

    In notebooks `tests.notebook.front_end.Notebook.run` checks the output of every test.
    """
    terminal = Terminal(tmp_path)
    try:
        for cell in AHEAD[1:]:
            terminal.enter(f"{BEGIN}{cell}{END}")
        for mistake in MISTAKES[::EVERY]:
            seen = ""
            for cell in mistake.cells:
                seen = "\n".join(terminal.enter(f"{BEGIN}{cell}{END}"))
            assert not INSIDES.findall(seen), seen
            assert [each for each in mistake.said if each not in seen] == [], seen
    finally:
        terminal.child.close(force=True)
