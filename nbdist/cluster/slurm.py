"""The launcher of `--launcher slurm`: one `srun` starts an agent on each node of an allocation.

The head uses the allocation in which the notebook runs (SLURM_JOB_ID), or with `--salloc` a new
allocation that ends with the world. For a new allocation it starts another process, `python -m
nbdist.cluster.slurm SALLOC ...`, which runs `salloc` and cancels the job at the end. Without this
process a job would go on if `salloc` was killed, or stay in the queue if the head was killed. A
task of Slurm is an agent and not a rank, because Slurm cannot restart a single task.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nbdist.cluster.launcher import AgentCommand, Launched, LaunchError, agent_command
from nbdist.cluster.ticket import Ticket
from nbdist.config import WorldConfig
from nbdist.system.processes import LEFT_BEHIND, MODULE_OPTIONS, find_leftovers
from nbdist.words import count, one_line, word_exit

SLURM_QUERY_TIMEOUT = 10.0  # seconds for Slurm's controller to answer about an allocation
QUEUE_TIMEOUT = 86_000.0  # seconds that an allocation may wait in Slurm's queue; Stop ends the wait

OF_ALLOCATION = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET"),
    *("SLURM_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU", "SLURM_GPUS_PER_TASK", "SLURM_DISTRIBUTION"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_THREADS_PER_CORE"),
)
"""Environment variables on tasks, processors and memory that `salloc` sets for its command.

They are removed before `srun` runs, because `srun` would take them as options.
"""

OF_TASK = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEPID", "SLURM_STEP_ID", "SLURM_GTIDS"),
)
"""Environment variables that describe the agent's task of Slurm; the agent does not get them.

