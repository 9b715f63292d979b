"""Tests of `nbdist.world.exchange`: each rank has its own part, and no more than that."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from nbdist.errors import UsageError, VariableNotSent
from nbdist.world.exchange import Scatter
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)


def test_every_kind(world: World) -> None:
    """What the ranks have, put together, is what was cut; the first have one element more."""
    import polars as pl
    from datasets import Dataset

    whole = torch.arange(35.0).reshape(5, 7)
    world.scatter("x", whole)
    assert [len(part) for part in world.gather("x")] == [3, 2]
    assert world.gather("x", join="cat").equal(whole)
    world.scatter("x", whole.numpy(), dim=1)
    assert [part.shape for part in world.gather("x")] == [(5, 4), (5, 3)]
    assert np.array_equal(world.gather("x", join="cat", dim=1), whole)
    world.scatter("x", ["a", "b", "c"])
    assert world.gather("x") == [["a", "b"], ["c"]]
    frame = pd.DataFrame({"n": range(3), "s": list("abc")})
    world.scatter("x", frame)
    assert world.gather("x", join="cat").equals(frame)
    world.scatter("x", pl.from_pandas(frame))
    assert world.gather("x", join="cat").equals(pl.from_pandas(frame))
    world.scatter("x", pa.Table.from_pandas(frame))
    assert world.gather("x", join="cat").to_pandas().equals(frame)
    world.scatter("x", whole.to_sparse())
    assert world.gather("x", join="cat").to_dense().equal(whole)
    world.scatter("x", Dataset.from_dict({"n": [1, 2, 3]}).with_format("numpy"))
    assert world.gather("x[:]['n'].tolist()") == [[1, 2], [3]]
    world.scatter("x", [5])
    assert world.gather("x") == [[5], []]


def test_some_ranks(world: World) -> None:
    """Those get all; what the name is on others stays."""
    world.scatter("x", [1, 2])
    world.scatter("x", ["ab"] * 3, ranks=[1])
    assert world.gather("x") == [[1], ["ab", "ab", "ab"]]
    assert world.session.names.owners()["x"] == ("workers", {0, 1})


def test_no_more_than_its_part(world: World) -> None:
    """All parts together are as big as the value: nothing of it travels twice."""
    import polars as pl
    from datasets import Dataset

    data = Dataset.from_dict({"n": [*range(500_000)]})
    arrays = torch.ones(1000, 1000), torch.ones(1000, 2000)[:, :1000], np.ones((1000, 500))
    for value, dim in (
        *((array, dim) for array in arrays for dim in (None, 1)),
        (pd.DataFrame(np.ones((1000, 500))), None),
        ([bytes([n % 256]) * 4000 for n in range(1000)], None),
        (pl.DataFrame({"n": range(500_000)}), None),
        (pa.table({"n": range(500_000)}), None),
        (pa.array(range(500_000)), None),
        (data, None),
        (data.shuffle(seed=1), None),
    ):
        with closing(Scatter(world.session, "x", value, dim=dim)) as scatter:
            done = [*scatter.packing()]
        assert 3_990_000 <= scatter.bytes <= 4_100_000, (type(value), dim)
        assert done == sorted(done)
        assert scatter.bytes - done[-1] < 100


def test_what_it_says(world: World) -> None:
    """Who gets how much."""
    assert str(Scatter(world.session, "x", [1, 2, 3])) == "x: 3 elements, 2 to rank 0, 1 to rank 1"
    even = str(Scatter(world.session, "x", torch.ones(3, 4), dim=1))
    assert even == "x: 4 along dimension 1, 2 to each of ranks 0-1"


def test_what_cannot_be(world: World) -> None:
    """The ranks keep what they have."""
    world.execute("x = 'as it was'")
    with pytest.raises(VariableNotSent, match=r"`x`: `x\[0\]` \(generator\) cannot be sent"):
        world.scatter("x", [1, (i for i in "a")])
    with pytest.raises(UsageError, match="cannot be split"):
        world.scatter("x", 5)
    with pytest.raises(UsageError, match="name the parts"):
        world.scatter("x[0]", [1])
    assert world.gather("x") == ["as it was"] * 2
