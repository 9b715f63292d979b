"""What ranks say after their cell has ended: threads, asyncio tasks, children."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.front_end import Notebook
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.shared_world

TOLD = (
    "import asyncio, os, subprocess, threading, time\n"
    "def be_told():\n"
    "    while not os.path.exists(sign): time.sleep(0.02)\n"
    "begin = lambda say: threading.Thread(target=say).start()\n"
)
"""What ranks say late they say when the test makes this file, after the end of their cell."""

LATER = {
    "thread": "def say(): be_told(); print('said late by', rank)\nbegin(say)",
    "asyncio task": (
        "async def say():\n"
        "    await asyncio.to_thread(be_told)\n"
        "    print('said late by', rank)\n"
        "task = asyncio.ensure_future(say()); None"
    ),
    "child": (
        "say = f'until [ -e {sign} ]; do sleep 0.02; done; echo said late by {rank}'\n"
        "child = subprocess.Popen(['sh', '-c', say])"
    ),
    "child, to stderr": (
        "say = f'until [ -e {sign} ]; do sleep 0.02; done; echo said late by {rank} >&2'\n"
        "child = subprocess.Popen(['sh', '-c', say])"
    ),
    "thread that shows an error": (
        "def say():\n"
        "    be_told()\n"
        "    try: raise ValueError(f'said late by {rank}')\n"
        "    except ValueError: get_ipython().showtraceback()\n"
        "begin(say)"
    ),
    "thread that displays": (
        "def say(): be_told(); display({'text/plain': f'said late by {rank}'}, raw=True)\n"
        "begin(say)"
    ),
}


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    started = Notebook("%load_ext nbdist", "%%distributed -n 2\npass")
    yield started
    started.close()


def shown_since(notebook: Notebook, *wanted: str) -> dict[str, Any]:
    """The display that has these texts, which appears while no cell runs."""
    deadline = time.monotonic() + SOON
    while True:
        message = notebook.client.get_iopub_msg(timeout=deadline - time.monotonic())
        if message["msg_type"] in ("display_data", "update_display_data"):
            content: dict[str, Any] = message["content"]
            if all(each in content["data"]["text/plain"] for each in wanted):
                return content


@pytest.mark.parametrize("later", LATER)
def test_late_output_is_shown_under_its_cell(
    notebook: Notebook, later: str, tmp_path: Path
) -> None:
    """While no cell runs, in the place of the cell's own output, which stays."""
    sign = tmp_path / "sign"
    cell = f"{TOLD}sign = {str(sign)!r}\nprint('said in time')\n{LATER[later]}"
    outcome = notebook.run(f"%%distributed\n{cell}")
    assert outcome.errors == []
    sign.touch()
    # Of all ranks: what came after this would be in the cell of another test.
    said = shown_since(notebook, "said late by 0", "said late by 1")
    assert said["transient"] == outcome.displays[0]["transient"]
    assert "said in time" in said["data"]["text/plain"]
    assert notebook.run("%%distributed\npass").errors == []


def test_late_output_of_a_rank_that_is_done_before_others(notebook: Notebook) -> None:
    """It is the running cell's."""
    outcome = notebook.run(
        "%%distributed\nimport threading, time\n"
        "if rank == 0: threading.Timer(0.2, print, ['said late']).start()\nelse: time.sleep(1.5)"
    )
    assert "said late" in outcome.text


def test_late_output_comes_with_the_next_cell(notebook: Notebook, tmp_path: Path) -> None:
    """Where nothing can be drawn again, as in a terminal, the next cell says so first."""
    notebook.run('%config NbDist.display = "plain"')
    sign, done = tmp_path / "sign", tmp_path / "done"
    say = f"until [ -e {sign} ]; do sleep 0.02; done; echo said late; sleep 1; touch {done}"
    try:
        notebook.run(
            f"%%rank 1\nimport subprocess\nchild = subprocess.Popen(['sh', '-c', {say!r}])"
        )
        sign.touch()
        wait_until(done.exists, "the child has said it")
        said = "".join(notebook.run("%%distributed\npass").streams)
        assert said.startswith("rank 1 printed after its last cell: said late\n")
    finally:
        notebook.run('%config NbDist.display = "auto"')


def test_flood_after_a_cell(notebook: Notebook) -> None:
    """A thread that never stops to talk slows no cell, and is shown a few times a second."""
    notebook.run(
        "%%distributed\nimport threading\nover = threading.Event()\n"
        "def talk():\n    while not over.wait(0.001): print('talks')\n"
        "talker = threading.Thread(target=talk)\ntalker.start()"
    )
    drawn, until = 0, time.monotonic() + 2.0
    while time.monotonic() < until:
        shown_since(notebook, "talks")
        drawn += 1
    assert drawn <= 12
    outcome = notebook.run("%%distributed\nover.set()\ntalker.join()")
    assert outcome.errors == []


def test_display_is_updated_by_a_later_cell(notebook: Notebook) -> None:
    """`h.update()` changes what the earlier cell has shown."""
    first = notebook.run(
        "%%distributed\nh = display({'text/plain': 'before'}, raw=True, display_id=True)"
    )
    assert "before" in first.text
    notebook.run("%%distributed\nprint('between')")
    later = notebook.run("%%distributed\nh.update({'text/plain': 'after'}, raw=True)\nprint('x')")
    # Each may be drawn several times: rank by rank, and while the cell runs.
    (own,) = later.displays
    last = {each["transient"]["display_id"]: each["data"] for each in (own, *later.updates)}
    (earlier,) = first.displays
    changed = last[earlier["transient"]["display_id"]]["text/plain"]
    assert "after" in changed
    assert "before" not in changed
    assert "x" in last[own["transient"]["display_id"]]["text/plain"]