With them, a library in a worker, such as Lightning, would take the node's number for the worker's
rank.
"""

# The shell command of each task of Slurm. It passes the number of the task to the agent as the
# number of the node, because there is one task on each node, in the same order.
NUMBERED = f'number=$SLURM_PROCID; unset {" ".join(OF_TASK)}; exec "$@" --node "$number"'
CLUSTERS = "SALLOC_CLUSTERS"

IN_ALLOCATION = (
    'srun --jobid="$SLURM_JOB_ID" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES"'
)

_NODE_COUNTS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_SAID = re.compile(r"(?:salloc|srun): (?:(?:error|fatal): )?(.+)")
_REASON = re.compile(r"(?:salloc|srun): (error|fatal|unrecognized|invalid|option)")
_NOT_SLURMS = re.compile(r"task [-0-9,]+: (Exited with|Killed|Terminated)")
_SALLOC_LINE = re.compile(r"nbdist: (salloc .*)")
_JOB_GONE = re.compile(
    r"has expired|Invalid job id|Expired or invalid job|Force Terminated|been revoked|CANCELLED"
)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """An allocation of Slurm: its number, its state, and its nodes."""

    number: str
    state: str
    nodes: int
    names: str  # the nodes' names, as Slurm shortens them: `node[1-4]`


class SlurmLauncher:
    """Starts agents by Slurm, for `--launcher slurm`."""

    def launch(self, config: WorldConfig, ticket: Ticket, folder: Path) -> Launched:
        """Start agents in the notebook's allocation, or with `--salloc` in a new allocation.

        Does not wait until Slurm grants the new allocation. Raises LaunchError or OSError if agents
        cannot be started.
        """
        needed = ("salloc", "srun") if config.salloc else ("scontrol", "srun")
        if missing := [name for name in needed if shutil.which(name) is None]:
            raise LaunchError(
                f"there is no `{missing[0]}` on this machine. Begin the notebook where Slurm's "
                "commands are, or use `--hosts` for ssh"
            )
        if config.salloc is not None:
            owner = Allocation(config, ticket, folder)
            nodes, queue_text = requested_nodes(config)[0], lambda: word_queue(owner.last_lines())
            return Launched([owner], nodes, arrive_timeout=QUEUE_TIMEOUT, news=queue_text)
        job = find_job(os.environ)
        nodes = nodes_of(job, config)
        names = ask("scontrol", "show", "hostnames", job.names, timeout=SLURM_QUERY_TIMEOUT).split()
        command, environ = srun_command(job.number, nodes, config), step_environ(os.environ)
        process = SlurmCommand("", command, ticket, folder, environ)
        process.allocation = f"allocation {job.number}"
        return Launched([process], nodes, names[:nodes])


class SlurmCommand(AgentCommand):
    """The process of an `srun`, or of a command that runs `srun`.

    `allocation` is the name of the allocation in messages to the user.
    """

    allocation = ""

    def complaint(self) -> str:
        return word_complaint(self.allocation, self.last_lines())


class Allocation(SlurmCommand):
    """The head's object for the process that runs `salloc` and at last cancels the job.

    That process runs `own_allocation`.
    """

    def __init__(self, config: WorldConfig, ticket: Ticket, folder: Path) -> None:
        command = salloc_command(config)
        owner = [sys.executable, *MODULE_OPTIONS, "nbdist.cluster.slurm"]
        super().__init__("", [*owner, *command], ticket, folder)
        self.allocation, self.command = f"`--salloc {config.salloc}`", shlex.join(command)

    def end(self, timeout: float) -> None:
        """End the process, which first cancels the job.

        If the job may still run afterwards, write that to stderr, which is the head's log.
        """
        # A last `scancel` may begin just before `CANCEL_TIMEOUT` is over: wait for its end, too.
        super().end(timeout + 2 * CANCEL_TIMEOUT)
        if remaining := find_leftovers(self.last_lines()):
            sys.stderr.write(f"{LEFT_BEHIND}{remaining}\n")


# --- commands -----------------------------------------------------------------------------


def srun_command(job: str, nodes: int, config: WorldConfig) -> list[str]:
    """Return the command that starts an agent on each of `nodes` nodes of the allocation `job`."""
    return ["srun", f"--jobid={job}", f"--nodes={nodes}", f"--ntasks={nodes}", *_step(config)]


def salloc_command(config: WorldConfig) -> list[str]:
    """Return the command that waits for a new allocation, and starts an agent on each node."""
    minimum, maximum = requested_nodes(config)
    nodes = f"--nodes={minimum}" if minimum == maximum else f"--nodes={minimum}-{maximum}"
    unset = [word for name in OF_ALLOCATION for word in ("-u", name)]
    return [
        *("salloc", f"--job-name={config.name}", *_resources(config)),
        *(*_split(config.salloc or ""), nodes),
        *("env", *unset, "sh", "-c", f'exec {IN_ALLOCATION} "$@"', "sh", *_step(config)),
    ]


def _step(config: WorldConfig) -> list[str]:
    """Return the arguments with which `srun` starts an agent on each node."""
    memory = _memory(config) or "0"
    return [
        *("--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=0", "--wait=0"),
        *(f"--mem={memory}", "--mpi=none", "--cpu-bind=none", "--quiet", "--chdir=/"),
        *(f"--job-name={config.name}", "sh", "-c", NUMBERED, "sh"),
        *(*config.wrapper, *agent_command(config.python)),
    ]


def _resources(config: WorldConfig) -> list[str]:
    """Return the options of salloc for the processors and memory that the workers need.

    nbdist's own options `--cpus` and `--memory` are for each worker.
    """
    per_node, options = config.per_node, []
    minimum, maximum = requested_nodes(config)
    if isinstance(per_node, int) and minimum < maximum:
        # Give no number of tasks: Slurm would grant only as many nodes as the tasks need.
        options.append(f"--mincpus={per_node * (config.cpus or 1)}")
    elif isinstance(per_node, int):
        options.append(f"--ntasks-per-node={per_node}")
    if config.cpus is not None:
        options.append(f"--cpus-per-task={config.cpus}")
    if memory := _memory(config):
        options.append(f"--mem={memory}")
    elif config.memory:
        options.append(f"--mem-per-gpu={config.memory}")
    return options


def _memory(config: WorldConfig) -> str:
    """Return how much memory all workers of a node need together, such as `16G`.

    Returns "" without `--memory`, or if the number of workers on a node is not known.
    """
    per_node = config.per_node
    if config.memory is None or not isinstance(per_node, int):
        return ""
    return f"{int(config.memory[:-1]) * per_node}{config.memory[-1]}"


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


def requested_nodes(config: WorldConfig) -> tuple[int, int]:
    """Return the least and the largest number of nodes for a new allocation.

    Both are from the option -N in `--salloc`, or without -N from `-j`. Without both options they
    are 1. Raises LaunchError if -N and `-j` contradict each other, or if nbdist cannot use an
    option in `--salloc`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-N", "--nodes", default="")
    try:
        text = parser.parse_known_args(_split(config.salloc or ""))[0].nodes
    except argparse.ArgumentError as error:
        raise LaunchError(f"`--salloc {config.salloc}`: {error}") from None
    match = _NODE_COUNTS.fullmatch(text) if text else None
    of_layout = (config.min_nodes, config.max_nodes or config.min_nodes)
    if match is None:
        return of_layout
    requested = (int(match[1]), int(match[2] or match[1]))
    if config.max_nodes is not None and requested != of_layout:
        raise LaunchError(
            f"`--salloc {config.salloc}`: -N {text} are not the nodes of `-j`; leave one out"
        )
    return requested


# --- allocations --------------------------------------------------------------------------


