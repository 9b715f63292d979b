"""A notebook with two workers for the programs of this folder."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.notebook.front_end import Notebook, lasting
from tests.objects import programs
from tests.objects.programs import BEGIN, Run

two = lasting(*BEGIN, may_have_torch=True, NBDIST_SNAPSHOT_DIR="{folder}/snapshots")


failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    report = yield
    before = report.when != "setup" and item.session.stash.get(failed, False)
    item.session.stash[failed] = report.failed or before
    return report


@pytest.fixture
def program(two: Notebook, request: pytest.FixtureRequest) -> Run:
    """Runs a program in a notebook with two workers that have no names of other programs.

    The workers are new if the module has `NEW_WORKERS`, or if the test before has failed.
    """
    are_new = getattr(request.module, "NEW_WORKERS", False)
    programs.begin(two, are_new=are_new or request.session.stash.get(failed, False))
    return lambda steps: programs.run(two, steps)
