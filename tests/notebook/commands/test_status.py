"""Tests of `nbdist.notebook.commands.inspect`: whose the names are, and that there are none."""

from __future__ import annotations

from collections.abc import Callable

from nbdist.notebook.commands.inspect import owners_text
from tests.notebook.front_end import Notebook, Outcome


def test_owners():
    """A line for each of both."""
    owners = {
        "model": ("workers", frozenset({0, 1})),
        "x": ("notebook", frozenset({0})),
        "a": ("workers", frozenset({1})),
    }
    assert owners_text(owners) == "made on the workers: a, model\nsent by the notebook: x"
    assert owners_text({}) == "made on the workers: none\nsent by the notebook: none"


def test_without_workers(typed: Callable[[str], str]):
    """How some are started, and with `-v` that no name is anywhere."""
    shown = typed("%dist_status -v").splitlines()
    assert shown[0].startswith("no workers are running · `%%distributed -n 4`")
    assert shown[1:] == ["made on the workers: none", "sent by the notebook: none"]


def test_again_and_again(fresh: Callable[..., Notebook]):
    """`-f` draws the table anew in its place until Stop, which is no error."""
    notebook = fresh("%load_ext nbdist", env={"NBDIST_PRESTART": "0"})
    stopped: list[bool] = []

    def stop(outcome: Outcome) -> None:
        if len(outcome.updates) >= 2 and not stopped:
            stopped.append(True)
            notebook.manager.interrupt_kernel()

    shown = notebook.run("%dist_status -f 0.1", stop)
    assert shown.errors == []
    assert shown.text.startswith("no workers are running")
    assert len(shown.displays) == 1
    assert len(shown.updates) >= 2
    assert "`--follow x`: a number of seconds" in notebook.run("%dist_status -f x").error
