"""The rank's counterparts of the notebook's objects: received, changed in place, and compared.

In each worker, on its main thread. `Namespace` calls it for values that come with a task, and ops
call it to find out what the rank has changed.
"""

from __future__ import annotations

import gc
import mmap
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nbdist.values.copying import copy_into
from nbdist.values.definitions import SYSTEM_NAMES
from nbdist.values.digests import digest_bytes
from nbdist.values.linked import Arrived, NotThere, bytes_of_storage, flat_tensor, read, reducer_for
from nbdist.values.links import Block, Links
from nbdist.values.payload import Identity, is_atomic
from nbdist.values.pickling import Buffer, without_cycles
from nbdist.values.scan import Scan
from nbdist.values.states import Parts, State, keys_in, reachable_keys
from nbdist.values.tensors import version_of
from nbdist.values.updates import apply
from nbdist.wire.ops import Inspected, Replaced, type_text

MAX_SEARCH_SECONDS = 0.1
"""Seconds for which variables are searched for parts of an object that was replaced."""

PAGES_FROM_BYTES = 4 << 20
"""Size of memory from which on `are_written` is asked before the contents are read."""


class Keyed(NamedTuple):
    """An object with its key and the state in which it was received, for another rank or a file.

    `tool` is the way in which its state is read. A tensor that fills its memory brings the key and
    digest of that memory too.
    """

    key: int
    tool: str
    value: Any
    state: State | None
    block: int = 0
    digest: str = ""


