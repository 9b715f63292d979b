"""Python values as frames: one pickle, and its big contents beside it, not copied.

The notebook and the workers use it in both directions.  It is cloudpickle but for one
thing: functions of the sender's `__main__` become functions of the receiver's
`__main__`.  They find there whatever they use by name, so what they use is not in the
pickle; it is reported instead (`Pickled.needs`).  Big pickles are read in pieces, so that
Stop does not wait for all of one.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import io
import pickle as plain_pickle
import sys
import types
import zlib
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from operator import itemgetter
from typing import Any, ClassVar, cast

import cloudpickle.cloudpickle as by_value

from nbdist.system.limits import ASKED_FROM, require_memory
from nbdist.values.definitions import (
    MAIN,
    PYTHON,
    CellSource,
    Fence,
    MadeBy,
    Variable,
    cell_source,
    fill_class,
    fill_function,
    global_names,
    import_by_name,
    imported_submodules,
    is_importable,
    keep_cell_sources,
    make_cached_function,
    make_cached_property,
    make_class,
    make_code,
    make_function,
    module_namespace,
    mutable_ids,
    other_name,
    receiving,
    require_importable,
    take_slots,
)
from nbdist.values.shared_memory import Buffer
from nbdist.values.tensors import TensorReducer, reduce_constant

LONG = 1 << 20
"""Bytes of a text or `bytes` that a sketch leaves out."""

Reduced = tuple[Any, ...]
Reduce = Callable[[Any], Reduced]


class Pickled:
    """A value as frames, and what was learnt on the way through it.

    The frames show the value's own memory: pack them before the value changes.
    """

    def __init__(self, pickler: _Pickler) -> None:
        # It keeps every object that it met alive, so that ids stay theirs.
        self._pickler = pickler
        self.frames: list[Buffer] = [pickler.file.getbuffer(), *pickler.buffers]

    @property
    def needs(self) -> frozenset[str]:
        """Names that the value's functions will look for in the receiver's `__main__`."""
        return frozenset(self._pickler.needs)

    @property
    def versions(self) -> tuple[int, ...]:
        """torch's counts of in-place changes, of the tensors in the order they were met."""
        tensors = self._pickler.tensors
        return tuple(tensors.versions) if tensors else ()

    @property
    def is_sketch(self) -> bool:
        """It can be compared with, but not loaded: some of its contents were left out."""
        tensors = self._pickler.tensors
        return self._pickler.file.left_out > 0 or (tensors is not None and tensors.sketched)

    @property
    def size(self) -> int:
        """The bytes of its frames, with those of texts that a sketch has left out."""
        return sum(memoryview(each).nbytes for each in self.frames) + self._pickler.file.left_out

    @property
    def objects(self) -> list[Any]:
        """All that was met on the way and can be met again, in that order."""
        return [met for _, met in sorted(self._pickler.memo.copy().values(), key=itemgetter(0))]

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """Ids of the mutable objects in it, and addresses of tensors' memory.

        Two values share an object where these meet, if both `Pickled` are still there.
        What classes and functions hold does not count: a class is the same one in the
        receiver whatever brings it.
        """
        with without_cycles():
            memo = self._pickler.memo.copy()
        ids = mutable_ids(memo, self._pickler.fences)
        tensors = self._pickler.tensors
        return ids | tensors.addresses if tensors else ids


def pickle(
    value: Any,
    namespace: dict[str, Any],
    *,
    sketch: bool = False,
    back_to_device: bool = False,
    exact: bool = False,
    reduce: Reduce | None = None,
) -> Pickled:
    """Pickle `value` for another process, where `namespace` is the `__main__` of this one.

    Raises what pickling raises, for the most part `PicklingError` and `TypeError`; a
    class's own `__reduce__` can raise anything.  With `sketch` tensors on a device are
    not copied from there, nor are long texts; the result says whether they changed.  With
    `back_to_device` they arrive on the receiver's own device of that kind, with `exact`
    nothing beside what a tensor shows.  `reduce` is asked first how to take an object apart;
    NotImplemented for as usual.
    """
    options = (sketch, back_to_device, exact, reduce)
    pickler = _Pickler(namespace, frozenset(), *options)
    pickler.dump_with_cells(value)
    whole = pickler.tensors.overlapping if pickler.tensors else None
    if whole:
        pickler = _Pickler(namespace, whole, *options)
        pickler.dump_with_cells(value)
    return Pickled(pickler)


def unpickle(frames: Sequence[Buffer], namespace: dict[str, Any] | None = None) -> Any:
    """Make the value of `pickle`'s frames; writable frames are used as memory, not copied.

    Functions of the sender's `__main__` get `namespace`, by default this process's
    `__main__`, as their globals.
    """
    # Arrays and tensors would otherwise be read-only.
    buffers = [bytearray(frame) if isinstance(frame, bytes) else frame for frame in frames[1:]]
    with receiving(namespace):
        return load(frames[0], buffers)[0]


