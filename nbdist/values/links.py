"""Tables of objects by key: an object of the notebook has the same key as its counterparts.

The notebook gives a key to each object that it sends and whose identity matters; each rank keeps
its own object under the same key.  The notebook and each rank have such a table.  A table has weak
references to most objects, and does not keep these alive.  Lists, dicts and other objects without
weak references are held until `drop_unused` finds that nothing else refers to them, or their key is
dropped.
"""

from __future__ import annotations

import itertools
import random
import sys
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from nbdist.values.memory import memory_at

MAX_WHOLE_BYTES = 64 << 20
"""Memory with at most so many bytes is sent as a whole, even for a view of a part of it.

So other views of the memory that are sent later share memory on the ranks, too.  Of bigger memory,
only the bytes that the view spans are sent if they are less than half.  If the elements of a tensor
lie far apart in memory of more than 1 MiB (`is_scattered`), mostly the elements alone are sent."""


ALIGNMENT = 64


class _WeakEntry(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to an object with a key.

    `tool`, such as "dict" or "tensor", is a name: it selects the functions that read the object's
    state and change the object.
    """

    __slots__ = ("key", "number", "tool")

    key: int
    number: int  # the id of the object
    tool: str


class _StrongEntry:
    """A strong reference to an object with a key, if Python allows no weak one, as for a list."""

    __slots__ = ("key", "number", "tool", "value")

    key: int
    number: int
    tool: str

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


class _Owners:
    """Weak references to the objects that keep one piece of memory alive."""

    __slots__ = ("_refs",)

    def __init__(self, *refs: Callable[[], Any]) -> None:
        self._refs = [*refs]

    def __call__(self) -> Any:
        """Return an owner that is still alive; None if there is none."""
        return next((owner for ref in self._refs if (owner := ref()) is not None), None)

    def add(self, ref: Callable[[], Any]) -> None:
        """Add a reference unless it is here; then also drop references to ended objects."""
        if all(ref is not each for each in self._refs):
            self._refs = [*(each for each in self._refs if each() is not None), ref]


@dataclass(eq=False, slots=True, weakref_slot=True)
class MemoryBlock:
    """Memory of tensors and arrays that is sent as one piece: the bytes from `start` to `end`.

    `owner()` returns an object that keeps the memory alive, or None if the memory was freed.  On a
    rank, this object is an array of the bytes.  If a tensor has only few elements, which lie far
    apart in memory, only the elements are sent.  Then `copied` identifies the elements in the
    notebook's block, and `start`, `end` and `size` are 0 there.
    """

    key: int
    start: int
    end: int
    owner: Any
    device: str = "cpu"
    copied: tuple[Any, ...] = ()
    users: list[Any] = field(default_factory=list)  # weak references to a rank's tensors
    size: int = field(init=False)  # the number of bytes from `start` to `end`
    _view: memoryview | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.size = self.end - self.start

    def add_owner(self, owner: Any) -> None:
        """Add a weak reference to another object that keeps the memory alive.

        `torch.from_numpy(array)` and `array` have the same memory: either of them may end first.
        """
        if isinstance(self.owner, _Owners):
            self.owner.add(owner)
        elif owner is not self.owner:
            self.owner = _Owners(self.owner, owner)

    def owner_storage(self) -> Any:
        """Return the storage with memory on a GPU; None for memory of the CPU or freed memory."""
        if self.device == "cpu":
            return None
        return self.owner()

    def users_storage(self) -> Any:
        """Return the present storage of a tensor that this rank received as a view of the block.

        The tensor may have other memory than the block by now, for example after `model.cuda()`.
        Return None if all received tensors are gone or have storages of another size.
        """
        for user in self.users:
            tensor = user()
            if tensor is not None and tensor.untyped_storage().nbytes() == self.size:
                return tensor.untyped_storage()
        return None

    def view(self) -> memoryview:
        """Return a view of the block's bytes on the CPU; valid only while the owner is alive."""
        if self._view is None:
            self._view = memory_at(self.start, self.size)
        return self._view


LinkEntry = _WeakEntry | _StrongEntry


class Links:
    """The objects of this process by key, and their keys by object.

    New keys are counted from a random number, so that two processes hardly ever make the same key.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, LinkEntry] = {}
        self.by_key: dict[int, LinkEntry] = {}
        self._strong: dict[int, _StrongEntry] = {}
        self.blocks = Blocks(self)
        # Whether an object may have ended since the last `drop_unused`, and its parts be unused.
        self.has_dead = False
        self._next = itertools.count(random.SystemRandom().getrandbits(40) << 22)
        self._dead: list[int] = []

    def __len__(self) -> int:
        return len(self.by_key) + len(self.blocks)

    def new_key(self) -> int:
        """Return a key that this table has not given out before."""
        return next(self._next)

    def key_of(self, value: Any) -> int | None:
        """Return the key of an object; None if it has no key."""
        entry = self.by_id.get(id(value))
        return None if entry is None else entry.key

    def add(self, value: Any, tool: str, key: int | None = None) -> LinkEntry:
        """Register an object under `key`, and return its entry.

        `tool`, such as "dict", selects the functions that read the object's state and change the
        object.  Without `key`, an object that has a key keeps it, and any other object gets a new
        key.
        """
        number = id(value)
        existing = self.by_id.get(number)
        if existing is not None:
            if key is None or existing.key == key:
                return existing
            self._remove(existing)
        entry: LinkEntry
        try:
            entry = _WeakEntry(value, self._record_death)
        except TypeError:
            entry = _StrongEntry(value)
        entry.key, entry.number, entry.tool = (
            (next(self._next) if key is None else key),
            number,
            tool,
        )
        if (before := self.by_key.get(entry.key)) is not None:
            self._remove(before)
        self.by_id[number] = self.by_key[entry.key] = entry
        if isinstance(entry, _StrongEntry):
            self._strong[number] = entry
        return entry

    def find(self, key: int) -> Any:
        """Return the object with this key, or the owner of the memory block with this key.

        None if there is neither.
        """
        entry = self.by_key.get(key)
        return self.blocks.owner_of(key) if entry is None else entry()

    def renew(self, entry: LinkEntry) -> None:
        """Give an object another key, so that ranks get a new counterpart.

        The old key counts as dead, so the ranks forget the old counterpart.
        """
        self.by_key.pop(entry.key, None)
        self._dead.append(entry.key)
        entry.key = next(self._next)
        self.by_key[entry.key] = entry

    def renew_key(self, key: int) -> None:
        """Give the object with this key another key; memory gets one when it is sent again.

        The old key counts as dead, so the ranks forget the old counterpart.
        """
        if (entry := self.by_key.get(key)) is not None:
            self.renew(entry)
        elif self.blocks.get(key) is not None:
            self.blocks.forget(key)  # the memory gets its new key when it is sent again
            self._dead.append(key)

    def forget(self, keys: Iterable[int]) -> None:
        """Drop the objects and memory blocks with these keys from the table."""
        for key in keys:
            if (entry := self.by_key.get(key)) is not None:
                self._remove(entry)
            self.blocks.forget(key)

    def pop_dead_keys(self) -> tuple[int, ...]:
        """Return the keys that have lost their objects or memory blocks since the last call."""
        self.blocks.drop_dead()
        dead, self._dead = self._dead, []
        return tuple(dead)

    def drop_unused(self, before_drop: Callable[[Sequence[LinkEntry]], None] | None = None) -> None:
        """Drop the objects that only this table keeps alive.

        If a dropped list was the last to refer to another object of the table, that object is
        dropped, too.  `before_drop` is called with entries before their objects are dropped.
        """
        self.has_dead = False
        while True:
            entries = [*self._strong.values()]
            unused = [each for each in entries if sys.getrefcount(each.value) <= _ALONE]
            if not unused:
                return
            del entries
            if before_drop is not None:
                before_drop(unused)
            self._drop(unused)

    def _drop(self, unused: list[_StrongEntry]) -> None:
        while unused:
            entry = unused.pop()
            self._dead.append(entry.key)
            self._remove(entry)

    def entries(self) -> list[LinkEntry]:
        """Return a list of the entries of all objects."""
        return [*self.by_key.values()]

    def _remove(self, entry: LinkEntry) -> None:
        if self.by_key.get(entry.key) is entry:
            del self.by_key[entry.key]
        if self.by_id.get(entry.number) is entry:
            del self.by_id[entry.number]
        # Use no global name here, such as `_StrongEntry` in an `isinstance`: Python may call this
        # while the interpreter ends, when global names are gone.
        if entry.number in self._strong and self._strong[entry.number] is entry:
            del self._strong[entry.number]

    def _record_death(self, entry: _WeakEntry) -> None:
        # Python calls this in the thread that frees the object, also while the interpreter ends.
        if self.by_key.get(entry.key) is entry:
            self._dead.append(entry.key)
        self._remove(entry)
        self.has_dead = True


def _count_alone() -> int:
    """Return what `sys.getrefcount` counts for an object to which only a table's entry refers.

    The number depends on the version of Python, so it is measured.
    """
    entries = [_StrongEntry([])]
    return max([sys.getrefcount(each.value) for each in entries])


_ALONE = _count_alone()


class Blocks:
    """The `MemoryBlock`s of this process: memory of tensors and arrays that is sent as one piece.

    A block is found by its key or its address; a block of scattered elements by its view, too.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._by_key: dict[int, MemoryBlock] = {}
        self._sorted: list[MemoryBlock] = []
        self._copied: dict[tuple[Any, ...], MemoryBlock] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[MemoryBlock]:
        return iter([*self._by_key.values()])

    def get(self, key: int) -> MemoryBlock | None:
        """Return the memory block with this key; None if there is none."""
        return self._by_key.get(key)

    def find_containing(self, start: int, end: int, root: int, device: str) -> MemoryBlock | None:
        """Return a block that contains the bytes from `start` to `end`; None if no block does.

        The bytes are those of a tensor or array.  `root` is the address at which its memory begins:
        before `start` if the tensor or array is a view of a later part of the memory.
        """
        for block in self._around(start, root, device):
            if block.owner() is None:
                self._links._dead.append(block.key)
                self._remove(block)
            elif block.start <= start and end <= block.end:
                return block
        return None

    def get_exact(self, start: int, size: int, device: str) -> MemoryBlock | None:
        """Return the block that begins at `start` and has `size` bytes; None if there is none."""
        block = self.find_containing(start, start + size, start, device)
        return block if block is not None and block.size == size else None

    def find_or_add(
        self, start: int, end: int, root: tuple[int, int], make_ref: Callable[[], Any], device: str
    ) -> MemoryBlock:
        """Return a block that contains the bytes from `start` to `end`; make it if there is none.

        The bytes are those of a tensor or array.  `root` has the bounds of the whole memory of
        which the tensor or array is a view.  `make_ref` returns a weak reference to the object that
        keeps the memory alive.
        """
        if (block := self.find_containing(start, end, root[0], device)) is not None:
            block.add_owner(make_ref())
            return block
        is_whole = root[1] - root[0] <= max(MAX_WHOLE_BYTES, 2 * (end - start))
        # Begin the block a multiple of ALIGNMENT bytes after the beginning of the memory.  Then a
        # tensor of any dtype begins a whole number of elements after the beginning of the block.
        bounds = root if is_whole else (start - (start - root[0]) % ALIGNMENT, end)
        return self.add(MemoryBlock(self._links.new_key(), *bounds, make_ref(), device))

    def get_copied(self, what: tuple[Any, ...]) -> MemoryBlock | None:
        """Return the block of a scattered view, a tensor whose elements lie far apart in memory.

        `what` has the bounds, dtype, shape and strides of the view.  None if there is no block.
        """
        return self._copied.get(what)

    def add_copied(
        self, what: tuple[Any, ...], make_ref: Callable[[], Any], device: str
    ) -> MemoryBlock:
        """Return the block of a scattered view; make the block if there is none.

        `what` has the bounds, dtype, shape and strides of the view, a tensor whose elements lie far
        apart.  `make_ref` returns a weak reference to the object that keeps its memory alive.
        """
        block = self._copied.get(what)
        if block is None or block.owner() is None:
            block = MemoryBlock(self._links.new_key(), 0, 0, make_ref(), device, what)
            self._copied[what] = self._by_key[block.key] = block
        else:
            block.add_owner(make_ref())
        return block

    def add(self, block: MemoryBlock) -> MemoryBlock:
        """Add a block to the table, and return it."""
        self._by_key[block.key] = block
        insort(self._sorted, block, key=attrgetter("start"))
        return block

    def owner_of(self, key: int) -> Any:
        """Return the `owner()` of the memory block with this key; None if there is no block."""
        block = self._by_key.get(key)
        return None if block is None else block.owner()

    def forget(self, key: int) -> None:
        """Drop the block with this key from the table."""
        if (block := self._by_key.get(key)) is not None:
            self._remove(block)

    def drop_dead(self) -> None:
        """Drop the blocks without owners and users, and record their keys for `pop_dead_keys`."""
        for block in [*self._by_key.values()]:
            if block.owner() is None and block.users_storage() is None:
                self._links._dead.append(block.key)
                self._remove(block)

    def _around(self, start: int, root: int, device: str) -> list[MemoryBlock]:
        """Return the blocks on a device that begin between the addresses `root` and `start`.

        The last block comes first.  `root` is the beginning of the memory to which `start` belongs.
        """
        at = bisect_right(self._sorted, start, key=attrgetter("start"))
        blocks = []
        while at > 0 and self._sorted[at - 1].start >= root:
            at -= 1
            if self._sorted[at].device == device:
                blocks.append(self._sorted[at])
        return blocks

    def _remove(self, block: MemoryBlock) -> None:
        if self._by_key.get(block.key) is block:
            del self._by_key[block.key]
        if block.copied:
            self._copied.pop(block.copied, None)
        elif block in self._sorted:
            self._sorted.remove(block)
