"""What ops return crosses from a worker to the notebook, and comes out equal."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from nbdist.wire.ops import Mesh


@pytest.mark.parametrize("names", [None, ("copies", "shards")])
def test_a_mesh_in_a_manifest(names: tuple[str, ...] | None) -> None:
    """It comes back from JSON as it was."""
    mesh = Mesh("cpu", (2, 2), (0, 1, 2, 3), names)
    assert Mesh.read(json.loads(json.dumps(asdict(mesh)))) == mesh


def test_a_mesh_in_a_world_of_another_size() -> None:
    """Its first dimension gets another length, if all ranks were in it and they divide."""
    line, table = Mesh("cpu", (4,), (0, 1, 2, 3)), Mesh("cpu", (2, 2), (0, 1, 2, 3), ("a", "b"))
    assert line.fitted(4, 3) == Mesh("cpu", (3,), (0, 1, 2))
    assert table.fitted(4, 6) == Mesh("cpu", (3, 2), (0, 1, 2, 3, 4, 5), ("a", "b"))
    assert table.fitted(4, 4) == table
    some, turned = Mesh("cpu", (2,), (0, 1)), Mesh("cpu", (2, 2), (0, 2, 1, 3))
    assert (table.fitted(4, 5), some.fitted(4, 3), turned.fitted(4, 6)) == (None, None, None)
