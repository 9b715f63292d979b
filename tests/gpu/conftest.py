"""Fixtures of tests on the GPU, which are skipped without a GPU, and results for the report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.world.world import World
from tests.gpu import lab

Figure = Callable[[str, float, str], None]
Fact = Callable[[str, object], None]


@pytest.fixture(scope="module", params=lab.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The backend that has the CUDA tensors: `gloo` or `nccl`."""
    needs_gpu()
    return str(request.param)


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, kind: str) -> Iterator[World]:
    """A world of four workers, or as the module's mark says; they share GPUs if need be."""
    mark = request.node.get_closest_marker("shared_world")
    ranks, options = (mark.args, mark.kwargs) if mark is not None else ((), {})
    with lab.make_world(kind, *(ranks or (4,)), **options) as world:
        yield world


@pytest.fixture
def world(started: World) -> World:
    """The module's world, made ready for the next test."""
    return lab.whole(started)


@pytest.fixture(scope="module")
def gpu() -> str:
    """The device that tensors are on; skips the test if no GPU is visible."""
    needs_gpu()
    return lab.DEVICE


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """Adds a figure to the report: name, value, unit."""
    return lambda name, value, unit: record_property(name, f"{value:.4g} {unit}".strip())


@pytest.fixture
def fact(record_property: Callable[[str, object], None]) -> Fact:
    """Adds words to the report: name, text."""
    return lambda name, value: record_property(name, str(value))


def needs_gpu() -> None:
    if not lab.has_gpu():
        pytest.skip("no GPU is visible here")


# --- a line of JSON for each test, for the report of `python -m tests.gpu` ------------------

LONGEST = 2000  # characters of the error of a test


def _say(**what: Any) -> None:
    if file := os.environ.get("NBDIST_REPORT_FILE"):
        with Path(file).open("a") as lines:
            lines.write(f"{json.dumps(what)}\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    _say(tests=[item.nodeid.rpartition("::")[2] for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    _say(begun=nodeid.rpartition("::")[2])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a line about the call, and about a set-up or teardown that did not pass."""
    if report.when != "call" and report.passed:
        return
    note = report.longreprtext[-LONGEST:] if report.failed else ""
    if report.skipped and isinstance(report.longrepr, tuple):
        note = str(report.longrepr[2]).removeprefix("Skipped: ")
    _say(
        test=report.nodeid.rpartition("::")[2],
        when=report.when,
        outcome=report.outcome,
        seconds=round(report.duration, 3),
        note=note,
        figures=dict(report.user_properties),
    )
