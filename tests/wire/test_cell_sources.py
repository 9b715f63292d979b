"""The source of cells, which travels with their functions."""

from __future__ import annotations

import functools
import inspect
import linecache
import types
from collections.abc import Callable
from typing import Any

import pytest

from nbdist.wire.cell_sources import CellSource, cell_source
from nbdist.wire.pickling import pickle, unpickle


def test_the_source_of_a_cell_travels_with_its_functions(
    notebook: Any, worker: Any, ship: Callable[..., frozenset[str]]
) -> None:
    """`inspect.getsource` and tracebacks show the cell's lines there."""
    notebook.run("class A:\n    def m(self):\n        return 1 / 0  # here\n")
    ship("A")
    assert worker.run("import inspect\ninspect.getsource(A.m)").endswith("1 / 0  # here\n")
    worker.run(
        "import traceback\ntry:\n    A().m()\nexcept ZeroDivisionError:\n"
        "    text = traceback.format_exc()"
    )
    assert "return 1 / 0  # here" in worker.run("text")


def test_the_number_of_a_cell_travels_with_its_functions(
    notebook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where IPython runs on both sides, its tracebacks say `Cell In[7]` on both."""
    from IPython.core.compilerop import CachingCompiler

    shell = types.SimpleNamespace(compile=CachingCompiler())
    if not hasattr(shell.compile, "_filename_map"):
        pytest.skip("IPython 7 keeps no numbers; workers do (tests/notebook/test_magics.py)")
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    source = "def f(): pass\n"
    filename = shell.compile.cache(source, 7)
    exec(compile(source, filename, "exec"), notebook.names)
    pickled = pickle(notebook.names["f"], notebook.names)
    del shell.compile._filename_map[filename], linecache.cache[filename]
    function = unpickle(pickled.frames, notebook.names)
    assert shell.compile._filename_map[filename] == 7
    assert inspect.getsource(function) == source


def test_the_number_of_a_cell_of_ipython_7(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is that of the last cell with this text; its source is dated."""
    source = "def f(): pass\n"
    history = types.SimpleNamespace(input_hist_parsed=["", source, source, "f()"])
    shell = types.SimpleNamespace(compile=object(), history_manager=history)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    name = "/tmp/ipykernel_1/2.py"
    monkeypatch.setitem(linecache.cache, name, (len(source), 1.0, [source], name))
    assert cell_source(name) == CellSource(source, 2)


def test_files_on_disk_do_not_travel(notebook: Any) -> None:
    """Only cells: a function of a module on disk has its source there anyway."""
    inner = functools.wraps(print)(lambda: None)
    pickled = pickle(inner, notebook.names)
    assert b"files_on_disk_do_not_travel(notebook" not in bytes(pickled.frames[0])
