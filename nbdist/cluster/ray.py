"""The launcher of `--launcher ray`: an agent on each node that a Ray cluster reserves.

Ray's library has threads and signal handlers, and ends its process if the cluster ends. So the head
does not import Ray. It starts another process, the *driver* (`python -m nbdist.cluster.ray`), and
exchanges pickled messages with it. The driver starts an actor of Ray on each node, and each actor
starts an agent.
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
from nbdist.cluster.launcher import LAUNCHER_KILL_TIMEOUT, Launched, LauncherProcess, agent_command
from nbdist.cluster.ticket import Ticket
from nbdist.config import WorldConfig
from nbdist.system.processes import MODULE_OPTIONS, Child
from nbdist.words import count

PLACED_TIMEOUT = 60.0  # seconds for the driver to import Ray and start all actors

RAY_LEAVE_TIMEOUT = 5.0  # seconds for the driver to disconnect from Ray and exit

RAY_ARRIVE_TIMEOUT = 180.0
"""Seconds for the agents to connect, once the driver has started the actors.

On each node Ray first starts a Python process for the actor, which imports Ray. On two cores with
four other busy processes, agents took more than 60 s to connect.
"""

TOKEN = re.compile("authentication token", re.IGNORECASE)
TOKEN_WANTED = (
    "the Ray cluster takes only whom it knows by its token: set RAY_AUTH_MODE=token before the "
    "notebook begins, and have the token in ~/.ray/auth_token or in RAY_AUTH_TOKEN"
)
"""The message that users are shown if the cluster wants a token.

Ray's own message is longer than a line, or only in Ray's log.
"""

Ended = tuple[int, int, list[str]]
"""The number of an agent that has ended, its exit code, and the last lines that it has written."""


class RayLauncher:
    """Starts agents by Ray, for `--launcher ray`."""

    def launch(self, config: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Make Ray reserve nodes and start an agent on each; raises OSError if that fails."""
        if importlib.util.find_spec("ray") is None:
            raise OSError(f"Ray is not installed here: {sys.executable} -m pip install nbdist[ray]")
        driver = Driver(folder / "ray.log")
        agents = driver.place(config, ticket)
        hosts = [agent.host for agent in agents]
        return Launched(agents, len(agents), hosts, "", RAY_ARRIVE_TIMEOUT, close=driver.leave)


class Driver(Child):
    """The head's object for the driver process; a thread reads the driver's messages.

    First the head sends the options and the ticket. The driver answers with a list of the hosts on
    which actors run agents, or with a text that says why it could not start actors. After that, the
    head sends the number of each agent that must exit, and the driver sends an `Ended` for each
    agent that has ended.
    """

    def __init__(self, log: Path) -> None:
        command = [sys.executable, *MODULE_OPTIONS, "nbdist.cluster.ray"]
        super().__init__("", command, log, stdout=subprocess.PIPE)
        self._agents: Sequence[RayAgent] = ()
        self._listener = threading.Thread(target=self._listen, name="ray", daemon=True)

    def place(self, config: WorldConfig, ticket: Ticket) -> Sequence[RayAgent]:
        """Make the driver start an actor with an agent on each node; return the agents.

        Raises OSError if that fails.
        """
        timer = threading.Timer(PLACED_TIMEOUT, self._process.kill)
        timer.start()
        try:
            send(self._process.stdin, (config, ticket.to_line()))
            reply = read_message(self._process.stdout)
        finally:
            timer.cancel()
        if isinstance(reply, list):
            self._agents = [RayAgent(self, at, host, config) for at, host in enumerate(reply)]
            self._listener.start()
            return self._agents
        self._end(LAUNCHER_KILL_TIMEOUT)
        lines = self.last_lines()
        self.close()
        if any(map(TOKEN.search, [reply or "", *lines])):
            reply = TOKEN_WANTED
        last_line = " ".join(lines[-1:])
        slow = f"Ray did not place the agents within {PLACED_TIMEOUT:.0f} s: {last_line}"
        raise OSError(reply or slow)

    def end_agent(self, number: int) -> None:
        """Make the driver close the stdin of an agent, so that the agent exits."""
        send(self._process.stdin, number)

    def leave(self) -> None:
        """End the driver's process; its actors and their agents end with it."""
        self._end(RAY_LEAVE_TIMEOUT)
        self._listener.join(LAUNCHER_KILL_TIMEOUT)
        self.close()

    def close(self) -> None:
        """Close this process's descriptors; called after the driver has exited."""
        super().close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _end(self, timeout: float) -> None:
        self._close_stdin()
        if not self._exits_within(timeout):
            self._process.kill()
            self._exits_within(LAUNCHER_KILL_TIMEOUT)

    def _listen(self) -> None:
        while (ended := read_message(self._process.stdout)) is not None:
            number, code, lines = ended
            self._agents[number].record_end(code, lines)
        code = self._process.wait()
        for agent in self._agents:
            agent.record_end(code, [])