def join(parts: Sequence[Pickled]) -> list[Buffer]:
    """Make one list of frames of several pickled mappings; `unpickle` gives their union."""
    if len(parts) == 1:
        return parts[0].frames
    buffers: list[Buffer] = []
    joined = [[plain_pickle.PickleBuffer(frame) for frame in part.frames] for part in parts]
    outer = plain_pickle.dumps(
        (MadeBy(_load_union, joined), None), 5, buffer_callback=buffers.append
    )
    return [outer, *buffers]


class _FirstFrame(io.BytesIO):
    """The pickle itself: strings, bytes and small things, of which there can be much too."""

    def __init__(self, *, sketch: bool) -> None:
        super().__init__()
        self.left_out = 0
        self._sketch = sketch
        self._looked = 0

    def write(self, data: Any) -> int:
        """Keep the bytes; NotEnoughMemory before they are more than there is room for.

        Of long ones a sketch keeps what differs when they do.
        """
        size = memoryview(data).nbytes
        if self._sketch and size >= LONG:
            self.left_out += size
            return super().write(digest_of(data).encode())
        if self.tell() + size - self._looked >= ASKED_FROM:
            self._looked = self.tell() + size
            require_memory(max(size, ASKED_FROM))
        return super().write(data)


class _Pickler(by_value.Pickler):  # type: ignore[misc]  # cloudpickle has no types.
    """Says how each object is taken apart; pickle's C code does the rest."""

    dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(
        {
            functools.cached_property: lambda it: (make_cached_property, (it.func, it.attrname)),
            types.CodeType: lambda code: _reduce_code(code),
        },
        by_value.Pickler.dispatch_table,
    )

    def __init__(
        self,
        namespace: dict[str, Any],
        whole: frozenset[int],
        sketch: bool,  # noqa: FBT001
        back_to_device: bool,  # noqa: FBT001
        exact: bool,  # noqa: FBT001
        reduce: Reduce | None,
    ) -> None:
        self.file = _FirstFrame(sketch=sketch)
        self.buffers: list[Buffer] = []
        # Nothing that it holds may refer to it: what it met would be kept alive until
        # Python looks for cycles.  `raw` flattens what is contiguous in Fortran's order.
        take = self.buffers.append
        super().__init__(self.file, 5, buffer_callback=lambda buffer: take(buffer.raw()))
        self.needs: set[str] = set()
        self.sources: dict[str, CellSource] = {}
        self.fences: list[tuple[Fence, Fence]] = []
        self.tensors: TensorReducer | None = None
        torch = sys.modules.get("torch")
        if hasattr(torch, "TypedStorage"):  # Not while it is still being imported.
            assert torch is not None
            self.tensors = TensorReducer(
                torch,
                whole,
                sketch=sketch,
                back_to_device=back_to_device,
                exact=exact,
            )
        self._namespace = namespace
        self._reduce = reduce
        self._variables: dict[int, Variable] = {}

    def dump_with_cells(self, value: Any) -> None:
        """Pickle the value, and after it the cells in it, which are all known by then."""
        self.dump((value, MadeBy(keep_cell_sources, self.sources)))

    def reducer_override(self, value: Any) -> Reduced:
        """Take apart what is not a plain built-in.  Called by pickle."""
        if self._reduce is not None:
            reduced = self._reduce(value)
            if cast(Any, reduced) is not NotImplemented:
                return reduced
        kind = type(value)
        if kind is types.FunctionType:
            return self._reduce_function(value)
        if issubclass(kind, type):
            return self._reduce_class(value)
        if self.tensors is not None and isinstance(value, self.tensors.types):
            return self.tensors.reduce(value)
        if isinstance(value, types.ModuleType):
            return import_by_name, (require_importable(value),)
        if isinstance(value, io.TextIOBase):
            return _reduce_stream(value)
        if isinstance(value, ctypes.CDLL):
            # Its handle is a number, which pickle would take along as one.
            raise plain_pickle.PicklingError("a loaded library cannot be pickled")
        # Looked for here because the C code asks an object's `__reduce__` before the
        # table when that gives a name.
        if kind is _CACHED and not is_importable(value):
            parameters = value.cache_parameters()
            return make_cached_function, (value.__wrapped__, *parameters.values())
        name = _SENTINELS.get(id(value))
        if name is not None:
            return getattr, (sys.modules["dataclasses"], name)
        return reduce_constant(value)

    def _reduce_function(self, function: types.FunctionType) -> Reduced:
        own = function.__globals__
        if own is self._namespace:
            names = global_names(function.__code__)
            self.needs |= names
            return self._rebuild_in(MAIN, function, imported_submodules(function, names))
        reduced: Reduced = super().reducer_override(function)
        if cast(Any, reduced) is NotImplemented:
            return reduced  # by its name
        module = sys.modules.get(own.get("__name__", ""))
        if module is not None and module.__dict__ is own:
            # A closure that a library made, for instance by decorating: it belongs to the
            # library's module there as here.
            return self._rebuild_in(MadeBy(module_namespace, module.__name__), function, [])
        self._keep_source(function.__code__)
        return reduced

    def _rebuild_in(
        self, namespace: object, function: types.FunctionType, submodules: list[types.ModuleType]
    ) -> Reduced:
        self._keep_source(function.__code__)
        # They get their values after the function is there, because these may lead to it.
        known = self._variables
        closure = [known.setdefault(id(c), Variable(c)) for c in function.__closure__ or ()]
        details = {
            "__qualname__": function.__qualname__,
            "__annotations__": function.__annotations__,
            "__kwdefaults__": function.__kwdefaults__,
            "__defaults__": function.__defaults__,
            "__module__": function.__module__,
            "__doc__": function.__doc__,
        }
        if getattr(function, "__type_params__", ()):
            details["__type_params__"] = function.__type_params__  # type: ignore[attr-defined]
        inner = self._fenced((dict(function.__dict__), details, submodules))
        return (
            make_function,
            (function.__code__, namespace, function.__name__, tuple(closure)),
            ([variable.contents() for variable in closure], inner),
            None,
            None,
            fill_function,
        )

    def _reduce_class(self, kind: type) -> Reduced:
        if alias := other_name(kind):
            return getattr, (sys.modules[kind.__module__], alias)
        reduced = super().reducer_override(kind)
        if reduced is NotImplemented or len(reduced) == REFERENCE:
            return cast(Reduced, reduced)
        maker, args, state = reduced[:3]
        if not issubclass(kind, Enum) and (slots := take_slots(kind, state[0])) is not None:
            args = (*args[:3], {**args[3], "__slots__": slots}, *args[4:])
        # Python puts these there when they are first asked for: that is no change.
        state[0].pop("__slotnames__", None)
        if not state[0].get("__annotations__", True):
            del state[0]["__annotations__"]
        return (
            make_class,
            (maker, args, kind.__qualname__),
            self._fenced(state),
            None,
            None,
            fill_class,
        )

    def _fenced(self, state: Any) -> tuple[Fence, Any, Fence]:
        fences = Fence(), Fence()
        self.fences.append(fences)
        return fences[0], state, fences[1]

    def _keep_source(self, code: types.CodeType) -> None:
        if code.co_filename not in self.sources:
            source = cell_source(code.co_filename)
            if source is not None:
                self.sources[code.co_filename] = source


