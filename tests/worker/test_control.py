"""Tests of `nbdist.worker.control`: what a worker answers, whatever its task does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from jupyter_client.session import Session

from nbdist.output.events import Failure
from nbdist.wire import control
from nbdist.wire.views import Collective, Place
from nbdist.world.hangs import ABORTED
from nbdist.world.states import State
from nbdist.world.world import World
from tests.waiting import SOON, wait_until
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


class Asker:
    """Another client of a rank's kernel, as its agent is one."""

    def __init__(self, rank: int) -> None:
        runtime = Path(os.environ["XDG_RUNTIME_DIR"])
        (file,) = runtime.glob(f"nbdist-*/*r{rank}.json")
        known = json.loads(file.read_text())
        self._session = Session(key=known["key"].encode())
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"ipc://{known['ip']}-{known['control_port']}")

    def send(self, *buffers: bytes) -> None:
        self._session.send(self._socket, control.REQUEST, buffers=[*buffers])

    def ask(self, request: control.Request) -> control.Answer:
        self.send(control.pack(request))
        assert self._socket.poll(SOON * 1000), "there is no answer"
        _, reply = self._session.recv(self._socket)
        assert reply["msg_type"] == control.REPLY
        return control.answer_from(reply["buffers"])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def test_without_a_group(new_world: NewWorld) -> None:
    """There is none to tell of, to abort or to form anew."""
    with new_world(1, backend="none"):
        alone = Asker(0)
        try:
            assert alone.ask(control.ListGroups()) == control.HeldGroups(0, 1, {})
            assert alone.ask(control.LastCollective()) == control.Ok()
            assert alone.ask(control.Abort()) == control.Ok()
            assert alone.ask(control.Regroup(2, {}, (), {})) == control.Ok()
        finally:
            alone.close()


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as world:
        yield world


@pytest.fixture
def rank1(world: World) -> Iterator[Asker]:
    world.execute("pass")
    asker = Asker(1)
    yield asker
    asker.close()


def test_where_it_is(world: World, rank1: Asker) -> None:
    """Nowhere while it is idle; in a cell's line while that runs, with the calls on demand."""
    assert rank1.ask(control.Locate(briefly=True)) == Place()
    idle = rank1.ask(control.Locate())
    assert isinstance(idle, Place)
    assert (idle.line, idle.operation) == (0, "")
    nowhere = rank1.ask(control.Trace())
    assert isinstance(nowhere, control.Traced)
    assert nowhere.place == Place()
    running = world.submit(world.task("import time\nprint('begun')\ntime.sleep(60)"))
    while not running.transcript[1].line_count:
        world.session.receive(0.05)
    for briefly in (True, False):
        place = rank1.ask(control.Locate(briefly))
        assert isinstance(place, Place)
        assert place.line == 3
    traced = rank1.ask(control.Trace())
    assert isinstance(traced, control.Traced)
    cells = [frame for frame in traced.frames if frame.is_cell]
    assert [(frame.line, frame.function) for frame in cells] == [(3, "<module>")]
    world.interrupt()
    world.session.wait(running)


def test_collectives_and_groups(world: World, rank1: Asker) -> None:
    """The last one that was begun; which groups there are besides the world's own."""
    world.restart()
    fresh = Asker(1)
    try:
        assert fresh.ask(control.LastCollective()) == control.Ok()
        assert fresh.ask(control.ListGroups()) == control.HeldGroups(1, 2, {})
        world.execute("pair = dist.new_group([0, 1])\ndist.all_reduce(torch.ones(1))")
        last = fresh.ask(control.LastCollective())
        assert isinstance(last, Collective)
        assert (last.name, last.is_done) == ("all_reduce", True)
        held = fresh.ask(control.ListGroups())
        assert isinstance(held, control.HeldGroups)
        assert [*held.members.values()] == [(0, 1)]
    finally:
        fresh.close()


def test_libraries_have_all(rank1: Asker) -> None:
    """With the versions that the tests run with."""
    assert rank1.ask(control.Check()) == control.Lacks(())


def test_lent_memory_is_released(world: World, rank1: Asker) -> None:
    """As soon as what a task has brought back has been read, though no other task comes."""
    task = world.task("", fetch=("bytes(1 << 20)",))
    world.session.wait(world.submit(task))

    def is_held() -> bool:
        return any(map(is_ours, Path(f"/proc/{world.pids[1]}/fd").iterdir()))

    assert is_held()
    assert rank1.ask(control.LetGo(task.id)) == control.Ok()
    assert not is_held()


def is_ours(fd: Path) -> bool:
    return fd.exists() and "memfd:nbdist" in os.readlink(fd)


@pytest.mark.parametrize("buffers", [[], [b"garbage"]])
def test_what_is_no_request(rank1: Asker, buffers: list[bytes]) -> None:
    """It gets no answer; the next one does."""
    rank1.send(*buffers)
    assert rank1.ask(control.Check()) == control.Lacks(())


def test_a_collective_is_aborted(world: World, rank1: Asker) -> None:
    """What waits in it goes on at once, with an error."""
    running = world.submit(world.task("dist.barrier()", ranks=[1]))
    while not rank1.ask(control.Locate()).operation:
        world.session.receive(0.01)
    assert rank1.ask(control.Abort()) == control.Ok()
    world.session.wait(running)
    (error,) = running.transcript.errors.values()
    assert isinstance(error, Failure)
    assert error.name == ABORTED
    world.session.heal()
    assert rank1.ask(control.LastCollective()) == control.Ok()
    world.execute("dist.barrier()")


def test_who_is_not_its_parent(world: World, rank1: Asker) -> None:
    """It is bound to its agent's life: where that has ended before, it ends at once."""
    parent = psutil.Process(world.pids[1]).ppid()
    assert rank1.ask(control.Bind(parent)) == control.Ok()
    dead = psutil.Process(world.pids[1])
    rank1.send(control.pack(control.Bind(1)))
    dead.wait(SOON)

    def is_known() -> bool:
        world.session.receive_waiting()
        return world.state is State.BROKEN

    wait_until(is_known, "its end is known")
    world.execute("dist.barrier()")
    assert world.pids[1] != dead.pid
