"""Fixtures with the programs and the process sources from which an agent gets its workers."""

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
    """Return a function that writes a program for workers to a new file.

    In a shared file, a shell that is slow to begin would read the program of a later worker.
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
    """A source for one test: a spawner, unless the parameter of the test names another kind."""
    source = Source(getattr(request, "param", "spawn"), runtime, runner)
    yield source
    source.end()