class RayAgent(LauncherProcess):
    """The head's object for an agent that an actor of Ray runs.

    `host` is the name of the node that Ray has chosen.
    """

    def __init__(self, driver: Driver, number: int, host: str, config: WorldConfig) -> None:
        self.host = host
        self._number = number
        command = " ".join([*config.wrapper, *agent_command(config.python, number)])
        self.command = f"ray actor {actor_name(config, number)}: {command}"
        self._driver = driver
        self._exit_code: int | None = None
        self._last_lines: list[str] = []
        self._has_ended = threading.Event()
        # `record_end` closes the writing end of this pipe. The reading end then becomes readable,
        # which tells the head's event loop that the agent has ended.
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        return self._reader

    def exit_code(self) -> int | None:
        return self._exit_code

    def last_lines(self) -> list[str]:
        return self._last_lines

    def end(self, timeout: float) -> None:
        """Close the agent's stdin, and wait at most `timeout` seconds until the agent has exited.

        An agent that has not exited by then is ended by `Driver.leave`.
        """
        self._driver.end_agent(self._number)
        self._has_ended.wait(timeout)

    def close(self) -> None:
        os.close(self._reader)

    def record_end(self, code: int, lines: list[str]) -> None:
        """Record the exit code and last lines of the agent; only the first call has an effect."""
        if self._exit_code is None:
            self._exit_code, self._last_lines = code, lines
            self._has_ended.set()
            os.close(self._writer)


def actor_name(config: WorldConfig, number: int) -> str:
    """Return the name of the actor on a node, which Ray's dashboard shows."""
    return f"nbdist:{config.name}/{number}"


def read_message(stream: IO[bytes] | None) -> Any:
    """Wait for a message between head and driver; return None if no more messages can come."""
    assert stream is not None
    try:
        return pickle.load(stream)
    except (EOFError, OSError, pickle.UnpicklingError):
        return None


def send(stream: IO[bytes] | None, message: object) -> None:
    """Send a message to the driver or to the head; drop the message if that process has exited."""
    assert stream is not None
    with suppress(OSError, ValueError):
        pickle.dump(message, stream)
        stream.flush()


# --- resources of the cluster's nodes -----------------------------------------------------------

# Ray's names for resources; memory is counted in bytes.
CPU_RESOURCE, GPU_RESOURCE, MEMORY_RESOURCE = "CPU", "GPU", "memory"
MAX_LISTED_NODES = 6  # the most nodes whose resources a message lists
_UNIT_BYTES = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}  # the units of the option `--memory`
_DIGIT_RUN = re.compile(r"([0-9]+)")

Bundle = Mapping[str, float]


class RayNode(NamedTuple):
    """A node of the Ray cluster, with all its resources, including those in use."""

    name: str
    resources: Bundle


class NoRoom(ValueError):
    """Raised if the Ray cluster lacks requested resources, or does not free them in time.

    The message says which resources the cluster has.
    """


