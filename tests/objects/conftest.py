"""A notebook with two workers for the programs of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.notebook.front_end import Notebook, lasting
from tests.objects import programs
from tests.objects.programs import FORGET, Run

two = lasting(
    "%load_ext nbdist", "%dist_init -n 2", FORGET, NBDIST_SNAPSHOT_DIR="{folder}/snapshots"
)


@pytest.fixture
def program(two: Notebook) -> Iterator[Run]:
    """Runs a program in a notebook with two new workers."""
    programs.begin(two)
    yield lambda steps: programs.run(two, steps)
    with suppress(AssertionError):  # the test has failed already
        two.run("_forget()")
