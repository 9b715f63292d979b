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


def test_calls_as_in_tracebacks() -> None:
    """With a library's own path, and no function where there is none."""
    library = "/v/lib/python3.11/site-packages/torch/nn/x.py"
    for frame, lines in (
        (StackFrame("Cell In[5]", 3, "<module>", "f()"), ["  Cell In[5], line 3", "    f()"]),
        (
            StackFrame(library, 7, "g", "return y"),
            ["  torch/nn/x.py, line 7, in g", "    return y"],
        ),
        (StackFrame("/usr/lib/python3.11/json/a.py", 1, "f"), ["  json/a.py, line 1, in f"]),
        (StackFrame("/home/me/lib/train.py", 1, "f"), ["  /home/me/lib/train.py, line 1, in f"]),
    ):
        assert frame.lines == lines
        assert frame.is_cell == frame.file.startswith("Cell")


def test_whether_a_rank_is_in_what_it_runs() -> None:
    """Else it says how that has ended."""
    for place in (Place(line=1), Place(file="train.py"), Place(operation="barrier")):
        assert place.is_in_code
    assert Place(holds_gil=True).is_in_code
    assert Place(is_stopped=True).is_in_code
    for place in (Place(), Place(counts={"default": 3})):
        assert not place.is_in_code


def test_any_other_line_is_refused() -> None:
    """A cell can have written into the file, or Python is one that is not known."""
    layout = CallLayout(1 << 46, 1 << 47, 1 << 45, *range(13))
    assert CallLayout.read(layout.line()) == layout
    odd = [b"", b"\n", b"1 2 3\n", b"\xff\n", b"9" * 5000, b"x " * 16, layout.line() + b"1"]
    for line in (*odd, b"1 2 3" + b" -1" * 13, b"1 2 3" + b" %d" % LARGEST * 13):
        with pytest.raises(ValueError, match=r"int\(\)|unpack|offsets|digits"):
            CallLayout.read(line)


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


def test_what_is_said_is_read_again() -> None:
    """As one line each, with all that is known of a worker."""
    attach = Attach("1.0", 12, "notebook-12.sock")
    said: list[Said] = [Describe(), Look(), attach, INFO, Accepted(3, 4), Refused("")]
    for each in said:
        line = to_line(each)
        assert line.index(b"\n") == len(line) - 1
        assert from_line(line) == each
    # What this version does not know is passed over.
    assert from_line(json.dumps({"Refused": {"why": "no", "until": 5}}).encode()) == Refused("no")


def test_what_is_none_of_it() -> None:
    """Raises, and makes nothing."""
    garbage = [b"", b"hello\n", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000]
    for line in (
        *garbage,
        b'{"Look": {}, "Accepted": {}}',
        b'{"System": {"command": "ls"}}',
        b'{"Accepted": {"agent": "1", "guard": 2}}',
        b'{"Refused": {}}',
        b'{"Refused": []}',
        b'{"WorldInfo": {"version": "", "host": "", "ranks": [{"rank": 0}]}}',
        b'{"WorldInfo": {"version": "", "host": "", "ranks": [7]}}',
    ):
        with pytest.raises(BadFrame):
            from_line(line)


def test_who_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As the kernel says, not the other side; names of sockets stay in the folder."""
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
    names = ("notebook-12.sock", "../x.sock", "notebook-1.sock/..")
    assert [bool(SOCKET.fullmatch(name)) for name in names] == [True, False, False]