class Counterparts:
    """The objects that the notebook has sent to this rank, by key, with their states as received.

    The table keeps no object alive, but for those that the notebook may send again (`_kept`).
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.links = Links()
        self._names = names
        self._states: dict[int, State] = {}
        self._digests: dict[int, str] = {}
        self._given: dict[str, Identity] = {}
        self._orphans: set[int] = set()  # keys of objects that have ended in the notebook
        # Objects that the notebook has removed from variables and objects here, and still has
        # itself.
        self._kept: dict[int, Any] = {}
        self._pinned: list[Any] | None = None
        self._versions: dict[int, int] = {}  # by key, a tensor's version when received
        self._altered: set[int] = set()  # keys of memory and containers changed in place here
        self._lost: list[int] = []  # keys of altered objects that have ended

    # --- receiving ----------------------------------------------------------------------------

    def read(self, frames: Sequence[Buffer]) -> Arrived:
        """Rebuild the values of a message without changing anything here.

        Raises NotThere if the message refers to an object that has ended here, CannotRebuild if a
        value cannot be made.
        """
        arrived = read(frames, self._find, self._names)
        for key, tool, _ in arrived.updates:
            if tool != "block" and self._find(key) is None:
                raise NotThere(key)
        return arrived

    def accept(self, arrived: Arrived) -> None:
        """Register the objects of a message by key, and apply its changes to older objects."""
        for key, digest, root in arrived.blocks:
            address = root.__array_interface__["data"][0]
            block = Block(key, address, address + root.nbytes, weakref.ref(root))
            self.links.blocks.add(block)
            self._digests[key] = digest
        for key, tool, value in arrived.objects:
            self.links.add(value, tool, key)
            if tool == "tensor":
                self._use_block(value)
        self._update(arrived)
        new = [self.links.by_key[key] for key, _, _ in arrived.objects if key in self.links.by_key]
        self._states |= self._read(new)
        tensors = [*new, *(self.links.by_key[k] for k, t, _ in arrived.updates if t == "tensor")]
        self._record_versions(tensors)

    def give(self, values: Mapping[str, Any]) -> None:
        """Bind variables to the notebook's values, and remember that it has bound them."""
        for name, value in values.items():
            if (old := self._names.get(name)) is not value:
                self._keep(self._keys_of(old))
        self._names.update(values)
        self._given.update({name: Identity(value) for name, value in values.items()})

    def _update(self, arrived: Arrived) -> None:
        entries = [self.links.by_key[k] for k, _, _ in arrived.updates if k in self.links.by_key]
        before = self._read(entries)
        parts = {k: self.links.find(k) for state in before.values() for k in state.children}
        token = self._scan().token
        for key, tool, data in arrived.updates:
            if tool == "block":
                self._write(key, data)
            else:
                apply(self.links.find(key), tool, data, token)
        now = self._read(entries)
        for key, after in now.items():
            gone = {*before[key].children} - {*after.children} if key in before else ()
            self._keep(gone)
            self._states[key] = _received(after, before.get(key), self._states.get(key))

        del parts  # held until here, so that no part ends during the update

    def _keep(self, keys: Iterable[int]) -> None:
        """Hold objects that the notebook has removed here, as long as it has them itself.

        The ranks may have changed them, and the notebook may send them again under another name.
        """
        for key in keys:
            if key not in self._orphans and (value := self.links.find(key)) is not None:
                self._kept[key] = value

    def _write(self, key: int, contents: Any) -> None:
        """Write new contents into the memory of a block, where its tensors have it now."""
        root = self._find(key)
        if root is None:  # its tensors have other memory, to which an update copies
            return
        new = np.frombuffer(contents, np.uint8)
        if isinstance(root, torch.UntypedStorage):
            with torch.no_grad():
                flat_tensor(root).copy_(torch.from_numpy(new.copy()))
        else:
            root[:] = new
        self._digests[key] = digest_bytes(new)

    def _use_block(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start and (block := self.links.blocks.find_containing(start, start + 1, start, "cpu")):
            block.users.append(weakref.ref(tensor))

    def _find(self, key: int) -> Any:
        """Return the object with this key, or the memory of a block; None if it has ended."""
        if (found := self.links.find(key)) is not None:
            return found
        block = self.links.blocks.get(key)
        return None if block is None else block.users_storage()

    # --- releasing ----------------------------------------------------------------------------

    def forget(self, keys: Iterable[int]) -> list[Any]:
        """Hold objects no longer that have ended in the notebook; return the objects held so far.

        A message that came with these keys may refer to the memory of the returned objects: keep
        them until it has been read.  While an object lives here it keeps its key: the state of an
        object that refers to it stays as is.
        """
        gone = {*keys}
        self._orphans |= gone
        self.links.has_dead = True
        return [self._kept.pop(key) for key in gone & self._kept.keys()]

    def let_go(self, name: str) -> None:
        """Hold no longer what the notebook has bound a variable to."""
        self._given.pop(name, None)

    def delete(self, names: Iterable[str]) -> list[str]:
        """Delete variables that the notebook has deleted, unless this rank has changed them.

        Return the names that were deleted.
        """
        gone = []
        for name in names:
            if name in self._names and not self.is_changed(name):
                self._keep(self._keys_of(self._names[name]))
                del self._names[name]
                self._given.pop(name, None)
                gone.append(name)
        return gone

    def take_dead(self) -> tuple[int, ...]:
        """Return the keys of objects that have ended here since the last call.

        Those that had ended in the notebook before are left out.
        """
        self._record_altered_memory()
        # Lists and dicts have no weak references: look which of them nothing else refers to.
        self.links.drop_unused(self._record_altered_containers)
        dead = self.links.pop_dead_keys()
        for key in dead:
            self._states.pop(key, None)
            self._digests.pop(key, None)
            self._versions.pop(key, None)
        self._lost += [key for key in dead if key in self._altered]
        self._altered.difference_update(dead)
        untold = [key for key in dead if key not in self._orphans]
        self._orphans.difference_update(dead)
        return tuple(untold)

    def take_lost(self) -> tuple[int, ...]:
        """Return the keys of ended objects whose contents this rank had changed.

        Memory counts only if a task before the one that dropped its tensor has changed it: a
        tensor that has ended cannot be asked for its version.
        """
        lost, self._lost = self._lost, []
        return tuple(lost)

    def _record_versions(self, entries: Iterable[Any]) -> None:
        for entry in entries:
            if entry.tool == "tensor" and (tensor := entry()) is not None:
                self._versions[entry.key] = version_of(tensor)

    def _record_altered_memory(self) -> None:
        """Record the memory of each tensor that was changed in place since the notebook sent it."""
        for key, version in self._versions.items():
            tensor, state = self.links.find(key), self._states.get(key)
            if tensor is not None and state is not None and version_of(tensor) != version:
                self._altered.update(state.children)

    def _record_altered_containers(self, entries: Iterable[Any]) -> None:
        """Record which of these containers, about to be dropped, this rank has changed."""
        for key, state in self._read(entries).items():
            if key in self._states and self._states[key] != state:
                self._altered.add(key)

    def begin_idle(self) -> None:
        """Keep garbage in reference cycles until the next task has received its values.

        At the end of a task the notebook learns which objects have ended, and in the next task it
        refers to all others: so no object may end in between.
        """
        if self._pin not in gc.callbacks:
            gc.callbacks.append(self._pin)

    def end_idle(self) -> None:
        """Allow garbage in reference cycles to be collected again."""
        if self._pin in gc.callbacks:
            gc.callbacks.remove(self._pin)
        self._pinned = None

    def _pin(self, phase: str, info: Any) -> None:
        if phase == "start" and self._pinned is None:
            self._pinned = [entry() for entry in self.links.entries()]

    # --- comparing ----------------------------------------------------------------------------

    def inspect(self, objects: Mapping[int, Parts], names: Iterable[str]) -> Inspected:
        """Return which parts of objects this rank has changed, and what variables hold here."""
        changed, gone = self._changed(objects)
        found = {}
        for name in names:
            if name in self._names:
                value = self._names[name]
                others = tuple(self._variables_with(name, value))
                found[name] = Replaced(type_text(value), self.is_changed(name), others)
        return Inspected(changed, found, tuple(gone))

    def is_changed(self, name: str) -> bool:
        """Return True if a variable is bound to another object than was sent, or a changed one."""
        value, given = self._names.get(name), self._given.get(name)
        if given is None or not given.is_still(value):
            return True
        keys = reachable_keys(self._states, self._keys_of(value))
        return bool(self._changed(dict.fromkeys(keys))[0])

    def _keys_of(self, value: Any) -> list[int]:
        """Return the key of an object; if it has none, the keys of the objects in it."""
        if is_atomic(value):
            return []
        key = self.links.key_of(value)
        return [key] if key is not None else keys_in(self._scan().token(value))

    def _changed(self, objects: Mapping[int, Parts]) -> tuple[dict[int, Parts], list[int]]:
        changed: dict[int, Parts] = {}
        gone = []
        entries = []
        for key in objects:
            if self.links.blocks.get(key) is not None:
                if self._is_written(key):
                    changed[key] = None
            elif (entry := self.links.by_key.get(key)) is not None:
                entries.append(entry)
            elif key in self._states:
                gone.append(key)
        for key, state in self._read(entries).items():
            before = self._states.get(key)
            if before is None or state == before:
                continue
            parts, differing = objects[key], state.changed_since(before)
            if differing is None or parts is None:
                changed[key] = differing
            elif both := differing & parts:
                changed[key] = both
        return changed, gone

    def _is_written(self, key: int) -> bool:
        """Return True if the contents of a block differ from what was received, or it has ended."""
        root = self._find(key)
        if root is None:
            return True
        if isinstance(root, torch.UntypedStorage):
            contents = flat_tensor(root).cpu().numpy()
        else:
            contents = root
            address = root.__array_interface__["data"][0]
            if root.nbytes >= PAGES_FROM_BYTES and not are_written(address, root.nbytes):
                return False
        return digest_bytes(contents) != self._digests.get(key)

    def _scan(self) -> Scan:
        return Scan(self.links, reducer_for(self._names), self._names, adds=False)

    def _read(self, entries: Iterable[Any]) -> dict[int, State]:
        scan = self._scan()
        with without_cycles():
            scan.read_all(entries)
        return scan.states

    def _variables_with(self, name: str, value: Any) -> list[str]:
        """List other variables that lead to an object, or to a parameter of a module."""
        if is_atomic(value) or isinstance(value, types.ModuleType | types.FunctionType | type):
            return []
        wanted = {id(value)}
        if isinstance(value, torch.nn.Module):
            wanted |= {id(each) for each in value.parameters()}
        until = time.monotonic() + MAX_SEARCH_SECONDS
        names = [each for each in self._names.items() if each[0] != name]
        return [
            other
            for other, held in names
            if not SYSTEM_NAMES.fullmatch(other) and _leads_to(held, wanted, self._names, until)
        ]

    # --- between ranks, and from files -------------------------------------------------------

    def keyed(self, values: Iterable[Any], *, adds: bool = False) -> list[Keyed]:
        """Return a `Keyed` for each of these objects that has a key.

        With `adds`, tensors, modules and optimizers without a key get one.
        """
        found = []
        for value in values:
            entry = self.links.by_id.get(id(value))
            if entry is None and adds and isinstance(value, _GET_KEYS) and not _is_named(value):
                entry = self.links.add(value, "tensor" if isinstance(value, torch.Tensor) else "")
            if entry is None or entry() is not value:
                continue
            block, digest = 0, ""
            if isinstance(value, torch.Tensor) and (own := self._whole_block(value)) is not None:
                block, digest = own.key, self._digests.get(own.key, "")
            state = self._states.get(entry.key)
            found.append(Keyed(entry.key, entry.tool, value, state, block, digest))
        return found

    def _whole_block(self, tensor: torch.Tensor) -> Block | None:
        if tensor.device.type != "cpu" or not tensor.numel() or tensor.is_sparse:
            return None
        storage = tensor.untyped_storage()
        return self.links.blocks.get_exact(storage.data_ptr(), storage.nbytes(), "cpu")

    def register(self, keyed: Iterable[Keyed], instead: Mapping[int, Any]) -> tuple[int, ...]:
        """Register objects that came from a rank or a file under their keys; return the keys.

        `instead` has, by id, the object that took the place of another one.
        """
        keys = []
        for each in keyed:
            value = instead.get(id(each.value), each.value)
            self.links.add(value, each.tool, each.key)
            keys.append(each.key)
            if each.state is not None:
                self._states[each.key] = each.state
            if each.block and isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self._link_memory(each.block, value, each.digest)
                keys.append(each.block)
        return tuple(keys)

    def move_keys(self, instead: Mapping[int, Any]) -> None:
        """Give the keys of objects to the objects that took their place, which are given by id."""
        moved = []
        for number, value in instead.items():
            entry = self.links.by_id.get(number)
            before = None if entry is None else entry()
            if entry is None or before is None or before is value:
                continue
            key, tool = entry.key, entry.tool
            block = self._block_of(before)
            moved.append(self.links.add(value, tool, key))
            if block is not None:
                self._link_memory(block.key, value, self._digests.get(block.key, ""))
        self._states |= self._read(moved)

    def _block_of(self, value: Any) -> Block | None:
        """Return the block that a tensor or array fills; None if there is none."""
        if isinstance(value, torch.Tensor):
            return self._whole_block(value)
        if not isinstance(value, np.ndarray) or not value.size or not value.flags.forc:
            return None
        start = value.__array_interface__["data"][0]
        return self.links.blocks.get_exact(start, value.nbytes, "cpu")

    def _link_memory(self, key: int, value: Any, digest: str) -> None:
        """Register the memory of a tensor or array under the key of a block."""
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            owner = partial(_bytes_of, weakref.ref(storage), bytes_of_storage)
        else:
            start, size = value.__array_interface__["data"][0], value.nbytes
            owner = partial(_bytes_of, weakref.ref(value), _bytes_of_array)
        block = Block(key, start, start + size, owner)
        if isinstance(value, torch.Tensor):
            block.users.append(weakref.ref(value))
        self.links.blocks.forget(key)
        self.links.blocks.add(block)
        self._digests[key] = digest

    def replace(
        self, values: Mapping[str, Any], keyed: Iterable[Keyed] = ()
    ) -> tuple[dict[int, Any], dict[str, Replaced]]:
        """Make variables equal to these values: in place if the old value has the same structure.

        Return, by id of each new object, the old one that took its place; and by name the old
        values that could not be changed in place.
        """
        there = {
            name: (self._names[name], value)
            for name, value in values.items()
            if name in self._names and self._names[name] is not value
        }
        others = [
            (found, each.value)
            for each in keyed
            if (found := self.links.find(each.key)) is not None and found is not each.value
        ]
        instead, failed = copy_into(there, others, *values.values())
        replaced = {}
        for name, value in values.items():
            old = self._names.get(name)
            if name in failed and not is_atomic(old):
                kept = tuple(self._variables_with(name, old))
                kind = type(old).__qualname__
                replaced[name] = Replaced(kind, is_changed=True, others=kept)
            self._names[name] = value if name in failed else instead.get(id(value), value)
        return instead, replaced


_GET_KEYS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


def _is_named(value: Any) -> bool:
    return isinstance(value, type | types.ModuleType)


def _bytes_of(owner: weakref.ref[Any], show: Callable[[Any], Any]) -> Any:
    """Return the bytes of a storage or an array; None once that object has ended."""
    found = owner()
    return None if found is None else show(found)


def _bytes_of_array(array: Any) -> Any:
    return array.reshape(-1, order="K").view(np.uint8)


def _received(after: State, before: State | None, was: State | None) -> State:
    """Return the state as received of an object, after an update has changed parts of it.

    Only those parts are taken from the state `after` the update: parts that the rank has changed
    itself still differ from what `was` received.
    """
    if before is None or was is None or after.parts is None or was.parts is None:
        return after
    return was.with_parts(after, after.changed_since(before) or ())


def _leads_to(top: Any, wanted: Collection[int], names: dict[str, Any], until: float) -> bool:
    """Return True if an object leads to a `wanted` one; not through classes and modules."""
    seen, waiting = {id(names)}, [top]
    while waiting and time.monotonic() < until:
        value = waiting.pop()
        if id(value) in wanted:
            return True
        if id(value) in seen or isinstance(value, type | types.ModuleType | types.CodeType):
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            waiting += [*(value.__closure__ or ()), value.__defaults__, value.__dict__]
        else:
            waiting += gc.get_referents(value)
    return False


_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
"""Bits of `/proc/PID/pagemap`, which every process may read for itself; proc_pid_pagemap(5)."""


def are_written(address: int, size: int) -> bool:
    """Return True if this process may have written to a page of this memory since it was mapped.

    A page of a private mapping of a file becomes the process's own once it is written to. Also True
    if the kernel does not say, or if other data on the first or last page was written.
    """
    first, last = address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(8 * first)
            found = np.frombuffer(pages.read(8 * max(0, last - first)), np.uint64)
    except OSError:
        return True
    is_own = ((found & (_PRESENT | _SWAPPED)) != 0) & ((found & _OF_A_FILE) == 0)
    return len(found) < last - first or bool(is_own.any())
