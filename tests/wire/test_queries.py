"""Tests of `nbdist.wire.queries`: queries of the user's processes to a world, and its answers."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from nbdist.wire.frames import BadFrame
from nbdist.wire.places import Begun, Collective, RankPosition
from nbdist.wire.queries import (
    ATTACH_SOCKET_PATTERN,
    Accepted,
    Attach,
    AttachRefused,
    Describe,
    DescribeRanks,
    QueryMessage,
    WorldInfo,
    connect_to,
    from_line,
    peer_user,
    to_line,
)
from nbdist.wire.status import Gpu, WorkerStatus

WORKER = WorkerStatus(
    *(0, 100, "here", "busy", 1.5, 2**20, "cuda:0"),
    RankPosition(3, counts={"0": 7}, stalled=(("a:1", "b:2"),), begun=(Begun("0", 4, "barrier"),)),
    *("x = 1", Collective("barrier", 4, is_done=True), Gpu(1, 2, 3), 0.5, 7),
    "loss\x1b[2J\udc80",
)
INFO = WorldInfo(
    *("1.0", "vm", "default", "exp", 2, "busy", "x = 1", 1.5, 0, 2.5, True, 7, {"torch": "2"}),
    *("a.ipynb", "gloo", 1.25, (WORKER, WorkerStatus(1, 2, "", "idle", 0.0, 0, ""))),
)


def test_queries_are_read_as_they_were_written() -> None:
    """Each query or answer is written as one line, and read as an equal object."""
    attach = Attach("1.0", 12, "notebook-12.sock")
    said: list[QueryMessage] = [
        Describe(),
        DescribeRanks(),
        attach,
        INFO,
        Accepted(3, 4),
        AttachRefused(""),
    ]
    for each in said:
        line = to_line(each)
        assert line.index(b"\n") == len(line) - 1
        assert from_line(line) == each
    # Fields that this version does not know are ignored.
    assert from_line(json.dumps({"Refused": {"why": "no", "until": 5}}).encode()) == AttachRefused(
        "no"
    )


def test_a_line_that_is_no_query_is_refused() -> None:
    """A line that is no known query or answer raises BadFrame."""
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


def test_only_sockets_of_this_user_are_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel names a socket's user, who must be this user; names of sockets have no folder."""
    one, other = socket.socketpair()
    with one, other:
        assert peer_user(one) == peer_user(other) == os.geteuid()
    # A socket of this user is connected to; a missing one, or one of another user, is an error.
    path = tmp_path / "x.sock"
    with pytest.raises(FileNotFoundError):
        connect_to(path, 1.0)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        door.listen()
        with connect_to(path, 1.0) as end:
            assert (end.gettimeout(), peer_user(end)) == (1.0, os.geteuid())
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(PermissionError, match="another user's"):
            connect_to(path, 1.0)
    names = ("notebook-12.sock", "../x.sock", "notebook-1.sock/..")
    assert [bool(ATTACH_SOCKET_PATTERN.fullmatch(name)) for name in names] == [True, False, False]
