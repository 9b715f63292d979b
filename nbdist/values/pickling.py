"""Pickles Python values into frames: the pickle, and the buffers of big memory beside it.

The notebook and workers use this file.  `Pickler` extends cloudpickle's pickler: a function of the
sender's `__main__` becomes a function of the receiver's `__main__`.  The global variables that the
function uses are not in the pickle; `Pickled.needs` has their names.

A *sketch* is a pickle without the largest contents of the value.  It is made faster than a whole
pickle, and can be compared with another sketch, but not loaded.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import io
import operator
import pickle as plain_pickle
import sys
import types
import weakref
import zlib
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import cloudpickle.cloudpickle as by_value

from nbdist.system.limits import ASKED_FROM, require_memory
from nbdist.values import definitions
from nbdist.values.definitions import CellSource, MadeBy, Variable
from nbdist.values.memory import is_plain_array, reduce_expanded
from nbdist.values.states import ATOMIC, optimizer_hooks
from nbdist.values.tensors import Reduced, TensorReducer, reduce_constant

LONG_TEXT, READ_FROM, READ_AT_ONCE = 1 << 20, 1 << 20, 64 << 20
"""Numbers of bytes.

In a sketch, a pickle that is only compared and never loaded, a digest stands for each text of
LONG_TEXT bytes or more.  So that Stop can interrupt, a pickle of READ_FROM bytes or more is read in
pieces, and a digest reads at most READ_AT_ONCE at a time."""

Buffer = bytes | bytearray | memoryview | plain_pickle.PickleBuffer
"""A frame of a pickled value: the pickle itself, or big memory that is sent beside the pickle."""

Reduce = Callable[[Any], Reduced]


class Pickled:
    """A pickled value: its frames, their size, and the names that its functions need.

    Frames can be views of the value's own memory: copy or send the frames before the value changes.
    """

    def __init__(self, pickler: Pickler) -> None:
        # The pickler's memo keeps pickled objects alive, so that no other object gets their ids.
        self._pickler = pickler
        self.frames: list[Buffer] = [pickler.file.getvalue(), *pickler.buffers]
        left_out = pickler.file.left_out
        self.size = sum(memoryview(each).nbytes for each in self.frames) + left_out
        """The bytes of all frames, and of the texts that a sketch has left out."""
        self.is_sketch = left_out > 0 or pickler.tensors.sketched
        """Whether contents were left out: then the frames can be compared, but not loaded."""
        self.needs = frozenset(pickler.needs)
        """Names that the value's functions will look for in the receiver's `__main__`."""

    @property
    def objects(self) -> list[Any]:
        """The objects in pickle's memo, in the order in which pickle has added them."""
        memo = self._pickler.memo.copy().values()
        return [value for _, value in sorted(memo, key=operator.itemgetter(0))]


def pickle(
    value: Any,
    namespace: dict[str, Any],
    *,
    sketch: bool = False,
    back_to_device: bool = False,
    exact: bool = False,
    reduce: Reduce | None = None,
) -> Pickled:
    """Pickle `value` for another process; `namespace` is the `__main__` of this process.

    A `sketch` is made faster, and can be compared with another sketch but not loaded: it has
    digests instead of long texts, and addresses instead of contents on a GPU.  With
    `back_to_device`, tensors of a GPU are restored on the receiver's GPU; without it, on the CPU.
    With `exact`, only the elements of tensors are sent, and not other parts of their storages,
    unless tensors overlap.  `reduce` is called first for each object that is no plain built-in.  It
    returns what `__reduce__` would return, or NotImplemented for an object that is pickled in the
    usual way.

    Raises any error of pickling; a class's own `__reduce__` can raise anything.
    """
    tensors = TensorReducer(sketch=sketch, back_to_device=back_to_device, exact=exact)
    pickler = Pickler(namespace, tensors, reduce)
    pickler.dump_with_cells(value)
    if whole := tensors.overlapping:
        pickler = Pickler(namespace, replace(tensors, whole=whole), reduce)
        pickler.dump_with_cells(value)
    return Pickled(pickler)


