"""`--launcher ray`: one agent on each node of a Ray cluster that is there, below an actor of Ray's.

The head exchanges pickled messages with the process that speaks with Ray, `ray_driver`.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

from nbdist import topology
from nbdist.cluster.launcher import KILL_TIMEOUT, AgentProcess, Launched, agent_command
from nbdist.cluster.ticket import Ticket
from nbdist.config import WorldConfig
from nbdist.system.processes import MODULE, Child
from nbdist.words import count

PLACED_TIMEOUT = 60.0  # seconds for Ray to be imported, and to place all actors

LEAVE_TIMEOUT = 5.0  # seconds for the driver to take its leave of Ray

ARRIVE_TIMEOUT = 180.0
"""Seconds for the agents to come then: on each node Ray starts an interpreter before, which imports
Ray; beside four spinning processes on two cores that took more than 60.
"""

TOKEN = re.compile("authentication token", re.IGNORECASE)
TOKEN_WANTED = (
    "the Ray cluster takes only whom it knows by its token: set RAY_AUTH_MODE=token before the "
    "notebook begins, and have the token in ~/.ray/auth_token or in RAY_AUTH_TOKEN"
)
"""What Ray says of that is for its log, or longer than a line."""

Order = tuple[WorldConfig, bytes]
"""What the driver is to place, and the line of the ticket; then it gets each `End`.

Its first answer is a list of the hosts on which actors are about to start agents, else why there
are none; then it says each `Ended`."""

End = tuple[int, bool]
"""The number of an agent that is to end: by its stdin, or True for its actor by force."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An agent, or its actor, has ended: how, and what it wrote last."""

    number: int
    exit_code: int
    last_lines: Sequence[str]


class RayLauncher:
    """`--launcher ray`."""

    def launch(self, wanted: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Let Ray place an actor on each node; raises OSError with what keeps it from that."""
        if importlib.util.find_spec("ray") is None:
            raise OSError(f"Ray is not installed here: {sys.executable} -m pip install nbdist[ray]")
        driver = Driver(folder / "ray.log")
        hosts = driver.place((wanted, ticket.to_line()))
        agents = [RayAgent(driver, number, host, wanted) for number, host in enumerate(hosts)]
        driver.watch(agents)
        return Launched(
            *(agents, len(agents), hosts), arrive_timeout=ARRIVE_TIMEOUT, close=driver.leave
        )


class Driver(Child):
    """The process that speaks with Ray, and the thread that hears what it says."""

    def __init__(self, log: Path) -> None:
        command = [sys.executable, *MODULE, "nbdist.cluster.ray_driver"]
        super().__init__("", command, log, stdout=subprocess.PIPE)
        self.agents: Sequence[RayAgent] = ()
        self._listener = threading.Thread(target=self._listen, name="ray", daemon=True)

    def place(self, order: Order) -> Sequence[str]:
        """Place all actors and return their hosts; raises OSError, with nothing left."""
        too_long = threading.Timer(PLACED_TIMEOUT, self._process.kill)
        too_long.start()
        try:
            self.tell(order)
            said = read_message(self._process.stdout)
        finally:
            too_long.cancel()
        if isinstance(said, list):
            return said
        self.end(KILL_TIMEOUT)
        lines = self.last_lines()
        self.close()
        if isinstance(said, str):
            raise OSError(TOKEN_WANTED if any(map(TOKEN.search, [said, *lines])) else said)
        told = " ".join(lines[-1:])
        raise OSError(f"Ray did not place the agents within {PLACED_TIMEOUT:.0f} s: {told}")

    def watch(self, agents: Sequence[RayAgent]) -> None:
        """Note from now on when these agents end."""
        self.agents = agents
        self._listener.start()

    def tell(self, message: Order | End) -> None:
        """Send what it is to do."""
        # Where it has ended at once, its last lines say why.
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def end(self, timeout: float) -> None:
        """End the process, and with it all actors; by force after `timeout` seconds."""
        self._end_stdin()
        if not self._ends_in(timeout):
            self._process.kill()
            self._ends_in(KILL_TIMEOUT)

    def leave(self) -> None:
        """End with all that is its own, once all agents have ended."""
        self.end(LEAVE_TIMEOUT)
        self._listener.join(KILL_TIMEOUT)
        self.close()

    def close(self) -> None:
        """Close all, after its end."""
        super().close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _listen(self) -> None:
        while (ended := read_message(self._process.stdout)) is not None:
            self.agents[ended.number].note_end(ended)
        code = self._process.wait()
        for agent in self.agents:
            agent.note_end(Ended(agent.number, code, ()))


class RayAgent(AgentProcess):
    """An agent that is the child of an actor; `host` is the node that Ray chose."""

    def __init__(self, driver: Driver, number: int, host: str, wanted: WorldConfig) -> None:
        self.host = host
        self.number = number
        command = " ".join([*wanted.wrapper, *agent_command(wanted.python, number)])
        self.command = f"ray actor {actor_name(wanted, number)}: {command}"
        self._driver = driver
        self._ended: Ended | None = None
        self._is_over = threading.Event()
        # Its reading end turns readable when the other is closed.
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        return self._reader

    def exit_code(self) -> int | None:
        return None if self._ended is None else self._ended.exit_code

    def last_lines(self) -> list[str]:
        return [*self._ended.last_lines] if self._ended else []

    def end(self, timeout: float) -> None:
        """End its stdin at once, its actor by force after `timeout` seconds."""
        self._driver.tell((self.number, False))
        if not self._is_over.wait(timeout):
            self._driver.tell((self.number, True))
            self._is_over.wait(KILL_TIMEOUT)

    def close(self) -> None:
        os.close(self._reader)

    def note_end(self, ended: Ended) -> None:
        """Count it as ended; the first word holds."""
        if self._ended is None:
            self._ended = ended
            self._is_over.set()
            os.close(self._writer)


def actor_name(wanted: WorldConfig, number: int) -> str:
    """Name the actor of a node, as Ray's dashboard lists it."""
    return f"nbdist:{wanted.name}/{number}"


def read_message(stream: IO[bytes] | None) -> Any:
    """Read what the other side has written next; None after its end."""
    assert stream is not None
    try:
        return pickle.load(stream)
    except (EOFError, OSError, pickle.UnpicklingError):
        return None


CPU, GPU, MEMORY = "CPU", "GPU", "memory"  # Ray's names of them; memory is in bytes
MOST_TOLD = 6  # nodes whose resources an error lists
_BYTES = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}  # what a number in `--memory` counts
_DIGITS = re.compile(r"([0-9]+)")

