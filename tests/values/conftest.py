"""Fixtures with two `__main__` modules: a notebook's in this process, a worker's in another."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.values.pickling import pickle

_here = runpy.run_path(str(Path(__file__).with_name("receiver.py")))


@pytest.fixture(scope="module")
def process() -> Iterator[Any]:
    worker = _here["Worker"]()
    yield worker
    worker.end()


@pytest.fixture
def worker(process: Any) -> Any:
    process.clear()
    return process


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    notebook = _here["Notebook"]()
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    return notebook


@pytest.fixture
def ship(notebook: Any, worker: Any) -> Callable[..., frozenset[str]]:
    """Sends variables of the notebook to the worker; returns which other variables they need."""

    def send(*names: str) -> frozenset[str]:
        pickled = pickle({name: notebook.names[name] for name in names}, notebook.names)
        worker.bind(pickled.frames)
        return pickled.needs & set(notebook.names)

    return send
