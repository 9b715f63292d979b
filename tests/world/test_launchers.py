"""Tests of `nbdist.world.agents`: what is started here for which launcher."""

from __future__ import annotations

import pytest

from nbdist.errors import UsageError
from nbdist.world.agents import AGENT, HEAD, launcher_names, module_of


def test_what_is_started_here() -> None:
    """This machine's agent, or the head of those of others; the names there are for none."""
    assert module_of("local") == AGENT
    assert module_of("ssh") == HEAD
    assert {"local", "ssh"} <= {*launcher_names()}
    with pytest.raises(UsageError, match=r"`--launcher shh`: available: .*local.*ssh"):
        module_of("shh")
