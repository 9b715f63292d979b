"""Dead ranks: reports of deaths, the policies of `--on-failure`, survivors and new workers."""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nbdist.errors import AgentLost, NbdistError, RanksReleased, UsageError, WorkerDied, WorkerError
from nbdist.output.events import Died
from nbdist.system.folders import RuntimeFolder
from nbdist.system.processes import children_of
from nbdist.wire.places import RankPosition
from nbdist.world import dispatch
from nbdist.world.agents import AgentProcess
from nbdist.world.states import WorldState
from nbdist.world.world import World
from tests.cells import follow, run
from tests.waiting import SOON, once, wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

LIMIT = 600 << 20


@pytest.fixture(scope="module")
def started(new_world: NewWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with new_world(2, log_dir=str(tmp_path_factory.mktemp("logs"))) as world:
        yield world


@pytest.fixture
def logged(started: World) -> World:
    """A world of two ranks with log files."""
    if started.size != 2:
        started.restart(2)
    return started


def death(world: World, source: str) -> tuple[Died, list[str]]:
    """Run cell 5, in which the last rank dies; return its death and the lines of its block."""
    last = world.size - 1
    pid = world.pids[last]
    ran = run(world, source, count=5)
    died = ran.running.transcript.errors[last]
    assert isinstance(died, Died)
    assert died.pid == pid
    return died, ran.lines(last)


def test_a_crash_shows_its_calls_from_the_cell(logged: World) -> None:
    """A crashed rank's block shows its calls from the cell inwards, not a child's earlier crash.

    Spawned workers are tested in `attacks/test_environments.py`.
    """
    end = "os.kill(os.getpid(), signal.SIGSEGV)"
    source = f"import os, signal\ndef end():\n    {end}\nprint('hello')\nif rank: end()"
    died, lines = death(logged, source)
    assert died.exit_code == -signal.SIGSEGV
    assert lines == [
        "hello",
        "Fatal Python error: Segmentation fault, in",
        "  Cell In[5], line 5",
        "    if rank: end()",
        "  Cell In[5], line 3, in end",
        f"    {end}",
    ]
    assert died.last_lines == tuple(lines)
    assert lines[1] in Path(logged.logs[1], "stderr.log").read_text().splitlines()
    child = "import ctypes, os\npid = os.fork()\nif not pid: os.abort()\nos.waitpid(pid, 0)\n"
    _, again = death(logged, f"{child}if rank: ctypes.string_at(0)")
    assert again[:3] == [*lines[1:3], "    if rank: ctypes.string_at(0)"]
    assert again[3].startswith("  ctypes/__init__.py, line ")
    assert len(again) == 5


@pytest.fixture
def small_group(control_group: Callable[..., Path]) -> Path:
    """A control group with little memory."""
    limits = "memory.max", "memory.limit_in_bytes"
    group = control_group("memory", *limits)
    for limit in filter(Path.exists, (group / name for name in limits)):
        limit.write_text(str(LIMIT))
    return group


def test_the_last_line_names_an_agent_out_of_memory(small_group: Path) -> None:
    """If the kernel has killed an agent for lack of memory, the agent's last line says so."""
    procs, runtime = small_group / "cgroup.procs", RuntimeFolder()
    procs.write_text(str(os.getpid()))
    try:
        agent = AgentProcess(runtime.path, fork_server=False)
    finally:
        (small_group.parent / "cgroup.procs").write_text(str(os.getpid()))
    wait_until(lambda: children_of(agent.pid), "it is below its guard")
    for pid in (agent.pid, *children_of(agent.pid)):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    fill = f"open({str(procs)!r}, 'w').write('0'); x = [bytearray(10_000_000) for _ in range(99)]"
    subprocess.run([sys.executable, "-c", fill], check=False, timeout=SOON)
    assert select.select([agent], [], [], SOON)[0] == [agent]
    lost = AgentLost(agent.host, agent.exit_code(), agent.last_lines()[-1])
    assert "was killed by SIGKILL (most likely killed by the kernel for lack of" in str(lost)
    agent.end(SOON)
    agent.close()
    runtime.close()


def test_a_line_names_a_rank_out_of_memory(logged: World, small_group: Path) -> None:
    """If the kernel has killed a rank for lack of memory, a line says so."""
    logged.execute("pass")
    (small_group / "cgroup.procs").write_text(str(logged.pids[1]))
    # The agent reads the group's count of kills while the cell sleeps.
    fill = "if rank:\n    x = [bytearray(10_000_000) for _ in range(99)]"
    died, (line,) = death(logged, f"import time\ntime.sleep(0.3)\n{fill}")
    assert died.exit_code == -signal.SIGKILL
    assert line.startswith("most likely killed by the kernel for lack of memory: oom_kill in ")
    assert str(small_group) in line
    assert line.endswith(" went from 0 to 1")


SUM = "t = torch.ones(1); dist.all_reduce(t); assert t.item() == world_size"

DIES = "import os, time\nif rank == 1: time.sleep(0.2); os.kill(os.getpid(), 9)\n"


@pytest.fixture
def world(started: World) -> World:
    """A ready world of four ranks with `kept`, and no restarts or policy of an earlier test."""
    started.engine.rank_table.pop_replaced()
    started.engine.config = started.engine.config.with_changes(on_failure="heal")
    if started.state is not WorldState.READY or started.size != 4:
        started.restart(4)
    started.execute("kept = rank")
    return started


def test_restart_all_gives_all_ranks_new_workers(world: World) -> None:
    """With `restart-all` a death makes all workers new, and is reported once."""
    world.engine.config = world.engine.config.with_changes(on_failure="restart-all")
    before = dict(world.pids)
    ran = run(
        world,
        "import os, threading, time\n"
        "if rank == 3: threading.Timer(0.2, os.kill, (os.getpid(), 9)).start()\n"
        "elif rank == 1:\n"
        f"    while os.path.exists('/proc/{before[3]}'): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), 9)\n"
        "elif rank == 2: dist.barrier()\n"
        "else: time.sleep(600)",
    )
    error = ran.error
    assert isinstance(error, WorkerDied)
    assert error.rank == 1
    assert "All workers were restarted (`--on-failure restart-all`); their" in str(error)
    with pytest.raises(WorkerDied):
        dispatch.check(world.engine, ran.running)
    assert world.engine.rank_table.pop_replaced() == {}
    assert set(before.values()).isdisjoint(world.pids.values())
    assert world.gather("globals().get('kept')") == [None] * 4
    world.execute(SUM)


def test_the_stop_policy_ends_all_workers_after_deaths(world: World) -> None:
    """With `stop` a death ends all workers, an exception does not; a start makes new workers."""
    world.engine.config = world.engine.config.with_changes(on_failure="stop")
    before = dict(world.pids)
    error = run(world, "if rank == 1: raise ValueError\ndist.barrier()").error
    assert isinstance(error, WorkerError)
    assert world.gather("kept") == [0, 1, 2, 3]
    error = run(world, f"{DIES}dist.barrier()").error
    assert isinstance(error, WorkerDied)
    assert "All workers were ended (`--on-failure stop`)" in str(error)
    assert world.state is WorldState.STOPPED
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before.values())
    world.start()
    world.execute(SUM)


