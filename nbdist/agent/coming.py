"""How an agent on another machine comes to the head of its world: with a ticket, once.

The fork server is started first, whose import of torch takes longest; while that goes on the
way to the head is found.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nbdist.agent.first_steps import begin
from nbdist.cluster.ticket import BadTicket, Ticket
from nbdist.errors import NoRuntimeFolder
from nbdist.system.folders import RuntimeFolder


def come(argv: Sequence[str]) -> None:
    """Be the agent of this machine, of the world to which the ticket on stdin leads."""
    from nbdist.cluster.client import read_ticket

    number = int(argv[argv.index("--node") + 1]) if "--node" in argv else -1
    try:
        ticket = read_ticket()
    except BadTicket as error:
        sys.exit(f"nbdist: {error}")
    serve(ticket, number)


def serve(ticket: Ticket, number: int) -> None:
    """Serve the head of this ticket, as the node of this number, -1 for any."""
    from nbdist.cluster.client import Coming, NoWay, find_way

    try:
        runtime = RuntimeFolder().path
    except (NoRuntimeFolder, OSError) as error:
        sys.exit(f"nbdist: {error}")
    guard, fork_server = begin(runtime, None, fork_server=ticket.fork)
    try:
        way = find_way(ticket)
    except NoWay as error:
        sys.exit(f"nbdist: {error}")
    from nbdist.agent.agent import run_agent

    coming = Coming(ticket, way, number)
    if problem := run_agent(runtime, 0, fork_server, coming=coming, guard=guard):
        sys.exit(f"nbdist: {problem}")
