"""Tests of `nbdist.cluster.ray`: where there is no Ray, or no cluster; with one: tests/hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from nbdist.cluster.launcher import find_launcher
from nbdist.cluster.ray import Order, RayLauncher
from nbdist.wire.ticket import KeyPair, Ticket
from nbdist.wire.wanted import Wanted

TICKET = Ticket(("127.0.0.1",), 1, "x" * 40, KeyPair.new())
WANTED = Wanted(launcher="ray", min_nodes=2, max_nodes=2, per_node=1, environ={"KEY": "secret"})


def test_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command that installs it for the interpreter that would need it."""
    launcher = find_launcher("ray")
    assert isinstance(launcher, RayLauncher)
    monkeypatch.setitem(sys.modules, "ray", None)  # Python's word for one that there is not
    with pytest.raises(OSError, match=rf"not installed here: {sys.executable} -m pip install"):
        launcher.launch(WANTED, TICKET, tmp_path)


@pytest.mark.world
def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where one was looked for, in one line, and nothing is left."""
    pytest.importorskip("ray", reason="Ray is not installed")
    before = {child.pid for child in psutil.Process().children()}
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(OSError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: .*refused") as it:
        RayLauncher().launch(WANTED, TICKET, tmp_path)
    assert "\n" not in str(it.value)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(OSError, match=r"no node of a Ray cluster; `ray start` makes it one"):
        RayLauncher().launch(WANTED, TICKET, tmp_path)
    assert {child.pid for child in psutil.Process().children()} <= before


def test_secrets_are_in_no_text() -> None:
    """An order has the ticket, and the world's environment."""
    text = repr(Order(WANTED, TICKET.to_line()))
    assert TICKET.keys.secret not in text
    assert "secret" not in text
