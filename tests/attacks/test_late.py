"""What ranks say after their cell has ended: threads, asyncio tasks, children."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.front_end import WAIT, Notebook
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world

LATER = {
    "thread": (
        "import threading\n"
        "def say(): print('said late by', rank)\n"
        "_ = threading.Timer(0.4, say).start()"
    ),
    "asyncio task": (
        "import asyncio\n"
        "async def say():\n    await asyncio.sleep(0.4)\n    print('said late by', rank)\n"
        "task = asyncio.ensure_future(say()); None"
    ),
    "child": (
        "import subprocess\n"
        "child = subprocess.Popen(['sh', '-c', f'sleep 0.4; echo said late by {rank}'])"
    ),
    "child, to stderr": (
        "import subprocess\n"
        "child = subprocess.Popen(['sh', '-c', f'sleep 0.4; echo said late by {rank} >&2'])"
    ),
    "thread that shows an error": (
        "import threading\n"
        "def say():\n"
        "    try: raise ValueError(f'said late by {rank}')\n"
        "    except ValueError: get_ipython().showtraceback()\n"
        "_ = threading.Timer(0.4, say).start()"
    ),
    "thread that displays": (
        "import threading\n"
        "def say(): display({'text/plain': f'said late by {rank}'}, raw=True)\n"
        "_ = threading.Timer(0.4, say).start()"
    ),
}


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    started = Notebook("%load_ext nbdist", "%%distributed -n 2\npass")
    yield started
    started.close()


def shown_since(notebook: Notebook, wanted: str) -> dict[str, Any]:
    """The display that has this text, which appears while no cell runs."""
    deadline = time.monotonic() + WAIT
    while True:
        message = notebook.client.get_iopub_msg(timeout=deadline - time.monotonic())
        if message["msg_type"] in ("display_data", "update_display_data"):
            content: dict[str, Any] = message["content"]
            if wanted in content["data"]["text/plain"]:
                return content


@pytest.mark.parametrize("later", LATER)
def test_late_output_is_shown_under_its_cell(notebook: Notebook, later: str) -> None:
    """While no cell runs, in the place of the cell's own output, which stays."""
    outcome = notebook.run(f"%%distributed\nprint('said in time')\n{LATER[later]}")
    assert outcome.errors == []
    said = shown_since(notebook, "said late by 1")
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
    done = tmp_path / "done"
    try:
        notebook.run(
            "%%rank 1\nimport subprocess\nchild = subprocess.Popen("
            f"['sh', '-c', 'sleep 0.3; echo said late; sleep 0.3; touch {done}'])"
        )
        wait_until(done.exists, "the child has said it")
        said = "".join(notebook.run("%%distributed\npass").streams)
        assert said.startswith("rank 1 said after its last cell: said late\n")
    finally:
        notebook.run('%config NbDist.display = "auto"')


def test_flood_after_a_cell(notebook: Notebook) -> None:
    """A thread that never stops to talk slows no cell, and is shown a few times a second."""
    notebook.run(
        "%%distributed\nimport threading\nover = threading.Event()\n"
        "def talk():\n    while not over.wait(0.001): print('talks')\n"
        "threading.Thread(target=talk).start()"
    )
    drawn, until = 0, time.monotonic() + 2.0
    while time.monotonic() < until:
        shown_since(notebook, "talks")
        drawn += 1
    assert drawn <= 12
    outcome = notebook.run("%%distributed\nover.set()")
    assert outcome.errors == []


def test_display_is_updated_by_a_later_cell(notebook: Notebook) -> None:
    """`h.update()` changes what the earlier cell has shown."""
    first = notebook.run(
        "%%distributed\nh = display({'text/plain': 'before'}, raw=True, display_id=True)"
    )
    assert "before" in first.text
    notebook.run("%%distributed\nprint('between')")
    later = notebook.run("%%distributed\nh.update({'text/plain': 'after'}, raw=True)\nprint('x')")
    (update,) = [
        each for each in later.updates if each["transient"] == first.displays[0]["transient"]
    ]
    assert "after" in update["data"]["text/plain"]
    assert "before" not in update["data"]["text/plain"]
    own = [each for each in later.displays if "x" in each["data"]["text/plain"]]
    assert len(own) == 1
