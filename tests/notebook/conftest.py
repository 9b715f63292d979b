"""Notebooks for the tests of the magics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.notebook.front_end import Notebook


@pytest.fixture(scope="module")
def kernel() -> Iterator[Notebook]:
    """One notebook for all tests of the module."""
    notebook = Notebook("%load_ext nbdist")
    yield notebook
    notebook.close()


@pytest.fixture
def notebook(kernel: Notebook) -> Notebook:
    """The notebook with four workers; those of the tests before, if they are in order."""
    if kernel.run("%%distributed -n 4\npass").errors:
        assert kernel.run("%dist_restart -n 4").errors == []
    return kernel


@pytest.fixture
def fresh() -> Iterator[Callable[..., Notebook]]:
    """Makes notebooks of the test's own."""
    made: list[Notebook] = []

    def make(*first: str, env: dict[str, str] | None = None) -> Notebook:
        made.append(Notebook(*first, env=env))
        return made[-1]

    yield make
    for notebook in made:
        notebook.close()