def find_job(environ: Mapping[str, str]) -> SlurmJob:
    """Return the allocation in which this process runs, as `environ` says.

    Raises LaunchError if there is none, or if it is not running. Raises OSError if Slurm does not
    answer.
    """
    number = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not number:
        raise LaunchError(
            "`--launcher slurm`: the notebook is in no allocation of Slurm's. Begin it in one, or "
            'have one made for its workers: `--salloc "-p gpu --gpus-per-node=4"`'
        )
    state = ""
    try:
        description = ask(
            "scontrol", "show", "--oneliner", "job", number, timeout=SLURM_QUERY_TIMEOUT
        )
        job = read_job(number, description)
        if job.state == "RUNNING":
            return job
        state = f" ({job.state})"
    except OSError as error:
        if not _JOB_GONE.search(str(error)):
            raise
    raise LaunchError(
        f"allocation {number} has ended{state}. Begin the notebook in a new one; "
        "`--launcher local` is for this machine, `--salloc` asks for an allocation"
    )


def read_job(number: str, text: str) -> SlurmJob:
    """Parse the output of `scontrol show --oneliner job` for the allocation with this number."""
    fields = dict(word.partition("=")[::2] for word in text.split())
    nodes = fields.get("NumNodes", "0").partition("-")[0]
    return SlurmJob(number, fields.get("JobState", ""), int(nodes), fields.get("NodeList", ""))


def nodes_of(job: SlurmJob, config: WorldConfig) -> int:
    """Return on how many nodes of an allocation agents must be started.

    Raises LaunchError if the allocation has fewer nodes than the user has requested.
    """
    if job.nodes < config.min_nodes:
        raise LaunchError(
            f"allocation {job.number} has {count(job.nodes, 'node')} ({job.names}), and "
            f"{config.min_nodes} are asked for"
        )
    return min(job.nodes, config.max_nodes or job.nodes)


def word_complaint(name: str, lines: Sequence[str]) -> str:
    """Return a message that says why Slurm has ended or refused an allocation.

    `name` is the name of the allocation in the message, and `lines` are the last lines of srun or
    salloc. Returns "" if these lines do not have the reason.
    """
    if owner_messages := [match[1] for line in lines if (match := _SALLOC_LINE.fullmatch(line))]:
        return f"{name}: {owner_messages[0]}"
    reasons = [line for line in lines if _REASON.match(line) and not _NOT_SLURMS.search(line)]
    refused = [line for line in reasons if line.startswith("salloc")]
    if not refused and any(_JOB_GONE.search(line) for line in lines):
        return f"the allocation of {name} has ended" if name[0] == "`" else f"{name} has ended"
    messages = [match[1].strip() for line in refused or reasons if (match := _SAID.fullmatch(line))]
    return f"{name}: Slurm says: {'; '.join(messages)}" if messages else ""


def word_queue(lines: Sequence[str]) -> str:
    """Return a line such as `job 7 waits in Slurm's queue: Priority`; "" if the job does not wait.

    `lines` are the last lines in the log of `own_allocation`.
    """
    text = "\n".join(lines)
    numbers = _JOB_NUMBER.findall(text) if GRANTED not in text else []
    reason = next((line for line in reversed(lines) if line.startswith(REASON)), REASON)
    why = f": {reason.removeprefix(REASON)}" if reason != REASON else ""
    return f"job {numbers[-1]} waits in Slurm's queue{why}" if numbers else ""


# --- the process that owns an allocation of `--salloc` ------------------------------------

JOB_END_TIMEOUT = 3.0  # seconds for agents to exit, and for salloc to release its allocation
CANCEL_TIMEOUT, CANCEL_STEP = 4.0, 0.1  # seconds for Slurm to end a job, and between two checks

# Seconds between two calls of squeue that ask why a job waits: at first, and at most. Until the
# maximum is reached, each pause is twice as long as the last.
MIN_QUEUE_PAUSE, MAX_QUEUE_PAUSE = 1.0, 30.0

LONGEST_LOG = 1 << 20

CARRIED = frozenset(
    ("PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ")
)
"""Environment variables of the head that agents get, besides `OF_SLURM`."""

OF_SLURM = frozenset(("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CLUSTER_NAME", "SLURM_JWT"))
"""The environment variables of Slurm that its commands need.

The commands do not get the head's other variables of Slurm: `srun` takes many of them as options,
and could start too many agents.
"""

GRANTED = "Granted job allocation"
REASON, NO_REASON = "nbdist: the queue: ", "None"
"""The beginning of a log line that says why a job waits, and squeue's word for no reason."""
_JOB_NUMBER = re.compile(r"(?:Granted|Pending) job allocation ([0-9]+)")
_FINAL_JOB_STATES = frozenset(("", "COMPLETING"))
_FORGOTTEN = "Invalid job id"


