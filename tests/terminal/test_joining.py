"""Tests of `nbdist.terminal.joining`: what ends before there is an agent.

Agents that come are tested with the worlds to which they come: tests/launch/test_join.py.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.terminal.console import main
from nbdist.wire.offers import write_offer
from nbdist.wire.ticket import KeyPair, Ticket


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No job launcher has started this process, no terminal is there, and no world waits."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"nothing\n")))


@pytest.fixture
def port() -> Iterator[int]:
    """Somebody else's, who listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["join", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_stale_place(capsys: pytest.CaptureFixture[str], port: int) -> None:
    """Nobody listens there any more, or there is no key: it is said at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    told = said(capsys, f"127.0.0.1:{gone}")
    assert told.startswith(f"nbdist: `nbdist join 127.0.0.1:{gone}`: no world waits there (Conn")
    told = said(capsys, f"127.0.0.1:{port}")
    assert told.startswith(f"nbdist: `nbdist join 127.0.0.1:{port}`: ")
    assert "/nbdist/joins has no key for it. Where the home folder is not" in told


def test_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path, port: int) -> None:
    """A place that is none, a key file that is not there, a key that is none, an unknown name."""
    assert said(capsys, "nowhere") == (
        "nbdist: `nbdist join nowhere`: it is HOST:PORT, as shown by the notebook."
    )
    place = f"127.0.0.1:{port}"
    missing = str(tmp_path / "missing")
    told = said(capsys, place, "--key-file", missing)
    assert told == f"nbdist: `--key-file {missing}`: No such file or directory."
    told = said(capsys, place, "--key-file", "-")
    assert told.startswith(f"nbdist: `nbdist join {place}`: that is no ticket of a world")
    write_offer(Ticket(("127.0.0.1",), port, KeyPair.new().public, KeyPair.new()))
    told = said(capsys, f"nowhere.invalid:{port}")
    assert told.startswith(f"nbdist: `nbdist join nowhere.invalid:{port}`: ")