REFERENCE = 2
"""Items in which cloudpickle takes apart a class that is known by its name; others have a state."""

_CACHED = type(functools.lru_cache(lambda: None))

_SENTINELS = {
    # `dataclasses` compares with these by identity.
    id(getattr(sys.modules["dataclasses"], name)): name
    for name in ("MISSING", "_HAS_DEFAULT_FACTORY")
}


def _reduce_stream(stream: io.TextIOBase) -> Reduced:
    for name in ("stdout", "stderr"):
        if stream is getattr(sys, name):
            return getattr, (sys, name)
    if isinstance(stream, io.TextIOWrapper):
        # cloudpickle reads the whole file, and sends that.
        raise plain_pickle.PicklingError("an open file cannot be pickled")
    return cast(Reduced, NotImplemented)


def _reduce_code(code: types.CodeType) -> Reduced:
    _, parts = by_value.Pickler.dispatch_table[types.CodeType](code)
    # cloudpickle drops the file's name from 3.1.3 on; a copy, as it makes one of each text.
    return make_code, (PYTHON, "".join(code.co_filename), *parts)


def _load_union(parts: list[list[Buffer]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for first, *buffers in parts:
        values.update(load(first, buffers)[0])
    return values


# --- read in pieces, between which Stop is met -------------------------------------------------


READ_FROM = 1 << 20
"""Bytes of a pickle itself that take some 10 ms to be read."""

AT_ONCE = 64 << 20
"""Bytes of memory that are read between two looks for Stop."""


def load(first: Buffer, buffers: Sequence[Buffer]) -> Any:
    """Load a pickle with the buffers that belong to it."""
    if memoryview(first).nbytes < READ_FROM:
        return plain_pickle.loads(first, buffers=buffers)
    with without_cycles():
        return plain_pickle.Unpickler(_Reading(first), buffers=buffers).load()


def digest_of(data: Buffer) -> str:
    """Return the digest of bytes: of length and CRC-32, which no value here is made to meet."""
    view, found = memoryview(data).cast("B"), 0
    # The fastest that Python has: 2.6 to 6 GB/s on a core, hashlib's SHA-1 0.9.
    for start in range(0, view.nbytes, AT_ONCE):
        found = zlib.crc32(view[start : start + AT_ONCE], found)
    return f"{view.nbytes:x}-{found:08x}"


@contextmanager
def without_cycles() -> Iterator[None]:
    """Have Python look for no cycles meanwhile.

    Among millions of new objects that takes longer than to make them, and Stop waits.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Reading:
    """A pickle read a piece at a time: between two pieces Stop is met, which C code never does."""

    def __init__(self, data: Buffer) -> None:
        self._file = io.BytesIO(data)

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def readline(self) -> bytes:
        return self._file.readline()

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer)
