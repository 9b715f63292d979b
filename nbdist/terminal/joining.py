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
from typing import NoReturn

import psutil

from nbdist.errors import UsageError
from nbdist.terminal.starters import part_of, without_starters
from nbdist.terminal.turn import turn_of
from nbdist.wire.interpreter import agent_command, safe_environ
from nbdist.wire.offers import Place, find_offer, offers_folder, place_from, read_key_file
from nbdist.wire.ticket import BadTicket, Ticket, ticket_from

REACH_TIMEOUT = 5.0
"""Seconds for the place to answer, where there is no key for it."""

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
    ticket = _reached_by(place, _ticket(place, key_file))
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
        _check_open(place)
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


def _check_open(place: Place) -> None:
    """Raise UsageError where nobody listens, of which a missing key is a sign."""
    try:
        socket.create_connection((place.host, place.port), REACH_TIMEOUT).close()
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise UsageError(
            f"`nbdist join {place}`: no world waits there ({why}): it has ended, or the address "
            f"is wrong. The notebook shows the address while it waits for machines."
        ) from None


def _reached_by(place: Place, ticket: Ticket) -> Ticket:
    """Have the address that was typed tried besides the ticket's, where it is another one."""
    if place.host in ticket.addresses:
        return ticket
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"`nbdist join {place}`: {error.strerror or error}.") from None
    typed = [str(each[4][0]) for each in found]
    return replace(ticket, addresses=tuple(dict.fromkeys([*typed, *ticket.addresses])))
