"""Writes and reads messages with variables; an object that the receiver has is sent as its key.

The notebook writes a message (`write`), and a rank reads it (`read`).  A message has values by
name, updates of objects that the receiver has, and the keys of objects that are new to the
receiver.  All pickles of a message share one memo, so an object in two of the values arrives once.
"""

from __future__ import annotations

import io
import pickle as plain_pickle
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nbdist.values import definitions
from nbdist.values.definitions import MadeBy
from nbdist.values.digests import digest_bytes
from nbdist.values.links import Links, MemoryBlock
from nbdist.values.memory import (
    attributes_of_array,
    has_plain_memory,
    is_plain_array,
    is_scattered,
    memory_at,
    reduce_file_array,
    root_of_array,
    span_of_array,
    span_of_tensor,
)
from nbdist.values.pickling import Buffer, Pickler, without_cycles
from nbdist.values.states import ObjectState, Reducer
from nbdist.values.tensors import Reduced, TensorReducer, set_attributes
from nbdist.values.updates import ObjectUpdate

READ_FROM = 1 << 20
"""A pickle of so many bytes or more is read by functions in Python, so that Stop can interrupt.

The C code of pickle would read all bytes before Stop takes effect.  It reads a smaller pickle in
only some 10 ms.
"""


class ValueMessage(NamedTuple):
    """A message for a rank; `size` is in bytes, and `keys` are of objects new to the rank."""

    frames: Sequence[Buffer]
    size: int
    keys: frozenset[int]


class ReceivedMessage(NamedTuple):
    """A message as a rank has read it."""

    values: dict[str, Any]  # by the name of the variable
    updates: list[ObjectUpdate]
    objects: list[tuple[int, str, Any]]  # new objects: key, kind ("tool") such as "dict", object
    blocks: list[tuple[int, str, Any]]  # new memory blocks: key, digest or "", array of the bytes


_DEFINED = (types.FunctionType, type, definitions.Import)


class NotThere(LookupError):
    """The receiver has no object with this key."""

    def __init__(self, key: int) -> None:
        super().__init__(key)
        self.key = key


