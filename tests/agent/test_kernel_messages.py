"""Tests of `nbdist.agent.kernel_messages`: what of a worker's messages is shown, and how."""

from __future__ import annotations

from typing import Any

import pytest
from jupyter_client.session import Session

from nbdist.agent.kernel_messages import NO_COMM, Message, as_shown, message_from, output_from
from nbdist.output.events import Clear, Display, Failure, Output
from nbdist.worker.group.gloo import wait
from nbdist.worker.ops.call import call


def message(kind: str, content: Any) -> Message:
    return Message(kind, content, "", 1, 5, (), "")


@pytest.mark.parametrize("function", [wait, call])
def test_our_own_frames_are_not_shown(function: Any) -> None:
    """Those between users' code and what it called, which nobody has written."""
    ours = f"File \x1b[32m{function.__code__.co_filename}:25\x1b[0m, in {function.__name__}"
    failure = Failure("ValueError", "x", ("Cell In[1], line 2", ours, "ValueError: x"), 5)
    assert as_shown(failure).traceback == ("Cell In[1], line 2", "ValueError: x")


def test_exit_says_what_it_does() -> None:
    """IPython's own words are for a terminal."""
    shown = as_shown(Failure("SystemExit", "3", ("long", "words"), 5))
    assert shown.message == "3"
    assert shown.traceback[0].startswith("sys.exit(3) ended the cell on this rank")


@pytest.mark.parametrize(
    ("kind", "content", "output"),
    [
        ("clear_output", {"wait": True}, Clear(wait=True)),
        ("display_data", {"data": {"text/plain": "x"}}, Display({"text/plain": "x"}, {})),
        ("display_data", {"data": {"text/plain": 5}}, Display({"text/plain": "5"}, {})),
        ("display_data", {"data": [1]}, None),
        ("update_display_data", {"data": {}}, None),
        ("error", {}, None),
        ("status", {"execution_state": "idle"}, None),
        ("comm_open", {"target_name": "jupyter.widget"}, None),
        ("comm_open", {"target_name": "mine"}, Display({"text/plain": NO_COMM.format("mine")}, {})),
    ],
)
def test_messages_become_outputs(kind: str, content: Any, output: Output | None) -> None:
    """Malformed ones, and kinds that are not relayed, become none."""
    assert output_from(message(kind, content)) == output


def test_messages_of_others_are_dropped() -> None:
    """What is no message, or was signed with another key."""
    ours, others = Session(key=b"ours"), Session(key=b"others")
    message = ours.msg("nbdist_reply", {})
    frames = ours.serialize(message)
    assert message_from(ours, [*frames, b"buffer"]).buffers == (b"buffer",)  # type: ignore[union-attr]
    assert message_from(ours, [b"garbage"]) is None
    assert message_from(ours, others.serialize(others.msg("nbdist_reply", {}))) is None
