"""Receives, changes and compares the counterparts of the notebook's objects on this rank.

Runs on the main thread of each worker. `Namespace` passes the values that come with a task to
`Counterparts`. Ops ask `Counterparts` which objects the rank has changed since it received them.
"""

from __future__ import annotations

import gc
import inspect
import mmap
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nbdist.values.copying import copy_into
from nbdist.values.definitions import SYSTEM_NAMES
from nbdist.values.digests import digest_bytes
from nbdist.values.linked import (
    NotThere,
    ReceivedMessage,
    bytes_of_storage,
    flat_tensor,
    read,
    reducer_for,
)
from nbdist.values.links import Links, MemoryBlock
from nbdist.values.payload import Identity, is_atomic
from nbdist.values.pickling import Buffer, without_cycles
from nbdist.values.scan import Scan
from nbdist.values.states import ChangedParts, ObjectState, keys_in, reachable_keys
from nbdist.values.tensors import version_of
from nbdist.values.updates import apply
from nbdist.wire.ops import Inspected, Replaced, type_text
from nbdist.wire.places import CALL_FILE

MAX_SEARCH_SECONDS = 0.1
"""Seconds after which `_variables_with` gives up its search."""

MAX_CLEARINGS = 3
"""The most times that `pop_ended_keys` clears the frames that a call has left behind.

Once is not always enough, because another thread may take hold of further frames meanwhile.
"""

PAGES_FROM_BYTES = 4 << 20
"""An array of at least this many bytes is checked by `are_written` before it is compared.

Comparing the contents of that much memory would take longer than the check.
"""


class Keyed(NamedTuple):
    """An object with its key, which a rank writes to a file or sends to another process.

    The other process is another rank, or the new process of a rank that is restarted. `tool` names
    the way in which the object's state is read. `state` is the object's state when this rank last
    received the object or a change of it; None if no state was recorded.

    `block` and `digest` are about the memory of a tensor on the CPU, if the whole memory has a key:
    `block` is this key, and `digest` is the digest of the memory's contents when this rank received
    them, or "" if it is unknown. In all other cases `block` is 0 and `digest` is "".
    """

    key: int
    tool: str
    value: Any
    state: ObjectState | None
    block: int = 0
    digest: str = ""


