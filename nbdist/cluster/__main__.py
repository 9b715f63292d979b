"""The head's process: `python -m nbdist.cluster RUNTIME_FOLDER NOTEBOOK_PID`.

The notebook starts the head with a pipe as stdin, which closes when the notebook exits. If the
world has the option `detach`, the head then keeps running, and another notebook can attach.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nbdist.agent.fork_server import start_guarded

COMMANDS_GRACE = 3.0
"""Seconds for `srun` and similar commands to exit, with their agents, after the head has exited.

The head's guard then sends SIGTERM to commands that still run. After another `COMMANDS_GRACE`
seconds the guard kills them.
"""


def main() -> None:
    """Run the head in a forked child, until it is shut down; this process becomes its guard."""
    runtime, notebook_pid = Path(sys.argv[1]), int(sys.argv[2])
    guard, _ = start_guarded(runtime, notebook_pid, fork_server=False, grace=COMMANDS_GRACE)
    from nbdist.agent.notebook_link import run
    from nbdist.cluster.head import Head

    run(runtime, lambda: Head(runtime, notebook_pid, guard).serve())


main()
