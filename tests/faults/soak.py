"""Random faults in a row, each followed by a collective: `python -m tests.faults.soak`.

    python -m tests.faults.soak --seed 7 --faults 200
    python -m tests.faults.soak --seed 77 --faults 100 --busy 4

Kind, rank and moment come from the seed, which is printed.  After each fault an all_reduce
has to give the right sum, and every rank that lived its variables.  At the end the
memory, descriptors, threads and processes of notebook, agent and fork server have to be as many as
after the first faults.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbdist.agent.fork_server import AFTER_FORK, makes_idle_imports
from nbdist.errors import NbdistError
from nbdist.world.states import State
from nbdist.world.world import World
from tests.faults.stops import spinning
from tests.waiting import wait_until

RANKS = 4
POOLED = 2
"""Threads that the agent's pool begins when it is first needed: one reads a rank's stack, others
count memory or look at GPUs; which of them meet is chance, and no more than three do."""

SETTLED = 10
"""Faults after which nothing may grow any more: each kind has been met by then."""

IMPORTED, LONGEST_IMPORTS = 2 * AFTER_FORK, 120.0
"""Seconds without work after which the fork server has nothing to import any more, and in all."""

COLLECTIVES = (
    "dist.all_reduce(torch.ones(9))",
    "dist.all_reduce(torch.ones(2_000_000))",
    "dist.barrier()",
    "dist.all_gather_object([None] * world_size, rank)",
    "dist.recv(torch.ones(1), (rank + 1) % world_size)",
)

KINDS = {
    "raises": "if rank == {rank}:\n    time.sleep({moment}); raise ValueError('bad')\n{collective}",
    "skips": "if rank != {rank}:\n    {collective}",
    "exits": "if rank == {rank}:\n    time.sleep({moment}); os._exit(3)\n{collective}",
    "killed": "if rank == {rank}:\n    time.sleep({moment})\n"
    "    os.kill(os.getpid(), signal.SIGKILL)\n{collective}",
    "stopped": "if rank == {rank}: time.sleep(600)\n{collective}",
    "killed while idle": "",
}
DEADLY = ("exits", "killed", "killed while idle")


@dataclass(frozen=True)
class Holdings:
    """What the processes that outlive every fault have."""

    descriptors: int
    threads: int
    processes: int
    megabytes: float

    def has_grown_since(self, before: Holdings) -> bool:
        """Whether there is more than a connection more, which may just be being made.

        Memory has its ups and downs: 16 MiB in three processes are none yet.
        """
        return (
            self.megabytes > before.megabytes + 16
            or self.descriptors > before.descriptors + 3
            or self.threads > before.threads + POOLED
            or self.processes > before.processes
        )

    @classmethod
    def now(cls, world: World) -> Holdings:
        """Of this process, which is the notebook, of the agent and the fork server."""
        lasting = [psutil.Process(), *_serving(world)]
        return cls(
            sum(process.num_fds() for process in lasting),
            sum(process.num_threads() for process in lasting),
            len(lasting),
            round(sum(map(_anonymous_kib, lasting)) / 2**10, 1),
        )


def _anonymous_kib(process: psutil.Process) -> int:
    """What it has written, whoever shares it: its own alone changes with each fork of a worker."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


def _serving(world: World) -> list[psutil.Process]:
    """Those processes of a world that are no workers."""
    workers = set(world.pids.values())
    guard = psutil.Process(world.session.link.agent.pid)
    return [guard, *(p for p in guard.children(recursive=True) if p.pid not in workers)]


def wait_for_imports(world: World) -> None:
    """Return once the fork server has imported all that it does while idle: no leak is as large."""
    if makes_idle_imports():
        (server,) = (p for p in _serving(world) if "nbdist.agent.fork_server" in p.cmdline())
        wait_until_at_rest(server)


def wait_until_at_rest(server: psutil.Process) -> None:
    """Return once a fork server has nothing to import any more."""
    deadline, before = time.monotonic() + LONGEST_IMPORTS, None
    while before != (before := server.cpu_times()):
        if time.monotonic() > deadline:
            raise AssertionError("the fork server has not ended its imports")
        time.sleep(IMPORTED)


def one_fault(world: World, dice: random.Random) -> str:
    """Make a fault, and check that all goes on; its kind."""
    kind, rank = dice.choice(list(KINDS)), dice.randrange(world.size)
    moment, collective = dice.choice((0, 0.01, 0.2)), dice.choice(COLLECTIVES)
    source = "import os, signal, time\n" + KINDS[kind].format(
        rank=rank, moment=moment, collective=collective
    )
    dead = world.pids[rank]
    if kind == "killed while idle":
        os.kill(dead, signal.SIGKILL)
        is_known = lambda: world.session.receive(0.05) or world.state is not State.READY  # noqa: E731
        wait_until(is_known, "a death while idle is known", 10.0)
    else:
        running = world.submit(world.task(source))
        for _ in world.follow(running):
            if kind == "stopped" and running.age > 0.1 + moment:
                break
        world.interrupt()
        world.session.wait(running)
        if running.error() is None:
            raise AssertionError(f"nothing failed: {kind} {source}")
    world.execute(
        "t = torch.full((1,), float(rank)); dist.all_reduce(t)\n"
        "assert t.item() == sum(range(world_size)), t"
    )
    lost = {rank} if kind in DEADLY else set()
    kept = world.gather("globals().get('kept')")
    expected = [None if r in lost else r for r in range(world.size)]
    if kept != expected or (world.pids[rank] != dead) != bool(lost):
        raise AssertionError(f"{kept} instead of {expected} after {kind} of rank {rank}:\n{source}")
    world.execute("kept = rank")
    return kind


def soak(seed: int, faults: int, ranks: int = RANKS) -> tuple[Counter[str], Holdings, Holdings]:
    """Make the faults; how many of each kind, and what was held after `SETTLED` and at the end."""
    dice, kinds = random.Random(seed), Counter[str]()
    with World(ranks, log_dir="") as world:
        world.execute("kept = rank")
        settled = None
        for number in range(faults):
            kinds[one_fault(world, dice)] += 1
            if number + 1 == min(SETTLED, faults):
                wait_for_imports(world)
                settled = Holdings.now(world)
        assert settled is not None
        return kinds, settled, Holdings.now(world)


def main() -> None:
    """Print what was done, and how it went; exit code 1 for something that grew."""
    parser = argparse.ArgumentParser("python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--busy", type=int, default=0, help="processes that spin beside")
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}, {options.faults} faults, {RANKS} ranks\n")
    started = time.monotonic()
    try:
        with spinning(options.busy):
            kinds, settled, end = soak(options.seed, options.faults)
    except NbdistError as error:
        sys.exit(f"after {time.monotonic() - started:.0f} s: {error}")
    seconds = time.monotonic() - started
    sys.stdout.write(f"{dict(kinds)}\n{settled}\n{end}\n{seconds / options.faults:.2f} s each\n")
    if end.has_grown_since(settled):
        sys.exit("something grew")


if __name__ == "__main__":
    main()
