"""The agent's process: `python -m nbdist.node RUNTIME_FOLDER NOTEBOOK_PID [--no-nursery]`.

Started by a launcher with a pipe as stdin, which ends when the notebook does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nbdist.node.birth import start_nursery


def main() -> None:
    """Start the nursery before anything else: its import of torch takes longest."""
    runtime, notebook_pid = Path(sys.argv[1]), int(sys.argv[2])
    started = None if "--no-nursery" in sys.argv else start_nursery(runtime)
    from nbdist.node.agent import run_agent
    from nbdist.node.processes import Nursery

    run_agent(runtime, notebook_pid, Nursery(started) if started else None)


main()
