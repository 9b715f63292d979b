"""Tests of `nbdist.wire.reading`: big pickles, and looking for cycles meanwhile."""

from __future__ import annotations

import gc
import pickle as plain_pickle
import sys

import pytest

from nbdist.wire.pickling import pickle, unpickle
from nbdist.wire.reading import READ_FROM, load, without_cycles


@pytest.mark.parametrize(("number", "least"), [(1000, 0), (300_000, 20)])
def test_big_pickles_are_read_in_pieces(number: int, least: int):
    """Python code runs between two of them, where Stop is met."""
    frames = pickle([float(n) for n in range(number)], {}).frames
    reads: list[str] = []
    sys.setprofile(lambda frame, event, _: reads.append(event + frame.f_code.co_name))
    try:
        value = unpickle(frames)
    finally:
        sys.setprofile(None)
    assert value == [float(n) for n in range(number)]
    assert least <= reads.count("callread") <= 10 * least


def test_buffers_beside_a_big_one():
    """They are used where they are."""
    buffers: list[plain_pickle.PickleBuffer] = []
    value = ["x" * READ_FROM, plain_pickle.PickleBuffer(bytearray(b"beside"))]
    data = plain_pickle.dumps(value, 5, buffer_callback=buffers.append)
    found = load(data, buffers)
    assert found[0] == value[0]
    assert bytes(found[1]) == b"beside"


def test_cycles_are_looked_for_again():
    """As it was before; also where it was off, and after an error."""

    def fail() -> None:
        with without_cycles():
            assert not gc.isenabled()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_cycles():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
