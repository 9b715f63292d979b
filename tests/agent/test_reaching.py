"""Tests of `nbdist.agent.reaching`: a machine that answers, and one that does not."""

from __future__ import annotations

import asyncio
import socket

from nbdist.agent.reaching import first_unreached
from nbdist.wire.many import Target


def test_a_port_on_which_nothing_listens_is_reached() -> None:
    """And one on which something does."""
    with socket.socket() as silent, socket.create_server(("127.0.0.1", 0)) as heard:
        silent.bind(("127.0.0.1", 0))
        found = [Target("a", *each.getsockname()) for each in (silent, heard)]
        assert asyncio.run(first_unreached(found)) == ""
        assert asyncio.run(first_unreached([])) == ""


def test_no_way() -> None:
    """Which machine, where, and why; of several the first."""
    here = Target("a", "127.0.0.1", 1)
    nowhere = Target("b", "255.255.255.255", 9)
    said = asyncio.run(first_unreached([here, nowhere]))
    assert said.startswith("b at 255.255.255.255:9: ")


def test_no_answer() -> None:
    """After some seconds it is said."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        place = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.settimeout(0)
            each.connect_ex(place)
        said = asyncio.run(first_unreached([Target("b", *place)], 0.2))
        for each in waiting:
            each.close()
    assert said == f"b at 127.0.0.1:{place[1]}: no answer within 0 s"