class Counterparts:
    """The objects of this rank that have a key, with their states when the rank received them.

    An object has *ended* on a rank, or in the notebook, once that process has freed it. A *block*
    is the memory of tensors or arrays, which has a key of its own.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self.links = Links()
        self._names = names
        self._states: dict[int, ObjectState] = {}
        self._digests: dict[int, str] = {}
        self._sent_values: dict[str, Identity] = {}
        self._orphans: set[int] = set()  # keys of objects that the notebook has freed
        # By key, objects that messages of the notebook have removed from variables or containers of
        # this rank. The notebook may refer to them again, so they are kept alive.
        self._retained: dict[int, Any] = {}
        self._released: list[Any] = []  # objects that `forget` has taken from `_retained`
        self._pinned: list[Any] = []  # keeps all objects with a key alive between two tasks
        # By key, a tensor's version counter when the tensor, or a change of it, was last received.
        self._versions: dict[int, int] = {}
        # Keys of memory that this rank has changed in place, and of changed containers that `links`
        # drops because nothing else refers to them.
        self._altered_keys: set[int] = set()
        self._lost_keys: list[int] = []  # keys of altered memory and containers that were freed
        # Keys of objects and memory that the arguments of the present call have brought.
        self._lent_keys: list[int] = []

    # --- receiving ----------------------------------------------------------------------------

    def read(self, frames: Sequence[Buffer]) -> ReceivedMessage:
        """Rebuild the values of a message, without changing any object or variable of this rank.

        Raise NotThere if the message refers to an object that has ended here, and CannotRebuild if
        a value cannot be rebuilt.
        """
        arrived = read(frames, self._find, self._names)
        for key, tool, _ in arrived.updates:
            if tool != "block" and self._find(key) is None:
                raise NotThere(key)
        return arrived

    def accept(self, arrived: ReceivedMessage) -> None:
        """Register the new objects of a message, and apply its changes to objects of this rank.

        `arrived` is the result of `read`. No variables are bound.
        """
        for key, digest, root in arrived.blocks:
            address = root.__array_interface__["data"][0]
            block = MemoryBlock(key, address, address + root.nbytes, weakref.ref(root))
            self.links.blocks.add(block)
            self._digests[key] = digest
        for key, tool, value in arrived.objects:
            self.links.add(value, tool, key)
            if tool == "tensor":
                self._add_block_user(value)
        self._apply_updates(arrived)
        new = [self.links.by_key[key] for key, _, _ in arrived.objects if key in self.links.by_key]
        self._states |= self._read_states(new)
        tensors = [*new, *(self.links.by_key[k] for k, t, _ in arrived.updates if t == "tensor")]
        self._record_versions(tensors)

    def accept_lent(self, arrived: ReceivedMessage) -> None:
        """Accept a message with the arguments of a call, as `accept` does.

        After a call, reference cycles or frames of the call may keep new objects of the message
        alive on some ranks only. Then `pop_ended_keys` tries to free these objects, so that all
        ranks have the same objects again.
        """
        self.accept(arrived)
        self._lent_keys += [key for key, _, _ in (*arrived.objects, *arrived.blocks)]

    def bind_sent(self, values: Mapping[str, Any]) -> None:
        """Bind variables to values that the notebook has sent, and record the values.

        Later `is_changed` compares the variables with this record.
        """
        for name, value in values.items():
            if (old := self._names.get(name)) is not value:
                self._retain(self._keys_of(old))
        self._names.update(values)
        self._sent_values.update({name: Identity(value) for name, value in values.items()})

    def _apply_updates(self, arrived: ReceivedMessage) -> None:
        if not arrived.updates:
            return
        entries = [self.links.by_key[k] for k, _, _ in arrived.updates if k in self.links.by_key]
        before = self._read_states(entries)
        parts = {k: self.links.find(k) for state in before.values() for k in state.children}
        token = self._new_scan().token
        for key, tool, data in arrived.updates:
            if tool == "block":
                self._write_block(key, data)
            else:
                apply(self.links.find(key), tool, data, token)
        now = self._read_states(entries)
        for key, after in now.items():
            removed = {*before[key].children} - {*after.children} if key in before else ()
            self._retain(removed)
            self._states[key] = _merge_received(after, before.get(key), self._states.get(key))

        del parts  # this reference has kept the parts alive during the update

    def _retain(self, keys: Iterable[int]) -> None:
        """Keep objects alive that the notebook has removed from variables or containers here.

        `keys` are the keys of these objects. The rank may have changed the objects, and the
        notebook may bind them here again, under another name. An object that no longer exists in
        the notebook is not kept itself. Objects inside of it are kept if they still exist in the
        notebook and the rank has changed them. The notebook can send unchanged objects again, such
        as the memory of batches.
        """
        below: set[int] = set()
        for key in keys:
            if key in self._orphans:
                below.update(self._children_of(key))
            elif (value := self.links.find(key)) is not None:
                self._retained[key] = value
        seen: set[int] = set()
        while below := below - seen:
            seen |= below
            changed, _ = self._find_changes(dict.fromkeys(below - self._orphans))
            values = {key: self.links.find(key) for key in changed}
            self._retained |= {key: value for key, value in values.items() if value is not None}
            below = {child for key in below - values.keys() for child in self._children_of(key)}

    def _children_of(self, key: int) -> Collection[int]:
        state = self._states.get(key)
        return () if state is None else state.children

    def _write_block(self, key: int, contents: Any) -> None:
        """Write new contents into the memory that has this key; do nothing if it has ended."""
        root = self._find(key)
        # If `root` is None, the tensors that used this memory were freed, or have other memory by
        # now. In the latter case they get their data by updates of their own.
        if root is None:
            return
        new = np.frombuffer(contents, np.uint8)
        if isinstance(root, torch.UntypedStorage):
            with torch.no_grad():
                flat_tensor(root).copy_(torch.from_numpy(new.copy()))
        else:
            root[:] = new
        self._digests[key] = digest_bytes(new)

    def _add_block_user(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start and (block := self.links.blocks.find_containing(start, start + 1, start, "cpu")):
            block.users.append(weakref.ref(tensor))

    def _find(self, key: int) -> Any:
        """Return the object or the memory that has this key; None if it has ended."""
        if (value := self.links.find(key)) is not None:
            return value
        block = self.links.blocks.get(key)
        return None if block is None else block.users_storage()

    # --- releasing ----------------------------------------------------------------------------

    def forget(self, keys: Iterable[int]) -> None:
        """Release objects that no longer exist in the notebook; `keys` are their keys.

        The objects stay alive until `end_idle` is called, because a message of the same task may
        refer to their memory. If something else keeps an object alive after that, the object also
        keeps its key, because the states of other objects refer to the key.
        """
        ended_keys = {*keys}
        self._orphans |= ended_keys
        self.links.has_dead = True
        released = {key: self._retained.pop(key) for key in ended_keys & self._retained.keys()}
        self._released = [*released.values()]
        self._retain(released)

    def forget_sent_value(self, name: str) -> None:
        """Forget the value that the notebook has sent for a variable.

        This is called for each variable that a task has bound or deleted.
        """
        self._sent_values.pop(name, None)

    def delete(self, names: Iterable[str]) -> list[str]:
        """Delete variables that the notebook has deleted, unless this rank has changed them.

        Return the names that were deleted.
        """
        deleted = []
        for name in names:
            if name in self._names and not self.is_changed(name):
                self._retain(self._keys_of(self._names[name]))
                del self._names[name]
                self._sent_values.pop(name, None)
                deleted.append(name)
        return deleted

    def pop_ended_keys(self) -> tuple[int, ...]:
        """Return the keys of objects and memory that have ended here since the last call.

        The keys are reported to the notebook. Keys of objects that the notebook itself has freed
        before are left out.

        The notebook's next task may refer to any object whose key is not returned. So this method
        also keeps all objects with a key, and their memory, alive until `end_idle` is called.
        Otherwise garbage collection, or a thread that drops a frame of the task, could end an
        object between two tasks.
        """
        self._pinned = []
        self._record_altered_memory()
        # Python allows no weak references to lists and dicts. So `links` keeps them alive until
        # `drop_unused` finds that nothing else refers to them.
        self.links.drop_unused(self._record_altered_containers)
        if any(map(self._is_left, self._lent_keys)):
            # Reference cycles may keep the arguments of a call alive on one rank and not on
            # another. The next call would use the changed objects on one rank, and new objects on
            # the other. So collect the cycles.
            gc.collect()
            self.links.drop_unused(self._record_altered_containers)
            for _ in range(MAX_CLEARINGS):
                if not any(map(self._is_left, self._lent_keys)) or not _clear_frames_of_call():
                    break
                gc.collect()  # cycles may have contained the frames
                self.links.drop_unused(self._record_altered_containers)
        self._lent_keys = []
        self._pinned = [entry() for entry in self.links.entries()]
        self._pinned += [block.owner() for block in self.links.blocks]
        ended = self.links.pop_dead_keys()
        for key in ended:
            self._states.pop(key, None)
            self._digests.pop(key, None)
            self._versions.pop(key, None)
        self._lost_keys += [key for key in ended if key in self._altered_keys]
        self._altered_keys.difference_update(ended)
        unreported = [key for key in ended if key not in self._orphans]
        self._orphans.difference_update(ended)
        return tuple(unreported)

    def _is_left(self, key: int) -> bool:
        """Return True if the object or memory with this key is alive and is no definition.

        Definitions are classes, functions, and the cells of closures. Classes always have reference
        cycles. If they counted, each call that brings a class would cost a garbage collection.
        """
        value = self._find(key)
        definitions = type, types.FunctionType, types.CellType
        return value is not None and not isinstance(value, definitions)

    def pop_lost_keys(self) -> tuple[int, ...]:
        """Return the keys of memory and containers that this rank has changed and then freed.

        If the notebook sends such an object again, it tells the user that the rank's changes are
        lost. Each key is returned once. The key of a tensor's memory is missing if a single task
        both changed the memory and freed the tensor: after the task, nobody can read the tensor's
        version counter.
        """
        lost, self._lost_keys = self._lost_keys, []
        return tuple(lost)

    def _record_versions(self, entries: Iterable[Any]) -> None:
        for entry in entries:
            if entry.tool == "tensor" and (tensor := entry()) is not None:
                self._versions[entry.key] = version_of(tensor)

    def _record_altered_memory(self) -> None:
        """Record the memory of tensors that were changed in place since the notebook sent them."""
        for key, version in self._versions.items():
            tensor, state = self.links.find(key), self._states.get(key)
            if tensor is not None and state is not None and version_of(tensor) != version:
                self._altered_keys.update(state.children)

    def _record_altered_containers(self, entries: Iterable[Any]) -> None:
        """Record which of these containers the rank has changed in place.

        `links` calls this for containers to which nothing else refers, and then drops them.
        """
        for key, state in self._read_states(entries).items():
            if key in self._states and self._states[key] != state:
                self._altered_keys.add(key)

    def end_idle(self) -> None:
        """Let go of the objects that have been kept alive since the last task ended."""
        self._pinned = []
        self._released.clear()

    # --- comparing ----------------------------------------------------------------------------

    def inspect(self, objects: Mapping[int, ChangedParts], names: Iterable[str]) -> Inspected:
        """Return which objects this rank has changed or freed, and facts about variables.

        `objects` has the objects to compare by their keys: for each object the parts to compare, or
        None if all its parts are compared. `names` are the variables. A variable that this rank
        lacks is left out of the result.
        """
        changed, ended = self._find_changes(objects)
        found_values = {}
        for name in names:
            if name in self._names:
                value = self._names[name]
                others = tuple(self._variables_with(name, value))
                found_values[name] = Replaced(type_text(value), self.is_changed(name), others)
        return Inspected(changed, found_values, tuple(ended))

    def is_changed(self, name: str) -> bool:
        """Return False if a variable still has the object that the notebook sent, unchanged.

        Return True in all other cases. An object counts as changed if any object in it has changed.
        """
        value, sent_value = self._names.get(name), self._sent_values.get(name)
        if sent_value is None or not sent_value.is_still(value):
            return True
        keys = reachable_keys(self._states, self._keys_of(value))
        return bool(self._find_changes(dict.fromkeys(keys))[0])

    def _keys_of(self, value: Any) -> list[int]:
        """Return the key of an object; if it has none, the keys of the objects in it."""
        if is_atomic(value):
            return []
        key = self.links.key_of(value)
        return [key] if key is not None else keys_in(self._new_scan().token(value))

    def _find_changes(
        self, objects: Mapping[int, ChangedParts]
    ) -> tuple[dict[int, ChangedParts], list[int]]:
        changed: dict[int, ChangedParts] = {}
        ended = []
        entries = []
        for key in objects:
            if self.links.blocks.get(key) is not None:
                if self._is_written(key):
                    changed[key] = None
            elif (entry := self.links.by_key.get(key)) is not None:
                entries.append(entry)
            elif key in self._states:
                ended.append(key)
        for key, state in self._read_states(entries).items():
            before = self._states.get(key)
            if before is None or state == before:
                continue
            parts, differing = objects[key], state.changed_since(before)
            if differing is None or parts is None:
                changed[key] = differing
            elif both := differing & parts:
                changed[key] = both
        return changed, ended

    def _is_written(self, key: int) -> bool:
        """Return True if the block with this key has ended or may have other contents by now."""
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

    def _new_scan(self) -> Scan:
        return Scan(self.links, reducer_for(self._names), self._names, adds=False)

    def _read_states(self, entries: Iterable[Any]) -> dict[int, ObjectState]:
        entries = [*entries]
        if not entries:  # saves time: no scan is needed
            return {}
        scan = self._new_scan()
        with without_cycles():
            scan.read_all(entries)
        return scan.states

    def _variables_with(self, name: str, value: Any) -> list[str]:
        """Return the variables, other than `name`, from which references lead to a value.

        If the value is a torch module, references to its parameters count too. Return [] if the
        value is a short plain value, a module of Python, a function or a class. The search has a
        time limit, so variables may be missing.
        """
        if is_atomic(value) or isinstance(value, types.ModuleType | types.FunctionType | type):
            return []
        ids = {id(value)}
        if isinstance(value, torch.nn.Module):
            ids |= {id(parameter) for parameter in value.parameters()}
        deadline = time.monotonic() + MAX_SEARCH_SECONDS
        names = [each for each in self._names.items() if each[0] != name]
        return [
            other
            for other, top in names
            if not SYSTEM_NAMES.fullmatch(other) and _leads_to(top, ids, self._names, deadline)
        ]

    # --- between ranks, and from files -------------------------------------------------------

    def keyed_objects(self, values: Iterable[Any], *, adds: bool = False) -> list[Keyed]:
        """Return a `Keyed` for each of `values` that has a key; objects inside of them are ignored.

        With `adds`, tensors, torch modules and optimizers among `values` get a key first.
        """
        keyed_objects = []
        for value in values:
            entry = self.links.by_id.get(id(value))
            if (
                entry is None
                and adds
                and isinstance(value, _GET_KEYS)
                and not _is_type_or_module(value)
            ):
                entry = self.links.add(value, "tensor" if isinstance(value, torch.Tensor) else "")
            if entry is None or entry() is not value:
                continue
            block, digest = 0, ""
            if isinstance(value, torch.Tensor) and (whole := self._whole_block(value)) is not None:
                block, digest = whole.key, self._digests.get(whole.key, "")
            state = self._states.get(entry.key)
            keyed_objects.append(Keyed(entry.key, entry.tool, value, state, block, digest))
        return keyed_objects

    def _whole_block(self, tensor: torch.Tensor) -> MemoryBlock | None:
        if tensor.device.type != "cpu" or not tensor.numel() or tensor.is_sparse:
            return None
        storage = tensor.untyped_storage()
        return self.links.blocks.get_exact(storage.data_ptr(), storage.nbytes(), "cpu")

    def register(self, keyed: Iterable[Keyed], substitutes: Mapping[int, Any]) -> tuple[int, ...]:
        """Give objects that came from a rank or a file the keys that they had there.

        The contents of a new object may have been copied into an old object of this rank. Then the
        old object gets the key, and `substitutes` has the old object by the id of the new one.
        Return all keys that were given: those of the objects, and those of tensors' memory.
        """
        keys = []
        for each in keyed:
            value = substitutes.get(id(each.value), each.value)
            self.links.add(value, each.tool, each.key)
            keys.append(each.key)
            if each.state is not None:
                self._states[each.key] = each.state
            if each.block and isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self._link_memory(each.block, value, each.digest)
                keys.append(each.block)
        return tuple(keys)

    def move_keys(self, substitutes: Mapping[int, Any]) -> None:
        """Move the key of each new object to the old object into which it was copied.

        `substitutes` has the old object by the id of the new one. If the new object's memory has a
        key, this key is moved to the memory of the old object, too.
        """
        moved = []
        for number, value in substitutes.items():
            entry = self.links.by_id.get(number)
            old = None if entry is None else entry()
            if entry is None or old is None or old is value:
                continue
            key, tool = entry.key, entry.tool
            block = self._block_of(old)
            moved.append(self.links.add(value, tool, key))
            if block is not None:
                self._link_memory(block.key, value, self._digests.get(block.key, ""))
        self._states |= self._read_states(moved)

    def _block_of(self, value: Any) -> MemoryBlock | None:
        """Return the block that has exactly the memory of a tensor or contiguous array, or None."""
        if isinstance(value, torch.Tensor):
            return self._whole_block(value)
        if not isinstance(value, np.ndarray) or not value.size or not value.flags.forc:
            return None
        start = value.__array_interface__["data"][0]
        return self.links.blocks.get_exact(start, value.nbytes, "cpu")

    def _link_memory(self, key: int, value: Any, digest: str) -> None:
        """Register the memory of a tensor or array as the block with this key.

        A block that had the key before is dropped.
        """
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            owner = partial(_bytes_of, weakref.ref(storage), bytes_of_storage)
        else:
            start, size = value.__array_interface__["data"][0], value.nbytes
            owner = partial(_bytes_of, weakref.ref(value), _bytes_of_array)
        block = MemoryBlock(key, start, start + size, owner)
        if isinstance(value, torch.Tensor):
            block.users.append(weakref.ref(value))
        self.links.blocks.forget(key)
        self.links.blocks.add(block)
        self._digests[key] = digest

    def replace(
        self, values: Mapping[str, Any], keyed: Iterable[Keyed] = ()
    ) -> tuple[dict[int, Any], dict[str, Replaced]]:
        """Give variables new values, if possible by changing their old values in place.

        `values` has the new values by name. An old value can be changed in place if it has the same
        structure as the new value. If `keyed` has a new object with the key of any other object of
        this rank, that object is changed in place, too, if possible.

        Return two dicts. The first has, by the id of a new object, the old object that was made
        equal to it. The second has, by the name of a variable, facts about its old value if this
        value could not be changed in place. Old values such as short numbers and texts are left out
        of the second dict.
        """
        pairs = {
            name: (self._names[name], value)
            for name, value in values.items()
            if name in self._names and self._names[name] is not value
        }
        more_pairs = [
            (old, each.value)
            for each in keyed
            if (old := self.links.find(each.key)) is not None and old is not each.value
        ]
        substitutes, failed_names = copy_into(pairs, more_pairs, *values.values())
        replaced = {}
        for name, value in values.items():
            old = self._names.get(name)
            if name in failed_names and not is_atomic(old):
                variables = tuple(self._variables_with(name, old))
                kind = type(old).__qualname__
                replaced[name] = Replaced(kind, is_changed=True, others=variables)
            self._names[name] = value if name in failed_names else substitutes.get(id(value), value)
        return substitutes, replaced


_GET_KEYS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


def _clear_frames_of_call() -> bool:
    """Delete the local variables of frames that a finished call has left behind.

    A profiler, or the control thread when it looks up the main thread's position, holds such frames
    for a moment. Their variables would keep the call's arguments alive on this rank alone, so that
    the next call would use the changed objects here and new objects on the other ranks. A frame
    keeps its variables if it belongs to a traceback, a generator or a coroutine that still exists,
    because the user may have kept that object. Return True if frames were cleared.
    """
    # `WorkerKernel.run` has called `pop_ended_keys`, and `pop_ended_keys` this function.
    here = inspect.currentframe()
    task = here and here.f_back and here.f_back.f_back
    if task is None:
        return False
    frames, used = [], set()
    for value in gc.get_objects():
        if type(value) is types.FrameType:
            frames.append(value)
        elif type(value) is types.TracebackType:
            used.add(id(value.tb_frame))
        elif type(value) is types.CoroutineType:
            used.add(id(value.cr_frame))  # None if the coroutine has ended
        elif type(value) is types.GeneratorType:
            used.add(id(value.gi_frame))
    has_cleared = False
    for frame in frames:
        if id(frame) not in used and _is_of_call(frame, task):
            with suppress(RuntimeError):  # the frame is still running
                frame.clear()
                has_cleared = True
    return has_cleared


def _is_of_call(frame: types.FrameType, task: types.FrameType) -> bool:
    """Return True if a frame belongs to a call, or to the code of nbdist that made the call.

    `task` is the frame of `WorkerKernel.run`, which performs the task. A frame belongs to the call
    if it was called from `task`, directly or not. Python 3.11 forgets who has called a coroutine
    that has ended. So a frame also belongs to the call if its code is in the same file as
    `WorkerKernel.run`, or if it was called from the file of the op that calls functions
    (`CALL_FILE`).
    """
    if frame.f_code.co_filename == task.f_code.co_filename:
        return True
    above: types.FrameType | None = frame
    while above is not None:
        if above is task or above.f_code.co_filename.endswith(CALL_FILE):
            return True
        above = above.f_back
    return False


def _is_type_or_module(value: Any) -> bool:
    return isinstance(value, type | types.ModuleType)


def _bytes_of(owner: weakref.ref[Any], get_bytes: Callable[[Any], Any]) -> Any:
    """Return the bytes of a storage or an array, or None if it has ended.

    `owner` is a weak reference to the storage or array, and `get_bytes` reads its bytes.
    """
    memory = owner()
    return None if memory is None else get_bytes(memory)


def _bytes_of_array(array: Any) -> Any:
    return array.reshape(-1, order="K").view(np.uint8)


def _merge_received(
    after: ObjectState, before: ObjectState | None, earlier: ObjectState | None
) -> ObjectState:
    """Return the state to record for an object after an update has changed parts of it.

    `before` and `after` are the object's states before and after the update, and `earlier` is the
    state that was recorded last. The result has the updated parts from `after`, and all other parts
    from `earlier`. So parts that the rank itself has changed still differ from the recorded state.
    If a state is unknown or has no parts, return `after`.
    """
    if before is None or earlier is None:
        return after
    if before.parts is None or after.parts is None or earlier.parts is None:
        return after
    return earlier.with_parts(after, after.changed_since(before) or ())


def _leads_to(top: Any, ids: Collection[int], names: dict[str, Any], deadline: float) -> bool:
    """Return True if references from `top` lead to an object with one of the `ids`.

    Classes, modules and globals of functions are not searched. Return False after the deadline.
    """
    visited, pending = {id(names)}, [top]
    while pending and time.monotonic() < deadline:
        value = pending.pop()
        if id(value) in ids:
            return True
        if id(value) in visited or isinstance(value, type | types.ModuleType | types.CodeType):
            continue
        visited.add(id(value))
        if isinstance(value, types.FunctionType):
            pending += [*(value.__closure__ or ()), value.__defaults__, value.__dict__]
        else:
            pending += gc.get_referents(value)
    return False


_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
"""Bits of an entry of `/proc/PID/pagemap`, which has an entry for each page of memory.

The man page proc_pid_pagemap(5) explains the bits. A process may read its own entries.
"""


def are_written(address: int, size: int) -> bool:
    """Return False if this process has certainly not written to this memory since it was mapped.

    This can be known of memory that is a private mapping of a file. When the process writes to a
    page of such memory, Linux makes a copy of the page, and this function looks for such copies. So
    it also returns True if the process has written to other data on the same pages, if the memory
    is no mapping of a file, or if Linux does not tell which pages are copies.
    """
    first, last = address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            pages.seek(8 * first)
            entries = np.frombuffer(pages.read(8 * max(0, last - first)), np.uint64)
    except OSError:
        return True
    is_own = ((entries & (_PRESENT | _SWAPPED)) != 0) & ((entries & _OF_A_FILE) == 0)
    return len(entries) < last - first or bool(is_own.any())
