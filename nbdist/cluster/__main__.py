"""The head's process: `python -m nbdist.cluster RUNTIME_FOLDER NOTEBOOK_PID`.

The notebook starts the head with a pipe as stdin, which is closed when the notebook ends. If the
world is detached the head goes on then, and the next notebook attaches to the head.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nbdist.agent.fork_server import start_guarded

COMMANDS_GRACE = 3.0
"""Seconds for `srun` and similar commands to end, with their agents, after a head was killed.

After that they get SIGTERM, and have as long again. The guard gives the head as much more time to
exit after its notebook.
"""


def main() -> None:
    """Run a head until its world ends."""
    runtime, notebook_pid = Path(sys.argv[1]), int(sys.argv[2])
    guard, _ = start_guarded(runtime, notebook_pid, fork_server=False, grace=COMMANDS_GRACE)
    from nbdist.agent.notebook_link import run
    from nbdist.cluster.head import Head

    run(runtime, lambda: Head(runtime, notebook_pid, guard).serve())


main()
