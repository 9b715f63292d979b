"""Python values on their way between processes: pickled, big ones in shared memory."""

from __future__ import annotations

import builtins
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from nbdist.errors import UsageError
from nbdist.values.pickling import pickle
from nbdist.values.shared_memory import Buffer, Segment, open_segment, to_end
from nbdist.values.shared_memory import SegmentRef as SegmentRef

Value = TypeVar("Value")

INLINE_LIMIT = 64 * 1024
"""From this many bytes on a payload goes into shared memory."""


class Payload(NamedTuple):
    """Frames of one pickle (the first) and its out-of-band buffers (the others).

    Small ones travel in the message; big ones stay in a segment that the sender owns.

    `within` is for payloads that were pickled with what is in the frames: by the path that
    their segments have in there, where these are for the reader.
    """

    frames: tuple[bytes, ...] = ()
    segment: SegmentRef | None = None
    within: tuple[tuple[str, SegmentRef], ...] = ()


Packed = tuple[Payload, Segment | None]
"""A payload, and the segment to keep open until it has been opened."""


def pack_frames(frames: Sequence[Buffer]) -> Packed:
    """Make a payload of these frames, at once."""
    return to_end(packing(frames))


def packing(
    frames: Sequence[Buffer], inline_limit: int = INLINE_LIMIT
) -> Generator[int, None, Packed]:
    """Make a payload of these frames; yields how many bytes have been copied.  It can be closed."""
    if size_of(frames) < inline_limit:
        return Payload(frames=tuple(bytes(memoryview(frame)) for frame in frames)), None
    segment = yield from Segment.filling(frames)
    return Payload(segment=segment.ref), segment


def size_of(frames: Iterable[Buffer]) -> int:
    """Count the bytes of all frames."""
    return sum(memoryview(frame).nbytes for frame in frames)


def pack_names(
    names: Mapping[str, Any] | None, namespace: dict[str, Any]
) -> tuple[Payload | None, Segment | None]:
    """Pickle and pack a mapping so; UsageError where a function in it needs another name."""
    if not names:
        return None, None
    pickled = pickle(dict(names), namespace)
    if missing := pickled.needs - names.keys() - vars(builtins).keys():
        listed = ", ".join(sorted(missing))
        raise UsageError(f"The functions among `names` use {listed}: pass these too.")
    return pack_frames(pickled.frames)


def open_payload(payload: Payload) -> list[Buffer]:
    """Return the frames, a segment's as writable copies; raises `SegmentGone`."""
    return [*(payload.frames if payload.segment is None else open_segment(payload.segment))]


# --- where segments are ----------------------------------------------------------------------

Places = Mapping[str, SegmentRef]
"""By a segment's path where it can be opened: on another machine it has been filled anew."""


def refs_in(value: object) -> tuple[SegmentRef, ...]:
    """Find the segments of the payloads in mappings, lists and tuples, each once."""
    refs: list[SegmentRef] = []

    def note(payload: Payload) -> Payload:
        within = [ref for _, ref in payload.within]
        refs.extend(filter(None, [payload.segment, *within]))
        return payload

    _with_payloads(value, note)
    return tuple(dict.fromkeys(refs))


def moved(value: Value, places: Places) -> Value:
    """Return the value with its payloads' segments where they are now; itself without places."""

    def now(ref: SegmentRef) -> SegmentRef:
        return places.get(ref.path, ref)

    def move(payload: Payload) -> Payload:
        within = tuple((path, now(ref)) for path, ref in payload.within)
        return payload._replace(segment=payload.segment and now(payload.segment), within=within)

    # Without places nothing is looked into: it may be the user's, and of any shape.
    return _with_payloads(value, move) if places else value


def _with_payloads(value: Any, change: Callable[[Payload], Payload]) -> Any:
    match value:
        case Payload():
            return change(value)
        case Mapping():
            return {key: _with_payloads(each, change) for key, each in value.items()}
        case list():
            return [_with_payloads(each, change) for each in value]
        case tuple():
            parts = [_with_payloads(each, change) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def as_read(value: Value, payload: Payload) -> Value:
    """Return what was pickled in this payload with its own payloads' segments where they are."""
    return moved(value, {path: ref for path, ref in payload.within if path != ref.path})


# --- what a name is bound to ------------------------------------------------------------------

_SMALL, _FEW = 4096, 16
_ATOMIC = (int, float, complex, bool, str, bytes, type(None), type(...))


def is_atomic(value: Any) -> bool:
    """Return True for a value so small and plain that its text stands for it."""
    if type(value) not in _ATOMIC:
        return False
    if isinstance(value, str | bytes):
        return len(value) <= _SMALL
    # Python refuses to write out longer numbers.
    return not isinstance(value, int) or value.bit_length() <= _SMALL


def _is_light(value: Any) -> bool:
    """Return True for what may be kept: it is atomic, or holds a few values that are."""
    if type(value) not in (list, tuple, dict) or len(value) > _FEW:
        return is_atomic(value)
    # Copies: another thread may change it meanwhile.
    return all(map(is_atomic, [*value, *value.values()] if type(value) is dict else [*value]))


def _outline(value: Any) -> tuple[Any, ...]:
    """Return enough of an object to notice another in its place: first its id and its type."""
    # Python's own: what a user's class says of itself can raise anything.
    length = len(value) if type(value) in (list, tuple, dict, bytearray, bytes, str) else 0
    first = itertools.islice(value, _FEW) if type(value) in (list, tuple, dict) else ()
    return id(value), type(value), length, *map(id, first)


class Identity:
    """Tells whether a name is still bound to the very same object.

    Another one can get the id of one that is gone: this keeps a weak reference, or a light object.
    """

    def __init__(self, value: Any) -> None:
        self._value = value if _is_light(value) else None
        self._weak: weakref.ref[Any] | None = None
        self._outline: tuple[Any, ...] | None = None
        if is_atomic(value):
            return
        try:
            self._weak = weakref.ref(value)
        except TypeError:
            self._outline = _outline(value)

    def is_still(self, value: Any) -> bool:
        """Return True if `value` is what this was made from."""
        if self._weak is not None:
            return self._weak() is value
        if self._outline is not None:
            # Its own length may have changed; it is the same object all the same.
            return self._outline[:2] == (id(value), type(value))
        return self._value is value

    def is_unchanged(self, value: Any) -> bool:
        """Return True if it also has the same contents, as far as a glance can show."""
        same = self._outline is None or self._outline == _outline(value)
        return same and self.is_still(value)


MODULE, OPTIMIZER, TENSOR, OTHER = range(4)
"""In the order in which people want to hear of them."""

_KINDS = ("torch.nn.modules.module.Module", "torch.optim.optimizer.Optimizer", "torch.Tensor")


def kind_of(value: Any) -> int:
    """Return which of these it is, without importing torch."""
    names = [f"{each.__module__}.{each.__qualname__}" for each in type(value).__mro__]
    return next((kind for kind, name in enumerate(_KINDS) if name in names), OTHER)
