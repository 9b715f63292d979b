"""Tests of `nbdist.cluster.slurm`: commands and messages; `tests/hosts` has the real Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbdist.cluster import slurm
from nbdist.cluster.launcher import LaunchError
from nbdist.cluster.slurm import SlurmJob, SlurmLauncher, nodes_of, salloc_command, word_complaint
from nbdist.cluster.ticket import KeyPair, Ticket
from nbdist.config import WorldConfig

AGENT = f"sh -c {slurm.NUMBERED} sh {{wrap}}/venv/python -P -m nbdist.agent --ticket"


def wanted(**options: Any) -> WorldConfig:
    return WorldConfig(launcher="slurm", python="/venv/python", name="run", **options)


def test_srun_starts_one_task_on_each_node() -> None:
    """A task shares all resources of the job, and outlives other tasks."""
    command = slurm.srun_command("17", 2, wanted(wrap="apptainer exec img"))
    assert command[0] == "srun"
    assert {
        *("--jobid=17", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--overlap"),
        *("--kill-on-bad-exit=0", "--wait=0", "--mem=0", "--cpu-bind=none", "--job-name=run"),
    } < {*command}
    assert " ".join(command).endswith(AGENT.format(wrap="apptainer exec img "))


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, ["--nodes=1"]),
        ({"layout": "2x4"}, ["--ntasks-per-node=4", "--nodes=2"]),
        ({"layout": "1:3x4", "cpus": 2}, ["--mincpus=8", "--cpus-per-task=2", "--nodes=1-3"]),
        (
            {"layout": "1x4", "memory": "16G", "cpus": 6},
            ["--ntasks-per-node=4", "--cpus-per-task=6", "--mem=64G", "--nodes=1"],
        ),
        ({"n": "gpu", "memory": "16G"}, ["--mem-per-gpu=16G", "--nodes=1"]),
        ({"salloc": "-p gpu -C 'a&b'"}, ["-p", "gpu", "-C", "a&b", "--nodes=1"]),
        ({"salloc": "-N2-4"}, ["-N2-4", "--nodes=2-4"]),
    ],
)
def test_salloc_gets_the_layouts_resources(options: dict[str, Any], asked: list[str]) -> None:
    """Options follow from the layout, `--cpus` and `--memory`, and the user's are added."""
    command = salloc_command(wanted(**options))
    assert command[:2] == ["salloc", "--job-name=run"]
    assert command[2 : command.index("env")] == asked
    assert " ".join(command).endswith(AGENT.format(wrap=""))
    # Variables of salloc on its own tasks do not reach the srun.
    unset = command[command.index("env") : command.index("sh")]
    assert {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_MEM_PER_CPU"} < {*unset[2::2]}
    assert {*unset[1::2]} == {"-u"}
    assert 'srun --jobid="$SLURM_JOB_ID" --nodes="$SLURM_JOB_NUM_NODES"' in " ".join(command)


def test_unfit_options_of_salloc_are_refused() -> None:
    """The error names the option, and why it is refused."""
    for asked, told in (
        ("--no-shell", "`--salloc --no-shell`: with --no-shell it would outlive"),
        ("-p gpu -N", "`--salloc -p gpu -N`: argument -N/--nodes: expected one arg"),
        ("-M c2", "`-M`: only salloc obeys it, and scancel does not: set SLURM_CL"),
        ("--clusters=c2", "`--clusters=c2`: only salloc obeys it"),
        ("-N 4", "`--salloc -N 4`: -N 4 are not the nodes of `-j`;"),
    ):
        with pytest.raises(LaunchError) as found:
            salloc_command(wanted(salloc=asked, layout="2x1"))
        assert str(found.value).startswith(told)


def test_nodes_get_no_secrets_and_no_step_variables() -> None:
    """Nodes get no variable that changes a nested srun; salloc also gets the user's defaults."""
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}
    environ = {**kept, "SLURM_JOB_ID": "17", "SLURM_NTASKS": "4", "HF_TOKEN": "secret"}
    assert slurm.step_environ(environ) == kept
    defaults = {"SALLOC_PARTITION": "gpu", "SALLOC_TIMELIMIT": "2:00:00"}
    assert slurm.salloc_environ(environ | defaults | {"SALLOC_NO_SHELL": "1"}) == kept | defaults


