"""Worlds in a real Slurm: in an allocation, in one of their own, and when Slurm says no.

slurmctld has a host of its own, each other has a slurmd, with 8 CPUs, 16,000 MB and 2 GPUs that
there are not.  This machine is one from which jobs are submitted.
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
    """A cluster of one partition whose nodes are the hosts of a network."""

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
        for child in self.control.processes():  # slurmctld has one to run scripts
            self.control.lasts(child)

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """What one of Slurm's commands does on this machine, outside of any allocation."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environ = kept | {"SLURM_CONF": str(self.config)}
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=SOON)
        assert not check or done.returncode == 0, f"{words}: {done.stderr}{done.stdout}"
        return done

    def allocate(self, *options: str) -> int:
        """The number of a new allocation that lasts until it is cancelled."""
        done = self.run("salloc", "--no-shell", "--immediate=10", *options)
        return int(done.stderr.split("Granted job allocation ")[1].split()[0])

    def cancel(self, job: int) -> None:
        """End an allocation, and wait until Slurm has forgotten what ran in it."""
        self.run("scancel", str(job), check=False)
        wait_until(lambda: job not in self.jobs(), f"job {job} is still there")

    @contextmanager
    def inside(self, *options: str) -> Iterator[int]:
        """Have this process be in a new allocation, as in the shell of a `salloc`."""
        job = self.allocate(*options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_JOB_ID", str(job))
            yield job
        self.cancel(job)

    def jobs(self) -> list[int]:
        """The numbers of all that Slurm has not done with."""
        done = self.run("squeue", "--noheader", "--format=%A")
        return [int(line) for line in done.stdout.split()]

    def close(self) -> None:
        for process in reversed(self._processes):
            end(process, signal.SIGKILL)  # what they would write down is not read again

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
        """One for all: they share a clock and a key."""
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
    """Do this while a cell runs, and return what that cell says."""
    running = once(lambda: world.state is WorldState.RUNNING, do, "the cell runs")
    with running, pytest.raises(WorkerDied) as died:
        world.execute("import time; time.sleep(600)")
    return str(died.value)


def start_killed_in_queue(world: World) -> None:
    """Start it, and kill its head and the guard above that once it waits in the queue."""
    for text in world.session.starting_texts():
        if "waits in Slurm's queue" in text:
            guard = psutil.Process(world.session.link.agent.pid)
            for each in [guard, *guard.children()]:
                each.kill()


def stop_start(world: World, said: str) -> None:
    """Start it, and press Stop once this is said."""
    for text in world.session.starting_texts():
        if said in text:
            press_stop()


def test_a_world(
    slurm: Slurm, hosts: list[Host], network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives as over ssh, as a step of its name; the end of the allocation is told."""
    with slurm.inside("-N2", f"--gpus-per-node={GPUS}", "--ntasks-per-node=4") as job:
        # So it is in such a shell, and srun would start four agents on each node.
        monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
        monkeypatch.setenv("SLURM_NTASKS", "8")
        steps = ("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%j")
        running = lambda: slurm.run(*steps, check=False).stdout.split()  # noqa: E731
        launched = allocated("slurm", running)
        with inherited(launched, network) as world:
            has_slots(world)
            # By these Lightning would take the node's number for the rank.
            told = "{'SLURM_NTASKS', 'SLURM_PROCID', 'SLURM_NODEID'} & {*os.environ}"
            assert world.gather(f"os.environ['SLURM_JOB_ID'], {told}") == [(str(job), set())] * 4
            assert world.session.spec.name in running()
            survives_an_agent(world, launched, network)

            said = dies_when(world, lambda: slurm.cancel(job))
            assert f"allocation {job} has ended" in said
            with pytest.raises(StartError, match=f"allocation {job} has ended") as found:
                make_world().start()
            assert "\n" not in str(found.value)


def test_a_notebook_that_is_killed(slurm: Slurm, hosts: list[Host]) -> None:
    """Its allocation ends, and all that was in it."""
    launched = Launched("slurm", {"layout": "1x1", "salloc": "-p main"})
    with other_notebook(launched, "/nowhere"):
        assert len(slurm.jobs()) == 1
    wait_until(lambda: not slurm.jobs(), "the allocation has ended")


def test_a_salloc_that_is_killed(slurm: Slurm, hosts: list[Host]) -> None:
    """Its allocation, of as many nodes as are free, ends with it; a restart has another one.

    With Slurm's controller away at the end it is said that the job may run on, and what ends it.
    """
    other = slurm.allocate("-N2", "--exclusive")
    with make_world("1:2x1", salloc="-p main", name="range") as world:
        shown = slurm.run("squeue", "--noheader", "--name=range", "--format=%A %D").stdout
        before, nodes = shown.split()
        assert nodes == "1"
        guard = psutil.Process(world.session.link.agent.pid)
        below = guard.children(recursive=True)
        (salloc,) = (each for each in below if each.name() == "salloc")
        said = dies_when(world, salloc.kill)
        assert f"`--salloc -p main`: salloc was killed by SIGKILL, and job {before} ends" in said
        wait_until(lambda: slurm.jobs() == [other], "the allocation has ended")
        world.restart()
        (job,) = {*slurm.jobs()} - {other}
        slurm.control.link_down()
        left = world.session.shutdown()
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
def test_what_slurm_refuses(salloc: str, told: str, slurm: Slurm, hosts: list[Host]) -> None:
    """In one line."""
    with pytest.raises(StartError) as found:
        make_world(salloc=salloc).start()
    assert str(found.value).startswith(f"the workers could not start: {told}")
    assert "\n" not in str(found.value)


def test_more_nodes_than_a_partition_has(slurm: Slurm, hosts: list[Host]) -> None:
    """Slurm's own word for it is shown while the job waits, and Stop ends the wait."""
    with pytest.raises(KeyboardInterrupt):
        stop_start(make_world("9x2", salloc="-p main"), "PartitionNodeLimit")
    wait_until(lambda: not slurm.jobs(), "it is in the queue no more")


def test_an_allocation_of_its_own(
    slurm: Slurm, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for in the queue, where nothing is left after Stop; it ends with the head."""
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
    for text in world.session.starting_texts():
        if "waits in Slurm's queue" in text and not said:
            said = True
            slurm.cancel(all_taken)
    with world:
        assert said
        shown = slurm.run("squeue", "--noheader", "--format=%j %D %C %l").stdout
        assert shown.split() == ["mine", "2", "4", "7:00"]
        assert world.size == 2
        (head,) = children_of(world.session.link.agent.pid)
        os.kill(head, signal.SIGKILL)
        wait_until(lambda: not slurm.jobs(), "the allocation has ended")
        with pytest.raises(AgentLost):
            world.execute("pass")
