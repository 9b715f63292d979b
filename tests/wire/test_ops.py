"""What ops return crosses from a worker to the notebook, and comes out equal."""

from __future__ import annotations

import pytest

from nbdist.wire.ops import Cleaned, Loaded, Written
from nbdist.wire.pickling import pickle, unpickle


@pytest.mark.parametrize(
    "value",
    [
        Cleaned((2, 1)),
        Written(names=("model",), also=("opt",), left_out={"lock": "a thread lock"}, size=3),
        Loaded(damage="its digest is another"),
    ],
)
def test_results_arrive_equal(value: object) -> None:
    """As part of what a rank brings back."""
    frames = [bytes(memoryview(frame)) for frame in pickle({"x": value}, {}).frames]
    assert unpickle(frames) == {"x": value}