def unpickle(frames: Sequence[Buffer], namespace: dict[str, Any] | None = None) -> Any:
    """Return the value that `pickle` has pickled into these frames.

    Tensors and arrays of the value use the memory of writable frames, without a copy.  Functions of
    the sender's `__main__` get `namespace`, or by default this process's `__main__`, as their
    globals.
    """
    # Copy `bytes`, because arrays on their memory would be read-only.
    buffers = [bytearray(frame) if isinstance(frame, bytes) else frame for frame in frames[1:]]
    with definitions.receiving(namespace):
        return load(frames[0], buffers)[0]


class _FirstFrame(io.BytesIO):
    """The file in memory into which a pickle is written, without its out-of-band buffers."""

    def __init__(self, *, sketch: bool) -> None:
        super().__init__()
        self.left_out = 0
        self._sketch = sketch
        self._checked_size = 0

    def write(self, data: Any) -> int:
        """Append bytes to the file; in a sketch, a digest in place of LONG_TEXT bytes or more.

        Raises NotEnoughMemory if the machine lacks memory.
        """
        size = memoryview(data).nbytes
        if self._sketch and size >= LONG_TEXT:
            self.left_out += size
            return super().write(digest_of(data).encode())
        if self.tell() + size - self._checked_size >= ASKED_FROM:
            self._checked_size = self.tell() + size
            require_memory(max(size, ASKED_FROM))
        return super().write(data)


def _tables_in(table: Mapping[type, Any]) -> list[Mapping[type, Any]]:
    """Return the tables of which a ChainMap is made, in the order in which `dict` must merge them.

    The first table of a ChainMap takes precedence, so it is merged last.
    """
    if not isinstance(table, ChainMap):
        return [table]
    return [each for inner in reversed(table.maps) for each in _tables_in(inner)]


