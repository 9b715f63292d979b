"""Tests of `nbdist.worker.control`: what a worker answers, whatever its task does."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from jupyter_client.session import Session

from nbdist.output.events import Failure
from nbdist.wire import control
from nbdist.wire.control import Complete, Completions, Description, Inspect, Question
from nbdist.wire.frames import pack
from nbdist.worker.control import complete, describe, look_up
from nbdist.world.hangs import ABORTED
from nbdist.world.world import World
from tests.waiting import SOON
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world(2)


class Asker:
    """Another client of a rank's kernel, as its agent is one."""

    def __init__(self, rank: int) -> None:
        (file,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob(f"nbdist-*/*r{rank}.json")
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
    with new_world(1, backend="none") as w, closing(Asker(0)) as alone:
        assert alone.ask(control.ListGroups()) == control.HeldGroups(0, 1, {})
        asks = control.LastCollective(), control.Abort(), control.Regroup(2, {}, w.session.spec, {})
        assert {*map(alone.ask, asks)} == {control.Ok()}


def test_a_collective_is_aborted(world: World) -> None:
    """What waits in it goes on at once, with an error; what is no request gets no answer."""
    world.execute("pass")
    with closing(Asker(1)) as rank1:
        rank1.send()
        rank1.send(b"garbage")
        assert rank1.ask(control.Check()) == ()
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


# --- what a front end asks --------------------------------------------------------------


SLOW = """
import pathlib, time
class Slow:
    quick = 1
    def __repr__(self):
        while not pathlib.Path({gate!r}).exists():
            time.sleep(0.01)
        return "slow"
slow = Slow()
"""


def ask(world: World, question: Question, *ranks: int) -> Completions | Description:
    """The first answer that comes in time; on a busy machine a rank may take too long."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        asked = world.session.consult(question, ranks or (0, 1))
        assert asked is not None
        if isinstance(answer := asked.result(SOON), Completions | Description):
            return answer
    raise AssertionError(f"no answer within {SOON} s")


def texts(world: World, code: str, *ranks: int) -> set[str]:
    answer = ask(world, Complete(code, len(code)), *ranks)
    assert isinstance(answer, Completions)
    return {each.text for each in answer.candidates}


def until_there(world: World, text: str, code: str, *ranks: int) -> None:
    """Until jedi, which has much to read at first, knows it: longer than an answer takes."""
    deadline = time.monotonic() + SOON
    while text not in texts(world, code, *ranks):
        assert time.monotonic() < deadline


def test_an_idle_one_is_asked_first(world: World, tmp_path: Path) -> None:
    """Rank 1, while rank 0 is busy; of that what is there is told, and no `repr` awaited."""
    gate = tmp_path / "gate"
    world.execute(SLOW.format(gate=str(gate)) + "mine = rank\nimport torch.nn as nn")
    try:
        told = ask(world, Inspect("slow", 4), 0)
        assert isinstance(told, Description)
        assert told.data["text/plain"] == "Type:      Slow\nRank:      0"
        assert "quick" in texts(world, "slow.qu", 0)
        assert [*world.execute("rank + 1", fetch=("rank",))] == [0, 1]
        running = world.submit(world.task("str(slow)", ranks=[0]))
        until_there(world, "weight", "nn.Linear(1, 1).wei")
        assert "quick" in texts(world, "slow.qu", 0)
        assert texts(world, "nn.Linear(1, 1).wei", 0) == set()
        told = ask(world, Inspect("mine", 4), 0)
        assert isinstance(told, Description)
        assert told.data["text/plain"].splitlines()[:2] == ["Type:      int", "Value:     0"]
        assert told.data["text/plain"].endswith("\nRank:      0")
    finally:
        gate.touch()
    world.session.wait(running)
    world.session.check(running)


def test_a_rank_that_holds_the_gil(world: World, tmp_path: Path) -> None:
    """The other one answers; where there is none, nobody does, within a second."""
    fifo = tmp_path / "fifo"
    world.execute(f"import ctypes, os\nos.path.exists({str(fifo)!r}) or os.mkfifo({str(fifo)!r})",
                  ranks=[0])  # fmt: skip
    world.execute(f"gate = os.open({str(fifo)!r}, os.O_RDWR)\nmine = 1", ranks=[0])
    world.execute("mine = 1", ranks=[1])
    held = "ctypes.PyDLL(None).read(gate, ctypes.create_string_buffer(1), 1)"
    running = world.submit(world.task(held, ranks=[0]))
    try:
        assert "mine" in texts(world, "mi")
        asked = world.session.consult(Complete("mi", 2), (0,))
        assert asked is not None
        assert asked.result(SOON) is None
    finally:
        fifo.write_bytes(b"x")
        world.session.wait(running)


# --- what is said without running users' code -------------------------------------------


class Never(BaseException):
    """Users' code was run."""


def never(*_: object) -> Any:
    raise Never


class Traps:
    """An object that must only be looked at."""

    there = 3

    def __init__(self) -> None:
        self.own = {"images": 1, "labels": 2, 3: 4}

    __getattr__ = __getattribute__ = __dir__ = __repr__ = never  # type: ignore[assignment]
    costly = property(never)


class Net(torch.nn.Module):
    """A small net."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 3)
        self.register_buffer("mean", torch.zeros(2))

    @staticmethod
    def of(size: int) -> Net:
        raise Never


def train(model: Net, lr: float = 0.1) -> None:
    """Train it."""


NAMES: dict[str, Any] = {
    "traps": Traps(),
    "net": Net(),
    "Net": Net,
    "train": train,
    "batch": {"images": 1, "labels": 2, 3: 4},
    "grad": torch.zeros(2, 3, dtype=torch.float64),
    "math": math,
    "epoch": 3,
    "half": Net.__new__(Net),
}
Net.__getattr__ = never  # type: ignore[method-assign]


def said_of(code: str) -> list[str]:
    found = complete(NAMES, code)
    assert (found.end, code[: found.start]) == (len(code), code[: found.start])
    return [each.text for each in found.candidates]


WANTED = {
    "x = tra": ["train", "traps"],
    "print(epo": ["epoch"],
    "traps.ow": ["own"],
    "traps.cos": ["costly"],
    "net.first.wei": ["weight"],
    "net.me": ["mean"],
    "net.first.weight.requires_grad": ["requires_grad", "requires_grad_"],
    'batch["': ["images", "labels"],
    "traps.own['la": ["labels"],
    "half.forw": ["forward"],  # its class is known before its parts are
}


def test_what_can_stand_there() -> None:
    """Names, attributes to any depth, keys; nothing where code would have to run."""
    assert {code: said_of(code) for code in WANTED} == WANTED
    for code in ("traps.costly.re", "nope.x", "nope.x.", "f().ow", "'text'.lo", "3.re", "", "a + "):
        assert said_of(code) == []


def test_where_and_of_what_kind() -> None:
    """What is replaced is the word before the cursor; what its maker has put there comes first."""
    code = "# %%distributed\nnet.first.wei\nlater"
    found = look_up(NAMES, Complete(code, code.index("\nlater")))
    assert isinstance(found, Completions)
    assert code[found.start : found.end] == "wei"
    kinds = {each.text: each.type for each in complete(NAMES, "t").candidates}
    assert (kinds["train"], kinds["type"], kinds["try"]) == ("function", "class", "keyword")
    (first,) = complete(NAMES, "net.fi").candidates
    assert (first.text, first.type) == ("first", "instance")
    assert said_of("net.")[:2] == ["first", "mean"]
    assert said_of("traps.")[:2] == ["own", "costly"]
    assert said_of("math.") == sorted(said_of("math."))


def test_what_it_is() -> None:
    """Signature, type, value, docstring; nothing of what only a property could tell."""
    for code, wanted in (
        ("train(net", ["Signature: train(model: 'Net', lr: 'float' = 0.1)", "Train it."]),
        ("net.of", ["Signature: of(size: 'int')"]),
        ("Net", ["Type:      type", "Docstring: A small net."]),
        ("epoch", ["Type:      int", "Value:     3"]),
        ("grad", ["Type:      Tensor", "shape (2, 3), torch.float64, cpu"]),
        ("batch", ["Type:      dict", "3 entries"]),
        ("traps", ["Type:      Traps", "An object that must only be looked at."]),
        ("len", ["Signature: len(obj, /)"]),
    ):
        found = look_up(NAMES, Inspect(code, len(code.partition("(")[0])))
        assert isinstance(found, Description)
        assert [each for each in wanted if each not in found.data["text/plain"]] == []
    assert describe(NAMES, "nope") == describe(NAMES, "traps.costly") == Description({})
