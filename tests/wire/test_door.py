"""Tests of `nbdist.wire.door`: what is said at a world's door, and seen through its window.

And what is not taken for it, and who is there.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
from pathlib import Path

import pytest

from nbdist.wire.door import (
    MOST_BYTES,
    SOCKET,
    Admitted,
    Attach,
    Held,
    Refused,
    Said,
    Who,
    WorldSeen,
    connect_to,
    from_line,
    seen_from,
    to_answer,
    to_line,
    user_at,
)
from nbdist.wire.frames import BadFrame, FrameCutter
from nbdist.wire.views import Collective, Gpu, Place, WorkerStatus

HELD = Held("1.0", "vm", "default", "exp", 2, "busy", "x = 1", 1.5, 0, 2.5, detach=True, guard=7)


@pytest.mark.parametrize(
    "said", [Who(), Attach("1.0", 12, "notebook-12.sock"), HELD, Admitted(3, 4), Refused("no")]
)
def test_what_is_said_is_read_again(said: Said) -> None:
    """As one line each."""
    line = to_line(said)
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    assert from_line(line) == said


def test_other_versions_may_say_more() -> None:
    """What this one does not know is passed over."""
    assert from_line(json.dumps({"Refused": {"why": "no", "until": 5}}).encode()) == Refused("no")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello\n",
        b"[]",
        b"{}",
        b'{"Who": {}, "Admitted": {}}',
        b'{"System": {"command": "ls"}}',
        b'{"Admitted": {"agent": "1", "guard": 2}}',
        b'{"Refused": {}}',
        b'{"Refused": []}',
        b"\xff\xfe",
    ],
)
def test_what_is_none_of_it(line: bytes) -> None:
    """Raises, and makes nothing."""
    with pytest.raises(BadFrame):
        from_line(line)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("notebook-12.sock", True), ("../x.sock", False), ("notebook-1.sock/..", False)],
)
def test_names_of_sockets(name: str, is_one: bool) -> None:  # noqa: FBT001
    """Stay in the folder."""
    assert bool(SOCKET.fullmatch(name)) is is_one


WORKER = WorkerStatus(
    *(0, 100, "here", "busy", 1.5, 2**20, "cuda:0", Place(line=3), "x = 1"),
    *(Collective("barrier", 4, is_done=True), Gpu(1, 2, 3), 0.5, 7, "loss\x1b[2J"),
)


def test_an_answer_arrives_as_it_was():
    """With all that is known of a worker."""
    seen = WorldSeen("here", 5, "a.ipynb", 1.25, "default", "run", "gloo", (WORKER,))
    (frame,) = FrameCutter(MOST_BYTES).feed(to_answer(seen))
    assert seen_from(frame) == seen


class Runs:
    """Runs something where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.kill, (os.getpid(), 9)


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", pickle.dumps(Runs()), pickle.dumps(WORKER), pickle.dumps("look")],
    ids=["nothing", "garbage", "runs", "worker", "look"],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    """And nothing of them runs."""
    with pytest.raises(BadFrame):
        seen_from(data)


def test_who_is_there():
    """As the kernel says, not the other side."""
    one, other = socket.socketpair()
    with one, other:
        assert user_at(one) == user_at(other) == os.geteuid()


def test_a_socket_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is connected to; one that somebody else listens at is not, nor one that is not there."""
    path = tmp_path / "x.sock"
    with pytest.raises(FileNotFoundError):
        connect_to(path, 1.0)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        with connect_to(path, 1.0) as end:
            assert (end.gettimeout(), user_at(end)) == (1.0, os.geteuid())
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(PermissionError, match="another user's"):
            connect_to(path, 1.0)
