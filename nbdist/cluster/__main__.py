"""The head's process: `python -m nbdist.cluster RUNTIME_FOLDER NOTEBOOK_PID`.

Started by the notebook with a pipe as stdin, which ends when the notebook does.  A head whose
world is to be detached goes on then, and is what the next notebook attaches to.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nbdist.agent.fork_server import begin

COMMANDS_GRACE = 3.0
"""Seconds for `srun` and the like to end when a head was killed: agents leave, and so do they;
and after a SIGTERM.  A head that leaves waits as long for an allocation to be gone."""


def main() -> None:
    """Run a head until its world ends."""
    runtime, notebook_pid = Path(sys.argv[1]), int(sys.argv[2])
    guard, _ = begin(runtime, notebook_pid, fork_server=False, grace=COMMANDS_GRACE)
    from nbdist.agent.notebook_link import run
    from nbdist.cluster.head import Head

    run(runtime, lambda: Head(runtime, notebook_pid, guard).serve())


main()
