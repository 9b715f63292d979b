"""Big values between this machine and two hosts, over ssh: and what can go wrong half-way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from nbdist.errors import WorkerDied
from nbdist.values.payload import pack_names
from nbdist.world.world import World
from tests.hosts.launched import has_come
from tests.hosts.network import Host
from tests.hosts.worlds import new_world
from tests.waiting import once, press_stop, wait_until

MIB = 1 << 20
SIZE = 64 * MIB
"""Bytes of a big value."""

LIMIT = 80
"""Million bits a second: they take some seven seconds."""


def segments(hosts: list[Host]) -> list[str]:
    """The shared memory that processes of the hosts, and the head, have open."""
    pids = [pid for host in hosts for pid in host.processes()]
    found = []
    for pid in [*pids, *heads()]:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("/memfd:nbdist "):
                found.append(f"{pid}: {target}")
    return found


def heads() -> list[int]:
    """The heads that this process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text()
        except OSError:
            continue
        if "\0nbdist.cluster\0" in command and f"\0{os.getpid()}\0" in command:
            found.append(int(path.parent.name))
    return found


def nothing_is_left(hosts: list[Host]) -> None:
    """All of it goes, as soon as the head has looked."""
    wait_until(lambda: not segments(hosts), "big values are let go of")


def begun(hosts: list[Host], then: Callable[[], None]) -> AbstractContextManager[None]:
    """Do something as soon as a big value is on its way: to hosts, or without any from them."""
    before = {*segments(hosts)}
    return once(lambda: {*segments(hosts)} - before, then, "a big value is on its way")


# What the memory is that a tensor lies in: the inode, and how much of it counts for this process.
MEMORY = """
import re
def memory_of(tensor):
    at, inode = tensor.data_ptr(), None
    for line in open("/proc/self/smaps"):
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) \\S+ \\S+ \\S+ (\\d+) +(.*)", line):
            first, last = int(found[1], 16), int(found[2], 16)
            inode = int(found[3]) if first <= at < last and "memfd:nbdist " in found[4] else None
        elif inode is not None and line.startswith("Pss:"):
            return inode, int(line.split()[1]) << 10
"""


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


def test_a_big_name(world: World) -> None:
    """It arrives as it was, once on each host, whose ranks share it; and comes back so."""
    big = torch.arange(SIZE // 8)
    world.execute("total = int(big.sum())", names={"big": big})
    assert world.gather("total") == [int(big.sum())] * 4
    world.execute(MEMORY + "at = memory_of(big)")  # once all have read all of it
    inodes, sizes = zip(*world.gather("at"), strict=True)
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]
    assert sizes == pytest.approx([SIZE // 2] * 4, rel=0.1)
    assert all(torch.equal(each, big) for each in world.gather("big"))


def test_values_from_host_to_host(world: World) -> None:
    """Copied through the group; and compared by what one rank lends to those of another host."""
    world.execute("import torch\nmine = torch.full((1 << 20,), float(rank))")
    (lent,) = world.call("diff.lend", [3], expression="mine", paths=("",)).values()
    found = world.call("diff.compare", [0], expression="mine", packed=lent.packed)
    assert found.rank(0)[""].most == 3.0
    world.sync(["mine"], source=3, ranks=range(3))
    world.execute("same = bool((mine == 3).all())")
    assert world.gather("same") == [True] * 4


def test_how_far_it_is(world: World, hosts_of_module: list[Host]) -> None:
    """The notebook is told while it is on its way, and when it is there on all hosts."""
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
