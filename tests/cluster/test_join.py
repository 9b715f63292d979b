"""Tests of `nbdist.cluster.join`: a world of machines that come by themselves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.wire.offers import SUFFIX, read_key_file
from nbdist.wire.ticket import KeyPair
from nbdist.world.world import World
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.own_agent

COMMAND = (sys.executable, "-m", "nbdist.terminal", "join")


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where keys lie, in a state folder of the test's own; no job launcher has started this."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", "/tmp")
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "state" / "nbdist" / "joins"


@pytest.fixture
def world(offers: Path) -> Iterator[World]:
    """Not started yet."""
    world = World(layout="2x1", launcher="join", address="127.0.0.1", log_dir="", show=False)
    yield world
    world.shutdown()


def place_in(offers: Path) -> str:
    """Wait until a world waits, and return the place that it shows."""
    wait_until(lambda: list(offers.glob(f"*{SUFFIX}")), "a key is there")
    (file,) = offers.glob(f"*{SUFFIX}")
    return ":".join(file.stem.rsplit("-", 1))


def died(world: World) -> list[int]:
    """The ranks that have died."""
    world.session.receive_waiting()
    return [*world.session.dead]


def twice_by_torchrun(place: str) -> list[str]:
    """The command that has torchrun start it twice, as on a node with two GPUs.

    Through torchx's component `dist.ddp`, where that is installed.
    """
    if torchx := shutil.which("torchx"):
        ddp = ["run", "-s", "local_cwd", "dist.ddp", "-j", "1x2", "-m", "nbdist.terminal"]
        return [torchx, *ddp, "--", "join", place]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--master-port=0"]
    return [*torchrun, "--log-dir=.", "--nproc-per-node", "2", *COMMAND, place]


def twice_by_mpirun(place: str) -> list[str]:
    """The same of Open MPI, where that is installed; else by hand, once."""
    if shutil.which("mpirun") is None:
        return [*COMMAND, place]
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *COMMAND, place]


def test_machines_come_by_themselves(
    world: World, offers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever starts the command, one agent comes of it; who has come is said meanwhile.

    All processes end with the world, with 0, and its key is gone.
    """
    # Torchx calls the torchrun that it finds, and copies the folder in which it is.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (folder := tmp_path / "cwd").mkdir()
    said: list[str] = []
    start = threading.Thread(target=lambda: said.extend(world.session.starting_texts()))
    start.start()
    place = place_in(offers)
    joined = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, cwd=folder)
        for command in (twice_by_torchrun(place), twice_by_mpirun(place))
    ]
    start.join(SOON)
    world.execute("import os, torch, torch.distributed as dist; t = torch.ones(1)")
    world.execute("dist.all_reduce(t); mpi = [n for n in os.environ if n.startswith('OMPI_')]")
    seen = world.gather("(float(t), world_size, os.environ['GROUP_WORLD_SIZE'], mpi)")
    assert seen == [(2.0, 2, "2", [])] * 2
    assert world.session.resolve("auto") == 2  # for a cell that says it again
    host = os.uname().nodename
    texts = [text for text in said if text]
    assert f"starting: run `nbdist join {place}` on each machine · 0 of 2 nodes" in texts
    assert any(text.startswith(f"starting: 2 of 2 nodes: {host} #0 (1), {host}") for text in texts)
    world.shutdown()
    assert [each.wait(SOON) for each in joined] == [0, 0]
    assert list(offers.iterdir()) == []
    stale = subprocess.run([*COMMAND, place], capture_output=True, text=True, timeout=SOON)
    assert stale.stderr.startswith(f"nbdist: `nbdist join {place}`: no world waits there (Conn")


def test_only_who_has_the_key_comes(world: World, offers: Path) -> None:
    """An old key is refused in a line; who ends the command takes its ranks along."""
    start = threading.Thread(target=world.start)
    start.start()
    place = place_in(offers)
    (file,) = offers.iterdir()
    ticket = read_key_file(file)
    assert all(secret not in place for secret in (ticket.keys.secret, ticket.keys.public))
    for old in (
        replace(ticket, keys=KeyPair.new()),
        replace(ticket, server_key=KeyPair.new().public),
    ):
        refused = subprocess.run(
            [*COMMAND, place, "--key-file", "-"],
            input=old.to_line().decode(),
            capture_output=True,
            text=True,
            timeout=SOON,
        )
        assert refused.returncode == 2
        assert f"does not take this key, made for the world at {place}" in refused.stderr
    right = [subprocess.Popen([*COMMAND, place], stdin=subprocess.DEVNULL) for _ in range(2)]
    start.join(SOON)
    assert world.gather("rank") == [0, 1]
    right[1].terminate()
    assert right[1].wait(30) == 128 + signal.SIGTERM
    wait_until(lambda: died(world), "its rank has died")
    world.shutdown()
    assert right[0].wait(30) == 0
    assert list(offers.iterdir()) == []
