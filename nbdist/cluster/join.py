"""`nbdist join HOST:PORT`: the agent of this machine, for a world whose notebook waits there.

It runs until the world ends, and leaves it when it is ended itself.  torchrun, mpirun and srun
start a command several times on a node, and tell each its number: one of these processes works,
the others wait and end as it did.  They meet in a file of this machine, which the one that works
holds locked while it does.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
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
from nbdist.system import folders
from nbdist.system.processes import agent_command, safe_environ
from nbdist.wire.spec import NBDIST_DECIDES

REACH_TIMEOUT = 5.0
"""Seconds for the place to answer, and then to take the key."""

ENDED = 128 + signal.SIGTERM
"""The exit code of what was ended, as a shell has it."""

LEAVE_TIMEOUT = 15.0
"""Seconds for the agent to have ended its workers; it takes 10 at most."""


def join(text: str, key_file: str | None = None, node: int | None = None) -> int:
    """Be the agent of this machine, or wait for the process that is; return an exit code.

    `text` is the place that the notebook shows.  Raises UsageError.
    """
    try:
        place = place_from(text)
    except ValueError as why:
        raise UsageError(f"`nbdist join {text}`: {why}.") from None
    signal.signal(signal.SIGTERM, _end)
    try:
        return _take_part(place, key_file, node)
    except KeyboardInterrupt:
        return ENDED


def _take_part(place: Place, key_file: str | None, node: int | None) -> int:
    part = part_of(os.environ, str(place))
    number = part.node if node is None else node
    if not part.key:
        return _come(place, key_file, number)
    with turn_of(part.key) as turn:
        if not part.leads:
            return turn.outcome(since=psutil.Process(os.getppid()).create_time())
        code = 1
        turn.begin()
        try:
            code = _come(place, key_file, number)
        finally:
            turn.ended(code)
        return code


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


@dataclass(frozen=True, slots=True)
class Starter:
    """What numbers processes: the variables of a number on its node, of the node, and of the job.

    The first of the variables that is there counts; those of the job tell it from others.
    """

    local_rank: tuple[str, ...]
    node: tuple[str, ...]
    job: tuple[str, ...]


# The one that stands nearest to the process comes first: mpirun and torchrun run in Slurm's jobs.
STARTERS = (
    Starter(
        ("LOCAL_RANK",),
        ("GROUP_RANK",),
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    ),
    Starter(("OMPI_COMM_WORLD_LOCAL_RANK",), (), ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    Starter(("MPI_LOCALRANKID", "PALS_LOCAL_RANKID"), (), ("PMI_JOBID", "HYDI_CONTROL_FD")),
    Starter(("SLURM_LOCALID",), ("SLURM_NODEID",), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)

COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
"""The number of a pod in an Indexed Job of Kubernetes."""

OF_STARTERS = (
    *("TORCHELASTIC_", "OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "PALS_", "HYDI_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID"),
)
"""What begins so is for the process that was started, and would mislead libraries in workers."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one process: whether it `leads` its node, and which `node` that is, or -1.

    `key` is the same for all processes of the job on this node, and for no other's.
    """

    leads: bool
    node: int
    key: str


def part_of(environ: Mapping[str, str], place: str) -> Part:
    """Find out which part the process with this environment has in joining that place."""
    index = _number(environ, (COMPLETION_INDEX,))
    for starter in STARTERS:
        local_rank = _number(environ, starter.local_rank)
        if local_rank < 0:
            continue
        node = _number(environ, starter.node)
        job = [environ.get(name, "") for name in starter.job]
        return Part(local_rank == 0, node if node >= 0 else index, _key(place, node, job))
    return Part(leads=True, node=index, key="")


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


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    for name in names:
        text = environ.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return -1


def _key(place: str, node: int, job: list[str]) -> str:
    text = "\0".join([place, str(node), *job])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


LEADER_TIMEOUT = 60.0
"""Seconds for the process that works to begin: each imports Python's modules over a network."""

STEP = 0.1

RUNNING = "running"


class Turn:
    """The file in which processes of the same `key` meet; `ended` is said by the one that works."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def begin(self) -> None:
        """Be the one that works."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._write(RUNNING)

    def ended(self, code: int) -> None:
        """Have the others end with this exit code."""
        self._write(str(code))
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def outcome(self, since: float) -> int:
        """Wait until the one that works has ended; return its exit code, 1 where it was killed.

        What has been written before that time, in seconds since 1970, was an earlier one's.
        Raises UsageError where none begins.
        """
        deadline = time.monotonic() + LEADER_TIMEOUT
        while not self._has_begun(since):
            if time.monotonic() > deadline:
                raise UsageError(
                    f"no process with local rank 0 connected within {LEADER_TIMEOUT:.0f} s: "
                    "run the command at least once on each node, alone or with LOCAL_RANK 0."
                )
            time.sleep(STEP)
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        code = self._read()
        return int(code) if code.isdigit() else 1

    def _has_begun(self, since: float) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return bool(self._read()) and os.fstat(self._fd).st_mtime >= since

    def _write(self, text: str) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def _read(self) -> str:
        return os.pread(self._fd, 16, 0).decode()


@contextmanager
def turn_of(key: str) -> Iterator[Turn]:
    """Open the file of this key; what no process uses any more is removed at the end.

    That is the file itself where this was the last, and those of processes that were killed.
    """
    folder = Path(tempfile.gettempdir()) / f"nbdist-join-{os.geteuid()}"
    try:
        folders.make_private(folder)
        folders.check_private(folder)
        fd = _open_used(folder / key)
    except OSError as error:
        raise UsageError(f"{folder} cannot be used: {error.strerror or error}.") from None
    try:
        yield Turn(fd)
    finally:
        os.close(fd)
        for file in folder.glob("*"):
            _remove_unused(file)
        with suppress(OSError):  # others meet there
            folder.rmdir()


def _open_used(file: Path) -> int:
    """Open it, and hold it: by a lock of the other kind than the one of the process that works."""
    while True:
        fd = folders.open_private(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        fcntl.lockf(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # another process has removed it in between


def _remove_unused(file: Path) -> None:
    with suppress(OSError), file.open("r+b") as opened:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()
