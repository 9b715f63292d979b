"""Python values as frames: one pickle, and its big contents beside it, not copied.

It is cloudpickle, but functions of the sender's `__main__` become functions of the receiver's:
the names that they use there are not in the pickle, but reported (`Pickled.needs`).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import importlib
import io
import operator
import pickle as plain_pickle
import sys
import types
import weakref
import zlib
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar

import cloudpickle.cloudpickle as by_value

from nbdist.system.limits import ASKED_FROM, require_memory
from nbdist.values import definitions
from nbdist.values.definitions import CellSource, Fence, MadeBy, Variable
from nbdist.values.tensors import Reduced, TensorReducer, reduce_constant

LONG, READ_FROM, AT_ONCE = 1 << 20, 1 << 20, 64 << 20
"""Bytes of a text that a sketch leaves out, of a pickle that takes some 10 ms to be read, and of
memory that is read between two looks for Stop."""

Buffer = bytes | bytearray | memoryview | plain_pickle.PickleBuffer
"""What frames are, and the memory that is pickled beside them."""

Reduce = Callable[[Any], Reduced]


class Pickled:
    """A value as frames of its own memory, to be packed before it changes, and what was learnt."""

    def __init__(self, pickler: _Pickler) -> None:
        # It keeps every object that it met alive, so that ids stay theirs.
        self._pickler = pickler
        self.frames: list[Buffer] = [pickler.file.getbuffer(), *pickler.buffers]
        left_out = pickler.file.left_out
        self.size = sum(memoryview(each).nbytes for each in self.frames) + left_out
        """The bytes of its frames, with those of texts that a sketch has left out."""
        self.is_sketch = left_out > 0 or pickler.tensors.sketched
        """It can be compared with, but not loaded: some of its contents were left out."""
        self.needs = frozenset(pickler.needs)
        """Names that the value's functions will look for in the receiver's `__main__`."""
        self.versions = tuple(pickler.tensors.versions)
        """torch's counts of in-place changes, of the tensors in the order they were met."""

    @property
    def objects(self) -> list[Any]:
        """All that was met on the way and can be met again, in that order."""
        memo = self._pickler.memo.copy().values()
        return [met for _, met in sorted(memo, key=operator.itemgetter(0))]

    @functools.cached_property
    def shared(self) -> frozenset[int]:
        """Ids of the mutable objects in it, and addresses of tensors' memory.

        Two values share an object where these meet, if both `Pickled` are still there.  What
        classes and functions hold does not count: they are the same in the receiver anyway.
        """
        with without_cycles():
            memo = self._pickler.memo.copy()
        ids = definitions.mutable_ids(memo, self._pickler.fences)
        return ids | self._pickler.tensors.addresses


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

    Raises what pickling raises; a class's own `__reduce__` can raise anything.  A `sketch` has no
    tensors on a device, nor long texts, but tells whether they changed.  With `back_to_device`
    tensors arrive on the receiver's own device, with `exact` nothing beside what they show.
    `reduce` is asked first how to take an object apart; NotImplemented for as usual.
    """
    tensors = TensorReducer(sketch=sketch, back_to_device=back_to_device, exact=exact)
    pickler = _Pickler(namespace, tensors, reduce)
    pickler.dump_with_cells(value)
    if whole := tensors.overlapping:
        pickler = _Pickler(namespace, replace(tensors, whole=whole), reduce)
        pickler.dump_with_cells(value)
    return Pickled(pickler)


def unpickle(frames: Sequence[Buffer], namespace: dict[str, Any] | None = None) -> Any:
    """Make the value of `pickle`'s frames; writable frames are used as memory, not copied.

    Functions of the sender's `__main__` get `namespace`, or this process's, as their globals.
    """
    # Arrays and tensors would otherwise be read-only.
    buffers = [bytearray(frame) if isinstance(frame, bytes) else frame for frame in frames[1:]]
    with definitions.receiving(namespace):
        return load(frames[0], buffers)[0]


class _FirstFrame(io.BytesIO):
    """The pickle itself: strings, bytes and small things, of which there can be much too."""

    def __init__(self, *, sketch: bool) -> None:
        super().__init__()
        self.left_out = 0
        self._sketch = sketch
        self._looked = 0

    def write(self, data: Any) -> int:
        """Keep the bytes, of long ones in a sketch a digest; NotEnoughMemory for too many."""
        size = memoryview(data).nbytes
        if self._sketch and size >= LONG:
            self.left_out += size
            return super().write(digest_of(data).encode())
        if self.tell() + size - self._looked >= ASKED_FROM:
            self._looked = self.tell() + size
            require_memory(max(size, ASKED_FROM))
        return super().write(data)


class _Pickler(by_value.Pickler):  # type: ignore[misc]  # cloudpickle has no types.
    dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(
        {
            functools.cached_property: lambda it: (type(it), (it.func,), {"attrname": it.attrname}),
            types.CodeType: lambda code: _reduce_code(code),
            # What is weakly referred to is there afterwards if something else holds it.
            weakref.WeakKeyDictionary: lambda it: (type(it), (), None, None, iter([*it.items()])),
            weakref.WeakValueDictionary: lambda it: (type(it), (), None, None, iter([*it.items()])),
            weakref.WeakSet: lambda it: (type(it), (), [*it], None, None, type(it).update),
            weakref.ref: lambda it: _reduce_reference(it),
        },
        by_value.Pickler.dispatch_table,
    )

    def __init__(
        self, namespace: dict[str, Any], tensors: TensorReducer, reduce: Reduce | None
    ) -> None:
        self.file = _FirstFrame(sketch=tensors.sketch)
        self.buffers: list[Buffer] = []
        # Nothing that it holds may refer to it: what it met would be kept alive until
        # Python looks for cycles.  `raw` flattens what is contiguous in Fortran's order.
        take = self.buffers.append
        super().__init__(self.file, 5, buffer_callback=lambda buffer: take(buffer.raw()))
        self.needs: set[str] = set()
        self.sources: dict[str, CellSource] = {}
        self.fences: list[tuple[Fence, Fence]] = []
        self.tensors = tensors
        self._namespace = namespace
        self._reduce = reduce
        self._variables: dict[int, Variable] = {}
        self._kinds: set[type] = set()  # types of objects that were met and may be pickled

    def dump_with_cells(self, value: Any) -> None:
        """Pickle the value, and after it the cells in it, which are all known by then."""
        self.dump((value, MadeBy(definitions.keep_cell_sources, self.sources)))

    def reducer_override(self, value: Any) -> Reduced:
        """Take apart what is not a plain built-in.  Called by pickle."""
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
            # Its handle is a number, which pickle would take along as one.
            raise plain_pickle.PicklingError("a loaded library cannot be pickled")
        # Looked for here because the C code asks an object's `__reduce__` before the
        # table when that gives a name.
        if kind is _CACHED and not definitions.is_importable(value):
            wrap = MadeBy(functools.lru_cache, *value.cache_parameters().values())
            return operator.call, (wrap, value.__wrapped__)
        if name := _SENTINELS.get(id(value)):
            return getattr, (sys.modules["dataclasses"], name)
        return reduce_constant(value)

    def _reduce_function(self, function: types.FunctionType) -> Reduced:
        own = function.__globals__
        if own is self._namespace:
            names = definitions.global_names(function.__code__)
            self.needs |= names
            return self._rebuild_in(definitions.MAIN, function, names)
        if function.__code__ is definitions.DISPATCHER:
            default, *parts = definitions.parts_of_dispatcher(function)
            state = self._fenced(parts)
            fill = definitions.fill_dispatcher
            return functools.singledispatch, (default,), state, None, None, fill
        reduced: Reduced = super().reducer_override(function)
        if reduced is NotImplemented:
            return reduced  # by its name
        module = sys.modules.get(own.get("__name__", ""))
        if module is not None and module.__dict__ is own:
            # A closure that a library made, for instance by decorating: it belongs to the
            # library's module there as here.
            there = MadeBy(vars, MadeBy(importlib.import_module, module.__name__))
            return self._rebuild_in(there, function)
        self._keep_source(function.__code__)
        return reduced

    def _rebuild_in(
        self, namespace: object, function: types.FunctionType, names: frozenset[str] = frozenset()
    ) -> Reduced:
        self._keep_source(function.__code__)
        # They get their values after the function is there, because these may lead to it.
        known = self._variables
        closure = [known.setdefault(id(c), Variable(c)) for c in function.__closure__ or ()]
        details = {name: getattr(function, name) for name in DETAILS if hasattr(function, name)}
        submodules = definitions.imported_submodules(function, names)
        inner = self._fenced((dict(function.__dict__), details, submodules))
        return (
            types.FunctionType,
            (function.__code__, namespace, function.__name__, None, tuple(closure) or None),
            ([variable.contents() for variable in closure], inner),
            None,
            None,
            definitions.fill_function,
        )

    def _reduce_class(self, kind: type) -> Reduced:
        if alias := definitions.other_name(kind):
            return getattr, (sys.modules[kind.__module__], alias)
        reduced: Reduced = super().reducer_override(kind)
        if reduced is NotImplemented or len(reduced) == REFERENCE:
            return reduced
        maker, args, state = reduced[:3]
        slots = None
        if issubclass(kind, Enum):
            state = (*state, *definitions.member_attributes(kind))
        else:
            slots = definitions.take_slots(kind, state[0])
        if slots is not None:
            args = (*args[:3], {**args[3], "__slots__": slots}, *args[4:])
        # Python puts these there when they are first asked for: that is no change.
        state[0].pop("__slotnames__", None)
        if not state[0].get("__annotations__", True):
            del state[0]["__annotations__"]
        made = maker, args, kind.__qualname__
        return definitions.make_class, made, self._fenced(state), None, None, definitions.fill_class

    def _fenced(self, state: Any) -> tuple[Fence, Any, Fence]:
        fences = Fence(), Fence()
        self.fences.append(fences)
        return fences[0], state, fences[1]

    def _keep_source(self, code: types.CodeType) -> None:
        name = code.co_filename
        if name not in self.sources and (source := definitions.cell_source(name)) is not None:
            self.sources[name] = source


DETAILS = (
    *("__qualname__", "__annotations__", "__kwdefaults__", "__defaults__", "__module__", "__doc__"),
    "__type_params__",  # from Python 3.12 on
)
"""What a function has besides its code and closure, which may lead to the function itself."""

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
    return NotImplemented


def _reduce_reference(reference: weakref.ref[Any]) -> Reduced:
    if reference.__callback__ is not None:
        raise TypeError("a weak reference with a callback cannot be pickled")
    if (value := reference()) is None:
        return definitions.dead_reference, ()
    return weakref.ref, (value,)


def _reduce_code(code: types.CodeType) -> Reduced:
    _, parts = by_value.Pickler.dispatch_table[types.CodeType](code)
    # cloudpickle drops the file's name from 3.1.3 on; a copy, as it makes one of each text.
    return definitions.make_code, (definitions.PYTHON, "".join(code.co_filename), *parts)


def load(first: Buffer, buffers: Sequence[Buffer]) -> Any:
    """Load a pickle with the buffers that belong to it."""
    if memoryview(first).nbytes < READ_FROM:
        return plain_pickle.loads(first, buffers=buffers)
    file = io.BytesIO(first)
    # A piece at a time: between two pieces Stop is met, which C code alone never does.
    reading = types.SimpleNamespace(
        read=lambda size: file.read(size),
        readline=lambda: file.readline(),
        readinto=lambda buffer: file.readinto(buffer),
    )
    with without_cycles():
        return plain_pickle.Unpickler(reading, buffers=buffers).load()


def digest_of(data: Buffer) -> str:
    """Return the digest of bytes: of length and CRC-32, which no value here is made to meet."""
    view, found = memoryview(data).cast("B"), 0
    # The fastest that Python has: 2.6 to 6 GB/s on a core, hashlib's SHA-1 0.9.
    for start in range(0, view.nbytes, AT_ONCE):
        found = zlib.crc32(view[start : start + AT_ONCE], found)
    return f"{view.nbytes:x}-{found:08x}"


@contextmanager
def without_cycles() -> Iterator[None]:
    """Look for no cycles meanwhile, which takes longer than to make millions of objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- whether a value has changed -------------------------------------------------------------

