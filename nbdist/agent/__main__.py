"""The agent's process: `python -m nbdist.agent RUNTIME_FOLDER NOTEBOOK_PID [--no-fork]`.

Started by the notebook with a pipe as stdin, which ends when the notebook does.  On another
machine `python -m nbdist.agent --ticket [--node NUMBER]`, by a launcher: the first line of its
stdin says where the world's head is, and its end ends the agent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.agent.fork_server import begin

if TYPE_CHECKING:
    from nbdist.cluster.ticket import Ticket


def main() -> None:
    """Start the fork server before anything else: its import of torch takes longest."""
    if "--ticket" in sys.argv:
        return come(sys.argv)
    runtime, notebook_pid = Path(sys.argv[1]), int(sys.argv[2])
    return serve(runtime, notebook_pid, has_fork_server="--no-fork" not in sys.argv)


def serve(runtime: Path, notebook_pid: int, *, has_fork_server: bool) -> None:
    """Serve the notebook that has this number."""
    guard, fork_server = begin(runtime, notebook_pid, fork_server=has_fork_server)
    from nbdist.agent.agent import run_agent

    run_agent(runtime, notebook_pid, fork_server, guard=guard)


def come(argv: Sequence[str]) -> None:
    """Be the agent of this machine, of the world to which the ticket on stdin leads."""
    from nbdist.cluster.client import read_ticket
    from nbdist.cluster.ticket import BadTicket

    number = int(argv[argv.index("--node") + 1]) if "--node" in argv else -1
    try:
        ticket = read_ticket()
    except BadTicket as error:
        sys.exit(f"nbdist: {error}")
    serve_head(ticket, number)


def serve_head(ticket: Ticket, number: int) -> None:
    """Serve the head of this ticket, as the node of this number, -1 for any.

    While the fork server imports torch the way to the head is found.
    """
    from nbdist.cluster.client import Coming, NoWay, find_way
    from nbdist.errors import NoRuntimeFolder
    from nbdist.system.folders import RuntimeFolder

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


main()
