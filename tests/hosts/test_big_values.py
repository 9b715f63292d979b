"""Big values between this machine and two hosts, over ssh: and what can go wrong half-way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import psutil
import pytest
import torch

from nbdist.errors import WorkerDied
from nbdist.values.payload import pack_names
from nbdist.world.world import World
from tests.hosts.network import Host
from tests.hosts.worlds import has_come, new_world
from tests.waiting import once, press_stop, wait_until

MIB = 1 << 20
SIZE = 64 * MIB
"""Bytes of a big value."""

LIMIT = 80
"""Million bits a second: they take some seven seconds."""


def segments(hosts: list[Host]) -> list[str]:
    """The shared memory that processes of the hosts, and the heads of this process, have open."""
    pids, found = [pid for host in hosts for pid in host.processes()], []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            pids += [each.pid] if "nbdist.cluster" in each.cmdline() else []
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                if (target := os.readlink(link)).startswith("/memfd:nbdist "):
                    found.append(f"{pid}: {target}")
    return found


def nothing_is_left(hosts: list[Host]) -> None:
    """All of it goes, as soon as the head has looked."""
    wait_until(lambda: not segments(hosts), "big values are let go of")


def begun(hosts: list[Host], then: Callable[[], None]) -> AbstractContextManager[None]:
    """Do something as soon as a big value is on its way: to hosts, or without any from them."""
    before = {*segments(hosts)}
    return once(lambda: {*segments(hosts)} - before, then, "a big value is on its way")


@pytest.fixture(scope="module")
def shared(hosts_of_module: list[Host], path: None) -> Iterator[World]:
    """One for all tests that leave it as it was."""
    with new_world() as world:
        yield world


@pytest.fixture
def world(shared: World, hosts_of_module: list[Host]) -> Iterator[World]:
    """The same, after which no big value may be left on a host."""
    yield shared
    if shared.state.has_workers:
        shared.execute("for name in ('big', 'mine', 'part'): globals().pop(name, None)")
    nothing_is_left(hosts_of_module)


def test_how_far_it_is(world: World, hosts_of_module: list[Host]) -> None:
    """The notebook is told while it is on its way, once to each host, and when it is there."""
    hosts_of_module[1].limit(2 * LIMIT)
    payload, segment = pack_names({"big": torch.ones(SIZE // 4)}, {})
    assert segment is not None
    with segment:
        running = world.session.submit(world.session.task("total = big.sum()", names=payload))
        seen = [running.bytes_moved for _ in world.session.follow(running)]
    hosts_of_module[1].no_limit()
    done, total = zip(*(far for far in dict.fromkeys(seen) if far[1]), strict=True)
    assert len(done) > 3
    assert [*done] == sorted(done)
    assert {*total} == {done[-1]}
    assert done[-1] == pytest.approx(2 * SIZE, rel=0.01)
    assert world.gather("int(total)") == [SIZE // 4] * 4


def test_stop_before_it_is_there(world: World, hosts_of_module: list[Host]) -> None:
    """No rank gets the task, what has come is let go, and the next cell runs."""
    hosts_of_module[1].limit(LIMIT)
    with begun(hosts_of_module, press_stop), pytest.raises(KeyboardInterrupt):
        world.execute("ran = True", names={"big": torch.ones(SIZE // 4)})
    nothing_is_left(hosts_of_module)
    hosts_of_module[1].no_limit()
    world.execute("has = 'big' in globals() or 'ran' in globals()")
    assert world.gather("has") == [False] * 4


def test_a_host_is_lost(world: World, hosts_of_module: list[Host]) -> None:
    """Its ranks count as dead: the others end the task, and what has come back is no value."""
    second = hosts_of_module[1]
    second.limit(LIMIT)
    with begun(hosts_of_module, second.link_down), pytest.raises(WorkerDied, match="node2"):
        world.execute("done = True", names={"big": torch.ones(SIZE // 4)})
    second.mend()
    wait_until(lambda: has_come(world), "node2 to come back")
    world.execute(f"import torch\nmine = torch.ones({SIZE // 4})")
    second.limit(LIMIT)
    with begun([], second.link_down), pytest.raises(WorkerDied, match="node2"):
        world.gather("mine", ranks=[2])
    world.shutdown()  # or node2 would come back once more
    second.mend()
