"""What workers come from, as an agent has it."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.sources import Program, Source


@pytest.fixture(scope="module")
def bench() -> Iterator[Source]:
    """A fork server for all tests of a module."""
    with tempfile.TemporaryDirectory(prefix="nbt-") as folder, asyncio.Runner() as runner:
        bench = Source("fork", Path(folder), runner)
        yield bench
        bench.end()


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Makes a program for workers to run, in a file of its own.

    A shell that has not begun to read its program would otherwise run the next one.
    """
    numbers = itertools.count()

    def make(text: str) -> Path:
        path = tmp_path / f"worker{next(numbers)}.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def source(
    request: pytest.FixtureRequest, runtime: Path, runner: asyncio.Runner
) -> Iterator[Source]:
    """A spawner, or of another kind, for the test alone."""
    source = Source(getattr(request, "param", "spawn"), runtime, runner)
    yield source
    source.end()
