"""The first milliseconds of an agent's process, and of a head's, before anything else is imported.

What is imported here each of them has before it forks, and before the fork server is started,
whose import of torch takes longest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nbdist.agent.fork_messages import ForkServerProcess, start_fork_server
from nbdist.node.guard import Guard, go_below_guard
from nbdist.system.limits import raise_file_limit, word_lack


def begin(
    runtime: Path, notebook_pid: int | None, *, fork_server: bool, grace: float = 0.0
) -> tuple[Guard, ForkServerProcess | None]:
    """Go on below a guard, as `go_below_guard` says, beside a fork server where there is to be one.

    Ends with one line where the machine has no room for these processes.
    """
    raise_file_limit()
    try:
        guard = go_below_guard(runtime, notebook_pid, grace)
        return guard, start_fork_server(runtime) if fork_server else None
    except OSError as error:
        sys.exit(f"nbdist: {word_lack(error.errno)}")
