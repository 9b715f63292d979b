"""What a world keeps where its head, an agent or a cable stops for some seconds: a table.

    python -m tests.hosts.pauses [SECONDS ...] [--link-timeout 60]    # 1 2 3 5 10 30

Needs what `tests.hosts.network` does.  `tests/hosts/test_pauses.py` has a line of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from nbdist.errors import WorkerDied
from nbdist.world.world import World
from tests.hosts.launched import has_come
from tests.hosts.network import Host, Network
from tests.hosts.sshd import Sshd
from tests.hosts.worlds import SUM, agent_on, new_world
from tests.waiting import wait_until

SECONDS = (1, 2, 3, 5, 10, 30)

Part = Callable[[World, Host, float], None]


def pause_head(world: World, host: Host, seconds: float) -> None:
    """Have the head stand still."""
    _pause(world.session.link.agents[0].pid, seconds)


def pause_agent(world: World, host: Host, seconds: float) -> None:
    """Have the agent of a host stand still."""
    _pause(agent_on(host), seconds)


def pull_cable(world: World, host: Host, seconds: float) -> None:
    """Have the cable of a host be out."""
    host.link_down()
    time.sleep(seconds)
    host.link_up()


PARTS: dict[str, Part] = {"head": pause_head, "agent": pause_agent, "cable": pull_cable}


def _pause(guard: int, seconds: float) -> None:
    """Have the process stand still that a guard has started first."""
    paused = psutil.Process(guard).children()[0]
    paused.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    with suppress(psutil.NoSuchProcess):  # a guard ends an agent that does not end by itself
        paused.send_signal(signal.SIGCONT)


def kept(world: World, host: Host, part: Part, seconds: float) -> list[int]:
    """Pause this part of a world of four ranks, and use it: the ranks whose variables are there."""
    world.execute("kept = rank")
    part(world, host, seconds)
    try:
        world.execute(SUM)
    except WorkerDied:
        world.execute(SUM)
    return [rank for rank in world.gather("globals().get('kept')") if rank is not None]


def main() -> None:
    """Write the table: of four ranks so many keep their variables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", nargs="*", type=float, default=SECONDS)
    parser.add_argument("--link-timeout", type=int)
    options = parser.parse_args()
    os.environ["NBDIST_TEST_RUN"] = "pauses"  # by which leaks are found, and what sshd hands on
    network = Network(("node1", "node2"))
    sshd = Sshd(network)
    os.environ.update(sshd.environ)
    try:
        with new_world(link_timeout=options.link_timeout) as world:
            for name, part in PARTS.items():
                for seconds in options.seconds:
                    if world.size < 4:
                        wait_until(lambda: has_come(world), "node2 to come back")
                        world.restart(4)
                    found = len(kept(world, network.hosts[1], part, seconds))
                    sys.stdout.write(f"{name} {seconds:g} s: {found} of 4 ranks kept\n")
                    sys.stdout.flush()
    finally:
        sshd.close()
        network.close()


if __name__ == "__main__":
    main()
