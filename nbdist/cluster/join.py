"""`nbdist join HOST:PORT`: the agent of this machine, for a world whose notebook waits there.

It runs until the world ends, and leaves it when it is ended itself.  torchrun, mpirun and srun
start a command several times on a node, and tell each its number: the first of these processes
joins, the others say so and end.
"""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import zmq
from zmq.utils.monitor import parse_monitor_message

from nbdist.cluster.ticket import (
    BadTicket,
    Place,
    Ticket,
    come_with,
    endpoint,
    find_join_key,
    join_keys_folder,
    place_from,
    place_of,
    read_key_file,
    ticket_from,
)
from nbdist.errors import UsageError
from nbdist.system.processes import agent_command, safe_environ
from nbdist.wire.spec import NBDIST_DECIDES

REACH_TIMEOUT = 5.0
"""Seconds for the place to answer, and then to take the key."""

ENDED = 128 + signal.SIGTERM
"""The exit code of what was ended, as a shell has it."""

LEAVE_TIMEOUT = 15.0
"""Seconds for the agent to have ended its workers; it takes 10 at most."""


def join(text: str, key_file: str | None = None, node: int | None = None) -> int:
    """Be the agent of this machine until the world ends; return an exit code.

    `text` is the place that the notebook shows.  Raises UsageError.
    """
    try:
        place = place_from(text)
    except ValueError as why:
        raise UsageError(f"`nbdist join {text}`: {why}.") from None
    part = part_of(os.environ)
    if not part.leads:
        sys.stderr.write("nbdist: one `nbdist join` per node: local rank 0 joins, this one ends\n")
        return 0
    signal.signal(signal.SIGTERM, _end)
    try:
        return _come(place, key_file, part.node if node is None else node)
    except KeyboardInterrupt:
        return ENDED


def _come(place: Place, key_file: str | None, number: int) -> int:
    address = _reach(place)
    key = _ticket(place, key_file)
    ticket = replace(key, addresses=(address,), port=place.port)
    if not _is_taken(ticket):
        raise UsageError(
            f"`nbdist join {place}`: what listens there does not take this key, made for the world "
            f"at {place_of(key)}: that one has ended, or the address is another's."
        )
    environ = safe_environ(without_starters(os.environ), os.getcwd())
    # A session of its own: Ctrl-C ends the agent through its stdin, with its workers.
    agent = subprocess.Popen(
        agent_command("", number), stdin=subprocess.PIPE, env=environ, start_new_session=True
    )
    assert agent.stdin is not None
    try:
        with suppress(BrokenPipeError):  # its own last line says why
            agent.stdin.write(ticket.to_line())
            agent.stdin.flush()
        sys.stderr.write(f"nbdist: {socket.gethostname()} joins the world at {place}\n")
        code = agent.wait()
    finally:
        _leave(agent)
    return code if code >= 0 else 1


def _end(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _leave(agent: subprocess.Popen[bytes]) -> None:
    """End the agent, which has nothing left behind when its stdin has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(BrokenPipeError):
        assert agent.stdin is not None
        agent.stdin.close()
    try:
        agent.wait(LEAVE_TIMEOUT)
    except subprocess.TimeoutExpired:
        agent.kill()  # the process above it ends what is left
        agent.wait()


# --- the key ----------------------------------------------------------------------------------


def _ticket(place: Place, key_file: str | None) -> Ticket:
    """Find the key of the world at this place; raises UsageError where there is none."""
    try:
        if key_file == "-":
            return ticket_from(sys.stdin.buffer.readline())
        if key_file is not None:
            return read_key_file(Path(key_file))
        if found := find_join_key(place):
            return found
        if sys.stdin.isatty():
            return ticket_from(getpass.getpass(f"Key of the world at {place}: ").encode())
    except BadTicket as error:
        raise UsageError(f"`nbdist join {place}`: {error}.") from None
    except OSError as error:
        raise UsageError(f"`--key-file {key_file}`: {error.strerror or error}.") from None
    raise UsageError(
        f"`nbdist join {place}`: {join_keys_folder()} has no key for it. Where the home folder is "
        "not the notebook's, copy the file of that address from there: `--key-file FILE`, or "
        "`--key-file -` for stdin."
    )


def _reach(place: Place) -> str:
    """Return the address that answers there; UsageError for none: the world has ended, say."""
    try:
        with socket.create_connection((place.host, place.port), REACH_TIMEOUT) as reached:
            return socket.getnameinfo(reached.getpeername(), socket.NI_NUMERICHOST)[0]
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise UsageError(
            f"`nbdist join {place}`: no world waits there ({why}): it has ended, or the address "
            f"is wrong. The notebook shows the address while it waits for machines."
        ) from None


def _is_taken(ticket: Ticket) -> bool:
    """Check that the server at the ticket's address accepts its key; it may be another world's."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as link:
        link.linger = 0
        come_with(link, ticket)
        ends = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
        said: Any = link.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | ends)
        with said:
            link.connect(endpoint(ticket.addresses[0], ticket.port))
            heard = said.poll(REACH_TIMEOUT * 1000) and parse_monitor_message(said.recv_multipart())
            link.disable_monitor()
        return bool(heard) and heard["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED


# The one that stands nearest to the process comes first: mpirun and torchrun run in Slurm's jobs.
STARTERS = (
    ("LOCAL_RANK", "GROUP_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", ""),
    ("MPI_LOCALRANKID", ""),
    ("PALS_LOCAL_RANKID", ""),
    ("SLURM_LOCALID", "SLURM_NODEID"),
)
"""The variables by which each numbers processes on a node, and nodes."""

COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
"""The number of a pod in an Indexed Job of Kubernetes."""

OF_STARTERS = (
    *("TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "PALS_", "HYDI_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID"),
)
"""What begins so is for the process that was started, and would mislead libraries in workers."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one process: whether it `leads` its node, and which `node` that is, or -1."""

    leads: bool
    node: int


def part_of(environ: Mapping[str, str]) -> Part:
    """Return the part of the process with this environment."""
    index = _number(environ, COMPLETION_INDEX)
    for local_rank, node in STARTERS:
        if (number := _number(environ, local_rank)) >= 0:
            named = _number(environ, node)
            return Part(number == 0, named if named >= 0 else index)
    return Part(leads=True, node=index)


def without_starters(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out what was said to this process by what has started it, and is not the agent's.

    torchrun sets OMP_NUM_THREADS to 1 where nobody has set it.
    """
    left_out = set(NBDIST_DECIDES)
    if "TORCHELASTIC_RUN_ID" in environ and environ.get("OMP_NUM_THREADS") == "1":
        left_out.add("OMP_NUM_THREADS")
    return {
        name: value
        for name, value in environ.items()
        if name not in left_out and not name.startswith(OF_STARTERS)
    }


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