class Pickler(by_value.Pickler):  # type: ignore[misc]  # cloudpickle has no types.
    """Pickles as cloudpickle does, except for functions, classes, tensors and some other types.

    While it pickles, `buffers` gets the out-of-band buffers, `needs` the global names that
    functions of `__main__` use, and `sources` the cells that define functions, by file name.
    """

    dispatch_table: Mapping[type, Any] = ChainMap(
        {
            functools.cached_property: lambda it: (type(it), (it.func,), {"attrname": it.attrname}),
            types.CodeType: lambda code: _reduce_code(code),
            # An item of a weak container is lost in the receiver if no other object there holds it.
            weakref.WeakKeyDictionary: lambda it: (type(it), (), None, None, iter([*it.items()])),
            weakref.WeakValueDictionary: lambda it: (type(it), (), None, None, iter([*it.items()])),
            weakref.WeakSet: lambda it: (type(it), (), [*it], None, None, type(it).update),
            weakref.ref: lambda it: _reduce_reference(it),
        },
        by_value.Pickler.dispatch_table,
    )
    _tables = _tables_in(dispatch_table)

    def __init__(
        self, namespace: dict[str, Any], tensors: TensorReducer, reduce: Reduce | None
    ) -> None:
        # A dict, since pickle looks up types often, and a ChainMap is slow Python code.
        self.dispatch_table = entries = dict[type, Any]()
        for table in self._tables:
            entries |= table
        self.file = _FirstFrame(sketch=tensors.sketch)
        self.buffers: list[Buffer] = []
        # The callback uses `append`, not `self`: with a reference cycle, the pickler and all
        # pickled objects would stay alive until Python collects cycles.  `raw` flattens memory that
        # is contiguous in Fortran's order.
        append = self.buffers.append
        super().__init__(self.file, 5, buffer_callback=lambda buffer: append(buffer.raw()))
        self.needs: set[str] = set()
        self.sources: dict[str, CellSource] = {}
        self.tensors = tensors
        self._namespace = namespace
        self._reduce = reduce
        self._variables: dict[int, Variable] = {}
        self._kinds: set[type] = set()  # types that `refuse_process_bound` has accepted

    def dump_with_cells(self, value: Any) -> None:
        """Pickle the value, and after it the texts of the cells that define its functions."""
        self.dump((value, MadeBy(definitions.keep_cell_sources, self.sources)))

    def reducer_override(self, value: Any) -> Reduced:
        """Reduce an object that is no plain built-in; pickle calls this for each such object."""
        if self._reduce is not None:
            reduced = self._reduce(value)
            if reduced is not NotImplemented:
                return reduced
        kind = type(value)
        if kind not in self._kinds:
            definitions.refuse_process_bound(kind)
            self._kinds.add(kind)
        if kind is types.FunctionType:
            return self._reduce_function(value)
        if issubclass(kind, type):
            return self._reduce_class(value)
        if isinstance(value, self.tensors.types):
            return self.tensors.reduce(value)
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (definitions.require_importable(value),)
        if isinstance(value, io.TextIOBase):
            return _reduce_stream(value)
        if isinstance(value, ctypes.CDLL):
            # pickle would send the library's handle, a number that means nothing elsewhere.
            raise plain_pickle.PicklingError("a loaded library cannot be pickled")
        # `dispatch_table` has no entry for cached functions, because pickle would use the entry for
        # importable functions, too, which are pickled by their names.
        if kind is _CACHED and not definitions.is_importable(value):
            wrap = MadeBy(functools.lru_cache, *value.cache_parameters().values())
            return operator.call, (wrap, value.__wrapped__)
        if name := _SENTINELS.get(id(value)):
            return getattr, (sys.modules["dataclasses"], name)
        if hasattr(kind, "register_step_pre_hook") and (hooks := optimizer_hooks(value)):
            make, args, state, *more = value.__reduce_ex__(5)
            return make, args, {**state, **hooks}, *more
        if is_plain_array(value):
            return reduce_expanded(value)
        return reduce_constant(value)

    def _reduce_function(self, function: types.FunctionType) -> Reduced:
        namespace = function.__globals__
        if namespace is self._namespace:
            names = definitions.global_names(function.__code__)
            self.needs |= names
            return self._rebuild_in(definitions.MAIN, function, names)
        if function.__code__ is definitions.DISPATCHER:
            default, *parts = definitions.parts_of_dispatcher(function)
            state = tuple(parts)
            fill = definitions.fill_dispatcher
            return functools.singledispatch, (default,), state, None, None, fill
        reduced: Reduced = super().reducer_override(function)
        if reduced is NotImplemented:
            return reduced  # pickle sends the function by its name
        module = sys.modules.get(namespace.get("__name__", ""))
        if module is not None and module.__dict__ is namespace:
            # The function comes from a module, but is not pickled by its name, for example a
            # decorator's closure.  In the receiver, the same module's variables are its globals.
            library = MadeBy(vars, MadeBy(importlib.import_module, module.__name__))
            return self._rebuild_in(library, function)
        self._keep_source(function.__code__)
        return reduced

    def _rebuild_in(
        self, namespace: object, function: types.FunctionType, names: frozenset[str] = frozenset()
    ) -> Reduced:
        self._keep_source(function.__code__)
        # Captured variables get their values later, since a value may refer to the function.
        closure = [self.variable_of(cell) for cell in function.__closure__ or ()]
        details = definitions.details_of(function)
        submodules = definitions.imported_submodules(function, names)
        inner = dict(function.__dict__), details, submodules
        return (
            types.FunctionType,
            (function.__code__, namespace, function.__name__, None, tuple(closure) or None),
            ([self.contents_of(variable) for variable in closure], inner),
            None,
            None,
            definitions.fill_function,
        )

    def _reduce_class(self, kind: type) -> Reduced:
        if alias := definitions.other_name(kind):
            return getattr, (sys.modules[kind.__module__], alias)
        reduced: Reduced = super().reducer_override(kind)
        if reduced is NotImplemented or len(reduced) == definitions.REFERENCE_LENGTH:
            return reduced
        maker, args, state = reduced[:3]
        slots = None
        if issubclass(kind, Enum):
            state = (*state, *definitions.member_attributes(kind))
        else:
            slots = definitions.pop_slots(kind, state[0])
        if slots is not None:
            args = (*args[:3], {**args[3], "__slots__": slots}, *args[4:])
        # Leave out an attribute that Python adds when it first pickles an instance: the class would
        # seem to have changed.
        state[0].pop("__slotnames__", None)
        definitions.set_annotations(kind, state[0])
        made = maker, args, kind.__qualname__
        return definitions.make_class, made, state, None, None, definitions.fill_class

    def variable_of(self, cell: types.CellType) -> Variable:
        """Return the stand-in of a captured variable, the same for all closures that share it."""
        return self._variables.setdefault(id(cell), Variable(cell))

    def contents_of(self, variable: Variable) -> tuple[Any, ...]:
        """Return (value,) to send a captured variable's value, and () to send none.

        This class returns () only for a variable without a value.  A subclass may return () for
        other variables, which the receiver then does not set.
        """
        return variable.contents()

    def known_variable(self, cell: types.CellType) -> Variable | None:
        """Return the stand-in of a captured variable; None if `variable_of` has made none."""
        return self._variables.get(id(cell))

    def _keep_source(self, code: types.CodeType) -> None:
        name = code.co_filename
        if name not in self.sources and (source := definitions.cell_source(name)) is not None:
            self.sources[name] = source


