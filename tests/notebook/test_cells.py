"""Tests of `nbdist.notebook.cells`, which checks and sends a cell and shows its output."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook, body

pytestmark = pytest.mark.shared_world


PRESS = """
import os, pathlib, signal, sys, tempfile, time
FOLLOWING = ("world/recovery.py", "world/dispatch.py", "world/task_run.py", "world/engine.py",
             "world/rank_table.py", "world/task_table.py", "world/connection.py",
             "world/world_outputs.py", "world/inbox.py", "notebook/cells.py",
             "notebook/display.py", "/contextlib.py")
def stop_at(number):
    '''Press Stop at this line of those that follow a cell, once its ranks have begun.'''
    left, deadline = iter(range(number, 0, -1)), time.monotonic() + 30
    def trace(frame, event, arg):
        if not frame.f_code.co_filename.endswith(FOLLOWING):
            return None
        sent = event == "return" and frame.f_code.co_name == "send"
        while sent and not have_begun() and time.monotonic() < deadline:
            time.sleep(0.01)
        if event == "line" and have_begun() and next(left, None) is None:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace
    with tempfile.TemporaryDirectory() as folder:
        have_begun = lambda: all(os.path.exists(os.path.join(folder, name)) for name in "01")
        sys.settrace(trace)
        get_ipython().run_cell_magic("distributed", "", f'''
import time
from pathlib import Path
print("begun")
Path({folder!r}, str(rank)).touch()
time.sleep(600)
''')
"""
"""A cell that defines `stop_at`, which presses Stop at a line that nbdist runs during a cell.

Python handles a signal that a trace function raises as if it had come at the traced line."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Notebook]:
    """A notebook with two workers whose `sys.path` begins with `folder`; ranks import from it."""
    (folder / "my_train.py").write_text("def steps():\n    return 'first version'\n")
    (folder / "my_data.py").write_text("kind = 'first'\n")
    for file in folder.iterdir():
        edit(file, file.read_text(), seconds=-60)
    notebook = Notebook(
        "%load_ext nbdist",
        f"import sys\nsys.path.insert(0, {str(folder)!r})",
        "%%distributed -n 2\nimport my_train",
        "%%rank 1\nimport my_data",
    )
    yield notebook
    notebook.close()


def edit(file: Path, text: str, seconds: float) -> None:
    """Write a file, and set its modification time to `seconds` from now; negative is before now."""
    file.write_text(text)
    at = time.time() + seconds
    os.utime(file, (at, at))


def test_a_note_names_ranks_with_an_outdated_module(two: Notebook, folder: Path) -> None:
    """Only the next cell shows the note, even if it fails; with `%autoreload 2` no cell does."""
    advice = "imported it: run `%distributed %autoreload 2` once, or `%dist_restart`"
    edit(folder / "my_train.py", "def steps():\n    return 'second, longer'\n", seconds=-30)
    edit(folder / "my_data.py", "kind = 'the second'\n", seconds=-30)
    shown = two.run("%%distributed\nmy_train.steps()").text
    assert "first version" in shown
    assert f"my_train.py changed after ranks 0-1 {advice}" in shown
    assert f"my_data.py changed after rank 1 {advice}" in shown
    assert "imported it" not in two.run("%%distributed\nmy_train.steps()").text
    edit(folder / "my_data.py", "kind = 'another'\n", seconds=-20)
    failed = two.run("%%rank 1\n1 / 0").panel["text/plain"]
    assert f"my_data.py changed after rank 1 {advice}" in failed
    assert two.run("%%distributed\n%autoreload 2").errors == []
    assert "second, longer" in two.run("%%distributed\nmy_train.steps()").text
    edit(folder / "my_train.py", "def steps():\n    return 'third, longer still'\n", seconds=-10)
    shown = two.run("%%distributed\nmy_train.steps()").text
    assert "third, longer still" in shown
    assert "imported it" not in shown


@pytest.mark.parametrize("is_in_mid_cell", [True, False])
def test_a_new_page_says_whether_it_missed_output(two: Notebook, *, is_in_mid_cell: bool) -> None:
    """A page's first cell has a note if the page was opened before the last cell had ended."""
    first, others = two.client, []

    def open_page(_: object = None) -> None:
        if not others:
            others.append(two.new_client())
            others[0].kernel_info()

    two.run("%%distributed\nimport time\ntime.sleep(2.2)", open_page if is_in_mid_cell else None)
    time.sleep(0 if is_in_mid_cell else 1)  # any page takes longer to load
    open_page()
    try:
        (two.client,) = others
        shown = [two.run("%%distributed\nprint('next')").text for _ in range(2)]
    finally:
        two.client.stop_channels()
        two.client = first
    have_note = ["this page was opened or reloaded before cell [" in text for text in shown]
    assert have_note == [is_in_mid_cell, False]
    assert "reloaded" not in two.run("%%distributed\nprint('next')").text


def test_stop_while_a_cell_is_followed_loses_nothing(two: Notebook) -> None:
    """Stop at a line that nbdist runs during a cell stops all ranks; no output or rank is lost."""
    two.run(PRESS)
    for number in range(0, 140, 28):
        stopped = two.run(f"stop_at({number})")
        assert stopped.error.endswith("Stopped on ranks 0-1. No variables were lost."), number
        text = stopped.panel["text/plain"]
        for expected in ("begun", "■ 2 stopped"):
            assert expected in text, number
        assert "KeyboardInterrupt" in text.splitlines(), number  # without a message
    assert body(two.run("%%distributed\nprint(rank)"))[-1] == "1"


def test_the_tabs_layout_gives_each_rank_a_tab(two: Notebook) -> None:
    """The setting `layout` applies from the next cell on; each cell gives its tabs a new name."""
    names = []
    two.run("%config NbDist.layout = 'tabs'")
    try:
        for _ in range(2):
            data = two.run("%%distributed\nprint('the same')").displays[-1]["data"]
            assert data["text/plain"].endswith("── rank 0 ──\nthe same\n── rank 1 ──\nthe same")
            (first, second) = re.findall(r'<details name="([^"]+)"', data["text/html"])
            assert first == second
            names.append(first)
    finally:
        two.run("%config NbDist.layout = 'merged'")
    assert names[0] != names[1]
    assert "ranks 0-1 (same)" in two.run("%%distributed\nprint('the same')").text
