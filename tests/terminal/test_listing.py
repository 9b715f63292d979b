"""Tests of `nbdist.terminal.listing`: `nbdist ps` and `nbdist kill`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from nbdist import __version__
from nbdist.terminal.console import main
from nbdist.terminal.listing import HEADINGS, row_of
from nbdist.wire.at_door import Held
from nbdist.world.agents import Found, worlds
from nbdist.world.world import World


def test_a_row() -> None:
    """Of a world that no notebook has, and of one that has begun on another day."""
    cell = "for step in range(10_000_000): train(model, step)"
    now = time.time()
    held = Held(
        __version__, "vm", "default", "exp", 8, "busy", cell, now, 0, now, detach=True, guard=5
    )
    row = dict(zip(HEADINGS, row_of(Found(Path("/x"), 6, held)), strict=True))
    clock = time.strftime("%H:%M", time.localtime(now))
    assert row["cell"] == cell[:40]
    assert (row["since"], row["notebook"], row["process"]) == (
        clock,
        f"detached since {clock}",
        "6",
    )
    old = Held(
        __version__, "vm", "default", "exp", 8, "ready", "", 0.0, 7, now, detach=False, guard=5
    )
    row = dict(zip(HEADINGS, row_of(Found(Path("/x"), 6, old)), strict=True))
    assert row["notebook"] == "7"
    assert row["since"].split()[1] in ("Jan", "Dec")


@pytest.mark.world
@pytest.mark.own_agent
def test_a_world_is_listed_and_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """By its name; its notebook learns of it as of any lost agent."""
    victim = f"victim-{os.getpid()}"
    with World(1, log_dir="", backend="none", name=victim) as world:
        pids = [*world.pids.values()]
        assert main(["ps"]) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = (line for line in lines if line.startswith(f"{victim} "))
        (agent,) = (each.agent for each in worlds() if each.held.name == victim)
        assert line.split()[1:4] == ["default", "1", "ready"]
        assert line.split()[-2:] == [str(os.getpid()), str(agent)]
        assert main(["kill", victim]) == 0
        assert capsys.readouterr().out == f"`{victim}` ended\n"
        assert not any(map(psutil.pid_exists, pids))
    assert main(["kill", victim]) == 2
    assert "none of your worlds on this machine has this name" in capsys.readouterr().err