def test_survivors_are_freed_whoever_they_wait_for(world: World) -> None:
    """A death also releases survivors that wait in a group without the dead rank."""
    waits = "if rank == 2: dist.barrier(group=pair)\nif rank == 3: time.sleep(3)"
    error = run(world, f"pair = dist.new_group([2, 3])\n{DIES}{waits}").error
    assert isinstance(error, WorkerDied)
    world.execute(SUM)


LAST_TO_COME = """
import os, time
if rank == 0:
    while not os.path.exists({gate!r}): time.sleep(0.01)
dist.broadcast(torch.ones(100), 0)
"""


def test_a_survivor_that_gloo_does_not_wake_is_restarted(world: World, tmp_path: Path) -> None:
    """A survivor that gloo does not wake is restarted, with the reason; the others keep all.

    Gloo forgets data that it could not write to a connection that has ended, if its own thread has
    not noticed the end yet (torch 2.13).  The test holds that thread meanwhile, for about 6 s.
    """
    sleeper, dying = (psutil.Process(world.pids[rank]) for rank in (0, 3))
    gate = tmp_path / "gate"

    def places() -> Mapping[int, RankPosition]:
        running = world.engine.task_table.last
        return defaultdict(RankPosition, running.reports.places if running else {})

    def all_wait() -> bool:
        return all(places()[rank].operation for rank in (1, 2, 3)) and rests()

    def rests() -> bool:
        states = [task.joinpath("stat").read_text() for task in tasks_of(sleeper)]
        return all(state.rpartition(")")[2].split()[0] in "St" for state in states)

    def die() -> None:
        (loop,) = (task for task in tasks_of(sleeper) if "gloo_tcp" in (task / "comm").read_text())
        with held(int(loop.name)):
            dying.kill()
            wait_until(lambda: all(c.status != "ESTABLISHED" for c in sleeper.net_connections()))
            gate.touch()
            wait_until(lambda: places()[0].operation and rests(), "it sends")

    with once(all_wait, die, "the others wait"):
        error = run(world, LAST_TO_COME.format(gate=str(gate))).error
    assert isinstance(error, WorkerDied)
    assert "rank 3 on " in str(error)
    assert "Gloo did not wake rank 0 from a collective that had ended." in str(error)
    assert "Ranks 0,3 were restarted" in str(error)
    assert world.gather("globals().get('kept')") == [None, 1, 2, None]
    world.execute(SUM)


