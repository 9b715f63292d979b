"""Tests of `nbdist.cluster.head`: ranks, code and Stop on several nodes, and answers of nodes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import tempfile
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from nbdist.agent.code_folder import CodeFolder
from nbdist.agent.group_formation import group_by_node
from nbdist.cluster.head import Head, displayed_only, first_answer, on_head_clock, rows_of
from nbdist.cluster.node import KeptCode, NodeLost, place_new_world
from nbdist.cluster.nodes import NodePool
from nbdist.config import Patience
from nbdist.errors import RanksReleased, ScaleError, UsageError, WorkerDied, WorkerError
from nbdist.output.events import Died, Done, Failure, Text
from nbdist.system.processes import Guard
from nbdist.terminal import mcp
from nbdist.wire import messages
from nbdist.wire.control import Candidate, Complete, Completions
from nbdist.wire.messages import (
    BatchAcknowledged,
    CodeHeld,
    GetCode,
    Interrupt,
    Landmark,
    Outputs,
    PutCode,
)
from nbdist.wire.node_messages import Form, Formed, GetHeld, LiveRanks, NodeDown, Renumber
from nbdist.wire.status import WorkerStatus
from nbdist.wire.store import STORE_SOCKET
from nbdist.world import dispatch, inbox
from nbdist.world.code_sync import archive_of
from nbdist.world.stop import SPARE_TIMEOUT
from nbdist.world.task_error import error_of
from nbdist.world.world import World
from tests.cells import follow, give_up_on_c_code, run_for, stop
from tests.cluster.test_node import SPEC, wanted
from tests.cluster.test_node import node as node_that
from tests.faults.step_stops import ADAM, BEGIN, PLAIN
from tests.waiting import SOON, until, wait_until

pytestmark = [pytest.mark.shared_world, pytest.mark.own_agent]

DIES = """
import os, torch.distributed as dist
if rank == 1: os.kill(os.getpid(), 9)
dist.barrier()
"""

SUM = """
import os, torch, torch.distributed as dist
total = torch.tensor([float(rank)])
dist.all_reduce(total)
slot = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
"""

MEMORY = """
import os, re
def memory_of(tensor):
    at = tensor.data_ptr()
    for line in open("/proc/self/maps"):
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= at < last:
            return line.split()[4], line.split()[5]
"""


def test_big_values_reach_ranks_of_two_nodes(world: World) -> None:
    """Ranks of a node share a sent value; values are gathered, scattered, compared and synced."""
    big = torch.arange(1 << 20)
    world.execute(MEMORY + "where, total = memory_of(big), int(big.sum())", names={"big": big})
    assert world.gather("total") == [int(big.sum())] * 4
    inodes = [inode for inode, name in world.gather("where")]
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]
    world.execute("import torch; mine = torch.full((1 << 18,), float(rank)); mine[7] = 0.5")
    for rank, value in enumerate(world.gather("mine")):
        assert value.shape == (1 << 18,)
        assert (value[7], value[8]) == (0.5, rank)
    world.scatter("part", torch.arange(1 << 20))
    world.execute("ends = int(part[0]), int(part[-1])")
    quarter = 1 << 18
    assert world.gather("ends") == [(r * quarter, (r + 1) * quarter - 1) for r in range(4)]
    given = torch.ones(1 << 18)
    result = world.run(lambda x: x * 3, given)
    assert all(torch.equal(result.rank(r), given * 3) for r in range(4))
    (lent,) = world.call("diff.lend", [3], expression="mine", paths=("",)).values()
    found = world.call("diff.compare", [0], expression="mine", packed=lent.packed)
    assert found.rank(0)[""].most == 3.0
    world.sync(["mine"], source=3, ranks=range(3))
    world.execute("same = bool((mine[8:] == 3).all())")
    assert world.gather("same") == [True] * 4


def test_a_rank_in_c_code_stops_late_and_loses_nothing(world: World) -> None:
    """The head kills no rank that still runs C code when control is back in the notebook."""
    give_up_on_c_code(world, 3, control_timeout=SPARE_TIMEOUT + 0.3)


def test_stop_ends_training_at_a_common_step(world: World) -> None:
    """Ranks of both nodes end at the same step; a second Stop interrupts ranks that make none."""
    world.execute("import torch, torch.distributed as dist" + BEGIN + ADAM)
    for _ in range(3):
        running = run_for(world, PLAIN, 0.5)
        stop(world, running)
        ends = {track.done.steps for track in running.transcript if track.done is not None}
        assert len(ends) == 1
        assert ends != {0}
        first, *others = world.gather("replicas()")
        assert others == [first] * 3
    running = run_for(world, f"{PLAIN}    if rank == 2: time.sleep(600)\n", 0.5)
    world.interrupt()
    stop(world, running)  # the second Stop waits for no common step
    assert running.transcript.deaths == {}
    assert world.gather("int(rank)") == [0, 1, 2, 3]


TRAINS_BUT_ONE = """
where = ""
if rank != 3:
    try:
        while True:
            optimizer.step()
            dist.barrier(group)
    except KeyboardInterrupt as error:
        while error.__traceback__.tb_next:
            error.__traceback__ = error.__traceback__.tb_next
        where = error.__traceback__.tb_frame.f_code.co_name