class CannotRebuild(Exception):
    """Unpickling the variable `name` of a message has raised the error in `__cause__`.

    If `name` is "", unpickling another part of the message, such as an update, has raised it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def reducer_for(namespace: dict[str, Any]) -> Reducer:
    """Return functions that tell how an object would be pickled (`Reducer`).

    A `Scan`, which reads the states of objects so that changes are noticed, calls these functions.
    `namespace` is the `__main__` of this process.
    """
    scout = Pickler(namespace, TensorReducer(sketch=True, back_to_device=False, exact=False), None)

    def content(value: Any) -> str:
        tensors = TensorReducer(sketch=True, back_to_device=False, exact=False)
        pickler = Pickler(namespace, tensors, None)
        pickler.dump(value)
        frames = [pickler.file.getvalue(), *pickler.buffers]
        return " ".join(map(digest_bytes, frames))

    def reduce(value: Any) -> Reduced:
        reduced = reduce_file_array(value)
        return scout.reducer_override(value) if reduced is NotImplemented else reduced

    return Reducer(reduce, content, Pickler.dispatch_table)


# --- the sender's side ------------------------------------------------------------------


class _Known:
    """Finds out which objects the receiver has, so that only their keys are pickled.

    `sent` has the keys of the objects that the receiver has.  A *stand-in* is an object that is
    pickled in place of another object, whose key the stand-in gets, too.

    Objects are found by their ids.  But an object may end while users' code runs during pickling,
    and Python may give its id to a new object.  For the new object, `key_of` returns None.
    """

    def __init__(self, links: Links, sent: Collection[int]) -> None:
        self._by_id = links.by_id
        entries = links.by_id.copy().items()
        # The key of each known object, by the object's id.  The entry stays if the object ends.
        self.keys = {number: entry.key for number, entry in entries if entry.key in sent}
        self._stand_ins: dict[int, int] = {}

    def add_stand_in(self, value: object, key: int) -> None:
        """Record that `value` is pickled in place of an object that the receiver has.

        `key` is the object's key.  `value` must live as long as the pickler, since it is recorded
        by its id.
        """
        self.keys[id(value)] = self._stand_ins[id(value)] = key

    def key_of(self, value: object) -> int | None:
        """Return the key of an object or stand-in; None if the receiver lacks the object."""
        number = id(value)
        key = self.keys.get(number)
        if key is None:
            return None
        entry = self._by_id.get(number)
        if entry is not None and entry.key == key:
            return key
        return self._stand_ins.get(number)


class _Memory(TensorReducer):
    """Pickles tensors and arrays as views of memory blocks, which the receiver may have already."""

    def __init__(self, links: Links, known: _Known, sent: Collection[int]) -> None:
        super().__init__(sketch=False, back_to_device=False, exact=False)
        self.links, self.known, self.sent = links, known, sent
        self.pieces: dict[int, _BlockPiece] = {}

    def piece_of(self, block: MemoryBlock) -> _BlockPiece:
        """Return the stand-in that is pickled in place of a memory block; a block has only one.

        If the receiver has the block, only the block's key is pickled.
        """
        piece = self.pieces.get(block.key)
        if piece is None:
            piece = self.pieces[block.key] = _BlockPiece(block)
            if block.key in self.sent:
                self.known.add_stand_in(piece, block.key)
        return piece

    def reduce_array(self, value: Any) -> Reduced:
        """Reduce a numpy array to a view of its memory block.

        Return NotImplemented if the array is in no memory block: then it is pickled as usual.
        """
        if value.dtype.hasobject or not value.size:
            return NotImplemented
        start, end = span_of_array(value)
        root, _ = root_of_array(self._torch, value, (start, end))
        block = self.links.blocks.find_containing(start, end, root[0], "cpu")
        if block is None:
            return NotImplemented
        at = value.__array_interface__["data"][0] - block.start
        shape = value.dtype, at, value.shape, value.strides, bool(value.flags.writeable)
        args = (self.piece_of(block), *shape, type(value))
        attributes = attributes_of_array(value)
        if not attributes:
            return array_on, args
        return array_on, args, attributes, None, None, set_own_attributes

    def reduce(self, value: Any) -> Reduced:
        """Reduce a tensor or storage to a view of its memory block, or as `TensorReducer` does."""
        if isinstance(value, self.types[1]):
            block = self.links.blocks.get_exact(value.data_ptr(), value.nbytes(), value.device.type)
            if block is not None:
                return storage_on, (self.piece_of(block),)
            return super().reduce(value)
        if isinstance(value, self.types[2]) or not has_plain_memory(self._torch, value):
            return super().reduce(value)
        return self._linked(value)

    def _linked(self, tensor: Any) -> Reduced:
        data = tensor.detach()
        if not data.numel():
            return super().reduce(tensor)
        storage, (start, end) = data.untyped_storage(), span_of_tensor(data)
        root = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        device = storage.device.type
        block = self.links.blocks.find_containing(start, end, root[0], device)
        if block is None and is_scattered(data, root, start, end):
            what = start, end, str(data.dtype), tuple(data.shape), tuple(data.stride())
            block = self.links.blocks.get_copied(what)
        if block is None:
            return super().reduce(tensor)
        offset, stride = start - block.start, tuple(data.stride())
        piece = self.piece_of(block)
        if block.copied:
            piece.contents, stride = self._compact(data)
            offset = 0
        elif piece.contents is None and self.known.key_of(piece) is None:
            piece.contents = self.contents_of(block, storage)
        kind = type(tensor) is not self._torch.Tensor
        args = (piece, data.dtype, offset, tuple(data.shape), stride, tensor.requires_grad, kind)
        grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        attributes = tensor.__dict__ if grad is None else {**tensor.__dict__, "grad": grad}
        if not attributes:
            return tensor_on, args
        return tensor_on, args, attributes, None, None, set_attributes

    def _compact(self, data: Any) -> tuple[Any, tuple[int, ...]]:
        once = data[tuple(slice(1) if step == 0 else slice(None) for step in data.stride())]
        copy = once.clone(memory_format=self._torch.preserve_format).cpu()
        kept = zip(data.stride(), copy.stride(), strict=True)
        contents = plain_pickle.PickleBuffer(copy.contiguous().view(self._torch.uint8).numpy())
        return contents, tuple(new if old else 0 for old, new in kept)

    def contents_of(self, block: MemoryBlock, owner: Any = None) -> Any:
        """Return a memory block's bytes as a buffer: a view of the CPU's memory, or else a copy.

        `owner` is the storage with the memory.  A view keeps `owner` alive; if `owner` is None, the
        caller must keep the memory alive.
        """
        if block.device != "cpu":
            flat = flat_tensor(owner)[block.start - owner.data_ptr() :][: block.size]
            host: Any = self._on_host(flat).numpy()
            return plain_pickle.PickleBuffer(host)
        return plain_pickle.PickleBuffer(_keep_owner(memory_at(block.start, block.size), owner))


def _keep_owner(view: memoryview, owner: Any) -> Any:
    """Return the ctypes array to which a view belongs, and let the array keep `owner` alive."""
    made: Any = view.obj
    made.owner = owner  # a ctypes array can have new attributes, and a memoryview cannot
    return made


class _BlockPiece:
    """Stands in a pickle for a memory block.

    A receiver that does not have the block gets an array of the block's bytes.
    """

    def __init__(self, block: MemoryBlock) -> None:
        self.block = block
        self.contents: Any = None

    def __reduce__(self) -> Reduced:
        contents = self.contents
        if contents is None:
            contents = plain_pickle.PickleBuffer(memory_at(self.block.start, self.block.size))
        return block_from, (contents,)


class _LinkedPickler(Pickler):
    """Pickles values, with tensors and arrays as views of memory blocks.

    `write` uses this class if the receiver has no objects yet, and else `_ReferringPickler`.
    """

    def __init__(
        self, namespace: dict[str, Any], links: Links, known: _Known, sent: Collection[int]
    ) -> None:
        self.memory = _Memory(links, known, sent)
        super().__init__(namespace, self.memory, None)
        self._known = known
        self._known_ids = known.keys

    def reducer_override(self, value: Any) -> Reduced:
        """Return how an object is pickled; pickle calls this for all but objects of basic types."""
        if type(value) is OrderedDict:  # avoids slow checks: torch modules have many of these
            return NotImplemented
        if is_plain_array(value):
            entry = self.memory.links.by_id.get(id(value))
            is_opaque = entry is not None and entry.tool == "opaque"
            reduced = (reduce_file_array if is_opaque else self.memory.reduce_array)(value)
            if reduced is not NotImplemented:
                return reduced
        return super().reducer_override(value)

    def variable_of(self, cell: types.CellType) -> Any:
        """Return the stand-in of a variable that functions capture, a `cell` object of Python.

        If the receiver has the variable, only its key is pickled for the stand-in.
        """
        variable = super().variable_of(cell)
        if (key := self._known.key_of(cell)) is not None:
            self._known.add_stand_in(variable, key)
        return variable

    def contents_of(self, variable: Any) -> tuple[Any, ...]:
        """Return (value,) for a captured variable, () if it has no value or the receiver has it."""
        is_known = self._known.key_of(variable) is not None
        return () if is_known else super().contents_of(variable)


class _ReferringPickler(_LinkedPickler):
    """Pickles only the key of each object that the receiver has.

    If the receiver has no objects, `_LinkedPickler` is used, which is faster: pickle does not have
    to call `persistent_id` for each object.
    """

    def persistent_id(self, value: Any) -> int | None:
        """Return an object's key if the receiver has the object, else None.

        Pickle calls this for each object.  If a key is returned, only the key is pickled.
        """
        return self._known.key_of(value) if id(value) in self._known_ids else None


def write(
    values: Mapping[str, Any],
    updates: Iterable[ObjectUpdate],
    links: Links,
    states: Mapping[int, ObjectState],
    sent: Collection[int],
    namespace: dict[str, Any],
) -> ValueMessage:
    """Pickle values and updates for ranks that have the objects whose keys are in `sent`.

    `values` has variables by name, and `states` has states by key.  The message lists the objects
    with a key in `states` that it brings to the receiver, so that the receiver can register them.
    Raises any error that pickling raises.
    """
    kind = _ReferringPickler if sent else _LinkedPickler
    pickler = kind(namespace, links, _Known(links, sent), sent)
    updates = [*updates]
    # Definitions come first: rebuilding other values may need them.
    definitions_first = lambda name: not isinstance(values[name], _DEFINED)  # noqa: E731
    values = {name: values[name] for name in sorted(values, key=definitions_first)}
    pickler.dump((*values,))
    for value in values.values():
        pickler.dump(value)
    pickler.dump([(key, tool, _with_memory(data, pickler.memory)) for key, tool, data in updates])
    memo = {number: index for number, (index, _) in pickler.memo.copy().items()}
    new, objects = set[int](), []
    for key in states:
        entry = links.by_key.get(key)
        if entry is None or key in sent:
            continue
        target: Any = entry()
        stand_in: Any = pickler.known_variable(target) if entry.tool == "cell" else target
        if stand_in is not None and id(stand_in) in memo:
            new.add(key)
            objects.append((key, entry.tool, stand_in))
    blocks = []
    for key, piece in pickler.memory.pieces.items():
        if key not in sent and id(piece) in memo:
            new.add(key)
            digest = states[key].digest.decode() if key in states else ""
            blocks.append((key, digest, piece))
    pickler.dump((objects, blocks))
    pickler.dump(MadeBy(definitions.keep_cell_sources, pickler.sources))
    frames: list[Buffer] = [pickler.file.getvalue(), *pickler.buffers]
    size = sum(memoryview(frame).nbytes for frame in frames)
    # Frames can be views of the memory of pickled objects.  The pickler keeps these objects alive,
    # so the frames must keep the pickler alive.
    message = ValueMessage(_Frames(frames), size, frozenset(new))
    message.frames.pickler = pickler  # type: ignore[attr-defined]
    return message


class _Frames(list[Any]):
    """The frames of a message, with the pickler, which keeps the memory of the frames alive."""

    pickler: Any = None


def _with_memory(data: Any, memory: _Memory) -> Any:
    """Return the contents of `data` if it is a memory block, else `data` itself."""
    if isinstance(data, MemoryBlock):
        return memory.contents_of(data, data.owner_storage())
    return data


# --- the receiver's side ----------------------------------------------------------------


class _LinkedUnpickler(plain_pickle.Unpickler):
    find: Callable[[int], Any]

    def persistent_load(self, key: Any) -> Any:
        """Return the receiver's object with this key; raises NotThere if it has none.

        Pickle calls this for each object that was pickled as a key.
        """
        value = self.find(key)
        if value is None:
            raise NotThere(key)
        return value


def read(
    frames: Sequence[Buffer], find: Callable[[int], Any], namespace: dict[str, Any] | None
) -> ReceivedMessage:
    """Unpickle a message; `find` returns the receiver's own object with a key, or None.

    `namespace` has the globals for functions of the sender's `__main__`; None means the `__main__`
    of this process.  Raises NotThere if `find` returns None, and CannotRebuild if unpickling raises
    another error.
    """
    buffers = [bytearray(frame) if isinstance(frame, bytes) else frame for frame in frames[1:]]
    with definitions.receiving(namespace), without_cycles():
        file = io.BytesIO(frames[0])
        source: Any = file
        if memoryview(frames[0]).nbytes >= READ_FROM:
            # Let pickle call functions in Python, in which Stop can raise KeyboardInterrupt.  Code
            # in C alone would first read to the end.
            source = types.SimpleNamespace(
                read=lambda size: file.read(size),
                readline=lambda: file.readline(),
                readinto=lambda buffer: file.readinto(buffer),
            )
        unpickler = _LinkedUnpickler(source, buffers=buffers)
        unpickler.find = find
        values: dict[str, Any] = {}
        name, early = "", []
        try:
            for name in unpickler.load():
                values[name] = unpickler.load()
                # A user's class may be rebuilt by a function that uses an earlier variable of the
                # message: bind the variable until the whole message is read.
                if namespace is not None and name not in namespace:
                    namespace[name] = values[name]
                    early.append(name)
            name = ""
            updates = unpickler.load()
            objects, blocks = unpickler.load()
            unpickler.load()
        except NotThere:
            raise
        except Exception as error:  # a user's class can raise anything while it is rebuilt
            raise CannotRebuild(name) from error
        finally:
            for name in early:
                namespace.pop(name, None)  # type: ignore[union-attr]
    return ReceivedMessage(values, updates, objects, blocks)


def block_from(contents: Any) -> Any:
    """Return a memory block as an array of bytes, of which tensors and arrays are views."""
    import numpy as np

    view = memoryview(contents).cast("B")
    if view.readonly:
        view = memoryview(bytearray(view))
    return np.frombuffer(view, np.uint8)


_storages: dict[int, Any] = {}
"""Weak references to the storages that `storage_on` has made, by the address of their memory."""


def storage_on(root: Any) -> Any:
    """Return a torch storage on the memory of a block; `root` is the block's array or storage.

    All tensors on the block share one storage object, as long as any of them is alive.
    """
    import torch

    if isinstance(root, torch.UntypedStorage):
        return root
    address = root.__array_interface__["data"][0]
    ref = _storages.get(address)
    storage = ref() if ref is not None else None
    if storage is None or storage.data_ptr() != address or storage.nbytes() != root.nbytes:
        storage = torch.from_numpy(root).untyped_storage()
        _storages[address] = weakref.ref(storage)
        if len(_storages) % 1024 == 0:
            for old in [old for old, each in _storages.items() if each() is None]:
                del _storages[old]
    return storage


def tensor_on(
    root: Any,
    dtype: Any,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,  # noqa: FBT001 (arguments of a pickle have no names)
    is_parameter: bool,  # noqa: FBT001
) -> Any:
    """Return a leaf tensor, or a parameter, that is a view of a memory block.

    `root` is the block's array or storage, and `offset` is in bytes.
    """
    import torch

    storage = storage_on(root)
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor = tensor.set_(storage, offset // tensor.element_size(), size, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def array_on(
    root: Any,
    dtype: Any,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    writeable: bool,  # noqa: FBT001
    kind: type,
) -> Any:
    """Return a numpy array of the class `kind` that is a view of a memory block.

    `root` is the block's array or storage, and `offset` is in bytes.
    """
    import numpy as np

    if not isinstance(root, np.ndarray):  # `root` is the storage of a tensor on this rank
        root = bytes_of_storage(root)
    array = np.ndarray(shape, dtype, root, offset, strides)
    array = array if kind is np.ndarray else array.view(kind)
    array.flags.writeable = writeable
    return array


def set_own_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Set attributes of a numpy array whose class is defined in `__main__`."""
    value.__dict__.update(attributes)


def flat_tensor(storage: Any) -> Any:
    """Return a storage as a tensor of its bytes, on the storage's device."""
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def bytes_of_storage(storage: Any) -> Any:
    """Return a storage of the CPU as a numpy array of its bytes, without a copy."""
    return flat_tensor(storage).numpy()