def step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of `environ` that Slurm's commands and the agents get."""
    return {name: value for name, value in environ.items() if name in CARRIED | OF_SLURM}


def salloc_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of `environ` that salloc gets.

    This is `step_environ` and the user's variables SALLOC_*, which set defaults for salloc.
    """
    salloc_defaults = {name: value for name, value in environ.items() if name.startswith("SALLOC_")}
    salloc_defaults.pop("SALLOC_NO_SHELL", None)  # with this variable salloc runs no command
    return step_environ(environ) | salloc_defaults


def own_allocation() -> None:
    """Run salloc until salloc exits or stdin is closed, then cancel salloc's job, and exit.

    This is the main function of `python -m nbdist.cluster.slurm`. stderr is a log file, from which
    this process reads the number of the job. If the job may still run at the end, the last line of
    the log says so.
    """
    salloc = subprocess.Popen(sys.argv[1:], env=salloc_environ(os.environ))
    # Ignore SIGTERM, so that it does not end this process before the job is cancelled. The head
    # or its guard sends SIGTERM only after stdin was closed, so this process will exit by itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    poller = select.poll()
    poller.register(os.pidfd_open(salloc.pid), select.POLLIN)
    poller.register(0, 0)  # with no events requested, `poll` reports only that the pipe was closed
    _wait_for_end(poller)
    salloc.poll()
    log_text = os.pread(2, LONGEST_LOG, 0).decode(errors="replace")
    number = numbers[-1] if (numbers := _JOB_NUMBER.findall(log_text)) else ""
    if salloc.returncode is None:
        if GRANTED not in log_text:
            # While its job is in the queue, salloc does not notice that stdin was closed.
            salloc.terminate()
        with suppress(subprocess.TimeoutExpired):
            salloc.wait(JOB_END_TIMEOUT)
    elif salloc.returncode < 0:
        consequence = f", and job {number} ends with it" if number else ""
        sys.stderr.write(f"nbdist: salloc {word_exit(salloc.returncode)}{consequence}\n")
    problem = cancel(number) if number else ""
    if salloc.poll() is None:
        salloc.kill()
    code = salloc.wait()
    if problem:
        sys.exit(f"{LEFT_BEHIND}{problem}")
    sys.exit(code if code >= 0 else 128 - code)


def _wait_for_end(poller: select.poll) -> None:
    """Wait until salloc exits or stdin is closed.

    While the job waits in Slurm's queue, write the reason to the log whenever it changes.
    """
    logged, pause = "", MIN_QUEUE_PAUSE
    while not poller.poll(pause * 1000):
        log_text = os.pread(2, LONGEST_LOG, 0).decode(errors="replace")
        if GRANTED in log_text:
            poller.poll()
            return
        numbers = _JOB_NUMBER.findall(log_text)
        if numbers and (reason := _squeue(numbers[-1], "%r")) != logged:
            sys.stderr.write(f"{REASON}{'' if reason == NO_REASON else reason}\n")
            logged = reason
        pause = min(2 * pause, MAX_QUEUE_PAUSE)


def cancel(number: str) -> str:
    """Cancel a job, and wait until Slurm has ended it or is ending it.

    Returns "" if this succeeds within `CANCEL_TIMEOUT` seconds, or else a message which says that
    the job may still run.
    """
    deadline = time.monotonic() + CANCEL_TIMEOUT
    while (state := _squeue(number, "%T")) not in _FINAL_JOB_STATES:
        with suppress(OSError):
            ask("scancel", number, timeout=CANCEL_TIMEOUT / 2)
        if time.monotonic() > deadline:
            return f"Slurm's job {number} may still run ({state}): `scancel {number}` ends it"
        time.sleep(CANCEL_STEP)
    return ""


def _squeue(number: str, form: str) -> str:
    """Return a field of a job as squeue prints it, or squeue's error message.

    `form` is the field in squeue's format: "%T" for the job's state, "%r" for the reason why the
    job waits. Returns "" if Slurm no longer knows the job.
    """
    command = ("squeue", "--noheader", f"--format={form}", f"--jobs={number}")
    try:
        return one_line(ask(*command, timeout=CANCEL_TIMEOUT / 2))
    except OSError as error:
        return "" if _FORGOTTEN in str(error) else one_line(str(error))


def ask(*command: str, timeout: float) -> str:
    """Run a command of Slurm and return its output; raise OSError if it fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=step_environ(os.environ),
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"Slurm has not answered `{command[0]}` in {timeout:.0f} s") from None
    if done.returncode:
        raise OSError(f"`{shlex.join(command)}`: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    own_allocation()
