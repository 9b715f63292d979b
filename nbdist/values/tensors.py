"""Pickles torch tensors with their contents out of band, and rebuilds them.

The picklers of `nbdist.values` use this file in the notebook and in workers.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

Reduced = Any
"""The return value of an object's `__reduce__`, or NotImplemented."""

PINNED_MOST = 1 << 30
"""The most bytes that are copied from a GPU through pinned memory.

The copy is faster with pinned memory, but torch keeps this memory for reuse."""


@dataclass(eq=False)
class _Piece:
    """Some bytes of a storage, which are pickled in place of the storage.

    A piece keeps the storage alive, so that no other storage gets its address meanwhile.
    """

    storage: torch.UntypedStorage
    contents: Any
    device: str

    def __reduce__(self) -> Reduced:
        return rebuild_storage, (self.contents, self.device)


@dataclass(kw_only=True, eq=False)
class TensorReducer:
    """Reduces the tensors and storages in one pickle: `reduce` returns what `__reduce__` would.

    The tensors' own memory becomes out-of-band buffers.  Copied are only contents on a GPU,
    elements that lie far apart, and tensors whose conjugation or negation torch has put off.

    For a tensor that uses at least half of its storage, the whole storage is sent.  For any other
    tensor, only the bytes from its first to its last element are sent, or a copy of its elements if
    these lie far apart.  With `exact`, no bytes are sent that the tensor does not use.

    Two tensors whose bytes overlap would no longer share memory in the receiver.  So the caller
    must pickle again if `overlapping` is not empty, with these addresses of storages as `whole`: of
    a storage in `whole`, all bytes are sent in any case.

    With `sketch`, contents on a GPU are left out, and `sketched` says whether there were any.
    `nbdist.values.pickling.pickle` explains `sketch`, `back_to_device` and `exact`.
    """

    sketch: bool
    back_to_device: bool
    exact: bool
    whole: frozenset[int] = frozenset()
    types: Any = field(init=False, default=())
    sketched: bool = field(init=False, default=False)
    # Each piece, by the address of the storage (the storage's id if the piece is empty), and its
    # beginning and end there.  If only elements that lie far apart are sent, the key also has their
    # shape and strides.
    _pieces: dict[tuple[int, int, int, tuple[int, ...]], _Piece] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self._torch = torch = cast(Any, sys.modules.get("torch"))
        if hasattr(torch, "TypedStorage"):  # missing while torch is being imported
            self.types = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)

    @property
    def overlapping(self) -> frozenset[int]:
        """The addresses of storages of which overlapping parts were pickled."""
        addresses, last_address, last_end = set(), 0, 0
        for address, start, end, _ in sorted(self._pieces):
            if address == last_address and start < last_end:
                addresses.add(address)
            last_end = max(end, last_end) if address == last_address else end
            last_address = address
        return frozenset(addresses)

    def reduce(self, value: Any) -> Reduced:
        """Reduce a tensor or storage; return NotImplemented if torch shall pickle the value."""
        if isinstance(value, self.types[2]):
            return rebuild_typed_storage, (untyped_storage_of(value), value.dtype)
        if isinstance(value, self.types[1]):
            if value.device.type != "cpu":
                return NotImplemented
            # Reduce the storage to `(piece,)[0]`: pickle then rebuilds the piece only once, even if
            # tensors in the same pickle use the piece, and they share the rebuilt storage.
            return operator.getitem, ((self._piece(value, 0, value.nbytes()),), 0)
        return self._reduce_tensor(value)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Reduced:
        grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        if not self._has_plain_memory(tensor):
            is_sparse = type(tensor) is self._torch.Tensor and "sparse" in str(tensor.layout)
            if grad is None and not is_sparse:
                return NotImplemented
            # The cast is for mypy: torch's method has no annotations.
            make, args = cast(Any, tensor).__reduce_ex__(5)
            if is_sparse:
                device = tensor.device.type if self.back_to_device else "cpu"
                make, args = rebuild_sparse, (make, args, device)
            attributes = {} if grad is None else {"grad": grad}
            return make, args, attributes, None, None, set_attributes
        data = tensor.detach()
        if data.is_conj() or data.is_neg():
            data = data.resolve_conj().resolve_neg()
        piece, offset, stride = self._place(data)
        kind = type(tensor) is not self._torch.Tensor
        shape = (data.dtype, offset, tuple(data.shape), stride)
        args = (piece, *shape, tensor.requires_grad, kind)
        attributes = tensor.__dict__ if grad is None else {**tensor.__dict__, "grad": grad}
        if not attributes:
            return rebuild_tensor, args
        return rebuild_tensor, args, attributes, None, None, set_attributes

    def _has_plain_memory(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) in (self._torch.Tensor, self._torch.nn.Parameter)
            and tensor.layout is self._torch.strided
            and not tensor.is_quantized
            and not tensor.is_nested
            and tensor.device.type != "meta"
            and (tensor.numel() == 0 or tensor.data_ptr() != 0)
        )

    def _place(self, data: torch.Tensor) -> tuple[_Piece, int, tuple[int, ...]]:
        """Return (piece, offset, strides): the bytes to send, and where in them the tensor is.

        The offset and the strides are in elements.
        """
        storage, width = data.untyped_storage(), data.element_size()
        stride = data.stride()
        steps = (step * (size - 1) for size, step in zip(data.shape, stride, strict=True))
        # `int` is for mypy: by its annotation the offset may be a symbolic number, as in tracing.
        offset = int(data.storage_offset())
        start = offset * width
        end = start + (int(sum(steps)) + 1) * width if data.numel() else start
        # An expanded dimension (stride 0) is in memory only once.
        once = data[tuple(slice(1) if step == 0 else slice(None) for step in stride)]
        shown = once.numel() * width
        share = 1 if self.exact else 2
        # If the tensor shows at least half of its storage (with `exact`: all), send the whole
        # storage, so that other views of the storage share memory in the receiver, too.
        if storage.data_ptr() in self.whole or share * shown >= storage.nbytes():
            return self._piece(storage, 0, storage.nbytes()), offset, stride
        # A sketch copies nothing from a GPU, not even a few elements that lie far apart.
        stays = self.sketch and storage.device.type != "cpu"
        if stays or share * shown >= end - start:
            return self._piece(storage, start, end), 0, stride
        # Few elements that lie far apart are copied together, in the order of their addresses.
        copy = once.clone(memory_format=self._torch.preserve_format)
        # The key has the place of the elements in their own storage, and not in the copy.  So
        # `overlapping` can compare the place with other pieces, and equal views share one copy.
        key = storage.data_ptr(), start, end, (*once.shape, *stride)
        existing = self._pieces.get(key)
        piece = existing or self._piece(copy.untyped_storage(), 0, copy.untyped_storage().nbytes())
        self._pieces[key] = piece
        kept = zip(stride, copy.stride(), strict=True)
        return piece, 0, tuple(new if old else 0 for old, new in kept)

    def _piece(self, storage: torch.UntypedStorage, start: int, end: int) -> _Piece:
        # Empty storages all have the address 0, but must stay apart, since one of them may grow.
        address = storage.data_ptr() if end > start else id(storage)
        piece = self._pieces.get((address, start, end, ()))
        if piece is None:
            device = storage.device.type if self.back_to_device else "cpu"
            piece = _Piece(storage, self._contents(storage, start, end), device)
            self._pieces[address, start, end, ()] = piece
        return piece

    def _contents(self, storage: torch.UntypedStorage, start: int, end: int) -> Any:
        if end == start:
            return b""
        if storage.device.type != "cpu":
            if self.sketch:
                self.sketched = True
                return storage.data_ptr(), start, end
            flat = self._torch.empty(0, dtype=self._torch.uint8, device=storage.device)
            flat = flat.set_(storage, start, (end - start,), (1,))
            storage = self._on_host(flat).untyped_storage()
            start, end = 0, end - start
        memory = (ctypes.c_char * (end - start)).from_address(storage.data_ptr() + start)
        memory.storage = storage  # type: ignore[attr-defined]  # keeps the memory alive
        return PickleBuffer(memory)

    def _on_host(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor on the CPU.

        A tensor of a GPU with at most `PINNED_MOST` bytes is copied into pinned memory if possible:
        this is faster than a copy into other memory.
        """
        if flat.device.type != "cuda" or flat.numel() > PINNED_MOST:
            return flat.cpu()
        try:
            pinned: torch.Tensor = self._torch.empty(
                flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True
            )
        except RuntimeError:  # no more memory can be pinned
            return flat.cpu()
        return pinned.copy_(flat)


def untyped_storage_of(value: Any) -> Any:
    """Return the untyped storage inside a typed storage; return an untyped storage itself."""
    return getattr(value, "_untyped_storage", value)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return True if Python code has registered a hook on a tensor; faster than `count_hooks`."""
    if tensor._backward_hooks:
        return True
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def count_hooks(tensor: torch.Tensor) -> int:
    """Return how many hooks for gradients Python code has registered on a tensor."""
    tables = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    return sum(len(each) for each in tables if each)


def reduce_constant(value: Any) -> Reduced:
    """Reduce a torch operator or memory format to its name, and a `finfo` or `iinfo` to its dtype.

    Return NotImplemented for any other object.
    """
    kind = type(value)
    match kind.__module__, kind.__name__:
        case ("torch", "memory_format") | ("torch._ops", "OpOverload" | "OpOverloadPacket"):
            return torch_name, (str(value),)
        case "torch" | "numpy" as library, "finfo" | "iinfo":
            return kind, (getattr(sys.modules[library], str(value.dtype)),)
    return NotImplemented


# --- the receiver's side ----------------------------------------------------------------


def rebuild_storage(contents: Any, device: str = "cpu") -> torch.UntypedStorage:
    """Return a storage on `device` with the bytes of `contents`.

    The storage uses the memory of `contents`, unless the memory is read-only or the storage is not
    on the CPU: then the contents are copied.
    """
    import torch

    view = memoryview(contents)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).to(device).untyped_storage()


