"""Tests of `nbdist.cluster.preflight`: versions that must be the same, and who tries which way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from nbdist.cluster.preflight import REACHED, mismatch, targets
from nbdist.wire.many import NodeFacts, NodeHello
from nbdist.wire.versions import versions_here

HERE = {"Python": "3.11.7", "torch": "2.13.0+cpu", "cloudpickle": "3.1.2"}
THERE = {"Python": "3.11.2", "torch": "2.13.1", "cloudpickle": "3.1.0"}
FACTS = NodeFacts("b", 1, "10.0.0.2", 4000, 4, (), "/usr/bin/python", THERE)


@pytest.mark.parametrize(
    ("version", "changes", "said"),
    [
        ("0.1.0", {}, ""),
        ("0.2.0", {}, "b has nbdist 0.2.0, the notebook 0.1.0: `pip install nbdist==0.1.0` for"),
        (
            "0.1.0",
            {"Python": "3.12.1"},
            "/usr/bin/python on b is Python 3.12.1, the notebook's is 3.11.7: ",
        ),
        ("0.1.0", {"torch": ""}, "/usr/bin/python on b has no torch: `--python` names the"),
        (
            "0.1.0",
            {"torch": "2.8.0"},
            "b has torch 2.8.0, the notebook 2.13.0+cpu: `pip install torch==2.13.0` for",
        ),
        (
            "0.1.0",
            {"cloudpickle": "3.0.0"},
            "b has cloudpickle 3.0.0, the notebook 3.1.2: `pip install cloudpickle==3.1.2` for",
        ),
    ],
)
def test_versions(version: str, changes: dict[str, str], said: str) -> None:
    """Both are named, with what makes them the same."""
    found = mismatch("b", NodeHello(version, 1, replace(FACTS, versions=THERE | changes)), HERE)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_a_notebook_without_torch() -> None:
    """Any will do."""
    assert mismatch("b", NodeHello("0.1.0", 1, FACTS), HERE | {"torch": ""}) == ""
    assert all(versions_here().values())


@dataclass
class Machine:
    """A node as far as the way there goes."""

    number: int
    name: str
    facts: NodeFacts


def machines(count: int) -> list[Machine]:
    """So many, each at an address of its own."""
    return [
        Machine(n, f"n{n}", replace(FACTS, address=f"10.0.0.{n}", port=5000 + n))
        for n in range(count)
    ]


def test_all_ways_are_tried() -> None:
    """From each to each, but of many not more than a share, which are others for each."""
    few = targets(machines(3))
    assert [[each.name for each in few[n]] for n in range(3)] == [
        ["n1", "n2"],
        ["n2", "n0"],
        ["n0", "n1"],
    ]
    assert (few[0][0].address, few[0][0].port) == ("10.0.0.1", 5001)
    many = targets(machines(40))
    assert {len(each) for each in many.values()} == {REACHED}
    assert {each.name for tried in many.values() for each in tried} == {f"n{n}" for n in range(40)}
    assert targets(machines(1)) == {0: ()}
