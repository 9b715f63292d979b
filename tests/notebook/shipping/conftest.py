"""A notebook with a table of names in this process, and a worker in another."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.notebook.free_names import names_bound
from nbdist.notebook.shipping import Plan, Shipment, plan
from nbdist.output.events import Done
from nbdist.values.payload import pack_frames
from nbdist.wire.ops import Inspected
from nbdist.world.name_table import NameTable
from nbdist.world.sent_objects import Parcel

_here = runpy.run_path(str(Path(__file__).parents[2] / "values" / "receiver.py"))
_Notebook = _here["Notebook"]

ALL = (0, 1)


@pytest.fixture(scope="module")
def process() -> Iterator[Any]:
    worker = _here["Worker"]()
    yield worker
    worker.end()


class House:
    """A notebook in this process, a worker that acts as all ranks, and the table of names."""

    def __init__(self, notebook: Any, worker: Any) -> None:
        self.notebook = notebook
        self.worker = worker
        self.table = NameTable(notebook.names)
        self.notices: list[str] = []

    def cell(self, source: str) -> Any:
        """Run a cell in the notebook, and record assigned names as the post_run_cell hook does."""
        result = self.notebook.run(source)
        self.table.record_assigned(names_bound(source))
        return result

    def distributed(self, source: str, ranks: tuple[int, ...] = ALL) -> Any:
        """Send what a cell needs, and run it on the worker; return the value of its last line."""
        self.send(plan(source, self.table, ranks), ranks)
        return self.run(source, ranks)

    def run(self, source: str, ranks: tuple[int, ...] = ALL) -> Any:
        """Run a cell on the worker without sending variables; return the last line's value."""
        before = self.worker.run("{n: id(v) for n, v in globals().items() if n[0] != '_'}")
        result = self.worker.run(source)
        after = self.worker.run("{n: id(v) for n, v in globals().items() if n[0] != '_'}")
        bound = frozenset(name for name in after if before.get(name) != after[name])
        lost, dead = frozenset(before.keys() - after.keys()), self.worker.pop_ended_keys()
        for rank in ranks:
            self.table.record_finished(rank, Done("ok", 0.0, bound, gone=lost, dead=dead), Parcel())
        return result

    def settled(self, planned: Plan, *changed: int) -> Shipment:
        """Let the worker answer a plan's question to the ranks, and return the shipment.

        If `changed` names ranks, the other ranks answer that they have changed no object.
        """
        if (question := planned.question) is not None:
            answer = self.worker.inspect(dict(question.objects), question.names)
            unchanged = Inspected(names=answer.names)
            ranks = question.ranks
            planned.answer({r: answer if r in changed or not changed else unchanged for r in ranks})
        return planned.shipment()

    def send(self, planned: Plan, ranks: tuple[int, ...] = ALL, *changed: int) -> Shipment:
        """Send all packets of a plan to the worker, and record them in the table."""
        shipment = self.settled(planned, *changed)
        self.notices += [*shipment.notices, *(f"sent {each}" for each in shipment.big)]
        forgotten = self.table.objects.pop_forgotten(ranks)
        deleted = self.table.pop_deleted(ranks)
        self.worker.forget([*{key for keys in forgotten.values() for key in keys}])
        for packet in shipment.packets:
            payload, segment = pack_frames(packet.message.frames)
            self.worker.receive(payload)
            self.table.record_sent(packet.parcel.names)
            if segment:
                segment.close()
        unbound = self.worker.delete([*{name for names in deleted.values() for name in names}])
        for rank in ranks:
            done = Done("ok", 0.0, gone=frozenset(unbound))
            self.table.record_finished(rank, done, shipment.parcels.get(rank, Parcel()))
        return shipment

    def plan(self, source: str, ranks: tuple[int, ...] = ALL) -> Shipment:
        """Return the shipment of a cell, after the question to the ranks, without sending it."""
        return self.settled(plan(source, self.table, ranks))

    def names(self, source: str, ranks: tuple[int, ...] = ALL) -> set[str]:
        """Return the variables that would be sent with a cell."""
        return set(self.plan(source, ranks).names)

    def changes(self, source: str, ranks: tuple[int, ...] = ALL) -> set[str]:
        """Return the variables that lead to objects whose changes would be sent with a cell."""
        question = plan(source, self.table, ranks).question
        keys = set() if question is None else question.objects.keys()
        records = {name: self.table.record(name) for name in self.table.owners()}
        return {
            name
            for name, record in records.items()
            if record and keys & self.table.objects.reach(ranks[0], record.bound_to)
        }


@pytest.fixture
def house(process: Any, monkeypatch: pytest.MonkeyPatch) -> House:
    process.clear()
    notebook = _Notebook()
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    return House(notebook, process)
