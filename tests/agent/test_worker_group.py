"""Tests of `nbdist.agent.worker_group`: failed starts, how ranks meet, and a node's own spec."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nbdist import topology
from nbdist.agent import worker_group
from nbdist.agent.processes import WorkerProcess
from nbdist.agent.worker import Worker
from nbdist.agent.worker_group import (
    FormingCanceller,
    HeldPort,
    WorkerGroup,
    adapt_spec,
    interface_of,
    problem_in,
)
from nbdist.config import WorldConfig
from nbdist.topology import Position, usable_cores
from nbdist.wire.control import ControlReply, Failed, Ok
from nbdist.wire.messages import StartFailure
from nbdist.wire.node_messages import StartPart
from nbdist.wire.spec import WorldSpec
from nbdist.wire.work import mark
from tests.agent.sources import TOKEN, Program, Source, worker_start
from tests.waiting import SOON, until, wait_until


async def started_with(
    source: Source, runtime: Path, program: Path | str, size: int = 3
) -> StartFailure:
    """Return the failure of a start whose workers run `program`."""
    group = WorkerGroup(runtime, source.children, None, lambda *_: None, lambda _: None)
    spec = replace(worker_start(runtime).world, world_size=size, python=str(program))
    try:
        failure = await group.execute(StartPart(spec, tuple(range(size)), 1))
    finally:
        group.close()
    assert (group.all, group.alive()) == ({}, [])
    assert failure.command == f"{program} -P -m nbdist.worker"
    assert failure.host == socket.gethostname()
    return failure


@pytest.mark.world
async def test_a_failed_start_says_which_rank_and_why(
    source: Source, runtime: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed start names the rank, the reason and its last lines; all other ranks are ended."""
    ends = program("[ $RANK = 1 ] || exec sleep 600\necho last words; exit 3")
    async with asyncio.timeout(5.0):
        found = await started_with(source, runtime, ends)
    assert (found.rank, found.reason) == (1, "it exited with code 3")
    assert found.last_lines == ("last words",)
    monkeypatch.setattr(worker_group, "GROUP_START_TIMEOUT", 1.0)
    found = await started_with(source, runtime, program("echo starting; exec sleep 600"))
    assert (found.rank, found.reason) == (0, "it was not ready after 1 s")
    assert found.last_lines == ("starting",)


@pytest.mark.world
async def test_a_killed_worker_is_named_rather_than_workers_that_fail_after_it(
    source: Source, runtime: Path, program: Program, tmp_path: Path
) -> None:
    """A failed start names the killed rank, even if another rank fails before this is noticed."""
    write = f"cd {tmp_path}; echo $$ > $RANK.new; mv $RANK.new $RANK.pid"
    waits = "while [ ! -e fail ]; do sleep 0.01; done; exit 1"
    ends = program(f"{write}; [ $RANK = 1 ] || exec sleep 600; {waits}")
    starting = asyncio.create_task(started_with(source, runtime, ends))
    await until(lambda: len([*tmp_path.glob("*.pid")]) == 3, "all workers have started")
    other, killed = (psutil.Process(int((tmp_path / f"{r}.pid").read_text())) for r in (1, 2))
    killed.kill()  # from here without `await`, so that both exits are noticed together
    wait_until(lambda: killed.status() == psutil.STATUS_ZOMBIE, "it is killed")
    (tmp_path / "fail").touch()
    wait_until(lambda: other.status() == psutil.STATUS_ZOMBIE, "it exits")
    failure = await starting
    assert (failure.rank, failure.reason) == (2, "it was killed by SIGKILL")


async def test_impossible_starts_fail_before_any_process(source: Source, runtime: Path) -> None:
    """Too many workers are refused before a start; a missing program gives the system's error."""
    found = await started_with(source, runtime, "python", size=10**7)
    assert "10000000 workers take" in found.reason.replace(",", "")
    assert os.listdir(runtime) == []
    found = await started_with(source, runtime, "/nowhere/python")
    assert "/nowhere/python" in found.reason
    assert "No such file or directory" in found.reason


@pytest.mark.world
async def test_a_death_calls_off_ranks_that_wait(runtime: Path, source: Source) -> None:
    """A death creates the file that calls off ranks that wait, unless all ranks have met."""
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as child:  # noqa: ASYNC220
        process = WorkerProcess(child.pid)
        source.children.expect(child.pid, process.set_exited)
        with FormingCanceller(runtime / "over", [process.exited]):
            process.kill()
            await until((runtime / "over").exists)
        child.returncode = await process.exited
    late = asyncio.get_running_loop().create_future()
    with FormingCanceller(runtime / "late", [late]):
        pass
    late.set_result(-9)
    await asyncio.sleep(0)
    assert not (runtime / "late").exists()


READY = f"printf %s '{mark(TOKEN, 'ready').decode()}'; exec sleep 1000"


