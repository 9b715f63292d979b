"""Tests of `nbdist.worker.exceptions`: what is packed of an exception, and what is not."""

from __future__ import annotations

from nbdist.values.payload import open_payload, size_of
from nbdist.values.pickling import unpickle
from nbdist.worker.exceptions import MOST_BYTES, contents_of


class Model:
    """Something large that lacks an attribute."""

    def __init__(self) -> None:
        self.weights = "x" * (1 << 20)

    def __reduce__(self) -> str:
        raise AssertionError("it must not be pickled")


def test_the_object_that_lacks_an_attribute_stays_where_it_is() -> None:
    """It may be a model of gigabytes; the attribute's name is sent."""
    try:
        Model().foward  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        packed = contents_of(error, {})
    args, attributes, whole = unpickle(open_payload(packed), {})
    assert unpickle(args[0]) == "'Model' object has no attribute 'foward'"
    assert unpickle(attributes["name"]) == "foward"
    assert (sorted(attributes), whole) == (["name"], None)


def test_it_stays_small() -> None:
    """Of an argument that is too large a text is sent; an attribute is left out."""
    error = ValueError(b"x" * 100 * MOST_BYTES)
    error.data = b"x" * 2 * MOST_BYTES  # type: ignore[attr-defined]
    packed = contents_of(error, {})
    assert packed.segment is None
    assert size_of(packed.frames) < MOST_BYTES
    args, attributes, _ = unpickle(open_payload(packed), {})
    assert unpickle(args[0]).startswith("b'xxx")
    assert attributes == {}
