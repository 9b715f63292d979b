"""Tests of `nbdist.launching`: which launcher is meant, and what contradicts it."""

from __future__ import annotations

import pytest

from nbdist.config import OPTIONS
from nbdist.errors import UsageError
from nbdist.hosts import parse_hosts
from nbdist.launching import (
    FOR_SOME,
    TAKES,
    check_room,
    check_taken,
    launcher_for,
    launcher_here,
    newer,
)
from nbdist.topology import parse_layout


def test_all_are_options() -> None:
    """What launchers take is what a world can be told."""
    assert OPTIONS.keys() > FOR_SOME


def test_the_launcher_that_is_meant() -> None:
    """By the options that only one takes."""
    found = [launcher_for({"n": 4}), launcher_for({"hosts": "a"}), launcher_for({"salloc": "-N 2"})]
    assert found == ["local", "ssh", "slurm"]


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, "local"),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}, "slurm"),
        ({"SLURM_JOB_ID": "17"}, "slurm"),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1"}, "slurm"),
        (
            {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "1", "SLURMD_NODENAME": "node1"},
            "local",
        ),
    ],
)
def test_the_launcher_of_a_place(environ: dict[str, str], launcher: str) -> None:
    """Slurm's in an allocation, unless that is this machine alone."""
    assert launcher_here(environ) == launcher
    assert launcher_for({}, launcher) == launcher
    assert launcher_for({"hosts": "a"}, launcher) == "ssh"


@pytest.mark.parametrize("launcher", [*TAKES, "of-a-package"])
@pytest.mark.parametrize("name", sorted(FOR_SOME))
def test_each_launcher_takes_its_own(launcher: str, name: str) -> None:
    """What it has no use for is refused with the launcher that has; others' take all."""
    said = {name: OPTIONS[name].usage, "hosts": "--hosts a"} if launcher == "ssh" else {}
    said |= {name: OPTIONS[name].usage}
    if name.startswith("rdzv"):
        said |= {"rdzv_backend": "--rdzv-backend x", "rdzv_endpoint": "--rdzv-endpoint x:1"}
    if launcher == "of-a-package" or name in TAKES[launcher]:
        check_taken(launcher, said)
        return
    with pytest.raises(UsageError, match=f"`, and not for `--launcher {launcher}`.$") as found:
        check_taken(launcher, said)
    assert all(f"--launcher {each}`" in str(found.value) for each in TAKES if name in TAKES[each])


def test_a_rendezvous_is_backend_and_endpoint() -> None:
    """One without the other is none."""
    with pytest.raises(UsageError, match="`--rdzv-backend c10d`: it takes both"):
        check_taken("join", {"rdzv_backend": "--rdzv-backend c10d"})


def test_of_what_was_said_the_newer_holds() -> None:
    """Nothing else changes with what the launcher takes."""
    assert newer({"name": "x"}, {"launcher": "ssh", "hosts": "a"}) == {}
    assert newer({"hosts": "b"}, {"launcher": "ssh", "hosts": "a"}) == {}
    assert newer({"hosts": "b"}, {"launcher": None, "salloc": "-N 2"})["salloc"] is None
    assert newer({"launcher": "join"}, {"hosts": "a"})["hosts"] is None
    assert "copy_env" not in newer({"launcher": "join"}, {"copy_env": "A"})


@pytest.mark.parametrize(
    ("workers", "layout", "hosts", "said"),
    [
        (6, None, "a:4,b:2", ""),
        (7, None, "a:4,b:2", "`W --hosts a:4,b:2`: the hosts have room for 6 workers."),
        (7, None, "a:4,b", ""),
        (None, "2x4", "a,b:4,c", ""),
        (None, "2x4", "a", "`W --hosts a`: 2 nodes, but 1 host."),
        (None, "1:2x4", "a", ""),
        (None, "2x4", "a:4,b:2", "`W --hosts a:4,b:2`: b:2 has no room for 4 workers."),
        (None, "2x4", "a:4,b:2,c", ""),
    ],
)
def test_room_on_hosts(workers: int | None, layout: str | None, hosts: str, said: str) -> None:
    """As far as it is known before they are asked; a host more than nodes is a spare one."""
    wanted = parse_layout(layout) if layout else None
    if not said:
        check_room("W", workers, wanted, parse_hosts(hosts))
        return
    with pytest.raises(UsageError) as found:
        check_room("W", workers, wanted, parse_hosts(hosts))
    assert str(found.value) == said