def tasks_of(process: psutil.Process) -> list[Path]:
    """Return the threads of a process, as folders of /proc."""
    return [*Path(f"/proc/{process.pid}/task").iterdir()]


@contextmanager
def held(thread: int) -> Iterator[None]:
    """Halt only a single thread of another process, as a debugger does; ptrace(2)."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long] * 4
    seize, interrupt, detach, of_any_kind = 0x4206, 0x4207, 17, 0x40000000
    assert ptrace(seize, thread, 0, 0) == 0, os.strerror(ctypes.get_errno())
    ptrace(interrupt, thread, 0, 0)
    os.waitpid(thread, of_any_kind)
    try:
        yield
    finally:
        ptrace(detach, thread, 0, 0)


def kill_idle(world: World, rank: int) -> None:
    """Kill a rank while no cell runs, and wait until the world knows of the death."""
    os.kill(world.pids[rank], signal.SIGKILL)
    wait_until(lambda: world.status()[rank].state == "dead")


def test_semaphores_of_a_killed_rank_are_removed(world: World) -> None:
    """A killed rank's semaphores are removed, by the resource tracker that the rank had started."""
    world.execute(
        "import multiprocessing\nsemaphore = multiprocessing.get_context('spawn').Lock()\n"
        "where = '/dev/shm/sem.' + semaphore._semlock.name.lstrip('/')"
    )
    made = [*map(Path, world.gather("where"))]
    assert all(path.exists() for path in made)
    kill_idle(world, 1)
    wait_until(lambda: not made[1].exists(), "its semaphore is removed")
    assert [path.exists() for path in made] == [True, False, True, True]
    world.execute("[globals().pop(each, None) for each in ('semaphore', 'where')];")
    wait_until(lambda: not any(path.exists() for path in made), "the others' are removed")


