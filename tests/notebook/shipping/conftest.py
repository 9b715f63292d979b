"""A notebook with a table of names in this process, and a worker in another."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.notebook.free_names import names_bound
from nbdist.notebook.shipping import Shipment, plan
from nbdist.output.events import Done
from nbdist.values.payload import pack_frames
from nbdist.world.names import NameTable

_here = runpy.run_path(str(Path(__file__).parents[2] / "values" / "receiver.py"))
_Notebook = _here["Notebook"]

ALL = (0, 1)


@pytest.fixture(scope="module")
def process() -> Iterator[Any]:
    worker = _here["Worker"]()
    yield worker
    worker.end()


class House:
    """A notebook and one worker, which plays all ranks, with the table between them."""

    def __init__(self, notebook: Any, worker: Any) -> None:
        self.notebook = notebook
        self.worker = worker
        self.table = NameTable(notebook.names)
        self.notices: list[str] = []

    def cell(self, source: str) -> Any:
        """A cell of the notebook, as the post_run_cell hook sees it."""
        result = self.notebook.run(source)
        self.table.bound_in_notebook(names_bound(source))
        return result

    def distributed(self, source: str, ranks: tuple[int, ...] = ALL) -> Any:
        """A cell on the workers; what its last line says there."""
        self.send(plan(source, self.table, ranks), ranks)
        before = self.worker.run("{n: id(v) for n, v in globals().items() if n[0] != '_'}")
        result = self.worker.run(source)
        after = self.worker.run("{n: id(v) for n, v in globals().items() if n[0] != '_'}")
        bound = frozenset(name for name in after if before.get(name) != after[name])
        for rank in ranks:
            self.table.finished(rank, Done("ok", 0.0, bound), {})
        return result

    def send(self, shipment: Shipment, ranks: tuple[int, ...] = ALL) -> None:
        self.notices += [*shipment.notices, *(f"sent {each}" for each in shipment.big)]
        if shipment.names:
            payload, segment = pack_frames(shipment.frames)
            self.worker.bind_payload(payload)
            self.table.sent(shipment.records)
            for rank in ranks:
                self.table.finished(rank, Done("ok", 0.0), shipment.records)
            if segment:
                segment.close()

    def names(self, source: str, ranks: tuple[int, ...] = ALL) -> set[str]:
        """What a cell would take along, without sending it."""
        return set(plan(source, self.table, ranks).names)


@pytest.fixture
def house(process: Any, monkeypatch: pytest.MonkeyPatch) -> House:
    process.clear()
    notebook = _Notebook()
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    return House(notebook, process)
