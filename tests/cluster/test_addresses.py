"""Tests of `nbdist.cluster.addresses`: by what other machines reach this one."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from nbdist.cluster.addresses import addresses, listened_at
from tests.waiting import SOON

LOOK = "from nbdist.cluster.addresses import addresses; print(*addresses(None))"

MACHINE = """
set -e
ip link set lo up
ip link add docker0 type veth peer name box && ip link set box up
ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up
ip link add eth0 type veth peer name cable && ip link set cable up
ip addr add 10.1.2.3/24 dev eth0 && ip link set eth0 up
ip route add default via 10.1.2.1
"""


def test_by_what_this_machine_can_be_reached() -> None:
    """Not by what means another machine to each; an interface or an address can be chosen."""
    own = {each.address for found in psutil.net_if_addrs().values() for each in found}
    found = addresses(None)
    assert found
    assert {*found} <= own
    assert not [each for each in found if each.startswith("fe80")]
    assert addresses("10.9.8.7") == ("10.9.8.7",)
    assert addresses("lo") == ("127.0.0.1",)


def test_where_to_listen() -> None:
    """Nowhere else than at what was chosen, where that is this machine's."""
    assert listened_at(None) == ()
    assert listened_at("127.0.0.1") == ("127.0.0.1",)
    assert listened_at("lo") == ("127.0.0.1",)
    assert listened_at("203.0.113.7") == ()
    assert listened_at("gateway.example.org") == ()


@pytest.mark.world
def test_the_one_by_which_packets_leave_is_first() -> None:
    """A bridge of containers on the same machine is not."""
    machine = ["unshare", "--net", "sh", "-c", f"{MACHINE} exec {sys.executable} -c '{LOOK}'"]
    if os.geteuid():
        pytest.skip("network namespaces need root")
    shown = subprocess.run(machine, capture_output=True, text=True, timeout=SOON)
    if "Operation not permitted" in shown.stderr:
        pytest.skip("no network namespaces here")
    assert shown.stdout.split()[:2] == ["10.1.2.3", "172.17.0.1"], shown.stderr
