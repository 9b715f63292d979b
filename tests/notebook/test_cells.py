"""Tests of `nbdist.notebook.cells`: a cell is checked, sent, followed, and run again."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest

from nbdist.notebook.cells import through
from tests.notebook.front_end import Notebook, body

pytestmark = pytest.mark.shared_world


def test_all_steps_are_taken() -> None:
    """What they lead to is what the last of them returns."""
    taken = []

    def steps() -> Generator[None, None, str]:
        for number in range(3):
            taken.append(number)
            yield
        return "the end"

    assert (through(steps()), taken) == ("the end", [0, 1, 2])


def test_an_error_they_lead_to_is_raised() -> None:
    """Also a StopIteration, which no generator can raise."""

    def steps() -> Generator[None, None, StopIteration]:
        yield
        return StopIteration("its own")

    with pytest.raises(StopIteration, match="its own"):
        through(steps())


def test_nothing_of_what_is_no_python_runs(notebook: Notebook) -> None:
    """The next cell finds the workers as they were; what it shows is shown."""
    (error,) = notebook.run("%%distributed\nseen = 1\nx = = 2").errors
    assert error["evalue"].endswith("(line 3 of the cell); nothing has run.")
    assert body(notebook.run("%%rank 0\nprint('seen' in globals())"))[-1] == "False"


def test_one_is_run_again(notebook: Notebook) -> None:
    """As often as it says, and no more once it has gone well."""
    tries = "tries = globals().get('tries', 0) + 1\nif tries < 3: raise ValueError(tries)"
    assert notebook.run(f"%%distributed --max-restarts 3\n{tries}").errors == []
    assert body(notebook.run("%%rank 0\nprint(tries)"))[-1] == "3"


PRESS = """
import os, pathlib, signal, sys, tempfile, time
FOLLOWING = ("world/following.py", "world/session.py", "world/running.py", "world/workers.py",
             "notebook/cells.py", "notebook/display.py", "/contextlib.py")
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
"""Makes `stop_at`.  In a trace function's frame a signal is met as if it came at the line."""


def test_stop_at_any_line_that_follows_it(fresh: Callable[..., Notebook]) -> None:
    """All ranks stop, what they have shown is there, and all of them can go on."""
    notebook = fresh("%load_ext nbdist", "%%distributed -n 2\nimport time", PRESS)
    for number in range(0, 140, 3):
        stopped = notebook.run(f"stop_at({number})")
        assert stopped.error.endswith("Stopped on ranks 0-1. No variables were lost."), number
        text = stopped.panel["text/plain"]
        assert {"begun", "KeyboardInterrupt: ", "■ 2 stopped"} == {
            each for each in ("begun", "KeyboardInterrupt: ", "■ 2 stopped") if each in text
        }, number
    assert body(notebook.run("%%distributed\nprint(rank)"))[-1] == "1"
