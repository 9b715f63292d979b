"""Tests of `nbdist.agent.coming`: an agent that cannot come says so in a line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.cluster.ticket import KeyPair, Ticket
from tests.waiting import SOON

pytestmark = pytest.mark.own_agent

NOWHERE = Ticket(("127.0.0.1",), 1, KeyPair.new().public, KeyPair.new(), fork=False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"hello\n", "nbdist: that is no ticket of a world"),
        (b"", "nbdist: stdin has ended before there was a ticket on it"),
        (
            NOWHERE.to_line(),
            "at 127.0.0.1:1: Connection refused",
        ),
    ],
)
def test_who_cannot_come(
    line: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, exit code 1, and no folder of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    command = [sys.executable, "-P", "-m", "nbdist.agent", "--ticket", "--node", "0"]
    ended = subprocess.run(command, input=line, capture_output=True, timeout=SOON)
    assert ended.returncode == 1
    (words,) = ended.stderr.decode().splitlines()
    assert said in words
    assert not [*tmp_path.iterdir()]
