"""Tests of `nbdist.agent.kernel_link`: which messages of a worker become outputs, and how.

Also the connection file, and the frames with which tasks end.
"""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.session import Session

from nbdist.agent.kernel_link import (
    BAD_WIDGET,
    MAX_LEVELS,
    NO_COMM,
    TOO_DEEP,
    FrameConnection,
    KernelClient,
    KernelMessage,
    message_from,
    output_from,
    user_failure,
)
from nbdist.output.events import (
    Clear,
    Comm,
    Display,
    Done,
    Failure,
    Output,
    Record,
    Tracked,
    TransferProgress,
)
from nbdist.values.payload import Payload
from nbdist.wire.frames import BadFrame, framed
from nbdist.wire.spec import WorkerStart, WorldSpec
from nbdist.wire.work import Finished, said_from
from nbdist.worker.group.gloo import wait
from nbdist.worker.ops.run import call


def message(kind: str, content: Any) -> KernelMessage:
    return KernelMessage(kind, content, 1, {"time_ns": 5})


@pytest.mark.parametrize("function", [wait, call])
def test_our_own_frames_are_not_shown(function: Any) -> None:
    """Frames of nbdist between a cell and the function that the cell called are left out."""
    ours = f"File \x1b[32m{function.__code__.co_filename}:25\x1b[0m, in {function.__name__}"
    failure = Failure("ValueError", "x", ("Cell In[1], line 2", ours, "ValueError: x"), 5)
    assert user_failure(failure).traceback == ("Cell In[1], line 2", "ValueError: x")
    # IPython's own text for SystemExit is meant for a terminal.
    shown = user_failure(Failure("SystemExit", "3", ("long", "words"), 5))
    assert (shown.message, shown.traceback[0][:21]) == ("3", "sys.exit(3) ended the")


TRACKED = {"curves": {"loss": [0, 1, 2.0, 2.0, 2.0, 0]}, "counted": {"loss": 1}}
RECORD = Record("vm", 0, 0, "app", 20, "INFO", "said", 1.5, "a.py", 3, "f", "MainThread", 7)


@pytest.mark.parametrize(
    ("kind", "content", "output"),
    [
        ("clear_output", {"wait": True}, Clear(wait=True)),
        ("display_data", {"data": {"text/plain": "x"}}, Display({"text/plain": "x"}, {})),
        ("display_data", {"data": {"text/plain": 5}}, Display({"text/plain": "5"}, {})),
        ("display_data", {"data": [1]}, None),
        ("update_display_data", {"data": {}}, None),
        ("error", {}, None),
        ("nbdist_moved", {"done": 1, "total": 2}, TransferProgress(1, 2)),
        ("nbdist_moved", {"done": float("inf"), "total": 2}, None),
        ("nbdist_record", RECORD._asdict(), RECORD),
        ("nbdist_record", RECORD._replace(message=5)._asdict(), None),
        ("nbdist_tracked", TRACKED, Tracked({"loss": (0, 1, 2, 2, 2, 0)}, {"loss": 1})),
        ("nbdist_tracked", {**TRACKED, "curves": {"loss": [0, 1, 2, 2, 2]}}, None),
        ("nbdist_tracked", {**TRACKED, "curves": {"loss": [0, 1, 2, 2, math.nan, 0]}}, None),
        ("nbdist_tracked", {**TRACKED, "counted": {"loss": 10**20}}, None),
        ("nbdist_tracked", {**TRACKED, "curves": {"\ud800": TRACKED["curves"]["loss"]}}, None),
        ("nbdist_tracked", {**TRACKED, "curves": {"loss": [1e308, 1, 2, 2, 2, 0]}}, None),
        ("nbdist_tracked", {**TRACKED, "curves": {"loss": [0, -1, 2, 2, 2, 0]}}, None),
        ("nbdist_tracked", {**TRACKED, "curves": {"loss": [0, 1, 2, 2, 2, -1]}}, None),
        ("status", {"execution_state": "idle"}, None),
        ("comm_msg", {"comm_id": "a", "data": {"x": 1}}, Comm("comm_msg", "a", {"x": 1}, {})),
        ("comm_msg", {"comm_id": 5}, None),
        ("comm_open", {"target_name": "mine"}, Display({"text/plain": NO_COMM.format("mine")}, {})),
    ],
)
def test_messages_become_outputs(kind: str, content: Any, output: Output | None) -> None:
    """Malformed messages, and messages of kinds that are not relayed, become no output."""
    assert output_from(message(kind, content)) == output


MODEL = {"_model_name": "M", "_model_module": "m", "_model_module_version": "1"}


def opens(**data: Any) -> tuple[str, dict[str, Any]]:
    return "comm_open", {"target_name": "jupyter.widget", "comm_id": "a", "data": data}


def changes(**data: Any) -> tuple[str, dict[str, Any]]:
    return "comm_msg", {"comm_id": "a", "data": data}


