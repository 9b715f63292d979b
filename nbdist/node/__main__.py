"""The agent's process: `python -m nbdist.node RUNTIME_FOLDER NOTEBOOK_PID [--no-fork]`.

Started by a launcher with a pipe as stdin, which ends when the notebook does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nbdist.node.fork_messages import start_fork_server
from nbdist.node.guard import go_below_guard
from nbdist.node.limits import raise_file_limit, word_lack


def main() -> None:
    """Start the fork server before anything else: its import of torch takes longest."""
    runtime, notebook_pid = Path(sys.argv[1]), int(sys.argv[2])
    has_fork_server = "--no-fork" not in sys.argv
    raise_file_limit()
    try:
        go_below_guard(runtime, notebook_pid)
        started = start_fork_server(runtime) if has_fork_server else None
    except OSError as error:
        sys.exit(f"nbdist: {word_lack(error.errno)}")
    from nbdist.node.agent import run_agent
    from nbdist.node.forker import Forker
    from nbdist.node.processes import Children

    children = Children()
    forker = Forker(runtime, children, started) if has_fork_server else None
    run_agent(runtime, notebook_pid, children, forker)


main()
