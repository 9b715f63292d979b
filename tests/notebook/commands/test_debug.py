"""Tests of `nbdist.notebook.commands.run`: which rank is looked at."""

from __future__ import annotations

import pytest

from nbdist.errors import UsageError
from nbdist.notebook.commands.run import failed_rank
from nbdist.notebook.pool import Pools
from nbdist.output.events import Died, Failure


def test_the_one_that_failed_first(pools: Pools) -> None:
    """Unless its process has ended: then there is nothing to look at."""
    pool = pools.default
    with pytest.raises(UsageError, match=r"no rank has failed yet. `-r 2`"):
        failed_rank(pool)
    pool.failed = 3, Failure("ValueError", "bad", (), 0)
    assert failed_rank(pool) == 3
    pool.failed = 2, Died(-9, 0)
    with pytest.raises(
        UsageError,
        match=r"rank 2 was killed by SIGKILL, so .* `%dist_output "
        r"--failed`",
    ):
        failed_rank(pool)
