"""Worlds in a real Slurm: in a given allocation, in their own, and refusals of Slurm.

slurmctld has a host of its own; each other host has a slurmd, with 8 CPUs, 16,000 MB and 2 GPUs
that do not exist.  This machine is where jobs are submitted.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from nbdist.errors import AgentLost, StartError, WorkerDied
from nbdist.system.processes import children_of
from nbdist.world import lifecycle
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.hosts.network import Host, Network, end, of_tests
from tests.hosts.worlds import (
    Launched,
    allocated,
    has_slots,
    inherited,
    other_notebook,
    survives_an_agent,
)
from tests.waiting import SOON, once, press_stop, wait_until

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "scancel")
CONTROLLER_PORT, NODE_PORT = 6817, 6818
CPUS, GPUS = 8, 2

CONFIG = """\
ClusterName=nbdist
SlurmctldHost={control}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=2
TaskProlog={folder}/prolog
DefMemPerCPU=100
"""


class Slurm:
    """A cluster with a single partition, whose nodes are the hosts of a network."""

    def __init__(self, network: Network) -> None:
        self.folder = network.folder / "slurm"
        self.folder.mkdir(mode=0o755)
        (self.folder / "state").mkdir()
        self.nodes = network.hosts
        self.control = network.add("control")
        self.config = self.folder / "slurm.conf"
        self._write_config()
        self._processes = [self._start_munged()]
        self._start(self.control, "slurmctld", CONTROLLER_PORT)
        for node in self.nodes:
            self._start(node, "slurmd", NODE_PORT)
        wait_until(self._is_up, f"Slurm's nodes are not idle; see {self.folder}")
        for child in self.control.processes():  # slurmctld has a child to run scripts
            self.control.lasts(child)

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm on this machine, outside of any allocation."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environ = kept | {"SLURM_CONF": str(self.config)}
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=SOON)
        assert not check or done.returncode == 0, f"{words}: {done.stderr}{done.stdout}"
        return done

    def allocate(self, *options: str) -> int:
        """Make an allocation that lasts until it is cancelled, and return its number."""
        done = self.run("salloc", "--no-shell", "--immediate=10", *options)
        return int(done.stderr.split("Granted job allocation ")[1].split()[0])

    def cancel(self, job: int) -> None:
        """End an allocation, and wait until Slurm does not list it any more."""
        self.run("scancel", str(job), check=False)
        wait_until(lambda: job not in self.jobs(), f"job {job} is still there")

    @contextmanager
    def inside(self, *options: str) -> Iterator[int]:
        """Put this process into a new allocation, as in the shell of a `salloc`."""
        job = self.allocate(*options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_JOB_ID", str(job))
            yield job
        self.cancel(job)

    def jobs(self) -> list[int]:
        """Return the numbers of all jobs that Slurm lists."""
        done = self.run("squeue", "--noheader", "--format=%A")
        return [int(line) for line in done.stdout.split()]

    def close(self) -> None:
        for process in reversed(self._processes):
            end(process, signal.SIGKILL)  # the state that they would save is not read again

    def _is_up(self) -> bool:
        done = self.run("sinfo", "--noheader", "--format=%T %D", check=False)
        return done.stdout.split() == ["idle", str(len(self.nodes))]

    def _write_config(self) -> None:
        names = ",".join(node.name for node in self.nodes)
        has = f"CPUs={CPUS} RealMemory=16000 Gres=gpu:{GPUS} State=UNKNOWN"
        lines = [
            CONFIG.format(
                control=self.control.name,
                address=self.control.address,
                folder=self.folder,
                controller_port=CONTROLLER_PORT,
                node_port=NODE_PORT,
            ),
            *(f"NodeName={node.name} NodeAddr={node.address} {has}\n" for node in self.nodes),
            f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP\n",
        ]
        self.config.write_text("".join(lines))
        prolog = self.folder / "prolog"
        prolog.write_text(
            "#!/bin/sh\n"
            + "".join(f"echo export {name}={value}\n" for name, value in of_tests().items())
        )
        prolog.chmod(0o755)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # Any two device files will do: nothing opens them.
        (self.folder / "gres.conf").write_text(
            f"NodeName={names} Name=gpu File=/dev/zero\nNodeName={names} Name=gpu File=/dev/null\n"
        )
        for host in [self.control, *self.nodes]:
            host.run("rm -rf /etc/slurm")
            host.run(["ln", "-s", str(self.folder), "/etc/slurm"])

    def _start_munged(self) -> subprocess.Popen[bytes]:
        """Start a munged for all hosts, which share a clock and a key."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {
            "key-file": key,
            "socket": self.folder / "munge.socket",
            "log-file": self.folder / "munge.log",
            "pid-file": self.folder / "munge.pid",
            "seed-file": self.folder / "munge.seed",
        }
        options = [f"--{name}={path}" for name, path in files.items()]
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "munged", "--foreground", "--force", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until((self.folder / "munge.socket").exists, "munged did not start")
        return process

    def _start(self, host: Host, daemon: str, port: int) -> None:
        process = host.popen(
            [str(shutil.which(daemon)), "-D"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._processes.append(process)
        host.lasts(process.pid, port)


@pytest.fixture(scope="module")
def slurm(network: Network) -> Iterator[Slurm]:
    """A real Slurm over the hosts, whose commands work on this machine."""
    if absent := [name for name in DAEMONS if not shutil.which(name)]:
        pytest.skip(f"no {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client munge)")
    slurm = Slurm(network)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(slurm.config))
        yield slurm
    slurm.close()


def make_world(layout: str = "2x1", **options: object) -> World:
    return World(layout=layout, log_dir="", show=False, **options)


def dies_when(world: World, do: Callable[[], object]) -> str:
    """Call `do` while a cell runs, and return that cell's error."""
    running = once(lambda: world.state is WorldState.RUNNING, do, "the cell runs")
    with running, pytest.raises(WorkerDied) as died:
        world.execute("import time; time.sleep(600)")
    return str(died.value)


def start_killed_in_queue(world: World) -> None:
    """Start a world, and kill its head and the guard once the world waits in the queue."""
    for text in lifecycle.starting_texts(world.engine):
        if "waits in Slurm's queue" in text:
            guard = psutil.Process(world.engine.connection.link.agent.pid)
            for each in [guard, *guard.children()]:
                each.kill()


def stop_start(world: World, said: str) -> None:
    """Start a world, and press Stop once the text `said` is shown."""
    for text in lifecycle.starting_texts(world.engine):
        if said in text:
            press_stop()


def test_a_world_in_an_allocation_is_a_step(
    slurm: Slurm, hosts: list[Host], network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world is a step of its name and lives as over ssh; the allocation's end is reported."""
    with slurm.inside("-N2", f"--gpus-per-node={GPUS}", "--ntasks-per-node=4") as job:
        # A shell of `salloc` has both, by which srun would start four agents on each node.
        monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
        monkeypatch.setenv("SLURM_NTASKS", "8")
        steps = ("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%j")
        running = lambda: slurm.run(*steps, check=False).stdout.split()  # noqa: E731
        launched = allocated("slurm", running)
        with inherited(launched, network) as world:
            has_slots(world)
            # Lightning would take the node's number for the rank because of such variables.
            told = "{'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_NODEID'} & {*os.environ}"
            assert world.gather(f"os.environ['SLURM_JOB_ID'], {told}") == [(str(job), set())] * 4
            assert world.engine.rank_table.spec.name in running()
            survives_an_agent(world, launched, network)

            said = dies_when(world, lambda: slurm.cancel(job))
            assert f"allocation {job} has ended" in said
            with pytest.raises(StartError, match=f"allocation {job} has ended") as found:
                make_world().start()
            assert "\n" not in str(found.value)


def test_the_allocation_of_a_killed_notebook_ends(slurm: Slurm, hosts: list[Host]) -> None:
    """If the notebook is killed, its allocation ends with all processes in it."""
    launched = Launched("slurm", {"layout": "1x1", "salloc": "-p main"})
    with other_notebook(launched, "/nowhere"):
        assert len(slurm.jobs()) == 1
    wait_until(lambda: not slurm.jobs(), "the allocation has ended")


def test_the_allocation_of_a_killed_salloc_ends(slurm: Slurm, hosts: list[Host]) -> None:
    """The allocation has as many nodes as are free; after its end a restart gets another.

    If Slurm's controller is away at the end, a line says how to end the job, which may run on.
    """
    other = slurm.allocate("-N2", "--exclusive")
    with make_world("1:2x1", salloc="-p main", name="range") as world:
        shown = slurm.run("squeue", "--noheader", "--name=range", "--format=%A %D").stdout
        before, nodes = shown.split()
        assert nodes == "1"
        guard = psutil.Process(world.engine.connection.link.agent.pid)
        below = guard.children(recursive=True)
        (salloc,) = (each for each in below if each.name() == "salloc")
        said = dies_when(world, salloc.kill)
        assert f"`--salloc -p main`: salloc was killed by SIGKILL, and job {before} ends" in said
        wait_until(lambda: slurm.jobs() == [other], "the allocation has ended")
        world.restart()
        (job,) = {*slurm.jobs()} - {other}
        slurm.control.link_down()
        left = lifecycle.shutdown(world.engine)
        slurm.control.link_up()
    assert re.search(rf"Slurm's job {job} may still run \(.+\): `scancel {job}` ends it$", left)
    for each in (job, other):
        slurm.cancel(each)


@pytest.mark.parametrize(
    ("salloc", "told"),
    [
        (
            "-p nope",
            "`--salloc -p nope`: Slurm says: invalid partition specified: nope; Job submit/allocate"
            " failed: Invalid partition name specified.",
        ),
        (
            "--gpus-per-node=9",
            "`--salloc --gpus-per-node=9`: Slurm says: Job submit/allocate failed: Requested node "
            "configuration is not available.",
        ),
    ],
)
def test_slurm_refuses_in_one_line(salloc: str, told: str, slurm: Slurm, hosts: list[Host]) -> None:
    """If Slurm refuses a request, the error is one line with Slurm's reason."""
    with pytest.raises(StartError) as found:
        make_world(salloc=salloc).start()
    assert str(found.value).startswith(f"the workers could not start: {told}")
    assert "\n" not in str(found.value)


def test_slurms_reason_is_shown_while_the_job_waits(slurm: Slurm, hosts: list[Host]) -> None:
    """Slurm's own word for the reason is shown, and Stop ends the wait."""
    with pytest.raises(KeyboardInterrupt):
        stop_start(make_world("9x2", salloc="-p main"), "PartitionNodeLimit")
    wait_until(lambda: not slurm.jobs(), "it is in the queue no more")


def test_a_world_waits_for_its_own_allocation(
    slurm: Slurm, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop and the head's death empty the queue; the allocation ends with the head as well."""
    monkeypatch.setenv("SALLOC_TIMELIMIT", "7")
    all_taken = slurm.allocate("-N3", "--exclusive")
    stopping = once(lambda: len(slurm.jobs()) == 2, press_stop, "it is time to stop")
    with stopping, pytest.raises(KeyboardInterrupt):
        make_world(salloc="-p main").start()
    wait_until(lambda: slurm.jobs() == [all_taken], "it is in the queue no more")

    with pytest.raises(AgentLost):
        start_killed_in_queue(make_world(salloc="-p main"))
    wait_until(lambda: slurm.jobs() == [all_taken], "it is in the queue no more")

    world = make_world(salloc=f"--gpus-per-node={GPUS} --mem=500", name="mine", cpus=2)
    said = False
    for text in lifecycle.starting_texts(world.engine):
        if "waits in Slurm's queue" in text and not said:
            said = True
            slurm.cancel(all_taken)
    with world:
        assert said
        shown = slurm.run("squeue", "--noheader", "--format=%j %D %C %l").stdout
        assert shown.split() == ["mine", "2", "4", "7:00"]
        assert world.size == 2
        (head,) = children_of(world.engine.connection.link.agent.pid)
        os.kill(head, signal.SIGKILL)
        wait_until(lambda: not slurm.jobs(), "the allocation has ended")
        with pytest.raises(AgentLost):
            world.execute("pass")
