"""Tests of `nbdist.notebook.commands.distributed`: which ranks a cell is for."""

from __future__ import annotations

import pytest

from nbdist.errors import UsageError
from nbdist.notebook.command import Line
from nbdist.notebook.commands.distributed import distributed, rank
from nbdist.notebook.pools import Pools


@pytest.mark.parametrize(
    ("text", "ranks", "pool"),
    [
        ("-1,0", "-1,0", "default"),
        ("0, 2-3", "0,2-3", "default"),
        ("1 --pool a", "1", "a"),
        ("--pool=a ::2", "::2", "a"),
    ],
)
def test_ranks_of_a_rank_cell(pools: Pools, text: str, ranks: str, pool: str):
    """They may begin with a sign and have spaces between them; `--pool` may stand anywhere."""
    line = Line(rank, pools, text, "pass")
    assert (line.options.ranks, line.pool.name) == (ranks, pool)
    assert (line.text, line.cell) == (f"%%rank {text}", "pass")


def test_a_rank_cell_needs_ranks(pools: Pools):
    """Without any it says how they look."""
    with pytest.raises(UsageError, match="`%%rank` needs ranks: `%%rank 0`"):
        Line(rank, pools, "--pool a", "pass")


@pytest.mark.parametrize("text", ["-r -1,0", "--ranks=-1,0", "-r=-1,0 --setup"])
def test_ranks_of_a_distributed_cell(pools: Pools, text: str):
    """`-r` takes what begins with a sign."""
    assert Line(distributed, pools, text, "pass").options.ranks == "-1,0"
