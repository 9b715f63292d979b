"""Tests of `nbdist.notebook.pool`: one world of a notebook, and how it is kept alive."""

from __future__ import annotations

from collections.abc import Callable

from nbdist.notebook.pools import Pools
from tests.notebook.front_end import Notebook


def test_one_without_workers(pools: Pools) -> None:
    """It says so, and there is nothing to end."""
    assert not pools.default.has_workers
    assert not pools.default.shutdown()


def test_the_agent_of_the_extension_is_a_local_one(fresh: Callable[..., Notebook]) -> None:
    """Workers of another launcher are not started by it; the next local ones are."""
    notebook = fresh("%load_ext nbdist")
    error = notebook.run("%dist_init -n 1 --launcher nowhere").error
    assert "`--launcher nowhere`: available:" in error
    assert "1 worker ready" in notebook.run("%dist_init -n 1 --backend none").text
