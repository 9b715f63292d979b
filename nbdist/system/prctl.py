"""What a process asks of the kernel about parents, children and their time (prctl(2), proc(5)).

Runs in agents, guards, fork servers and workers.  It is also a script, with no package around
it: `python -IS prctl.py COMMAND ...` becomes the command that wraps a worker (`--wrap`), which
then dies with its agent.  A worker asks for this itself, but not for a wrapper between it and
the agent; the setting survives exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def signal_on_parents_end(number: signal.Signals, parent: int) -> bool:
    """Have the kernel send this process the signal when its parent ends; False if it has.

    Polls for a lost parent in Python need the GIL; this does not.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def adopt_orphans(*, adopts: bool = True) -> None:
    """Have processes whose parents end become children of this one, so that it can end them."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(adopts))


def children_of(pid: int) -> list[int]:
    """List the processes whose parent it is."""
    processes = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [process for process in processes if _parent_of(process) == pid]


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b") ")[2].split()[1])
    except OSError:
        return 0  # it has ended


def cpu_seconds(pid: int) -> float:
    """Read what all threads of a process have run so far (proc(5), stat); 0 of one that ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


def main() -> None:
    """Become the command."""
    signal_on_parents_end(signal.SIGKILL, os.getppid())
    # Stop is not meant for the wrapper, which is in the worker's process group; this survives
    # exec too, and a kernel has a handler of its own while it runs a cell.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
