"""The agent's process: `python -m nbdist.agent RUNTIME_FOLDER NOTEBOOK_PID [--no-fork]`.

The notebook starts this process with a pipe as stdin, which closes when the notebook ends.  For a
world on several machines a launcher starts `python -m nbdist.agent --ticket [--node NUMBER]` on
each machine.  The first line of stdin is then the ticket, which says where the world's head is; if
stdin is a pipe, the agent exits when the pipe closes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nbdist.agent.fork_server import start_guarded


def main() -> None:
    """Run the agent until its notebook or head no longer needs the agent.

    The fork server is started before most imports, because its import of torch takes longest.
    """
    if "--ticket" in sys.argv:
        number = int(sys.argv[sys.argv.index("--node") + 1]) if "--node" in sys.argv else -1
        if problem := serve_head(number):
            sys.exit(f"nbdist: {problem}")
        return
    runtime, notebook = Path(sys.argv[1]), int(sys.argv[2])
    guard, fork_server = start_guarded(runtime, notebook, fork_server="--no-fork" not in sys.argv)
    from nbdist.agent.agent import Agent
    from nbdist.agent.notebook_link import run

    run(runtime, lambda: Agent(runtime, notebook, fork_server, guard).serve())


def serve_head(number: int) -> str:
    """Run the agent of a world on several machines, whose head is at the addresses in the ticket.

    The ticket comes on stdin.  `number` is this node's number; with -1 the head chooses one.
    Returns "", or a problem, such as that the head cannot be reached.  Exits with a message if no
    process can be started.
    """
    from nbdist.cluster.client import NoWay, find_route, read_ticket
    from nbdist.cluster.ticket import BadTicket
    from nbdist.errors import NoRuntimeFolder
    from nbdist.system.folders import RuntimeFolder

    try:
        ticket = read_ticket()
        runtime = RuntimeFolder().path
        guard, fork_server = start_guarded(runtime, None, fork_server=ticket.fork)
        route = find_route(ticket, number)
    except (BadTicket, NoRuntimeFolder, NoWay, OSError) as error:
        return str(error)
    from nbdist.agent.agent import Agent
    from nbdist.agent.notebook_link import run

    return run(runtime, lambda: Agent(runtime, 0, fork_server, guard, route).serve())


main()
