"""Tests of `nbdist.world.link`: calls, and their end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nbdist import __version__
from nbdist.errors import AgentLost, StartError
from nbdist.wire.messages import GetStatus
from nbdist.world.link import Link
from tests.waiting import SOON

pytestmark = pytest.mark.world


@contextmanager
def opened() -> Iterator[Link]:
    """A link of the test's own, to an agent without a fork server."""
    link = Link(fork_server=False)
    try:
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
