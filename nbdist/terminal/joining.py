"""`nbdist join HOST:PORT`: the agent of this machine, for a world whose notebook waits there.

It runs until the world ends, and leaves it when it is ended itself.
"""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import zmq
from zmq.utils.monitor import parse_monitor_message

from nbdist.errors import UsageError
from nbdist.terminal.starters import part_of, without_starters
from nbdist.terminal.turn import turn_of
from nbdist.wire.interpreter import agent_command, safe_environ
from nbdist.wire.offers import (
    Place,
    find_offer,
    offers_folder,
    place_from,
    place_of,
    read_key_file,
)
from nbdist.wire.ticket import BadTicket, Ticket, come_with, endpoint, ticket_from

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
        if found := find_offer(place):
            return found
        if sys.stdin.isatty():
            return ticket_from(getpass.getpass(f"Key of the world at {place}: ").encode())
    except BadTicket as error:
        raise UsageError(f"`nbdist join {place}`: {error}.") from None
    except OSError as error:
        raise UsageError(f"`--key-file {key_file}`: {error.strerror or error}.") from None
    raise UsageError(
        f"`nbdist join {place}`: {offers_folder()} has no key for it. Where the home folder is "
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
