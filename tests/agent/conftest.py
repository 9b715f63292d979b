"""A fork server of their own for the tests of a module, as an agent has one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.system.prctl import adopt_orphans
from tests.agent.sources import Bench


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    adopt_orphans()  # as an agent does
    with tempfile.TemporaryDirectory(prefix="nbt-") as folder:
        bench = Bench(Path(folder))
        yield bench
        bench.close()
    adopt_orphans(adopts=False)
