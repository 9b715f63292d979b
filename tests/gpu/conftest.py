"""Worlds on the GPU, what is skipped where there is none, and what each test measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nbdist.world.world import World
from tests.gpu import lab

Figure = Callable[[str, float, str], None]
Fact = Callable[[str, object], None]


@pytest.fixture(scope="module", params=lab.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which backend has the CUDA tensors: `gloo`, or `nccl`."""
    needs_gpu()
    return str(request.param)


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, kind: str) -> Iterator[World]:
    """Four workers, or as the module's mark has it, who share a GPU where there are fewer."""
    mark = request.node.get_closest_marker("shared_world")
    ranks, options = (mark.args, mark.kwargs) if mark is not None else ((), {})
    with lab.make_world(kind, *(ranks or (4,)), **options) as world:
        yield world


@pytest.fixture
def world(started: World) -> World:
    """The same, in order."""
    return lab.whole(started)


@pytest.fixture(scope="module")
def gpu() -> str:
    """The device that tensors are on; skips the test where there is no GPU."""
    needs_gpu()
    return lab.DEVICE


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """Puts a figure into the report: name, value, unit."""
    return lambda name, value, unit: record_property(name, f"{value:.4g} {unit}".strip())


@pytest.fixture
def fact(record_property: Callable[[str, object], None]) -> Fact:
    """Puts words into it."""
    return lambda name, value: record_property(name, str(value))


def needs_gpu() -> None:
    if not lab.has_gpu():
        pytest.skip("no GPU is visible here")