def bundles_of(config: WorldConfig, nodes: Sequence[RayNode]) -> list[Bundle]:
    """Return the resources that the options request: an item for each node that the world uses.

    `nodes` are the nodes of the cluster. Raises NoRoom if they have too few resources.
    """
    per_node, workers = config.per_node, config.workers
    has_gpus = any(node.resources.get(GPU_RESOURCE) for node in nodes) and config.backend != "gloo"
    one: dict[str, float] = {CPU_RESOURCE: config.cpus or 1}
    if has_gpus or per_node == "gpu":
        one[GPU_RESOURCE] = 1
    if config.memory:
        one[MEMORY_RESOURCE] = int(config.memory[:-1]) * _UNIT_BYTES[config.memory[-1]]
    # The number of workers for which each node has room if no other program uses the node.
    fits = (min(node.resources.get(n, 0) // much for n, much in one.items()) for node in nodes)
    rooms = sorted(map(int, fits), reverse=True)
    if isinstance(per_node, int):
        shares = [per_node for room in rooms if room >= per_node][: config.max_nodes]
        is_enough, least = len(shares) >= config.min_nodes, per_node
        needed = count(config.min_nodes, "node")
    else:
        # Without GPUs, put only a few workers on each node, unless the user has typed `-n cpu`.
        if GPU_RESOURCE not in one and per_node != "cpu":
            rooms = [min(room, topology.AUTO_LIMIT) for room in rooms]
        shares, least = [room for room in rooms if room], 1
        if workers is not None:
            pairs = zip(shares, accumulate(shares, initial=0), strict=False)
            shares = [min(room, workers - before) for room, before in pairs if before < workers]
        is_enough = sum(shares) >= (workers or 1)
        needed = count(workers or 1, "worker")
    if not is_enough:
        raise NoRoom(f"{needed} with {word_bundle(_times(one, least))} each: {_word_nodes(nodes)}")
    return [_times(one, share) for share in shares]


def word_bundle(bundle: Bundle) -> str:
    """Return resources in words: `2 CPU, 1 GPU, 3.0 GiB of memory`."""
    words = [f"{bundle[name]:g} {name}" for name in (CPU_RESOURCE, GPU_RESOURCE) if name in bundle]
    memory = bundle.get(MEMORY_RESOURCE)
    words += [f"{memory / (1 << 30):.1f} GiB of memory"] if memory else []
    return ", ".join(words) or "no CPU"


def _times(one: Bundle, number: int) -> Bundle:
    return {name: much * number for name, much in one.items()}


def _word_nodes(nodes: Sequence[RayNode]) -> str:
    text = "; ".join(
        f"{node.name} has {word_bundle(node.resources)}" for node in nodes[:MAX_LISTED_NODES]
    )
    more = f"; and {len(nodes) - MAX_LISTED_NODES} more" if len(nodes) > MAX_LISTED_NODES else ""
    return f"the cluster has {count(len(nodes), 'node')}: {text}{more}"


def distinct(names: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """Return the names, made distinct: names that are equal get their addresses as suffixes.

    If they are equal even then, they get numbers as suffixes.
    """
    for suffixes in (addresses, [f"{number}" for number in range(len(names))]):
        pairs = zip(names, suffixes, strict=True)
        names = [name if names.count(name) == 1 else f"{name}-{suffix}" for name, suffix in pairs]
    return [*names]


def natural_key(name: str) -> list[int | str]:
    """Return a key to sort names as a person expects: node2 comes before node10."""
    return [int(part) if part.isdigit() else part for part in _DIGIT_RUN.split(name)]


# --- the driver: what runs in its process -----------------------------------------------------

RAY_REACH_TIMEOUT = 5.0  # seconds for the cluster's address to answer
REACH_TRIES = ("RAY_NUM_REDIS_GET_RETRIES", "3")  # Ray tries to connect this often, not 20 times

PLACE_TIMEOUT = 20.0
"""Seconds for the requested resources to become free.

After a world has ended, its resources become free little by little, some after more than 5 s.
"""

NO_RAY_REMEDY = "`ray start` makes it one, and RAY_ADDRESS names another"
CURRENT = "ray_current_cluster"
"""The file in Ray's folder in which `ray start` writes the address of this machine's cluster."""

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
# The program of a process between an actor and the guard of its agent. It runs the guard, and exits
# with the guard's exit code. If an actor ends, Ray kills the actor's own children. The guard must
# survive this, to end what a killed agent leaves behind, so the actor does not start it directly.


class AgentActor:
    """The actor that Ray starts on a node to run the node's agent.

    When the agent exits, `run` returns. When the actor ends, the agent's stdin is closed, and the
    agent exits. Ray pickles this class and all objects of this module that the class uses. So none
    of them may use other modules of nbdist: the actor's interpreter may lack nbdist, and only the
    agent's interpreter must have it.
    """

    def __init__(self) -> None:
        self._child: Any = None

    def run(self, command: Sequence[str], guess: str, ticket: bytes) -> tuple[int, list[str]]:
        """Run `command`, which is the agent, until it exits; return its exit code and last lines.

        `guess` is "" if the user has chosen an interpreter. Otherwise `command` has the head's
        interpreter, and `guess` is its path. If this node has no file with this path, the actor's
        own interpreter runs the agent.
        """
        replacements = {guess: sys.executable} if guess and not os.path.exists(guess) else {}
        # Give the agent the environment of the node, without variables that Ray has set for actors.
        ray_names = {"SPT_NOENV", "PYTHONBREAKPOINT", "OMP_NUM_THREADS"}
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in ray_names and (name == "RAY_ADDRESS" or not name.startswith("RAY_"))
        }
        # Unblock all signals for the agent, which inherits the mask: Ray blocks SIGINT in actors.
        old_mask = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        wrapper = [sys.executable, "-I", "-S", "-c", APART]
        try:
            self._child = subprocess.Popen(
                [*wrapper, *(replacements.get(word, word) for word in command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        last_lines: deque[str] = deque(maxlen=20)
        with self._child:
            with suppress(BrokenPipeError):
                self._child.stdin.write(ticket)
                self._child.stdin.flush()
            for line in self._child.stdout:
                last_lines.append(line.decode(errors="replace").rstrip("\n"))
                sys.stderr.write(f"{last_lines[-1]}\n")
        return self._child.returncode, [*last_lines]

    def end(self) -> None:
        """Close the agent's stdin, so that the agent exits."""
        if self._child is not None:
            with suppress(BrokenPipeError):
                self._child.stdin.close()


def drive() -> None:
    """Run the driver: start the actors that the head requests, and serve the head.

    Returns when stdin is closed, or when the actors cannot be started.
    """
    # Send what Ray prints to the log file, which is stderr. The old stdout leads to the head, and
    # only messages may be written there.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    config, ticket = read_message(sys.stdin.buffer)
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if problem := word_no_cluster(address):
        send(output, problem)
        return
    os.environ.setdefault(*REACH_TRIES)
    import ray
    from ray.exceptions import RayError

    try:
        # For this machine's cluster pass "auto" and not the address that `current_cluster` returns:
        # only then Ray finds the cluster's token.
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
        bundles, names = reserve_nodes(config)
    except (NoRoom, OSError, RuntimeError, ValueError, RayError) as error:
        # Add the error's cause, in which Ray says that a token is missing.
        send(output, " ".join(f"{error} {error.__cause__ or ''}".split()))
        return
    agents = start(config, ticket, bundles)
    send(output, names)
    serve(agents, output)


def word_no_cluster(requested: str) -> str:
    """Return why no Ray cluster can be reached at the requested address, or "" if one may be there.

    `requested` is the value of RAY_ADDRESS; "auto" means this machine's cluster. This check is
    quicker than Ray's own.
    """
    address = current_cluster() if requested == "auto" else requested
    if not address:
        return f"this machine is no node of a Ray cluster; {NO_RAY_REMEDY}"
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        if port.isdigit():  # if nothing listens there, Ray itself would try longer
            socket.create_connection((host.strip("[]"), int(port)), RAY_REACH_TIMEOUT).close()
    except OSError as error:
        return f"no Ray cluster answers at {address}: {error.strerror or error}; {NO_RAY_REMEDY}"
    return ""


def current_cluster() -> str:
    """Return the address of this machine's Ray cluster, or "" if this machine is in none.

    The address is in a file that `ray start` writes.
    """
    try:
        return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", CURRENT).read_text().strip()
    except OSError:
        return ""


Reserved = tuple[Any, int, Bundle]
"""A reservation on one node: Ray's placement group, an index in it, and the reserved resources."""


def reserve_nodes(config: WorldConfig) -> tuple[list[Reserved], list[str]]:
    """Reserve the requested resources on nodes of Ray; return the reservations and nodes' names.

    Both lists are sorted by the names of the nodes. Raises NoRoom if the cluster lacks resources,
    or if they do not become free within `PLACE_TIMEOUT` seconds.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    alive = {each["NodeID"]: each for each in ray.nodes() if each["Alive"]}
    nodes = [RayNode(each["NodeManagerHostname"], each["Resources"]) for each in alive.values()]
    bundles = bundles_of(config, nodes)
    group = placement_group(
        [dict(bundle) for bundle in bundles], "STRICT_SPREAD", name=f"nbdist:{config.name}"
    )
    if not group.wait(PLACE_TIMEOUT):
        raise NoRoom(word_busy(bundles, ray.available_resources(), ray.cluster_resources()))
    node_ids = placement_group_table(group)["bundles_to_node_id"]
    chosen = [(alive[node_ids[number]], number) for number in range(len(bundles))]
    chosen.sort(key=lambda each: natural_key(each[0]["NodeManagerHostname"]))
    names = [str(node["NodeManagerHostname"]) for node, _ in chosen]
    addresses = [str(node["NodeManagerAddress"]) for node, _ in chosen]
    return [(group, number, bundles[number]) for _, number in chosen], distinct(names, addresses)


def word_busy(bundles: Sequence[Bundle], free: Bundle, total: Bundle) -> str:
    """Return a message which says that the needed resources did not become free in time.

    `bundles` has the resources that each node of the world needs.  `free` and `total` are resources
    of the whole cluster, which the message names, too.
    """
    nodes = f"{count(len(bundles), 'node')} with {word_bundle(bundles[0])}"
    return (
        f"{nodes} each: the cluster has that, but it was not free within {PLACE_TIMEOUT:.0f} s; "
        f"of {word_bundle(total)} there is {word_bundle(free)} free"
    )


def start(config: WorldConfig, ticket: bytes, places: Sequence[Reserved]) -> list[tuple[Any, Any]]:
    """Start an actor with an agent in each reserved place.

    `ticket` is passed to the agents.  Returns each actor, and Ray's reference to its result: the
    exit code and last lines of the agent (`AgentActor.run`).
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    guess = sys.executable if config.python in (None, sys.executable) else ""
    started = []
    for number, (group, index, bundle) in enumerate(places):
        actor = (
            ray.remote(AgentActor)
            .options(
                name=actor_name(config, number),
                max_concurrency=2,
                num_cpus=bundle[CPU_RESOURCE],
                num_gpus=bundle.get(GPU_RESOURCE, 0),
                memory=bundle.get(MEMORY_RESOURCE),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )
            .remote()
        )
        command = [*config.wrapper, *agent_command(config.python, number)]
        started.append((actor, actor.run.remote(command, guess, ticket)))
    return started


def serve(agents: Sequence[tuple[Any, Any]], output: IO[bytes]) -> None:
    """Serve the head until stdin is closed: end each agent whose number the head sends.

    `agents` has each actor and the reference to its result. When an agent has ended, a thread of
    Ray writes an `Ended` message to `output`.
    """
    for number, (_, result) in enumerate(agents):
        result.future().add_done_callback(lambda end, at=number: send(output, agent_end(at, end)))
    while (number := read_message(sys.stdin.buffer)) is not None:
        agents[number][0].end.remote()


def agent_end(number: int, result: Future[tuple[int, list[str]]]) -> Ended:
    """Return the message by which the head learns that agent `number` has ended.

    The message has the agent's exit code and last lines. If the actor was lost, it has the code of
    SIGKILL and Ray's error message instead.
    """
    error = result.exception()
    if error is None:
        return number, *result.result()
    return number, -signal.SIGKILL, str(error).splitlines()


if __name__ == "__main__":
    drive()
