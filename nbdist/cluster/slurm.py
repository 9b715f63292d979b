"""`--launcher slurm`: one agent on each node of an allocation, by a single `srun`.

The allocation is that of SLURM_JOB_ID, or with `--salloc` one that ends with the world, by
`nbdist.cluster.allocation`.  Ranks are no tasks: Slurm could not start a single one again.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from nbdist.cluster.allocation import CANCEL_TIMEOUT, GRANTED, cancel, run, step_environ
from nbdist.cluster.launcher import AgentCommand, Launched, LaunchError, agent_command
from nbdist.cluster.ticket import Ticket
from nbdist.config import WorldConfig
from nbdist.system.processes import LEFT, MODULE, left_behind
from nbdist.words import count

ASK_TIMEOUT = 10.0  # seconds for Slurm's controller to say something of an allocation
QUEUE_TIMEOUT = 86_000.0  # seconds that an allocation may wait in Slurm's queue; Stop ends the wait

OF_ALLOCATION = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_GPUS_PER_TASK", "SLURM_DISTRIBUTION"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_THREADS_PER_CORE"),
)
"""What `salloc` sets of that kind for the command it runs."""

OF_TASK = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEPID", "SLURM_STEP_ID", "SLURM_GTIDS"),
)
"""What would tell a library in a worker, Lightning first, that its rank is the node's number."""

# An agent's number is in a variable of its own: the first node's task is the first.
NUMBERED = f'number=$SLURM_PROCID; unset {" ".join(OF_TASK)}; exec "$@" --node "$number"'
CLUSTERS = "SALLOC_CLUSTERS"

IN_ALLOCATION = (
    'srun --jobid="$SLURM_JOB_ID" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"'
)

_SPAN = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_SAID = re.compile(r"(?:salloc|srun): (?:(?:error|fatal): )?(.+)")
_REASON = re.compile(r"(?:salloc|srun): (error|fatal|unrecognized|invalid|option)")
_NOT_SLURMS = re.compile(r"task [-0-9,]+: (Exited with|Killed|Terminated)")
_OWN = re.compile(r"nbdist: (salloc .*)")
_JOB = re.compile(r"job ([0-9]+)")
_PENDING = re.compile(r"Pending job allocation ([0-9]+)")
_ENDED = re.compile(
    r"has expired|Invalid job id|Expired or invalid job|Force Terminated|been revoked|CANCELLED"
)


@dataclass(frozen=True, slots=True)
class Job:
    """An allocation, as Slurm describes it."""

    number: str
    state: str
    nodes: int
    names: str


