"""Tests of `nbdist.world.link`: calls, their end, and strangers at the agent's socket."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from nbdist import __version__
from nbdist.errors import AgentLost, StartError
from nbdist.output.events import Text
from nbdist.wire.frames import pack
from nbdist.wire.messages import Answer, GetStatus, Hello, Outputs
from nbdist.world.link import Link
from nbdist.world.world import World
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.shared_world(2)

SENT: dict[str, list[bytes]] = {
    "garbage": [b"garbage"],
    "many frames": [b"a", b"b", b"c"],
    "a pickle that runs code": [b"cposix\nabort\n(tR."],
    "a hello": [pack(Hello("0", 1, "nowhere"))],
    "an answer": [pack(Answer(1, None))],
    "outputs": [pack(Outputs(((7, "", Text("stdout", "from nobody")),)))],
    "outputs that are none": [pack(Outputs((3,)))],  # type: ignore[arg-type]
}


def send(address: str, kind: int, frames: list[bytes]) -> None:
    """What a stranger sends, and has sent when this returns."""
    context = zmq.Context()
    stranger = context.socket(kind)
    stranger.linger = int(SOON * 1000)
    stranger.connect(address)
    stranger.send_multipart(frames)
    stranger.close()
    context.term()


def test_strangers_are_dropped(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """With a line in the log; the world works on.  Bytes of another protocol are nothing to it."""
    address = world.session.link.address
    world.execute("kept = rank")
    with caplog.at_level(logging.WARNING, "nbdist.world"):
        for number, frames in enumerate(SENT.values(), 1):
            for kind in (zmq.DEALER, zmq.REQ):
                send(address, kind, frames)
            wait_until(lambda: len(caplog.messages) >= 2 * number, "both are in the log")  # noqa: B023
            assert [row.rank for row in world.status()] == [0, 1]
    assert all("stranger" in message for message in caplog.messages)
    assert len(caplog.messages) == 2 * len(SENT)
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256))):
        with socket.socket(socket.AF_UNIX) as stranger, suppress(BrokenPipeError):
            stranger.connect(address.removeprefix("ipc://"))
            stranger.sendall(data * 1000)
            assert [row.rank for row in world.status()] == [0, 1]
    assert world.gather("kept") == [0, 1]


@pytest.mark.own_agent
def test_strangers_who_come_first() -> None:
    """The agent is the one who says hello; nothing is read of what came before."""
    with opened(*(SENT[sent] for sent in SENT.keys() - {"a hello"})) as link:
        assert link.call(GetStatus()) == ()


# --- calls ----------------------------------------------------------------------------------


@contextmanager
def opened(*strangers: list[bytes]) -> Iterator[Link]:
    """A link of the test's own, to an agent without a fork server."""
    link = Link(fork_server=False)
    try:
        for frames in strangers:
            send(link.address, zmq.DEALER, frames)
        link.open()
        yield link
    finally:
        link.close()
    link.close()  # once is enough


@pytest.mark.own_agent
def test_an_agent_that_answers_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """A call ends when it has waited for so long, or when the agent has ended."""
    with opened() as link:
        assert link.call(GetStatus()) == ()
        assert repr(link) == f"<Link up {link.agent} 0 calls open>"
        agent = psutil.Process(link.agent.pid).children()[0]
        agent.suspend()
        with pytest.raises(AgentLost):
            link.call(GetStatus(), timeout=0.2)
        calling = link.calling(GetStatus(), tick=0.05)
        assert next(calling).up == 0  # it has come round, and no worker is up
        asked = link.ask(GetStatus())
        agent.kill()
        with pytest.raises(AgentLost, match="was killed by SIGKILL") as caught:
            list(calling)
        link.wait(SOON)
        assert [*link.arrived] == [caught.value]
        assert repr(link).startswith("<Link lost <AgentProcess")
        assert not link.is_up
        with pytest.raises(AgentLost):
            link.call(GetStatus())
        for each in (asked, link.ask(GetStatus())):
            assert isinstance(each.exception(timeout=SOON), AgentLost)


def test_a_link_that_was_never_opened() -> None:
    """It leaves nothing, and nobody is waited for."""
    link = Link()
    folder = Path(link.address.removeprefix("ipc://")).parent
    assert folder.is_dir()
    link.close()
    assert not folder.exists()


@pytest.mark.own_agent
@pytest.mark.parametrize(
    ("text", "said", "lines"),
    [
        ("#!/bin/sh\necho why; exit 3", "start: ended at once", ["why"]),
        ("#!/bin/sh\necho so far; read more", "start: did not answer within 1 s", ["so far"]),
        ("#!/nowhere/sh", "start: .*No such file", []),
        (f'#!/bin/sh\nexec {sys.executable} "$@"', f"is nbdist {__version__}, the notebook 0", []),
    ],
)
def test_an_agent_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str, lines: list[str]
) -> None:
    """The error says how it was started, why it is not there, and what it wrote last."""
    if "not answer" in said:
        monkeypatch.setattr("nbdist.world.link.HELLO_TIMEOUT", 1.0)
    monkeypatch.setattr("nbdist.world.link.__version__", "0.0")
    program = tmp_path / "agent.sh"
    program.write_text(f"{text}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with opened() as link, pytest.raises(StartError, match=said) as caught:
        link.call(GetStatus())
    assert caught.value.rank is None
    assert [*caught.value.log_lines] == lines
