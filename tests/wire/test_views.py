"""Tests of `nbdist.wire.views`: a rank's place and stack, and where its calls are."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from nbdist.wire.frames import BadFrame
from nbdist.wire.views import (
    LARGEST,
    SOCKET,
    Accepted,
    Attach,
    Begun,
    CallLayout,
    Collective,
    Describe,
    Gpu,
    Look,
    Place,
    Refused,
    Said,
    StackFrame,
    WorkerStatus,
    WorldInfo,
    connect_to,
    from_line,
    to_line,
    user_at,
)


@pytest.mark.parametrize(
    ("frame", "lines"),
    [
        (StackFrame("Cell In[5]", 3, "<module>", "f()"), ["  Cell In[5], line 3", "    f()"]),
        (
            StackFrame("/v/lib/python3.11/site-packages/torch/nn/x.py", 7, "forward", "return y"),
            ["  torch/nn/x.py, line 7, in forward", "    return y"],
        ),
        (StackFrame("/usr/lib/python3.11/json/a.py", 1, "f"), ["  json/a.py, line 1, in f"]),
        (StackFrame("/home/me/lib/train.py", 1, "f"), ["  /home/me/lib/train.py, line 1, in f"]),
    ],
)
def test_calls_as_in_tracebacks(frame: StackFrame, lines: list[str]) -> None:
    """With a library's own path, and no function where there is none."""
    assert frame.lines == lines
    assert frame.is_cell == frame.file.startswith("Cell")


@pytest.mark.parametrize(
    ("place", "is_in_code"),
    [
        (Place(), False),
        (Place(counts={"default": 3}), False),
        (Place(line=1), True),
        (Place(file="train.py"), True),
        (Place(operation="barrier"), True),
        (Place(holds_gil=True), True),
        (Place(is_stopped=True), True),
    ],
)
def test_whether_a_rank_is_in_what_it_runs(place: Place, *, is_in_code: bool) -> None:
    """Else it says how that has ended."""
    assert place.is_in_code == is_in_code


LAYOUT = CallLayout(1 << 46, 1 << 47, 1 << 45, *range(13))


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\n", b"1 2 3\n", b"\xff\n", b"9" * 5000, b"x " * 16),
        LAYOUT.line() + b"1",
        b"1 2 3" + b" -1" * 13,
        b"1 2 3" + b" %d" % LARGEST * 13,
    ],
)
def test_any_other_line_is_refused(line: bytes) -> None:
    """A cell can have written into the file, or Python is one that is not known."""
    assert CallLayout.read(LAYOUT.line()) == LAYOUT
    with pytest.raises(ValueError, match=r"int\(\)|unpack|offsets|digits"):
        CallLayout.read(line)


# --- what other processes ask of a world ------------------------------------------------------


WORKER = WorkerStatus(
    *(0, 100, "here", "busy", 1.5, 2**20, "cuda:0"),
    Place(3, counts={"0": 7}, stalled=(("a:1", "b:2"),), begun=(Begun("0", 4, "barrier"),)),
    *("x = 1", Collective("barrier", 4, is_done=True), Gpu(1, 2, 3), 0.5, 7),
    "loss\x1b[2J\udc80",
)
INFO = WorldInfo(
    *("1.0", "vm", "default", "exp", 2, "busy", "x = 1", 1.5, 0, 2.5, True, 7, {"torch": "2"}),
    *("a.ipynb", "gloo", 1.25, (WORKER, WorkerStatus(1, 2, "", "idle", 0.0, 0, ""))),
)


@pytest.mark.parametrize(
    "said",
    [Describe(), Look(), Attach("1.0", 12, "notebook-12.sock"), INFO, Accepted(3, 4), Refused("")],
)
def test_what_is_said_is_read_again(said: Said) -> None:
    """As one line each, with all that is known of a worker."""
    line = to_line(said)
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    assert from_line(line) == said
    # What this version does not know is passed over.
    assert from_line(json.dumps({"Refused": {"why": "no", "until": 5}}).encode()) == Refused("no")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"hello\n",
        b"[]",
        b"{}",
        b'{"Look": {}, "Accepted": {}}',
        b'{"System": {"command": "ls"}}',
        b'{"Accepted": {"agent": "1", "guard": 2}}',
        b'{"Refused": {}}',
        b'{"Refused": []}',
        b'{"WorldInfo": {"version": "", "host": "", "ranks": [{"rank": 0}]}}',
        b'{"WorldInfo": {"version": "", "host": "", "ranks": [7]}}',
        b"\xff\xfe",
        b"[" * 100_000,
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


def test_who_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As the kernel says, not the other side."""
    one, other = socket.socketpair()
    with one, other:
        assert user_at(one) == user_at(other) == os.geteuid()
    # It is connected to; one that somebody else listens at is not, nor one that is not there.
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