class SlurmLauncher:
    """`--launcher slurm`."""

    def launch(self, wanted: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Start an agent on each node of the allocation, or of a new one."""
        needed = ("salloc", "srun") if wanted.salloc else ("scontrol", "srun")
        if missing := [name for name in needed if shutil.which(name) is None]:
            raise LaunchError(
                f"there is no `{missing[0]}` on this machine. Begin the notebook where Slurm's "
                "commands are, or use `--hosts` for ssh"
            )
        if wanted.salloc is not None:
            end_left()
            owner = Allocation(wanted, ticket, folder)
            nodes, news = nodes_asked(wanted)[0], lambda: word_queue(owner.last_lines())
            return Launched([owner], nodes, arrive_timeout=QUEUE_TIMEOUT, news=news)
        job = find_job(os.environ)
        nodes = nodes_of(job, wanted)
        names = _ask("scontrol", "show", "hostnames", job.names).split()
        command, environ = srun_command(job.number, nodes, wanted), step_environ(os.environ)
        process = SlurmCommand("", command, ticket, folder, environ)
        process.of = f"allocation {job.number}"
        return Launched([process], nodes, names[:nodes])


class SlurmCommand(AgentCommand):
    """A `srun`, or what runs one; `of` says of which allocation, for messages."""

    of = ""

    def complaint(self) -> str:
        return word_complaint(self.of, self.last_lines())


class Allocation(SlurmCommand):
    """What owns a `salloc`, and ends its job."""

    left: ClassVar[list[str]] = []
    """The jobs of this head that may still be there."""

    def __init__(self, wanted: WorldConfig, ticket: Ticket, folder: Path) -> None:
        command = salloc_command(wanted)
        owner = [sys.executable, *MODULE, "nbdist.cluster.allocation"]
        super().__init__("", [*owner, *command], ticket, folder)
        self.of, self.command = f"`--salloc {wanted.salloc}`", shlex.join(command)

    def end(self, timeout: float) -> None:
        """End it; the notebook reads in the head's log what Slurm has not ended."""
        super().end(timeout + CANCEL_TIMEOUT)
        if left := left_behind(self.last_lines()):
            Allocation.left += _JOB.findall(left)[:1]
            sys.stderr.write(f"{LEFT}{left}\n")


def end_left() -> None:
    """End the jobs that were left before; LaunchError where Slurm does not."""
    while Allocation.left:
        if problem := cancel(Allocation.left[-1]):
            raise LaunchError(problem)
        Allocation.left.pop()
        sys.stderr.write(f"{LEFT}\n")


# --- commands -----------------------------------------------------------------------------


def srun_command(job: str, nodes: int, wanted: WorldConfig) -> list[str]:
    """Return the command that starts an agent on each of so many nodes of an allocation."""
    number = f"{nodes}"
    return [
        *("srun", f"--jobid={job}", f"--nodes={number}", f"--ntasks={number}"),
        *_step_options(wanted),
        *_agents(wanted),
    ]


def salloc_command(wanted: WorldConfig) -> list[str]:
    """Return the command that waits for an allocation, and starts its agents."""
    least, most = nodes_asked(wanted)
    nodes = f"--nodes={least}" if least == most else f"--nodes={least}-{most}"
    unset = [word for name in OF_ALLOCATION for word in ("-u", name)]
    return [
        *("salloc", f"--job-name={wanted.name}", *_resources(wanted)),
        *(*_split(wanted.salloc or ""), nodes),
        *("env", *unset, "sh", "-c", f'exec {IN_ALLOCATION} "$@"', "sh"),
        *_step_options(wanted),
        *_agents(wanted),
    ]


def _step_options(wanted: WorldConfig) -> list[str]:
    """Return what makes a step of one task on each node, with all that the job has there."""
    memory = _memory(wanted) or "0"
    return [
        *("--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=0", "--wait=0"),
        *(f"--mem={memory}", "--mpi=none", "--cpu-bind=none", "--quiet", "--chdir=/"),
        f"--job-name={wanted.name}",
    ]


def _agents(wanted: WorldConfig) -> list[str]:
    return ["sh", "-c", NUMBERED, "sh", *wanted.wrapper, *agent_command(wanted.python)]


def _resources(wanted: WorldConfig) -> list[str]:
    """Return what `--cpus` and `--memory`, which are for each worker, mean to salloc."""
    per_node, options = wanted.per_node, []
    least, most = nodes_asked(wanted)
    if isinstance(per_node, int) and least < most:
        # With a number of tasks Slurm grants no node that these do not need.
        options.append(f"--mincpus={per_node * (wanted.cpus or 1)}")
    elif isinstance(per_node, int):
        options.append(f"--ntasks-per-node={per_node}")
    if wanted.cpus is not None:
        options.append(f"--cpus-per-task={wanted.cpus}")
    if memory := _memory(wanted):
        options.append(f"--mem={memory}")
    elif wanted.memory:
        options.append(f"--mem-per-gpu={wanted.memory}")
    return options


def _memory(wanted: WorldConfig) -> str:
    """Return the memory of all workers of a node, "" where it is not known or not said."""
    per_node = wanted.per_node
    if wanted.memory is None or not isinstance(per_node, int):
        return ""
    return f"{int(wanted.memory[:-1]) * per_node}{wanted.memory[-1]}"


def _split(text: str) -> list[str]:
    options = shlex.split(text)
    if "--no-shell" in options:
        raise LaunchError(f"`--salloc {text}`: with --no-shell it would outlive the world")
    clusters = [word for word in options if word.startswith(("-M", "--clusters"))]
    if clusters or os.environ.get(CLUSTERS):
        raise LaunchError(
            f"`{clusters[0] if clusters else CLUSTERS}`: only salloc obeys it, and scancel does "
            "not: set SLURM_CLUSTERS to the name of the cluster before the notebook starts"
        )
    return options


def nodes_asked(wanted: WorldConfig) -> tuple[int, int]:
    """Return how many nodes a new allocation has, at least and at most: by `-j`, or salloc's -N."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-N", "--nodes", default="")
    try:
        text = parser.parse_known_args(_split(wanted.salloc or ""))[0].nodes
    except argparse.ArgumentError as error:
        raise LaunchError(f"`--salloc {wanted.salloc}`: {error}") from None
    found = _SPAN.fullmatch(text) if text else None
    of_layout = (wanted.min_nodes, wanted.max_nodes or wanted.min_nodes)
    if found is None:
        return of_layout
    asked = (int(found[1]), int(found[2] or found[1]))
    if wanted.max_nodes is not None and asked != of_layout:
        raise LaunchError(
            f"`--salloc {wanted.salloc}`: -N {text} are not the nodes of `-j`; leave one out"
        )
    return asked


# --- allocations --------------------------------------------------------------------------


def find_job(environ: Mapping[str, str]) -> Job:
    """Look at the allocation that this process is in; LaunchError for none, or one that ended."""
    number = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not number:
        raise LaunchError(
            "`--launcher slurm`: the notebook is in no allocation of Slurm's. Begin it in one, or "
            'have one made for its workers: `--salloc "-p gpu --gpus-per-node=4"`'
        )
    try:
        job = read_job(number, _ask("scontrol", "show", "--oneliner", "job", number))
    except LaunchError as error:
        if not _ENDED.search(str(error)):
            raise
        raise _refuse(number) from None
    if job.state != "RUNNING":
        raise _refuse(number, job.state)
    return job


def read_job(number: str, text: str) -> Job:
    """Read what `scontrol show --oneliner job` has said."""
    found = dict(word.partition("=")[::2] for word in text.split())
    nodes = found.get("NumNodes", "0").partition("-")[0]
    return Job(number, found.get("JobState", ""), int(nodes), found.get("NodeList", ""))


def nodes_of(job: Job, wanted: WorldConfig) -> int:
    """Return on how many nodes of an allocation there are agents; LaunchError for too few."""
    if job.nodes < wanted.min_nodes:
        raise LaunchError(
            f"allocation {job.number} has {count(job.nodes, 'node')} ({job.names}), and "
            f"{wanted.min_nodes} are asked for"
        )
    return min(job.nodes, wanted.max_nodes or job.nodes)


def word_complaint(of: str, lines: Sequence[str]) -> str:
    """Word why Slurm ended or refused an allocation or a step, "" if it was not Slurm."""
    if own := [found[1] for line in lines if (found := _OWN.fullmatch(line))]:
        return f"{of}: {own[0]}"
    reasons = [line for line in lines if _REASON.match(line) and not _NOT_SLURMS.search(line)]
    refused = [line for line in reasons if line.startswith("salloc")]
    if not refused and any(_ENDED.search(line) for line in lines):
        return f"the allocation of {of} has ended" if of[0] == "`" else f"{of} has ended"
    said = [found[1].strip() for line in refused or reasons if (found := _SAID.fullmatch(line))]
    return f"{of}: Slurm says: {'; '.join(said)}" if said else ""


def word_queue(lines: Sequence[str]) -> str:
    """Word that salloc waits for an allocation, "" where it has it."""
    found = [pending for line in lines if (pending := _PENDING.search(line))]
    is_granted = any(GRANTED in line for line in lines)
    return f"job {found[-1][1]} waits in Slurm's queue" if found and not is_granted else ""


def _refuse(number: str, state: str = "") -> LaunchError:
    is_said = f" ({state})" if state else ""
    return LaunchError(
        f"allocation {number} has ended{is_said}. Begin the notebook in a new one; "
        "`--launcher local` is for this machine, `--salloc` asks for an allocation"
    )


def _ask(*command: str) -> str:
    """Return what one of Slurm's commands prints; LaunchError with its complaint."""
    try:
        done = run(command, ASK_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"Slurm has not answered `{command[0]}` in {ASK_TIMEOUT:.0f} s") from None
    if done.returncode:
        raise LaunchError(f"`{shlex.join(command)}`: {done.stderr.strip()}")
    return done.stdout
