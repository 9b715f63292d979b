"""Tests of `nbdist.run` and `nbdist.distributed`: workers for one call."""

from __future__ import annotations

import os
from typing import Any

import pytest

import nbdist
from nbdist.errors import UsageError
from nbdist.world.functions import Distributed, distributed

SPAWN: dict[str, Any] = {"n": 2, "backend": "none", "log_dir": "", "show": False}


def double(x: int) -> tuple[int, str | None]:
    return 2 * x, os.environ.get("ASKED")


@pytest.mark.world
def test_each_call_has_workers_of_its_own() -> None:
    """With what the decorator says; they are gone afterwards."""
    asked = distributed(**SPAWN, env={"ASKED": "yes"})(double)
    assert isinstance(asked, Distributed)
    assert list(asked(21)) == [(42, "yes")] * 2
    assert list(asked(x=1)) == [(2, "yes")] * 2


def test_options_are_checked_where_they_are_written() -> None:
    """Not at the first call, which may be hours later."""
    with pytest.raises(UsageError, match="`--cpus 0`: a number of cores"):
        nbdist.distributed(cpus=0)(double)
    with pytest.raises(TypeError, match="bogus"):
        nbdist.distributed(bogus=1)(double)
