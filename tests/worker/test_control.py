"""Tests of `nbdist.worker.control`: what a worker answers, whatever its task does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from jupyter_client.session import Session

from nbdist.output.events import Failure
from nbdist.wire import control
from nbdist.wire.frames import pack
from nbdist.world.hangs import ABORTED
from nbdist.world.world import World
from tests.waiting import SOON
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world(2)


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
        self.send(pack(request))
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


@pytest.fixture
def rank1(world: World) -> Iterator[Asker]:
    world.execute("pass")
    asker = Asker(1)
    yield asker
    asker.close()


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
