"""Tests of `nbdist.cluster.ray`: where there is no Ray, or no cluster; with one: tests/hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from nbdist.cluster.launcher import find_launcher
from nbdist.cluster.ray import (
    NoRoom,
    Order,
    RayLauncher,
    RayNode,
    bundles_of,
    distinct,
    in_order,
    word_bundle,
)
from nbdist.cluster.ticket import KeyPair, Ticket
from nbdist.config import WorldConfig

TICKET = Ticket(("127.0.0.1",), 1, "x" * 40, KeyPair.new())
WANTED = WorldConfig(launcher="ray", layout="2x1", env={"KEY": "secret"})


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


GIB = 1 << 30
SMALL = RayNode("small", {"CPU": 2, "memory": 4 * GIB, "node:10.0.0.1": 1})
BIG = RayNode("big", {"CPU": 16, "memory": 64 * GIB})
CARDS = RayNode("cards", {"CPU": 16, "GPU": 4, "memory": 64 * GIB})


def wanted(**options: object) -> WorldConfig:
    return WorldConfig(launcher="ray", **options)  # type: ignore[arg-type]


def test_as_many_on_each_node() -> None:
    """A CPU for each worker, or as many as it is to have, and its memory."""
    two = wanted(layout="2x2")
    assert bundles_of(two, [SMALL, BIG]) == [{"CPU": 2}, {"CPU": 2}]
    more = wanted(layout="1x2", cpus=4, memory="3G")
    assert bundles_of(more, [SMALL, BIG]) == [{"CPU": 8, "memory": 6 * GIB}]


def test_a_gpu_each_where_there_are_some() -> None:
    """Unless the backend has no use for them."""
    one = {"layout": "1x4"}
    assert bundles_of(wanted(**one), [BIG, CARDS]) == [{"CPU": 4, "GPU": 4}]
    assert bundles_of(wanted(**one, backend="gloo"), [BIG, CARDS]) == [{"CPU": 4}]


def test_at_least_and_at_most() -> None:
    """As many nodes as there are, between both."""
    some = wanted(layout="1:3x4")
    assert len(bundles_of(some, [SMALL, BIG, BIG])) == 2
    assert len(bundles_of(some, [BIG] * 5)) == 3


def test_so_many_in_all() -> None:
    """On as few nodes as have room for them, the biggest first."""
    nodes = [SMALL, CARDS, CARDS]
    assert bundles_of(wanted(n=5), nodes) == [{"CPU": 4, "GPU": 4}, {"CPU": 1, "GPU": 1}]
    assert bundles_of(wanted(n=5), [SMALL, BIG]) == [{"CPU": 4}, {"CPU": 1}]


def test_what_there_is() -> None:
    """Without a number, of all nodes: their GPUs, else a few CPUs, or all."""
    assert bundles_of(wanted(), [SMALL, BIG]) == [{"CPU": 4}, {"CPU": 2}]
    assert bundles_of(wanted(n="cpu"), [SMALL, BIG]) == [{"CPU": 16}, {"CPU": 2}]
    assert bundles_of(wanted(n="gpu"), [CARDS]) == [{"CPU": 4, "GPU": 4}]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"layout": "2x4"},
            "2 nodes with 4 CPU each: the cluster has 2 nodes: small has 2 CPU, 4.0 GiB of memory; "
            "big has 16 CPU, 64.0 GiB of memory",
        ),
        ({"n": 99}, "99 workers with 1 CPU each: the cluster has 2 nodes: small has"),
        ({"n": "gpu"}, "1 worker with 1 CPU, 1 GPU each: the cluster has 2 nodes: small"),
        ({"n": 1, "memory": "1T"}, "with 1 CPU, 1024.0 GiB of memory each: the cluster has"),
    ],
)
def test_too_little(asked: dict[str, object], said: str) -> None:
    """What was asked for, and what each node has."""
    with pytest.raises(NoRoom) as caught:
        bundles_of(wanted(**asked), [SMALL, BIG])
    assert said in str(caught.value)


def test_too_little_of_many_nodes() -> None:
    """Not all are told."""
    with pytest.raises(NoRoom, match=r"the cluster has 50 nodes: .*; and 44 more$"):
        bundles_of(wanted(layout="51x1"), [SMALL] * 50)


def test_a_node_that_has_nothing() -> None:
    """A cluster's head often has no CPU to give."""
    assert bundles_of(wanted(), [RayNode("head", {}), SMALL]) == [{"CPU": 2}]
    assert word_bundle({}) == "no CPU"


def test_names_of_nodes() -> None:
    """No two have one name: the head tells by them which has ended."""
    assert distinct(["a", "b"], ["1", "2"]) == ["a", "b"]
    assert distinct(["a", "a", "b"], ["1", "2", "3"]) == ["a-1", "a-2", "b"]
    assert distinct(["a", "a"], ["1", "1"]) == ["a-1-0", "a-1-1"]
    assert in_order(["node10", "node2", "a", "1b"]) == [3, 2, 1, 0]
