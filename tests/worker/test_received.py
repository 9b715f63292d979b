"""Tests of `nbdist.worker.received`: what has been changed in place since it came."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nbdist.values.payload import open_payload, pack_frames
from nbdist.values.pickling import pickle, unpickle
from nbdist.values.shared_memory import Segment, open_segment, to_end
from nbdist.worker import received
from nbdist.worker.received import Received, are_own, edges


class Box:
    """A user's own."""

    def __init__(self, value: Any) -> None:
        self.value = value


def made() -> dict[str, Any]:
    model = torch.nn.Linear(3, 3)
    return {
        "model": model,
        "adam": torch.optim.Adam(model.parameters()),
        "tensor": torch.zeros(1000),
        "array": np.zeros(1000),
        "rows": [1, [2, "three"]],
        "table": {"a": 1},
        "box": Box([1]),
        "n": 3,
        "f": made,
        "lines": (line for line in "ab"),
    }


def step(names: dict[str, Any]) -> None:
    names["model"](torch.ones(3)).sum().backward()
    names["adam"].step()


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], set[str]]] = [
    (lambda names: None, set()),
    (step, {"model", "adam"}),
    (lambda names: names["model"].eval(), {"model"}),
    (lambda names: names["model"].weight.data.add_(1), {"model", "adam"}),
    (lambda names: names["tensor"].numpy().__setitem__(5, 1), {"tensor"}),
    (lambda names: names["array"].__setitem__(5, 1), {"array"}),
    (lambda names: names["rows"][1].append(4), {"rows"}),
    (lambda names: names["table"].update(b=2), {"table"}),
    (lambda names: setattr(names["box"], "value", 2), {"box"}),
    (lambda names: names.update(table={"a": 1}, n=4), {"table"}),
    (lambda names: names.update(rows=5), {"rows"}),
    (lambda names: names.pop("rows"), set()),
    (lambda names: next(names["lines"]), set()),
    (lambda names: (names["table"].update(a=2), names["table"].update(a=1)), set()),
]


@pytest.mark.parametrize(("change", "found"), CHANGES)
def test_what_has_been_changed(change: Callable[[dict[str, Any]], Any], found: set[str]) -> None:
    """Whatever it is; not what cannot be looked at, nor what looks as it did."""
    names = made()
    known = Received(names)
    known.note(names)
    change(names)
    assert known.changed([*made(), "unknown"]) == found
    known.note(names)
    assert known.changed(names) == set()
    assert "array" in known._known


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x, y: x.sum() + y.sum(), set()),
        (lambda x, y: x.view(-1)[300_000:300_001].fill_(1.0), {"x"}),
        (lambda x, y: x.view(-1)[-1:].fill_(1.0), {"x"}),
        (lambda x, y: y.__setitem__(0, 1), {"y"}),
        (lambda x, y: y.__setitem__(300_000, 1), {"y"}),
        (lambda x, y: setattr(x, "data", x.data.clone()), {"x"}),
    ],
)
def test_big_values(
    change: Callable[[Any, Any], Any], found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not read when they come; one element that is written to is noticed all the same."""
    monkeypatch.setattr(received, "READ_MOST", 1 << 20)
    read: list[int] = []
    digest = received.digest_of
    monkeypatch.setattr(
        received, "digest_of", lambda view: (read.append(memoryview(view).nbytes), digest(view))[1]
    )
    values = {"x": torch.zeros(1000, 1000), "y": np.zeros(1_000_000)}
    payload, segment = pack_frames(pickle(values, {}).frames)
    assert segment is not None
    with segment:
        names = unpickle(open_payload(payload))
        known = Received(names)
        known.note(names)
        assert sum(read) < 1 << 18
        change(names["x"], names["y"])
        assert known.changed(names) == found


def test_big_values_of_no_mapping() -> None:
    """Of memory of this process's own there is nothing to see: it is read."""
    names = {"x": torch.zeros(20_000_000)}
    known = Received(names)
    known.note(names)
    assert known.changed(names) == set()
    names["x"][7] = 1
    assert known.changed(names) == {"x"}


PAGE = mmap.PAGESIZE


def test_what_has_been_written_to() -> None:
    """The pages of a segment are this process's own once written to, not when read."""
    with to_end(Segment.filling([bytes(100), bytes(20 * PAGE), bytes(100)])) as segment:
        _, frame, _ = open_segment(segment.ref)
        array = np.frombuffer(frame, np.uint8)
        address = array.ctypes.data
        assert not are_own(address, array.nbytes)
        assert not array.any()
        assert not are_own(address, array.nbytes), "they have been read"
        array[10 * PAGE] = 1
        assert are_own(address, array.nbytes)
        assert not are_own(address, 9 * PAGE)
        own = np.ones(10 * PAGE, np.uint8)
        assert are_own(own.ctypes.data, own.nbytes)


def test_what_lies_in_no_whole_page() -> None:
    """Is for others to look at; small memory is all of that."""
    memory = memoryview(bytes(range(256)) * (3 * PAGE // 256))
    first, last = edges(memory, PAGE + 100)
    assert (first, last) == (memory[: PAGE - 100], memory[-100:])
    assert edges(memory[: 2 * PAGE], PAGE) == (b"", b"")
    first, last = edges(memory[:50], PAGE + 100)
    assert bytes(first) + bytes(last) == memory[:50]
    assert not are_own(PAGE + 100, 50)
