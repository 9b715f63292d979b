"""What Ray calls the driver of a world's actors: `python -m nbdist.cluster.ray_driver`.

The head starts it (`nbdist.cluster.ray`), as Ray's library has threads and handlers of signals, and
ends its process with the cluster.  stdin brings an `Order`, then each `End`.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from nbdist.cluster.launcher import agent_command
from nbdist.cluster.ray import (
    CPU,
    GPU,
    MEMORY,
    TOKEN,
    TOKEN_WANTED,
    Bundle,
    End,
    Ended,
    NoRoom,
    RayNode,
    actor_name,
    bundles_of,
    distinct,
    in_order,
    read_message,
    word_bundle,
)
from nbdist.config import WorldConfig
from nbdist.words import count

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
        before = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT
        apart = [sys.executable, "-I", "-S", "-c", APART]
        try:
            self._child = subprocess.Popen(
                [*apart, *(own.get(word, word) for word in command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environ(),
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

    @staticmethod
    def _environ() -> dict[str, str]:
        """Return the node's environment, without what Ray has set for the code of its actors."""
        mine = {"SPT_NOENV", "PYTHONBREAKPOINT", "OMP_NUM_THREADS"}
        return {
            name: value
            for name, value in os.environ.items()
            if name not in mine and (name == "RAY_ADDRESS" or not name.startswith("RAY_"))
        }


def main() -> None:
    """Place what is wanted, and stay until all agents have ended, or stdin has."""
    # What Ray prints is not for the head to read.
    told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    wanted, ticket = read_message(sys.stdin.buffer)

    os.environ.setdefault(*REACH_TRIES)
    from ray.exceptions import RayError

    try:
        connect()
        bundles, names = place(wanted)
    except (NoRoom, OSError, RuntimeError, ValueError, RayError) as error:
        # Of a token Ray speaks in the cause alone.
        wants_token = TOKEN.search(f"{error} {error.__cause__}")
        say(told, TOKEN_WANTED if wants_token else " ".join(str(error).split()))
        return
    agents = start(wanted, ticket, bundles)
    say(told, names)
    serve(agents, told)


def say(stream: IO[bytes], message: list[str] | str | Ended) -> None:
    """Send a message to the head; one that it is too late for goes nowhere."""
    with suppress(BrokenPipeError):
        pickle.dump(message, stream)
        stream.flush()


# --- placing --------------------------------------------------------------------------------


def connect() -> None:
    """Connect to the cluster of RAY_ADDRESS, or of this machine; raises OSError, RuntimeError."""
    import ray

    asked = os.environ.get("RAY_ADDRESS") or "auto"
    address = current() if asked == "auto" else asked
    if not address:
        raise OSError(f"this machine is no node of a Ray cluster; {REMEDY}")
    probe(address)
    # By "auto", and not by an address, Ray finds out that the cluster of this machine has a token.
    ray.init(address=asked, log_to_driver=False, logging_level="WARNING")


def current() -> str:
    """Return the address that `ray start` has noted on this machine, "" for none."""
    try:
        return Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", CURRENT).read_text().strip()
    except OSError:
        return ""


def probe(address: str) -> None:
    """Raise OSError unless something listens there: Ray would look for it for a minute."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT).close()
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"no Ray cluster answers at {address}: {why}; {REMEDY}") from None


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
    chosen = [alive[at[number]] for number in range(len(bundles))]
    order = in_order([str(each["NodeManagerHostname"]) for each in chosen])
    names = [str(chosen[at]["NodeManagerHostname"]) for at in order]
    addresses = [str(chosen[at]["NodeManagerAddress"]) for at in order]
    return [(group, at, bundles[at]) for at in order], distinct(names, addresses)


def word_busy(bundles: Sequence[Bundle], free: Bundle, there: Bundle) -> str:
    """Word that others use what is wanted, and how much of each is free."""
    asked = f"{count(len(bundles), 'node')} with {word_bundle(bundles[0])}"
    return (
        f"{asked} each: the cluster has that, but it was not free within {PLACE_TIMEOUT:.0f} s; "
        f"of {word_bundle(there)} there is {word_bundle(free)} free"
    )


# --- running --------------------------------------------------------------------------------


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
    """Say how agents end, and end those that the head names, until there are none."""
    import ray

    events: queue.SimpleQueue[Ended | End | None] = queue.SimpleQueue()
    for number, (_, result) in enumerate(agents):
        result.future().add_done_callback(lambda of, at=number: events.put(ended(at, of)))
    threading.Thread(target=listen, args=(events.put,), daemon=True).start()
    running = {*range(len(agents))}
    while running and (event := events.get()) is not None:
        if isinstance(event, Ended):
            running.discard(event.number)
            say(told, event)
        else:
            number, by_force = event
            actor, _ = agents[number]
            ray.kill(actor) if by_force else actor.end.remote()


def listen(put: Callable[[End | None], None]) -> None:
    """Pass on what the head says; None at its end."""
    while (message := read_message(sys.stdin.buffer)) is not None:
        put(message)
    put(None)


def ended(number: int, result: Future[tuple[int, list[str]]]) -> Ended:
    """Return how an agent ended; where its actor is gone, as Ray tells it."""
    error = result.exception()
    if error is None:
        return Ended(number, *result.result())
    return Ended(number, -signal.SIGKILL, str(error).splitlines())


if __name__ == "__main__":
    main()
