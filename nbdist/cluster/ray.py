"""`--launcher ray`: one agent on each node of a Ray cluster that is there, below an actor of Ray's.

Ray's library has threads and handlers of signals, and ends its process with the cluster.  So the
head starts a process that speaks with Ray (`python -m nbdist.cluster.ray`), which Ray calls the
driver of the actors, and both exchange pickled messages.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
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

Ended = tuple[int, int, list[str]]
"""The number of an agent that has ended, or its actor: the exit code, and what it wrote last."""


class RayLauncher:
    """`--launcher ray`."""

    def launch(self, wanted: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Let Ray place an actor on each node; raises OSError with what keeps it from that."""
        if importlib.util.find_spec("ray") is None:
            raise OSError(f"Ray is not installed here: {sys.executable} -m pip install nbdist[ray]")
        driver = Driver(folder / "ray.log")
        agents = driver.place(wanted, ticket)
        hosts = [agent.host for agent in agents]
        return Launched(agents, len(agents), hosts, "", ARRIVE_TIMEOUT, close=driver.leave)


class Driver(Child):
    """The process that speaks with Ray, and the thread that hears what it says.

    It is sent what to place, and answers with a list of the hosts on which actors are about to
    start agents, else why there are none.  Then it is sent the number of each agent that is to end,
    and says each `Ended`.
    """

    def __init__(self, log: Path) -> None:
        command = [sys.executable, *MODULE, "nbdist.cluster.ray"]
        super().__init__("", command, log, stdout=subprocess.PIPE)
        self._agents: Sequence[RayAgent] = ()
        self._listener = threading.Thread(target=self._listen, name="ray", daemon=True)

    def place(self, wanted: WorldConfig, ticket: Ticket) -> Sequence[RayAgent]:
        """Place all actors, and note from then on when they end; OSError, with nothing left."""
        too_long = threading.Timer(PLACED_TIMEOUT, self._process.kill)
        too_long.start()
        try:
            send(self._process.stdin, (wanted, ticket.to_line()))
            said = read_message(self._process.stdout)
        finally:
            too_long.cancel()
        if isinstance(said, list):
            self._agents = [RayAgent(self, at, host, wanted) for at, host in enumerate(said)]
            self._listener.start()
            return self._agents
        self._end(KILL_TIMEOUT)
        lines = self.last_lines()
        self.close()
        if any(map(TOKEN.search, [said or "", *lines])):
            said = TOKEN_WANTED
        told = " ".join(lines[-1:])
        slow = f"Ray did not place the agents within {PLACED_TIMEOUT:.0f} s: {told}"
        raise OSError(said or slow)

    def end_agent(self, number: int) -> None:
        """End the stdin of an agent."""
        send(self._process.stdin, number)

    def leave(self) -> None:
        """End with all that is its own, the actors too."""
        self._end(LEAVE_TIMEOUT)
        self._listener.join(KILL_TIMEOUT)
        self.close()

    def close(self) -> None:
        """Close all, after its end."""
        super().close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _end(self, timeout: float) -> None:
        self._end_stdin()
        if not self._ends_in(timeout):
            self._process.kill()
            self._ends_in(KILL_TIMEOUT)

    def _listen(self) -> None:
        while (ended := read_message(self._process.stdout)) is not None:
            number, code, lines = ended
            self._agents[number].note_end(code, lines)
        code = self._process.wait()
        for agent in self._agents:
            agent.note_end(code, [])


class RayAgent(AgentProcess):
    """An agent that is the child of an actor; `host` is the node that Ray chose."""

    def __init__(self, driver: Driver, number: int, host: str, wanted: WorldConfig) -> None:
        self.host = host
        self._number = number
        command = " ".join([*wanted.wrapper, *agent_command(wanted.python, number)])
        self.command = f"ray actor {actor_name(wanted, number)}: {command}"
        self._driver = driver
        self._exit_code: int | None = None
        self._last_lines: list[str] = []
        self._is_over = threading.Event()
        # Its reading end turns readable when the other is closed.
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        return self._reader

    def exit_code(self) -> int | None:
        return self._exit_code

    def last_lines(self) -> list[str]:
        return self._last_lines

    def end(self, timeout: float) -> None:
        """End its stdin at once; what has not ended after `timeout` seconds the driver ends."""
        self._driver.end_agent(self._number)
        self._is_over.wait(timeout)

    def close(self) -> None:
        os.close(self._reader)

    def note_end(self, code: int, lines: list[str]) -> None:
        """Count it as ended; the first word holds."""
        if self._exit_code is None:
            self._exit_code, self._last_lines = code, lines
            self._is_over.set()
            os.close(self._writer)


