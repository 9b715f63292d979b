"""Tests of `nbdist.cluster.ssh`: the command; that it reaches hosts is in `tests/hosts`."""

from __future__ import annotations

import sys

import pytest

from nbdist.cluster.ssh import ssh_command
from nbdist.hosts import parse_hosts
from nbdist.wire.wanted import Wanted


def test_the_command() -> None:
    """OpenSSH decides how the host is reached, nothing is asked, and no secret is in it."""
    host = parse_hosts("root@b:2")[0]
    wanted = Wanted(launcher="ssh", python="/venv/bin/python", wrap=("nice", "-n", "5"))
    command = ssh_command(host.destination, 1, wanted)
    assert command[:2] == ["ssh", "-T"]
    assert "BatchMode=yes" in command
    assert command[-3:-1] == ["--", "root@b"]
    run = "nice -n 5 /venv/bin/python -P -m nbdist.agent --ticket --node 1"
    assert command[-1] == f"exec {run}"


def test_the_interpreter_is_the_notebooks_by_default() -> None:
    """Clusters have one path for it on all nodes."""
    assert f"exec {sys.executable} " in ssh_command("b", 0, Wanted(launcher="ssh"))[-1]


@pytest.mark.parametrize(("link_timeout", "seconds"), [(10.0, 15), (60.0, 60)])
def test_ssh_waits_as_long_as_the_link(link_timeout: float, seconds: int) -> None:
    """Three times that: a machine that is waited for does not lose its agent with ssh."""
    command = ssh_command("b", 0, Wanted(launcher="ssh", link_timeout=link_timeout))
    assert f"ServerAliveInterval={seconds}" in command