@pytest.mark.world
@pytest.mark.parametrize(
    ("text", "timeout", "why"),
    [
        ("exit 1", SOON, "it exited with code 1"),
        ("exec sleep 1000", 0.0, "it was not ready after 0 s"),
        (READY, SOON, "it cannot be reached: "),
        ("exec sleep 1000", SOON, ""),
    ],
)
async def test_a_worker_that_cannot_start_is_ended(
    runtime: Path, source: Source, program: Program, text: str, timeout: float, why: str
) -> None:
    """A worker that cannot start is ended with a reason, and calls off the start of others.

    A worker whose own start was called off is ended without a reason.
    """
    start = worker_start(runtime)
    start = replace(start, world=replace(start.world, python=str(program(text))))
    worker = Worker(start, source.source, None, lambda *_: None)
    dies = asyncio.get_running_loop().create_future()
    with FormingCanceller(runtime / "over", [dies]) as call_off:
        if not why:
            dies.set_result(-9)
        await call_off.start(worker, timeout)
    assert [failed for failed, _ in call_off.failures] == [worker] * bool(why)
    assert all(str(error).startswith(why) for _, error in call_off.failures)
    assert (runtime / "over").exists()
    await worker.stop(0.0)
    assert worker.state == "dead"


@pytest.mark.own_agent
@pytest.mark.parametrize("source", ["fork"], indirect=True)
async def test_a_fork_that_comes_late_is_killed(
    runtime: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start ends in its own time; a late fork is killed, and so is a fork server that hangs."""
    await source.source.prepare()
    server = psutil.Process(source.server_pid)
    before = {*psutil.Process().children()}

    async def start_in_vain() -> None:
        worker = Worker(worker_start(runtime), source.source, None, lambda *_: None)
        with FormingCanceller(runtime / "over") as call_off:
            await call_off.start(worker, 0.2)
        ((_, error),) = call_off.failures
        assert (str(error), server.is_running()) == ("it was not ready after 0 s", True)
        await worker.stop(0.0)

    server.suspend()
    await start_in_vain()
    server.resume()
    worker = psutil.Process((await source.worker(1)).pid)  # forked after the late fork
    await until(
        lambda: {*psutil.Process().children()} - before == {worker}, "the late one is killed"
    )
    server.suspend()
    with monkeypatch.context() as patched:
        patched.setattr("nbdist.agent.processes.FORK_TIMEOUT", 1.5)
        await start_in_vain()
    await until(lambda: not server.is_running(), "it is killed, though nobody waits for it")
    await source.worker(2)


@pytest.mark.parametrize(
    ("address", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_a_held_port_is_for_user_code(address: str, family: socket.AddressFamily) -> None:
    """No other program gets a held port, but user code can listen on it with SO_REUSEADDR."""
    if address not in {each.address for on in psutil.net_if_addrs().values() for each in on}:
        pytest.skip(f"this machine has no {address}")
    port = HeldPort(address)
    try:
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port.number))
        for _ in range(2):
            with socket.create_server((address, port.number), family=family):
                pass
    finally:
        port.close()


START = "rank 1 could not start: x"


@pytest.mark.parametrize(
    ("starts", "answers", "problem"),
    [
        ([""], [Ok()], ""),
        (["", START], [None], START),
        ([], [Ok(), None], "a rank did not answer"),
        ([], [Failed("broken", unfit=True), None], "broken"),
        ([START], [Failed("can't start new thread", unfit=False)], "no further process or thread"),
    ],
)
def test_the_first_problem_counts(
    starts: list[str], answers: list[ControlReply | None], problem: str
) -> None:
    """A new worker's problem comes before a survivor's; a lack of threads comes before both."""
    said = problem_in(starts, answers)
    assert said.startswith(problem)
    assert bool(said) == bool(problem)


SEATS = (Position(0, 0), Position(1, 0), Position(1, 1))


def spec(cwd: str, threads: int = 0) -> WorldSpec:
    """Return the spec of three ranks for the second node, which has two of the ranks."""
    environ = {"SEED": "1", "CUDA_VISIBLE_DEVICES": ""}
    return WorldSpec(3, "gloo", environ, cwd, (), threads, "", slots=SEATS, node=1)


def test_the_environment_is_the_nodes_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node uses its own environment, interpreter, cores and GPUs, and the requested variables."""
    here = adapt_spec(spec(str(tmp_path)), {"HOME": "/root", "SEED": "0"}, "eth0")
    assert here.environ == {"HOME": "/root", "SEED": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert (here.python, here.interface, here.gpus) == (sys.executable, "eth0", ())
    assert (here.cwd, here.threads) == (str(tmp_path), max(1, usable_cores() // 2))
    assert adapt_spec(spec(str(tmp_path), threads=7), {}, "eth0").threads == 7
    assert adapt_spec(spec("/nowhere/at/all"), {}, "eth0").cwd == str(Path.home())
    assert (interface_of("127.0.0.1"), interface_of("203.0.113.7")) == ("lo", "")
    monkeypatch.setattr(topology, "installed_gpus", lambda: 4)
    asked = replace(spec(str(tmp_path)), environ={}, config=WorldConfig(gpus="1,3"))
    assert adapt_spec(asked, {}, "eth0").gpus == ("1", "3")
    assert adapt_spec(asked, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "eth0").gpus == ("1", "3")
    assert adapt_spec(replace(asked, config=WorldConfig()), {}, "eth0").gpus == ("0", "1", "2", "3")
