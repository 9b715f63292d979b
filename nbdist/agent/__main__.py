"""The agent's process: `python -m nbdist.agent RUNTIME_FOLDER NOTEBOOK_PID [--no-fork]`.

Started by the notebook with a pipe as stdin, which ends when the notebook does.  On another
machine `python -m nbdist.agent --ticket [--node NUMBER]`, by a launcher: the first line of its
stdin says where the world's head is, and its end ends the agent.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nbdist.agent.first_steps import begin


def main() -> None:
    """Start the fork server before anything else: its import of torch takes longest."""
    if "--ticket" in sys.argv:
        from nbdist.agent.coming import come

        return come(sys.argv)
    runtime, notebook_pid = Path(sys.argv[1]), int(sys.argv[2])
    return serve(runtime, notebook_pid, has_fork_server="--no-fork" not in sys.argv)


def serve(runtime: Path, notebook_pid: int, *, has_fork_server: bool) -> None:
    """Serve the notebook that has this number."""
    guard, fork_server = begin(runtime, notebook_pid, fork_server=has_fork_server)
    from nbdist.agent.agent import run_agent

    run_agent(runtime, notebook_pid, fork_server, guard=guard)


main()
