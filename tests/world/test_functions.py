"""Tests of `nbdist.run` and `nbdist.distributed`: workers for one call."""

from __future__ import annotations

import pytest

import nbdist
from nbdist.errors import UsageError


def double(x: int) -> int:
    return 2 * x


def test_options_are_checked_where_they_are_written() -> None:
    """Not at the first call, which may be hours later."""
    with pytest.raises(UsageError, match="`--cpus 0`: a number of cores"):
        nbdist.distributed(cpus=0)(double)
    with pytest.raises(TypeError, match="bogus"):
        nbdist.distributed(bogus=1)(double)
