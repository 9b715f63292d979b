"""Tests of `nbdist.wire.at_door`: what is said there, and what is not taken for it."""

from __future__ import annotations

import json

import pytest

from nbdist.wire.at_door import (
    SOCKET,
    Admitted,
    Attach,
    Held,
    Refused,
    Said,
    Who,
    from_line,
    to_line,
)
from nbdist.wire.frames import BadFrame

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
