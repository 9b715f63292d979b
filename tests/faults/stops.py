"""Stop, in every collective, while the cores are busy: `python -m tests.faults.stops`.

    python -m tests.faults.stops --ranks 2,4,8 --busy 4

One rank sleeps, and the others wait for it in a collective, which is the first of their world or
comes after others.  Then Stop is pressed: every rank has to keep its process and its variables.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.cells import press_stop, run_for
from tests.faults.collectives import BEFORE, BIG_ONLY, SMALL

SPIN = "import os\nparent = {parent}\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"


@contextmanager
def spinning(processes: int) -> Iterator[None]:
    """Keep this many processes spinning; they end with this process at the latest."""
    command = [sys.executable, "-c", SPIN.format(parent=os.getpid())]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


NEEDS_MORE = re.compile(r"net\(|mesh|sharded|spread")
"""Sources that match need names which `BEFORE` makes."""

FIRST = {
    **{name: source for name, source in SMALL.items() if not NEEDS_MORE.search(source)},
    "DDP(...)": "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))",
    "new_group": "dist.new_group()",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh as make\n"
    "make(device.type, (world_size,))",
    "irecv": "dist.irecv(t, 1).wait()",
    "recv from any": "dist.recv(t)",
    "irecv from any": "dist.irecv(t).wait()",
}
"""Calls that can be the first collective of a world."""

AFTER = {**SMALL, "send": "t = torch.ones(25_000_000); " + BIG_ONLY["send"]}

WAITING = 0.7
"""Seconds into the cell when Stop is pressed: most ranks wait by then."""


def stop_in(world: World, source: str) -> tuple[float, float, tuple[int, ...]]:
    """Return seconds until control is back, and until all ranks work, and ranks with losses."""
    world.execute("kept = rank")
    before = dict(world.pids)
    cell = "import time\nt, u = torch.ones(256), torch.ones(world_size * 64)\n"
    running = run_for(world, f"{cell}if rank == 1: time.sleep(600)\n{source}", WAITING)
    pressed = time.monotonic()
    press_stop(world, running)
    control = time.monotonic() - pressed
    world.execute("dist.barrier()")
    working = time.monotonic() - pressed
    kept = world.gather("globals().get('kept')")
    lost = [r for r in before if kept[r] != r or world.pids[r] != before[r]]
    assert world.state is WorldState.READY
    return control, working, tuple(lost)


def tried(world: World, name: str, source: str, moment: str) -> tuple[bool, float]:
    """Press Stop in a call, and print the result.

    `moment` says whether the call is the first of its world. Return whether ranks lost anything,
    and the seconds until control is back.
    """
    control, working, lost = stop_in(world, source)
    times = f"{control:6.2f} s{working:6.2f} s  {f'LOST {lost}' if lost else 'kept'}"
    sys.stdout.write(f"{world.size:2} ranks, {moment:12} {name:24}{times}\n")
    sys.stdout.flush()
    return bool(lost), control


def all_stops(ranks: int) -> Iterator[tuple[bool, float]]:
    """Press Stop in each call, in a world of this many ranks; yield the results of `tried`."""
    with World(ranks, log_dir="", show=False) as world:
        for name, source in FIRST.items():
            yield tried(world, name, source, "first")
            world.restart()
        world.execute(BEFORE)
        for name, source in AFTER.items():
            has_lost, seconds = tried(world, name, source, "after others")
            yield has_lost, seconds
            if has_lost:
                world.restart()
                world.execute(BEFORE)


def main() -> None:
    """Print each Stop; exit with code 1 if a rank has lost anything."""
    parser = argparse.ArgumentParser("python -m tests.faults.stops", description=__doc__)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--busy", type=int, default=4, help="processes that spin beside")
    options = parser.parse_args()
    with spinning(options.busy):
        done = [each for ranks in options.ranks.split(",") for each in all_stops(int(ranks))]
    losses, longest = sum(has_lost for has_lost, _ in done), max(seconds for _, seconds in done)
    sys.stdout.write(
        f"{len(done)} Stops, {losses} with losses; control back after {longest:.2f} s at most\n"
    )
    sys.exit(bool(losses))


if __name__ == "__main__":
    main()