Bundle = Mapping[str, float]


class RayNode(NamedTuple):
    """A node of the cluster, with all that it has, used by others or not."""

    name: str
    resources: Bundle


class NoRoom(ValueError):
    """The cluster has not what is asked for; the message names what, and what there is."""


def bundles_of(wanted: WorldConfig, nodes: Sequence[RayNode]) -> list[Bundle]:
    """Return what to ask of each node: as many as are wanted and there are; raises NoRoom."""
    per_node, workers = wanted.per_node, wanted.workers
    has_gpus = any(node.resources.get(GPU) for node in nodes) and wanted.backend != "gloo"
    one: dict[str, float] = {CPU: wanted.cpus or 1}
    if has_gpus or per_node == "gpu":
        one[GPU] = 1
    if wanted.memory:
        one[MEMORY] = int(wanted.memory[:-1]) * _BYTES[wanted.memory[-1]]
    rooms = sorted((_room(node, one) for node in nodes), reverse=True)
    if isinstance(per_node, int):
        shares = [per_node for room in rooms if room >= per_node][: wanted.max_nodes]
        is_enough, of = len(shares) >= wanted.min_nodes, per_node
        asked = count(wanted.min_nodes, "node")
    else:
        if GPU not in one and per_node != "cpu":  # that was left open
            rooms = [min(room, topology.AUTO_LIMIT) for room in rooms]
        shares, of = [room for room in rooms if room], 1
        if workers is not None:
            pairs = zip(shares, accumulate(shares, initial=0), strict=False)
            shares = [min(room, workers - before) for room, before in pairs if before < workers]
        is_enough = sum(shares) >= (workers or 1)
        asked = count(workers or 1, "worker")
    if not is_enough:
        raise NoRoom(f"{asked} with {word_bundle(_times(one, of))} each: {_word_nodes(nodes)}")
    return [_times(one, share) for share in shares]


def _room(node: RayNode, one: Bundle) -> int:
    """Return how many workers have room on a node while no other program uses it."""
    return int(min(node.resources.get(name, 0) // much for name, much in one.items()))


def word_bundle(bundle: Bundle) -> str:
    """Word what is asked of a node, or what it has: `2 CPU, 1 GPU, 3.0 GiB of memory`."""
    words = [f"{bundle[name]:g} {name}" for name in (CPU, GPU) if name in bundle]
    memory = bundle.get(MEMORY)
    words += [f"{memory / (1 << 30):.1f} GiB of memory"] if memory else []
    return ", ".join(words) or "no CPU"


def _times(one: Bundle, number: int) -> Bundle:
    return {name: much * number for name, much in one.items()}


def _word_nodes(nodes: Sequence[RayNode]) -> str:
    told = "; ".join(f"{node.name} has {word_bundle(node.resources)}" for node in nodes[:MOST_TOLD])
    more = f"; and {len(nodes) - MOST_TOLD} more" if len(nodes) > MOST_TOLD else ""
    return f"the cluster has {count(len(nodes), 'node')}: {told}{more}"


def distinct(names: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """Name nodes so that no two have one name: with the address, and then the number, besides."""
    for ends in (addresses, [f"{number}" for number in range(len(names))]):
        pairs = zip(names, ends, strict=True)
        names = [name if names.count(name) == 1 else f"{name}-{end}" for name, end in pairs]
    return [*names]


def in_order(names: Sequence[str]) -> list[int]:
    """List the places of names in the order that a person expects: node2 before node10."""
    parts = [
        [int(part) if part.isdigit() else part for part in _DIGITS.split(name)] for name in names
    ]
    return sorted(range(len(names)), key=parts.__getitem__)