def rebuild_typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    """Return a `TypedStorage` that wraps an untyped storage."""
    import torch

    make: Any = torch.TypedStorage
    return make(wrap_storage=storage, dtype=dtype, _internal=True)


def rebuild_tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,  # noqa: FBT001 (arguments of a pickle have no names)
    is_parameter: bool,  # noqa: FBT001
) -> torch.Tensor:
    """Return a leaf tensor, or a parameter, that is a view of this storage.

    `offset` and `stride` are in elements.
    """
    import torch

    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def rebuild_sparse(make: Any, args: Any, device: str) -> Any:
    """Return a sparse tensor that is rebuilt on `device`, and not on the user's default device."""
    import torch

    with torch.device(device):
        return make(*args)


def set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Set a tensor's gradient, and attributes that Python code had set on the sender's tensor."""
    for name, value in attributes.items():
        if name == "grad" and value.dtype != tensor.dtype:
            tensor.grad_dtype = value.dtype  # without this torch refuses the gradient
        setattr(tensor, name, value)


def torch_name(path: str) -> Any:
    """Return the constant of torch, or the operator of `torch.ops`, to which a path leads."""
    import torch

    start, _, name = path.partition(".")
    if start == "torch":
        return getattr(torch, name)
    return functools.reduce(getattr, path.split("."), torch.ops)