"""


def test_unfinished_ranks_stop_at_a_step_though_one_has_finished(world: World) -> None:
    """A Stop for all ranks ends the unfinished ones at a common step, although one has finished."""
    world.execute(
        "import torch, torch.distributed as dist\ngroup = dist.new_group([0, 1, 2])\n"
        "optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])"
    )
    found = list[list[str]]()
    for _ in range(5):  # a busy machine may have no time for the answers
        running = world.submit(world.task(TRAINS_BUT_ONE))
        for _ in world.follow(running):
            if running.unfinished == (0, 1, 2) and running.age > 0.5:
                break
        world.engine.connection.link.send(Interrupt((0, 1, 2, 3)))
        assert follow(world, running).error is None
        found.append(world.gather("where"))
        if found[-1] == [*["_wait_for_stop_step"] * 3, ""]:
            break
    else:
        pytest.fail(f"ranks were interrupted between steps: {found}")


FINISHES = """
for number in range(5):
    optimizer.zero_grad()
    loss_of(model).backward()
    if number == 4 and rank > 1:
        time.sleep(0.8)
    optimizer.step()
"""


def test_stop_counts_the_steps_of_a_finished_machine(world: World) -> None:
    """Ranks of the other machine make as many steps as the ranks that have finished."""
    world.execute("import torch, torch.distributed as dist" + BEGIN + ADAM)
    running = world.submit(world.task(FINISHES))
    for _ in world.follow(running):
        if running.unfinished == (2, 3):
            break
    stop(world, running)
    assert [track.done.steps for track in running.transcript if track.done] == [5, 5, 5, 5]
    assert running.transcript.errors == {}


CLEANS_UP = """
import time
has_cleaned_up = False
try:
    while True:
        optimizer.step()
        time.sleep(0.01)
        print("trains", flush=True)
except KeyboardInterrupt:
    time.sleep(1.5)
    has_cleaned_up = True
"""


def test_a_second_stop_interrupts_ranks_only_once(world: World) -> None:
    """A rank that cleans up is not interrupted again, though a machine's count is missing."""
    world.execute("import torch\noptimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])")
    running = run_for(world, CLEANS_UP, 0.5)
    # A rank that does not train yet would be interrupted at once, and again by the second Stop.
    train = lambda: all(running.transcript[rank].tail(1) for rank in range(4))  # noqa: E731
    wait_until(lambda: inbox.receive(world.engine, 0.1) or train(), "all ranks train")
    late = psutil.Process(world.pids[3])
    late.suspend()  # the head waits for the step count of this rank
    world.interrupt()
    world.interrupt()
    end = running.age + 1.3
    wait_until(
        lambda: inbox.receive(world.engine, 0.1) or running.age > end, "both have had an effect"
    )
    late.resume()
    dispatch.wait(world.engine, running)
    dispatch.wait_for_stop(world.engine)
    assert world.gather("globals().get('has_cleaned_up')")[:3] == [True] * 3


class StopsOnce(deque[Any]):
    """Raises KeyboardInterrupt once, when a BatchAcknowledged message is read."""

    has_stopped = False

    def popleft(self) -> Any:
        if isinstance(self[0], BatchAcknowledged) and not self.has_stopped:
            self.has_stopped = True
            raise KeyboardInterrupt
        return super().popleft()