def actor_name(wanted: WorldConfig, number: int) -> str:
    """Name the actor of a node, as Ray's dashboard lists it."""
    return f"nbdist:{wanted.name}/{number}"


def read_message(stream: IO[bytes] | None) -> Any:
    """Read what the other side has sent next; None after its end."""
    assert stream is not None
    try:
        return pickle.load(stream)
    except (EOFError, OSError, pickle.UnpicklingError):
        return None


def send(stream: IO[bytes] | None, message: object) -> None:
    """Send the other side a message at once; one that it is too late for goes nowhere."""
    assert stream is not None
    with suppress(OSError, ValueError):
        pickle.dump(message, stream)
        stream.flush()


# --- what is asked of the cluster's nodes ---------------------------------------------------------

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
    # For how many workers there is room while no other program uses it.
    each = (min(node.resources.get(n, 0) // much for n, much in one.items()) for node in nodes)
    rooms = sorted(map(int, each), reverse=True)
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


def in_order(name: str) -> list[int | str]:
    """Return a key that sorts names as a person expects: node2 before node10."""
    return [int(part) if part.isdigit() else part for part in _DIGITS.split(name)]


# --- the driver ---------------------------------------------------------------------------------

REACH_TIMEOUT = 5.0  # seconds for the cluster's address to answer
REACH_TRIES = ("RAY_NUM_REDIS_GET_RETRIES", "3")  # a second apart; by itself Ray tries 20 times

PLACE_TIMEOUT = 20.0
"""Seconds for nodes that have what is wanted to have it free: a world that has just ended gives it
back by and by, beside other work over 5 s after its end."""

REMEDY = "`ray start` makes it one, and RAY_ADDRESS names another"
CURRENT = "ray_current_cluster"
"""The file in Ray's folder that has the address of the cluster that this machine is a node of."""

APART = """
import os, subprocess, sys
try:
    code = subprocess.call(sys.argv[1:])
except OSError as error:
    print(error)
    sys.exit(127)
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
# Ray kills an actor's children with it, and the process above an agent is to stay until it has
# ended what a killed one has left: so this is between them.


class Agent:
    """What Ray places on a node, and its dashboard shows: the agent is its child.

    It is pickled with what it names of this module, which is nothing of nbdist: only the agent's
    interpreter need have that.  It ends when the agent does, and the agent when it does, as that
    ends the agent's stdin.
    """

    def __init__(self) -> None:
        self._child: Any = None

    def run(self, command: Sequence[str], guess: str, ticket: bytes) -> tuple[int, list[str]]:
        """Run it, or this interpreter for a missing `guess`; return its end and last lines."""
        own = {guess: sys.executable} if guess and not os.path.exists(guess) else {}
        # The node's environment, without what Ray has set for the code of its actors.
        mine = {"SPT_NOENV", "PYTHONBREAKPOINT", "OMP_NUM_THREADS"}
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in mine and (name == "RAY_ADDRESS" or not name.startswith("RAY_"))
        }
        before = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT
        apart = [sys.executable, "-I", "-S", "-c", APART]
        try:
            self._child = subprocess.Popen(
                [*apart, *(own.get(word, word) for word in command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        last: deque[str] = deque(maxlen=20)
        with self._child:
            with suppress(BrokenPipeError):
                self._child.stdin.write(ticket)
                self._child.stdin.flush()
            for line in self._child.stdout:
                last.append(line.decode(errors="replace").rstrip("\n"))
                sys.stderr.write(f"{last[-1]}\n")
        return self._child.returncode, [*last]

    def end(self) -> None:
        """End the agent's stdin."""
        if self._child is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.close()


def drive() -> None:
    """Place what is wanted, and stay until stdin ends."""
    # What Ray prints is not for the head to read.
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    wanted, ticket = read_message(sys.stdin.buffer)
    asked = os.environ.get("RAY_ADDRESS") or "auto"
    if problem := word_no_cluster(asked):
        send(told, problem)
        return
    os.environ.setdefault(*REACH_TRIES)
    import ray
    from ray.exceptions import RayError

    try:
        # By "auto", not by an address, Ray finds out that the cluster of this machine has a token.
        ray.init(address=asked, log_to_driver=False, logging_level="WARNING")
        bundles, names = place(wanted)
    except (NoRoom, OSError, RuntimeError, ValueError, RayError) as error:
        # Of a token Ray speaks in the cause alone.
        send(told, " ".join(f"{error} {error.__cause__ or ''}".split()))
        return
    agents = start(wanted, ticket, bundles)
    send(told, names)
    serve(agents, told)


def word_no_cluster(asked: str) -> str:
    """Word why no cluster is there; "" where one may be: Ray takes seconds to be imported."""
    address = current() if asked == "auto" else asked
    if not address:
        return f"this machine is no node of a Ray cluster; {REMEDY}"
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        if port.isdigit():  # Ray would look for it for a minute
            socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT).close()
    except OSError as error:
        return f"no Ray cluster answers at {address}: {error.strerror or error}; {REMEDY}"
    return ""


def current() -> str:
    """Return the address that `ray start` has noted on this machine, "" for none."""
    try:
        return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", CURRENT).read_text().strip()
    except OSError:
        return ""


Reserved = tuple[Any, int, Bundle]
"""A placement group, a place in it, and the bundle that a node keeps there for the world."""


def place(wanted: WorldConfig) -> tuple[list[Reserved], list[str]]:
    """Reserve a bundle on each node; returns them and the nodes' names, in the order of these."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    alive = {each["NodeID"]: each for each in ray.nodes() if each["Alive"]}
    nodes = [RayNode(each["NodeManagerHostname"], each["Resources"]) for each in alive.values()]
    bundles = bundles_of(wanted, nodes)
    group = placement_group(
        [dict(bundle) for bundle in bundles], "STRICT_SPREAD", name=f"nbdist:{wanted.name}"
    )
    if not group.wait(PLACE_TIMEOUT):
        raise NoRoom(word_busy(bundles, ray.available_resources(), ray.cluster_resources()))
    at = placement_group_table(group)["bundles_to_node_id"]
    chosen = [(alive[at[number]], number) for number in range(len(bundles))]
    chosen.sort(key=lambda each: in_order(each[0]["NodeManagerHostname"]))
    names = [str(node["NodeManagerHostname"]) for node, _ in chosen]
    addresses = [str(node["NodeManagerAddress"]) for node, _ in chosen]
    return [(group, number, bundles[number]) for _, number in chosen], distinct(names, addresses)


def word_busy(bundles: Sequence[Bundle], free: Bundle, there: Bundle) -> str:
    """Word that others use what is wanted, and how much of each is free."""
    asked = f"{count(len(bundles), 'node')} with {word_bundle(bundles[0])}"
    return (
        f"{asked} each: the cluster has that, but it was not free within {PLACE_TIMEOUT:.0f} s; "
        f"of {word_bundle(there)} there is {word_bundle(free)} free"
    )


def start(wanted: WorldConfig, ticket: bytes, places: Sequence[Reserved]) -> list[tuple[Any, Any]]:
    """Make the actors, which run agents; return each with what its run will return."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    guess = sys.executable if wanted.python in (None, sys.executable) else ""
    started = []
    for number, (group, index, bundle) in enumerate(places):
        actor = (
            ray.remote(Agent)
            .options(
                name=actor_name(wanted, number),
                max_concurrency=2,
                num_cpus=bundle[CPU],
                num_gpus=bundle.get(GPU, 0),
                memory=bundle.get(MEMORY),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )
            .remote()
        )
        command = [*wanted.wrapper, *agent_command(wanted.python, number)]
        started.append((actor, actor.run.remote(command, guess, ticket)))
    return started


def serve(agents: Sequence[tuple[Any, Any]], told: IO[bytes]) -> None:
    """Say how agents end, from a thread of Ray's, and end those that the head names."""
    for number, (_, result) in enumerate(agents):
        result.future().add_done_callback(lambda of, at=number: send(told, ended(at, of)))
    while (number := read_message(sys.stdin.buffer)) is not None:
        agents[number][0].end.remote()


def ended(number: int, result: Future[tuple[int, list[str]]]) -> Ended:
    """Return how an agent ended; where its actor is gone, as Ray tells it."""
    error = result.exception()
    if error is None:
        return number, *result.result()
    return number, -signal.SIGKILL, str(error).splitlines()


if __name__ == "__main__":
    drive()
