"""Becomes the command that wraps a worker (`--wrap`), which then dies with its agent.

Run by `nbdist.node.processes` as a script, `python -IS wrapping.py COMMAND ...`, with no
package around it.  A worker asks for this itself, but not for a wrapper between it and the
agent; and the wish survives exec.  As does that Stop is not meant for the wrapper, which is in
the worker's process group: a kernel has a handler of its own while it runs a cell.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
