"""Tests of `nbdist.notebook.commands.inspect`: what is said where nothing has run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbdist.errors import UsageError
from nbdist.notebook.pool import Pools
from nbdist.notebook.why import Why


@pytest.mark.parametrize("line", ["%dist_output", "%dist_output -r 0 --all"])
def test_no_cell_has_run(typed: Callable[[str], str], line: str):
    """There is no output to show again."""
    with pytest.raises(UsageError, match="No distributed cell has run yet"):
        typed(line)


def test_the_last_failure(typed: Callable[[str], str], pools: Pools):
    """That of the pool; none has its line too."""
    assert typed("%dist_why") == "nothing has failed yet\n"
    pools.at("a").why = Why("12:00:00 · rank 1", "bad shard", ("rank 2: the same",), "/x.log")
    assert typed("%dist_why --pool a").splitlines() == [
        "12:00:00 · rank 1", "bad shard", "rank 2: the same", "all of its lines: /x.log"
    ]  # fmt: skip
    assert typed("%dist_why") == "nothing has failed yet\n"
