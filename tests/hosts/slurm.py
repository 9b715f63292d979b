"""A real Slurm over the hosts: munged, slurmctld on a host of its own, slurmd on each other.

Each node has 8 CPUs, 16,000 MB and 2 GPUs, none of which it has.  On the hosts Slurm's commands
need nothing; on this machine they need `Slurm.environ`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hosts.network import Host, Network, end, of_tests
from tests.waiting import SOON, wait_until

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


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    if absent := [name for name in DAEMONS if not shutil.which(name)]:
        return f"no {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client munge)"
    return None


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

    @property
    def environ(self) -> dict[str, str]:
        """For Slurm's commands on this machine."""
        return {"SLURM_CONF": str(self.config)}

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """What one of Slurm's commands does on this machine, outside of any allocation."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        done = subprocess.run(
            words, env=kept | self.environ, capture_output=True, text=True, timeout=SOON
        )
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
            for name, value in {**self.environ, "SLURM_JOB_ID": str(job)}.items():
                patch.setenv(name, value)
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
        process = _popen(["munged", "--foreground", "--force", *options])
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


def _popen(command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