@pytest.mark.parametrize(
    ("message_parts", "why"),
    [
        *((opens(state=each), "its state is no dictionary") for each in (None, [1], "x")),
        *((changes(state=each), "its state is no dictionary") for each in (None, ["msg_id"], 5)),
        (changes(state={}, buffer_paths=5), "its `buffer_paths` is no list of paths"),
        *(
            (opens(state=MODEL, buffer_paths=[each]), "its `buffer_paths` is no list of paths")
            for each in (1, [], [["x"]], "x", None)
        ),
        (opens(state={}), "`_model_name` in its state is no text"),
        (changes(state={"_model_module": {}}), "`_model_module` in its state is no text"),
        (("comm_msg", {"comm_id": "a", "data": [1]}), "its data is no dictionary"),
    ],
)
def test_malformed_widget_messages_become_lines(message_parts: tuple[str, Any], why: str) -> None:
    """A malformed message of a widget is replaced by a line that names the mistake."""
    shown = output_from(message(*message_parts))
    assert shown == Display({"text/plain": BAD_WIDGET.format(why)}, {})


def test_well_formed_widget_messages_are_relayed() -> None:
    """Messages that open, change or close a widget are relayed, the closing ones without data."""
    assert isinstance(output_from(message(*opens(state=MODEL, buffer_paths=[["a", 0]]))), Comm)
    assert isinstance(output_from(message(*changes(method="custom", content=[1]))), Comm)
    closes = {"comm_id": "a", "data": [1]}
    assert output_from(message("comm_close", closes)) == Comm("comm_close", "a", {}, {})


@pytest.mark.parametrize("levels", [MAX_LEVELS - 2, MAX_LEVELS - 1, 900, 3000])
def test_a_message_with_too_many_levels_is_dropped(levels: int) -> None:
    """The content of a message with too many levels becomes a line, under the same number."""
    session = Session(key=b"ours")
    packed = session.msg("display_data", {}, metadata={"nbdist": {"number": 7}})
    deep = b'{"data": {"application/json": %b1%b}}' % (b"[" * levels, b"]" * levels)
    packed["content"] = deep
    found = message_from(session, session.serialize(packed))
    assert found is not None
    assert found.number == 7
    shown = output_from(found)
    assert isinstance(shown, Display)
    is_dropped = shown.data == {"text/plain": TOO_DEEP.format("display_data", MAX_LEVELS)}
    assert is_dropped == (levels > MAX_LEVELS - 2)


def test_messages_of_others_are_dropped() -> None:
    """Bytes that are no message, and messages signed with another key, are dropped."""
    ours, others = Session(key=b"ours"), Session(key=b"others")
    message = ours.msg("nbdist_reply", {})
    frames = ours.serialize(message)
    assert message_from(ours, [*frames, b"buffer"]).buffers == [b"buffer"]
    assert message_from(ours, [b"garbage"]) is None
    assert message_from(ours, others.serialize(others.msg("nbdist_reply", {}))) is None


DONE = Done("ok", 0.5, frozenset({"x"}), {"np": "numpy"}, Payload((b"1",)))


def test_the_connection_file_is_private_and_removed(tmp_path: Path) -> None:
    """A private file gives the kernel a key and unix sockets; `close` removes the file."""
    spec, file = WorldSpec(1, None, {}, "/", (), 1, "python"), tmp_path / "r0.json"
    start = WorkerStart(0, spec, str(file), "token", "", "", 1, {})
    kernel = KernelClient(start, lambda *_: None)
    kernel.write_connection_file()
    said = json.loads(file.read_text())
    assert (said["transport"], said["ip"]) == ("ipc", f"{tmp_path}/r0")
    assert [said[f"{name}_port"] for name in ("shell", "iopub", "control")] == [1, 2, 4]
    assert len(said["key"]) >= 32
    assert file.stat().st_mode & 0o777 == 0o600
    kernel.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "frame",
    [
        b"garbage",
        pickle.dumps(Finished(3, "a", None)),
        pickle.dumps(Finished("3", "a", DONE)),
        pickle.dumps(Finished(3, "a", replace(DONE, values=DONE))),
        pickle.dumps(Finished(3, "a", replace(DONE, bound="x"))),
    ],
)
def test_ends_of_tasks_arrive_in_any_pieces(frame: bytes) -> None:
    """The end of a task may arrive in any pieces; a bad frame ends the connection, once."""
    ends: list[Finished] = []
    problems: list[BadFrame | None] = []
    connection = FrameConnection(lambda frame: ends.append(said_from(frame)), problems.append)
    end = Finished(3, "a", DONE)
    for byte in framed(pickle.dumps(end, protocol=5)):
        connection.data_received(bytes([byte]))
    assert ends == [end]
    connection.data_received(framed(frame))
    connection.data_received(framed(pickle.dumps(end)))
    connection.connection_lost(None)
    assert ends == [end]
    assert [type(problem) for problem in problems] == [BadFrame]