def test_stop_at_an_acknowledgement_loses_nothing(world: World) -> None:
    """The batch is not acknowledged twice, and all variables stay."""
    world.execute("kept = rank")
    link = world.engine.connection.link
    link.events.waiting = waiting = StopsOnce(link.events.waiting)
    with pytest.raises(KeyboardInterrupt):
        world.execute("print('shown')")
    assert waiting.has_stopped
    for _ in range(3):  # each request also sends the acknowledgement that waits
        assert world.gather("kept") == [0, 1, 2, 3]
    assert link.agent.last_lines() == []


def test_mcp_tools_report_on_ranks_of_both_nodes(world: World) -> None:
    """The tools of MCP report failed and missing ranks of both nodes, and all stacks.

    Ranks of both nodes reduce together, each in its own slot; an error of a rank frees the others.
    """
    world.execute(SUM)
    assert [float(each) for each in world.gather("total")] == [6.0] * 4
    assert world.gather("slot") == [[str(r % 2), "2", str(r // 2)] for r in range(4)]
    (name,) = (str(each.agent) for each in mcp.worlds_here() if each.info.notebook == os.getpid())
    with pytest.raises(WorkerError):
        world.execute("if rank == 3: raise ValueError('bad shard')\ndist.all_reduce(total)")
    assert "first failure: rank 3: ValueError: bad shard" in mcp.why(name)
    with pytest.raises(RanksReleased):
        world.execute("if rank < 3: dist.barrier()")
    assert "ranks 0-2 wait in barrier, line 1; rank 3 finished the cell" in mcp.why(name)
    assert mcp.stacks(name).startswith("── ranks 0-3 (pid ")
    assert "no log files" in mcp.output(name)
    with pytest.raises(UsageError, match="no Jupyter kernel"):
        mcp.memory(name)


def test_scaling_keeps_variables_and_hosts(world: World) -> None:
    """Ranks that stay keep variables and host, dead ranks come back, and restarts keep the size."""

    def hosts() -> list[str]:
        return [row.host for row in world.status()]

    world.execute("kept = rank")
    with pytest.raises(ScaleError, match="4 workers have room on these machines"):
        world.scale(6)
    world.scale(ranks=[0, 2])
    assert hosts() == ["node0", "node1"]
    world.scale(4)
    assert world.gather("globals().get('kept')") == [0, 2, None, None]
    with pytest.raises(WorkerDied, match="rank 1 on node1 "):
        world.execute(DIES)
    assert world.gather("globals().get('kept')") == [0, None, None, None]
    world.scale(1)
    forks_here = psutil.Process(world.pids[0]).ppid()
    world.restart()
    assert hosts() == ["node0"]
    assert psutil.Process(world.pids[0]).ppid() == forks_here  # the machines' agents stay
    world.scale(4)
    world.restart()
    assert hosts() == ["node0", "node0", "node1", "node1"]


def test_the_store_releases_ranks_and_is_made_again(world: World) -> None:
    """A rank that waits in the store is released; a group heals though its sockets were removed."""
    world.execute(
        "import gc\n"
        "from torch._C._distributed_c10d import PrefixStore\n"
        "kept = PrefixStore('a', get_ipython().kernel.group._store_of(0, 'b'))\n"
        "gc.collect()\n"
        "kept.set(str(rank), 'x')\n"
        "value = kept.get(str(rank))"
    )
    assert world.gather("value") == [b"x"] * 4
    with pytest.raises(RanksReleased, match="new_group"):
        world.execute("if rank == 0: dist.new_group([0, 1])")
    sockets = [*Path(os.environ["XDG_RUNTIME_DIR"]).glob(f"nbdist-*/{STORE_SOCKET}")]
    assert len(sockets) == 2
    for file in sockets:
        file.unlink()
    with pytest.raises(WorkerDied):
        world.execute(DIES)
    world.execute(SUM)


class Direct:
    """A node without a link, which carries out each request at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.code = CodeFolder()
        self.parts = 0
        self.is_lost = False

    async def ask(self, request: messages.RequestBody, timeout: float) -> CodeHeld:
        if self.is_lost:
            raise NodeLost(f"{self.name} is lost")
        self.parts += isinstance(request, PutCode)
        return self.code.answer(request)

    @property
    def files(self) -> dict[str, str]:
        """The contents of the Python files of the node, by name."""
        path = self.code.path
        return {each.name: each.read_text() for each in path.glob("*.py")}


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which archives are unpacked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def bring(
    kept: KeptCode, nodes: list[Direct], folder: Path, mark: Landmark | None = None, **texts: str
) -> CodeHeld:
    """Store code as a notebook does: `a="1"` is the content of `a.py`; return the last answer.

    `mark` is the landmark by which a node recognizes a shared folder.
    """
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    archive, digest = archive_of(folder, [f"{name}.py" for name in texts]), repr(texts)
    held = asyncio.run(kept.store(GetCode(digest, mark), nodes))
    for put in () if held.is_here else PutCode.of(digest, zlib.compress(archive)):
        held = asyncio.run(kept.store(put, nodes))
    return held


def test_each_node_gets_code_that_it_lacks(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node gets code at once or when it joins, never twice; a node that fails is named."""
    kept, first, late, folder = KeptCode(), Direct("a"), Direct("b"), parent / "nb"
    monkeypatch.setattr(messages, "PART", 60)
    assert not asyncio.run(kept.distribute([first])).is_here
    assert bring(kept, [], folder, a="1", b="2") == CodeHeld("", is_here=True)
    assert asyncio.run(kept.distribute([first])) == CodeHeld("", is_here=True)
    assert first.files == {"a.py": "1", "b.py": "2"}
    sent = first.parts
    assert sent > 1
    assert bring(kept, [first], folder, a="1", b="2") == CodeHeld("", is_here=True)
    assert first.parts == sent
    bring(kept, [first], folder, a="1", c="3")
    sent = first.parts
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(parent / "gone"))
        held = asyncio.run(kept.distribute([first, late]))
    assert (held.host, held.problem.startswith(str(parent / "gone"))) == ("b", True)
    late.is_lost = True
    assert asyncio.run(kept.distribute([first, late])).problem == "b is lost"
    late.is_lost = False
    # The notebook was interrupted before it had sent all of another archive.
    halves = zlib.compress(b"another")
    asyncio.run(kept.store(GetCode("other", None), [late]))
    asyncio.run(kept.store(PutCode("other", halves[:3], is_last=False), [late]))
    assert not asyncio.run(kept.distribute([late])).is_here
    assert bring(kept, [first, late], folder, a="1", c="3") == CodeHeld("", is_here=True)
    assert late.files == first.files == {"a.py": "1", "c.py": "3"}
    assert first.parts == sent
    for node in (first, late):
        node.code.close()
    # Nodes that see the folder are sent nothing.
    nodes, mark = [Direct("a"), Direct("b")], Landmark.of(str(folder / "a.py"))
    assert bring(KeptCode(), nodes, folder, mark, c="3").is_shared
    assert [node.parts for node in nodes] == [0, 0]


HOUR = 3600 * 10**9


def test_failures_of_a_node_get_the_heads_time() -> None:
    """Failures of a node get the time of the head's clock; of a lost node none are kept."""
    text, ended = Text("stdout", "step 9"), Done("error", 0.0, received=False)
    failure, died = Failure("ValueError", "no", (), HOUR + 5), Died(-9, HOUR + 7)
    outputs = Outputs(((0, "t", text), (0, "t", failure), (1, "t", died)))
    first, second, third = on_head_clock(outputs, HOUR).items
    assert first == (0, "t", text)
    assert second == (0, "t", failure._replace(time_ns=5))
    assert third == (1, "t", died._replace(time_ns=7))
    items = ((1, "t", text), (1, "t", failure), (1, "t", ended))
    assert displayed_only(Outputs(items)) == Outputs(items[:1])


async def test_rows_are_sorted_and_one_answer_is_enough() -> None:
    """Rows come in the order of ranks; a question has the first answer that a node gives."""
    sent: list[tuple[int, NodeDown]] = []
    first, second = (node_that(n, lambda it, n=n: sent.append((n, it))) for n in (0, 1))
    rows = asyncio.create_task(rows_of([first, second], messages.GetStatus()))
    await until(lambda: len(sent) == 2)
    for number, message in sent:
        there, rank = (first, 5) if number == 0 else (second, 2)
        there.resolve_request(message.id, (WorkerStatus(rank, 7, "a", "idle", 0.0, 0, "cpu"),))
    assert [each.rank for each in await rows] == [2, 5]
    assert group_by_node([3, 0, 1, 9], {0: 0, 1: 0, 3: 2}) == {2: (3,), 0: (0, 1)}  # 9 has no node
    second.mark_lost("gone")
    known = Completions((Candidate("x"),), 0, 0)
    question = messages.Consult((0, 1), Complete("x", 1))
    answer = asyncio.create_task(first_answer({first: (0,), second: (1,)}, question))
    await until(lambda: len(sent) == 3)
    first.resolve_request(sent[-1][1].id, known)
    assert await answer == known


async def test_ranks_of_a_silent_node_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a silent node may live, so the group is formed at the next try, with all ranks."""
    monkeypatch.setattr(GetHeld, "timeout", 0.05)
    asked_of: dict[int, list[Any]] = {0: [], 1: []}
    is_slow = True

    def answer(message: NodeDown, number: int) -> None:
        if not isinstance(message, messages.AgentRequest):
            return  # the pool is being closed
        asked_of[number].append(message.request)
        match message.request:
            case GetHeld() if number and is_slow:
                pass
            case GetHeld():
                nodes[number].resolve_request(message.id, LiveRanks({number: None}))
            case _:
                formed = Formed({number: 100 + number}, {number: ""}, (number,))
                nodes[number].resolve_request(message.id, formed)

    nodes = [node_that(n, lambda message, n=n: answer(message, n)) for n in (0, 1)]
    asked, none = wanted(layout="2x1"), lambda *_: None
    pool = NodePool(tmp_path, asked, none, none, none, none)
    pool.nodes.update(enumerate(nodes))
    pool.forming.spec = place_new_world(SPEC, asked, nodes)
    healed = await pool.forming.heal()
    assert healed.problem == f"{nodes[1].name} did not answer within 0 s"
    assert asked_of == {0: [GetHeld()], 1: [GetHeld()]}
    is_slow = False
    monkeypatch.setattr(GetHeld, "timeout", SOON)
    healed = await pool.forming.heal()
    await pool.close()
    assert (healed.problem, dict(healed.pids)) == ("", {0: 100, 1: 101})
    assert [each.missing for each in asked_of[1] if isinstance(each, Form)] == [()]


async def test_losing_all_nodes_one_by_one_is_noticed(tmp_path: Path) -> None:
    """Healing reports that all machines are lost, even if the last is lost meanwhile."""

    def answer(message: NodeDown) -> None:
        match message:
            case messages.AgentRequest(_, Renumber()):
                second.mark_lost("gone too")
            case messages.AgentRequest(number, request):
                second.resolve_request(
                    number, LiveRanks({1: None}) if request == GetHeld() else None
                )

    first, second = node_that(0, lambda _: first.mark_lost("gone")), node_that(1, answer)
    asked, none = wanted(layout="2x1"), lambda *_: None
    pool = NodePool(tmp_path, asked, none, none, none, none)
    pool.nodes.update({0: first, 1: second})
    pool.forming.spec = spec = place_new_world(SPEC, asked, [first, second])
    head = Head(tmp_path, os.getpid(), Guard(-1))
    healed = await head._heal(pool, spec)
    await pool.close()
    await head._notebook.close()
    assert (first.lost, second.lost) == ("gone", "gone too")
    assert healed.problem == "all machines are lost"


CHATTY = """
import time
for number in range(15):
    print(number, flush=True)
    time.sleep(0.05)
begun = time.monotonic()
if rank == 3:
    assert not {fails}
try:
    dist.barrier() if {fails} else None
except RuntimeError:
    pass
waited = time.monotonic() - begun
"""
"""A cell that prints more batches than an agent sends before the notebook acknowledges them."""


@pytest.mark.parametrize("fails", [False, True])
def test_a_blocked_notebook_is_not_needed_to_supervise(world: World, *, fails: bool) -> None:
    """The head learns at once that ranks ended, also if the notebook does not read their output."""
    source, seconds = CHATTY.format(fails=fails), 6
    running = world.submit(world.task(source), Patience(timeout=seconds - 2.0))
    # `PyDLL` holds the GIL, so neither the main thread nor any other thread of this process runs.
    ctypes.PyDLL(None).sleep(seconds)
    for _ in world.follow(running):
        pass
    assert running.ending.timed_out is None
    assert isinstance(error_of(running), WorkerError) is fails
    assert fails is (running.transcript.errors.keys() == {3})
    if fails:
        assert max(world.gather("waited", ranks=[0, 1, 2])) < seconds / 2
