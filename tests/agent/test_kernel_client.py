"""Tests of `nbdist.agent.kernel_client`: what of a worker's bytes gets through, what is left."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.agent.kernel_client import KernelClient, TaskConnection
from nbdist.output.events import Done
from nbdist.values.payload import Payload
from nbdist.wire.frames import BadFrame, framed
from nbdist.wire.spec import WorkerStart, WorldSpec
from nbdist.wire.work import Finished

SPEC = WorldSpec(1, None, {}, "/", (), 1, "python")
DONE = Done("ok", 0.5, frozenset({"x"}), {"np": "numpy"}, Payload((b"1",)))


def start_in(folder: Path) -> WorkerStart:
    """Of a worker whose files lie there."""
    return WorkerStart(0, 0, 1, SPEC, f"{folder}/r0.json", "token", "", "", 1, {})


def test_the_connection_file_and_what_is_left(tmp_path: Path) -> None:
    """The kernel reads a key and unix sockets from a file that nobody else can; it goes again."""
    kernel = KernelClient(start_in(tmp_path), lambda _: None)
    kernel.write_connection_file()
    file = tmp_path / "r0.json"
    said = json.loads(file.read_text())
    assert (said["transport"], said["ip"]) == ("ipc", f"{tmp_path}/r0")
    assert [said[f"{name}_port"] for name in ("shell", "iopub", "control")] == [1, 2, 4]
    assert len(said["key"]) >= 32
    assert file.stat().st_mode & 0o777 == 0o600
    kernel.close()
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_task_comes_through() -> None:
    """In however many pieces."""
    ends: list[Finished] = []
    connection = TaskConnection(ends.append, lambda _: None)
    end = Finished(3, "a", DONE)
    for byte in framed(pickle.dumps(end, protocol=5)):
        connection.data_received(bytes([byte]))
    assert ends == [end]


@pytest.mark.parametrize(
    "frame",
    [
        b"garbage",
        pickle.dumps(Finished(3, "a", None)),  # type: ignore[arg-type]
        pickle.dumps(Finished("3", "a", DONE)),  # type: ignore[arg-type]
        pickle.dumps(Finished(3, "a", replace(DONE, values=DONE))),
        pickle.dumps(Finished(3, "a", replace(DONE, bound="x"))),  # type: ignore[arg-type]
    ],
)
def test_anything_else_ends_the_connection(frame: bytes) -> None:
    """Once, and nothing that follows is read."""
    ends: list[Finished] = []
    problems: list[BadFrame | None] = []
    connection = TaskConnection(ends.append, problems.append)
    connection.data_received(framed(frame))
    connection.data_received(framed(pickle.dumps(Finished(3, "a", DONE))))
    connection.connection_lost(None)
    assert ends == []
    assert [type(problem) for problem in problems] == [BadFrame]