JOB = "JobId=17 JobName=x JobState=RUNNING NodeList=node[1-3] NumNodes=3 NumCPUs=4\n"


def test_an_allocation_gives_the_nodes_of_the_layout() -> None:
    """Without a layout all nodes are used; with too few nodes the error has both numbers."""
    job = slurm.read_job("17", JOB)
    assert job == SlurmJob("17", "RUNNING", 3, "node[1-3]")
    for layout, nodes in ((None, 3), ("2x1", 2), ("1:2x1", 2), ("1:8x1", 3), ("3x1", 3)):
        assert nodes_of(job, wanted(layout=layout)) == nodes
    with pytest.raises(LaunchError) as found:
        nodes_of(job, wanted(layout="4x1"))
    assert str(found.value) == "allocation 17 has 3 nodes (node[1-3]), and 4 are asked for"


def test_a_missing_allocation_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says that no allocation, or no Slurm, is on this machine."""
    with pytest.raises(LaunchError, match="in no allocation of Slurm's"):
        slurm.find_job({})
    monkeypatch.setenv("PATH", "/nowhere")
    ticket = Ticket(("127.0.0.1",), 1, "x" * 40, KeyPair.new())
    with pytest.raises(LaunchError, match="there is no `scontrol` on this machine"):
        SlurmLauncher().launch(wanted(), ticket, tmp_path)


INVALID = "salloc: error: invalid partition specified: nope"
CANCELLED = "slurmstepd-node1: error: *** STEP 1.1 ON node1 CANCELLED AT 2026 ***"
REFUSED = "salloc: error: Job submit/allocate failed: no"
KILLED = "salloc was killed by SIGKILL, and job 3 ends with it"
NOT_OF_SLURM = [
    "salloc: Granted job allocation 3",
    "srun: cluster configuration lacks support for cpu binding",
    "nbdist: the interpreter there is none",
    "srun: error: node1: task 0: Exited with exit code 1",
    "salloc: Relinquishing job allocation 3",
]


def test_complaints_of_slurm_become_a_line() -> None:
    """Slurm's reason becomes a line; lines of other programs give no line."""
    for lines, told in (
        (["srun: error: Slurm job 17 has expired"], "allocation 17 has ended"),
        ([CANCELLED], "allocation 17 has ended"),
        ([INVALID, "salloc: error: it failed"], f"Slurm says: {INVALID[15:]}; it failed"),
        ([REFUSED, "salloc: Job 3 has been revoked."], f"Slurm says: {REFUSED[15:]}"),
        (["salloc: unrecognized option '--bogus'"], "unrecognized option '--bogus'"),
        (["sh: 1: exec: /venv/python: not found"], ""),
        (NOT_OF_SLURM, ""),
        ([f"nbdist: {KILLED}", "srun: error: no"], f"allocation 17: {KILLED}"),
    ):
        said = word_complaint("allocation 17", lines)
        assert told in said
        assert bool(said) == bool(told), lines


def test_a_queued_request_is_reported() -> None:
    """The text says why a job waits until it is granted, or that its allocation has ended."""
    lines = ["salloc: Pending job allocation 3", "salloc: job 3 queued and waiting for resources"]
    assert slurm.word_queue(lines) == "job 3 waits in Slurm's queue"
    lines += [f"{slurm.REASON}Priority", f"{slurm.REASON}Resources"]
    assert slurm.word_queue(lines) == "job 3 waits in Slurm's queue: Resources"
    assert slurm.word_queue([*lines, slurm.REASON]) == "job 3 waits in Slurm's queue"
    assert slurm.word_queue([*lines, "salloc: Granted job allocation 3"]) == ""
    said = word_complaint("`--salloc -p gpu`", ["salloc: Job allocation 3 has been revoked."])
    assert said == "the allocation of `--salloc -p gpu` has ended"