def test_survivors_form_another_group_if_one_more_rank_dies(world: World) -> None:
    """If a survivor dies while the group forms, ranks that wait in the store form another group."""
    world.execute(
        "import nbdist.worker.group.group as group_module, os, threading, time\n"
        "def slow(*_): time.sleep(1); os._exit(4)\n"
        "if rank == 0: group_module.Group.regroup = slow"
    )
    kill_idle(world, 1)
    world.execute(SUM)
    assert world.engine.rank_table.pop_replaced().keys() == {0, 1}
    assert world.gather("globals().get('kept')") == [None, None, 2, 3]


def test_ranks_that_await_a_failing_survivor_lose_nothing(world: World) -> None:
    """If a survivor fails once all have its address, ranks that await it in gloo lose nothing."""
    world.execute(
        "import gc, socket, time\n"
        "from nbdist.worker.group.gloo import Gloo\n"
        "from nbdist.worker.group.stores import AbortableStore\n"
        "awaited = AbortableStore.awaited\n"
        "def fail(*args, **options):\n"
        "    awaited(*args, **options)\n"
        "    time.sleep(0.5)  # the others are further by then\n"
        "    raise MemoryError\n"
        "(port,) = [each._port for each in gc.get_objects() if type(each) is Gloo]\n"
        "port = socket.htons(port)"
    )
    ports = world.gather("port")
    fails = ports.index(max(ports))  # the rank with less waits until the other connects
    world.execute(f"if rank == {fails}: AbortableStore.awaited = fail")
    lost = {fails, (fails + 1) % 4}
    kill_idle(world, max(lost - {fails}))
    world.execute(SUM)
    assert world.engine.rank_table.pop_replaced().keys() == lost
    kept = [None if rank in lost else rank for rank in range(4)]
    assert world.gather("globals().get('kept')") == kept


def test_replace_renews_the_given_ranks_only(world: World) -> None:
    """Replaced ranks are new, and the others keep all; while a cell runs `replace` is refused."""
    for ranks in ([0, 3], [0, 1, 2, 3]):
        world.execute("kept = net = rank")
        before = dict(world.pids)
        world.replace(ranks)
        assert [rank for rank in before if before[rank] != world.pids[rank]] == ranks
        kept = [None if rank in ranks else rank for rank in range(4)]
        assert world.gather("globals().get('kept')") == kept
        assert re.search("kept(,| and) net", world.engine.names.lacking_text(ranks))
        world.execute(SUM)
    running = world.submit(world.task("import time; time.sleep(1)"))
    with pytest.raises(UsageError, match="still running an earlier cell"):
        world.replace([1])
    assert follow(world, running).error is None


def test_what_a_failed_cell_has_begun_is_ended(world: World) -> None:
    """Collectives that a failed cell has begun do not meet those of the next cell."""
    begun = "works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]"
    error = run(world, f"if rank == 1: raise ValueError('bad')\n{begun}").error
    assert isinstance(error, WorkerError)
    assert not isinstance(error, RanksReleased)
    result = world.execute("t = torch.full((1,), 5.0); dist.all_reduce(t)", fetch=("t.item()",))
    assert list(result) == [20.0] * 4
    assert world.gather("kept") == [0, 1, 2, 3]


def test_named_variables_survive_a_restart(world: World) -> None:
    """A restart keeps each rank's named variables; if one cannot be kept, no worker ends."""
    world.execute("big = torch.full((100_000,), float(rank)); both = [big, big]; other = 1")
    world.restart(keep=["big", "both"])
    assert world.gather("big.sum().item()") == [rank * 100_000.0 for rank in range(4)]
    assert world.gather("both[0] is both[1] is big") == [True] * 4
    assert world.gather("'other' in globals()") == [False] * 4
    world.replace([2], keep=["big"])
    assert world.gather("big[0].item()") == [0.0, 1.0, 2.0, 3.0]
    assert world.engine.names.lacking_text([2]) == "both"
    world.execute("import threading; lock = threading.Lock()")
    before = dict(world.pids)
    for keep in ("nowhere", "lock"):
        with pytest.raises(NbdistError, match=keep):
            world.restart(keep=[keep])
    assert world.pids == before
