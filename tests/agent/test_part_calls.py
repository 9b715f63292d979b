"""Tests of `nbdist.agent.part_calls`: what a node makes of the spec that all share."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist import topology
from nbdist.agent.part_calls import interface_of, spec_here
from nbdist.seats import Position
from nbdist.topology import usable_cores
from nbdist.wire.spec import WorldSpec

SEATS = (Position(0, 0), Position(1, 0), Position(1, 1))


def spec(cwd: str, threads: int = 0) -> WorldSpec:
    """One of three ranks, for the second node, which has two of them."""
    environ = {"SEED": "1", "CUDA_VISIBLE_DEVICES": ""}
    return WorldSpec(3, "gloo", environ, cwd, (), threads, "", seats=SEATS, node=1)


def test_the_environment_is_the_nodes_own(tmp_path: Path) -> None:
    """With what was asked for besides; so are interpreter, interface, GPUs and cores."""
    here = spec_here(spec(str(tmp_path)), {"HOME": "/root", "SEED": "0"}, "eth0")
    assert here.environ == {"HOME": "/root", "SEED": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert (here.python, here.interface, here.gpus) == (sys.executable, "eth0", ())
    assert (here.cwd, here.threads) == (str(tmp_path), max(1, usable_cores() // 2))
    assert spec_here(spec(str(tmp_path), threads=7), {}, "eth0").threads == 7


def test_a_folder_that_there_is_not() -> None:
    """Its ranks are at home then."""
    assert spec_here(spec("/nowhere/at/all"), {}, "eth0").cwd == str(Path.home())


def test_gpus_that_were_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their numbers, of those that this node has."""
    monkeypatch.setattr(topology, "installed_gpus", lambda: 4)
    asked = replace(spec(str(tmp_path)), environ={}, gpus_asked="1,3")
    assert spec_here(asked, {}, "eth0").gpus == ("1", "3")
    assert spec_here(asked, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "eth0").gpus == ("1", "3")
    assert spec_here(replace(asked, gpus_asked=""), {}, "eth0").gpus == ("0", "1", "2", "3")


def test_the_interface_of_an_address() -> None:
    """Gloo wants its name."""
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == ""
