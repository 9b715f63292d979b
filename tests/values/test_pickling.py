"""Tests of `nbdist.values.pickling`: values that come back whole, and pickles read in pieces."""

from __future__ import annotations

import gc
import pickle as plain_pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbdist.values.pickling import READ_FROM, load, pickle, unpickle, without_cycles

Ship = Callable[..., frozenset[str]]


def test_modules_are_sent_by_name(notebook: Any, worker: Any, ship: Ship) -> None:
    """`import x as y` has the same effect on the worker, and no other name is imported or bound."""
    worker.fetch("[1, {'a': lambda: 2}]")
    assert worker.run("import sys\n'torch' in sys.modules") is False
    notebook.run("import json as j\nimport os.path as p\nimport xml.dom.minidom as m")
    ship("j", "p", "m")
    assert worker.run("j.__name__, m.__name__") == ("json", "xml.dom.minidom")
    notebook.run("import xml.sax.saxutils\ndef f(): return xml.sax.saxutils.escape('<' * len([1]))")
    before = worker.run("import xml\nsorted(globals())")
    ship("f")
    assert worker.run("sorted(globals())") == sorted({*before, "f"})
    assert worker.run("f()") == "&lt;"


def test_a_module_made_by_hand_is_refused(notebook: Any, tmp_path: Path) -> None:
    """A module that the worker cannot import is an error, and an open file is an error too."""
    notebook.names["m"] = types.ModuleType("made_by_hand")
    with pytest.raises(plain_pickle.PicklingError, match="made_by_hand"):
        pickle(notebook.names["m"], notebook.names)
    # cloudpickle would send the whole file as a `StringIO`.
    (tmp_path / "x").write_text("text")
    with (
        open(tmp_path / "x") as notebook.names["file"],
        pytest.raises(plain_pickle.PicklingError, match="open file"),
    ):
        pickle(notebook.names["file"], notebook.names)


def test_weak_references_lead_to_what_travels_with_them(
    notebook: Any, worker: Any, ship: Ship
) -> None:
    """Weak references find objects that arrive with them; a dead reference arrives dead."""
    notebook.run(
        "import weakref\nclass A: pass\na, b = A(), A()\n"
        "a.me, a.other = weakref.ref(a), weakref.ref(A())\n"
        "keys = weakref.WeakKeyDictionary({a: 1, A(): 2})\n"
        "values = weakref.WeakValueDictionary(x=b)\n"
        "a.all, a.all_else = weakref.WeakSet([a, b]), weakref.WeakSet([A()])\n"
        "everything = [a, b, keys, values]\n"
        "call = weakref.ref(a, print)"
    )
    ship("everything")
    worker.run("import gc\na, b, keys, values = everything\n_ = gc.collect()")
    assert worker.run("a.me() is a, a.other(), type(a.me) is type(a.other)") == (True, None, True)
    assert worker.run("dict(keys) == {a: 1}, dict(values) == {'x': b}") == (True, True)
    assert worker.run("set(a.all) == {a, b}, len(a.all_else)") == (True, 0)
    with pytest.raises(TypeError, match="callback"):
        ship("call")


def test_arrays_are_not_copied(notebook: Any) -> None:
    """An array's memory is a frame, and the receiver's frame is the array's memory."""
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(100_000.0)
    pickled = pickle(array, notebook.names)
    assert memoryview(pickled.frames[0]).nbytes < 500
    assert numpy.shares_memory(numpy.frombuffer(pickled.frames[1]), array)
    memory = bytearray(memoryview(pickled.frames[1]))
    back = unpickle([pickled.frames[0], memory])
    assert numpy.shares_memory(numpy.frombuffer(memory), back)
    assert back.flags.writeable
    # Order and read-only flag come back as they were.
    array, frozen = numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)), numpy.arange(3)
    frozen.flags.writeable = False
    frames = [bytes(memoryview(f)) for f in pickle([array, frozen], notebook.names).frames]
    back = unpickle(frames)
    assert (back[0] == array).all()
    assert back[0].flags.f_contiguous
    assert [part.flags.writeable for part in back] == [True, False]


@pytest.mark.parametrize(("number", "least"), [(1000, 0), (300_000, 20)])
def test_big_pickles_are_read_in_pieces(number: int, least: int):
    """Python code, which Stop can interrupt, runs between two pieces; buffers are used in place."""
    frames = pickle([float(n) for n in range(number)], {}).frames
    reads: list[str] = []
    sys.setprofile(lambda frame, event, _: reads.append(event + frame.f_code.co_name))
    try:
        value = unpickle(frames)
    finally:
        sys.setprofile(None)
    assert value == [float(n) for n in range(number)]
    assert least <= reads.count("call<lambda>") <= 10 * least
    buffers: list[plain_pickle.PickleBuffer] = []
    beside = ["x" * READ_FROM, plain_pickle.PickleBuffer(bytearray(b"beside"))]
    found = load(plain_pickle.dumps(beside, 5, buffer_callback=buffers.append), buffers)
    assert (found[0], bytes(found[1])) == (beside[0], b"beside")


def test_garbage_collection_is_restored_afterwards():
    """After `without_cycles` garbage collection is on or off as before, also after an error."""

    def fail() -> None:
        with without_cycles():
            assert not gc.isenabled()
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_cycles():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_pickle_in_a_cycle_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python collects a pickle without an error; Python 3.13 would report open views of it."""
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    value: list[Any] = [1, 2]
    value.append(pickle(value, {}))
    del value
    gc.collect()
    assert said == []