WHOLE_LIMIT = 4 << 30  # up to this many bytes a value is compared whole, at some 5 GB each second
_SMALL = 4096
_SAMPLES = 64


def content_version(pickled: Pickled) -> bytes:
    """Return what differs when the value does: the digest of its pickle, and of its buffers.

    Where these are more than `WHOLE_LIMIT` in all they are looked at here and there only; the
    count of changes that every tensor keeps makes up for some of it.
    """
    first, *buffers = (memoryview(frame) for frame in pickled.frames)
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, first)
    in_full = is_compared_whole(pickled)
    for buffer in buffers:
        if in_full:
            _add(digest, buffer)
        else:
            digest.update(str(buffer.nbytes).encode())
            for start in range(0, buffer.nbytes, max(_SMALL, buffer.nbytes // _SAMPLES)):
                digest.update(buffer[start : start + _SMALL])
    if pickled.is_sketch or not in_full:
        digest.update(repr(pickled.versions).encode())
    return digest.digest()


def is_compared_whole(pickled: Pickled) -> bool:
    """Return True if its `content_version` differs whenever a byte of it does."""
    return pickled.size <= WHOLE_LIMIT


def _add(digest: hashlib.blake2b, view: memoryview) -> None:
    # Four times as fast as any hash in hashlib; no value is forged here.
    digest.update(view if view.nbytes <= 16 * _SMALL else digest_of(view).encode())
