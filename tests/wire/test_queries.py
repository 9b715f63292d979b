"""Tests of `nbdist.wire.queries`: what other processes of the user ask a world, and its answers."""

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


def test_what_is_said_is_read_again() -> None:
    """As one line each, with all that is known of a worker."""
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
    # What this version does not know is passed over.
    assert from_line(json.dumps({"Refused": {"why": "no", "until": 5}}).encode()) == AttachRefused(
        "no"
    )


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
        assert peer_user(one) == peer_user(other) == os.geteuid()
    # It is connected to; one that somebody else listens at is not, nor one that is not there.
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