_CACHED = type(functools.lru_cache(lambda: None))

_SENTINELS = {
    # `dataclasses` recognizes its sentinels by identity, so the receiver must use its own: they are
    # sent by name.
    id(getattr(sys.modules["dataclasses"], name)): name
    for name in ("MISSING", "_HAS_DEFAULT_FACTORY")
}


def _reduce_stream(stream: io.TextIOBase) -> Reduced:
    for name in ("stdout", "stderr"):
        if stream is getattr(sys, name):
            return getattr, (sys, name)
    if isinstance(stream, io.TextIOWrapper):
        # cloudpickle would send the whole contents of a file that is open for reading.
        raise plain_pickle.PicklingError("an open file cannot be pickled")
    return NotImplemented


def _reduce_reference(reference: weakref.ref[Any]) -> Reduced:
    if reference.__callback__ is not None:
        raise TypeError("a weak reference with a callback cannot be pickled")
    if (value := reference()) is None:
        return definitions.dead_reference, ()
    return weakref.ref, (value,)


def _reduce_code(code: types.CodeType) -> Reduced:
    _, parts = by_value.Pickler.dispatch_table[types.CodeType](code)
    # cloudpickle drops the file's name from 3.1.3 on, so it is sent here.  Copy the name, because
    # pickle writes a reference in place of an object that it has written before: then pickles of
    # equal code could differ.
    return definitions.make_code, (definitions.PYTHON, "".join(code.co_filename), *parts)


def frames_of(value: Any, namespace: dict[str, Any], reduce: Reduce | None = None) -> list[Buffer]:
    """Return the frames of a value; faster than `pickle` for a number, text or other plain value.

    Raises the same errors as `pickle`.
    """
    if type(value) in ATOMIC:
        return [plain_pickle.dumps((value,), plain_pickle.HIGHEST_PROTOCOL)]
    return pickle(value, namespace, reduce=reduce).frames


def is_pickled_by_name(value: Any) -> bool:
    """Return True if pickle surely sends just the name and module of a function or class.

    Return False for every function and class if the user has told cloudpickle to pickle some module
    by value.
    """
    return definitions.is_importable(value) and not by_value.list_registry_pickle_by_value()


def load(first: Buffer, buffers: Sequence[Buffer]) -> Any:
    """Return the value of the pickle in `first`, whose big contents are in `buffers`."""
    if memoryview(first).nbytes < READ_FROM:
        return plain_pickle.loads(first, buffers=buffers)
    file = io.BytesIO(first)
    # Let pickle read in pieces through functions in Python, between which Stop can interrupt.  C
    # code would read the whole pickle at once.
    reading = types.SimpleNamespace(
        read=lambda size: file.read(size),
        readline=lambda: file.readline(),
        readinto=lambda buffer: file.readinto(buffer),
    )
    with without_cycles():
        return plain_pickle.Unpickler(reading, buffers=buffers).load()


def digest_of(data: Buffer) -> str:
    """Return a digest of bytes: their number and CRC-32.  It is no protection against forgery."""
    view, crc = memoryview(data).cast("B"), 0
    # CRC-32 is fast: 2.6 to 6 GB/s on a core, while SHA-1 has 0.9.
    for start in range(0, view.nbytes, READ_AT_ONCE):
        crc = zlib.crc32(view[start : start + READ_AT_ONCE], crc)
    return f"{view.nbytes:x}-{crc:08x}"


@contextmanager
def without_cycles() -> Iterator[None]:
    """Turn Python's collection of reference cycles off within this context.

    While millions of objects are made, this collection would take longer than making them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
