"""`python -m nbdist.cluster.allocation SALLOC ...`: owns an allocation of Slurm's, and ends it.

`salloc` leaves its allocation behind when it is killed, and in the queue when the head is: this
ends it with stdin, which both share.  stderr is a log, from which it learns the job's number.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from nbdist.system.processes import LEFT
from nbdist.words import one_line, word_exit

END_TIMEOUT = 3.0  # seconds for agents to leave, and for salloc to give its allocation back
CANCEL_TIMEOUT, CANCEL_STEP = 4.0, 0.1  # seconds for Slurm to have ended a job, between looks

LONGEST_LOG = 1 << 20

CARRIED = frozenset(
    ("PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ")
)
"""What goes from this environment to the nodes, whose own Slurm would replace by all of it."""

OF_SLURM = frozenset(("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_JWT"))
"""What Slurm's commands need.  What else an allocation or a step has set asks for tasks,
memory or nodes of its own: `srun` would start four agents instead of two."""

GRANTED = "Granted job allocation"
_NUMBER = re.compile(r"(?:Granted|Pending) job allocation ([0-9]+)")
_ENDS = frozenset(("", "COMPLETING"))
_FORGOTTEN = "Invalid job id"


def step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what Slurm's commands have, and hand on to the nodes."""
    return {name: value for name, value in environ.items() if name in CARRIED | OF_SLURM}


def salloc_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the same with the user's own defaults of salloc, which `--salloc` can override."""
    own = {name: value for name, value in environ.items() if name.startswith("SALLOC_")}
    own.pop("SALLOC_NO_SHELL", None)  # there would be no agents
    return step_environ(environ) | own


def main() -> None:
    """Run salloc until it ends, or stdin does; then have its job be gone, or say that it is not."""
    salloc = subprocess.Popen(sys.argv[1:], env=salloc_environ(os.environ))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who sends it has ended stdin before
    ends = select.poll()
    ends.register(os.pidfd_open(salloc.pid), select.POLLIN)
    ends.register(0, 0)  # a pipe's hang-up
    ends.poll()
    salloc.poll()
    said = os.pread(2, LONGEST_LOG, 0).decode(errors="replace")
    number = found[-1] if (found := _NUMBER.findall(said)) else ""
    if salloc.returncode is None:
        if GRANTED not in said:
            salloc.terminate()  # in the queue, where it reads no stdin
        with suppress(subprocess.TimeoutExpired):
            salloc.wait(END_TIMEOUT)
    elif salloc.returncode < 0:
        fate = f", and job {number} ends with it" if number else ""
        sys.stderr.write(f"nbdist: salloc {word_exit(salloc.returncode)}{fate}\n")
    problem = cancel(number) if number else ""
    if salloc.poll() is None:
        salloc.kill()
    code = salloc.wait()
    if problem:
        sys.exit(f"{LEFT}{problem}")
    sys.exit(code if code >= 0 else 128 - code)


def cancel(number: str) -> str:
    """End a job of Slurm's; return what keeps it from that, "" once it is gone."""
    end = time.monotonic() + CANCEL_TIMEOUT
    while (state := _ask("squeue", "--noheader", "--format=%T", f"--jobs={number}")) not in _ENDS:
        _ask("scancel", number)
        if time.monotonic() > end:
            return f"Slurm's job {number} may still run ({state}): `scancel {number}` ends it"
        time.sleep(CANCEL_STEP)
    return ""


def run(command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; raises OSError, and TimeoutExpired after so many seconds."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=step_environ(os.environ),
    )


def _ask(*command: str) -> str:
    """Return the line that one of Slurm's commands writes, or its complaint."""
    try:
        done = run(command, CANCEL_TIMEOUT / 2)
    except subprocess.TimeoutExpired:
        return "Slurm does not answer"
    except OSError as error:
        return str(error)
    if _FORGOTTEN in done.stderr:
        return ""
    return one_line(done.stderr if done.returncode else done.stdout)


if __name__ == "__main__":
    main()
