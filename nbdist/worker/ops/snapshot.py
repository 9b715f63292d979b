"""Ops that write and read a rank's file of a snapshot: its variables and random states.

The kernel of each rank calls these ops, for `%dist_snapshot` and `%dist_restore`. A file has two
pickles: one of the variables, and one of the rank's shards of DTensors. Each pickle is stored as
frames: the pickled bytes, and the large memory beside them. The notebook chooses the names of the
variables, and keeps the digests of the files, but no value goes through the notebook.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from nbdist.system import folders
from nbdist.system.folders import Untrusted
from nbdist.values.payload import size_of
from nbdist.values.pickling import Buffer, Pickled, pickle, unpickle
from nbdist.wire.ops import Loaded, Written
from nbdist.wire.spec import versions_here
from nbdist.words import one_line
from nbdist.worker.compat import accelerator
from nbdist.worker.group.default import bucket_layout, set_bucket_layout
from nbdist.worker.namespace import Context, Taken
from nbdist.worker.ops import sharded

MAGIC = b"nbdist frames 1\n"
CHUNK = 1 << 24  # bytes that are read or written at once; Stop has an effect only after them


class Damaged(Exception):
    """A snapshot's file has other contents than were written; the message names the file."""


def write_frames(path: Path, frames: Sequence[Buffer]) -> tuple[int, str]:
    """Write the frames of pickles, which are bytes, to a new file; return its size and SHA-256.

    Only this user can read the file. The data is on the disk when this returns. Raises OSError.
    """
    views = [memoryview(frame).cast("B") for frame in frames]
    sizes = json.dumps([view.nbytes for view in views]).encode()
    head = MAGIC + len(sizes).to_bytes(8, "little") + sizes
    digest = hashlib.sha256()
    with open(path, "xb", opener=folders.open_private) as file:
        for part in (part for view in (memoryview(head), *views) for part in _chunks(view)):
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    return len(head) + sum(view.nbytes for view in views), digest.hexdigest()


def map_frames(path: Path, digest: str) -> list[memoryview]:
    """Return the frames of a file, which `write_frames` has written, as mapped memory.

    Processes that map the same file share the memory until they write to it. The frames are not
    aligned as torch's memory is. Raises Damaged if the file has another digest, Untrusted if
    another user could have written the file, and OSError.
    """
    with os.fdopen(folders.open_trusted(path), "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise Damaged(f"{path.name} has other contents than were written")
        file.seek(len(MAGIC))
        sizes = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        end, frames = file.tell(), []
        whole = memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE))
    for each in sizes:
        frames.append(whole[end : end + each])
        end += each
    return frames


def read_frames(path: Path, digest: str) -> list[memoryview]:
    """Return the frames of a file, copied to memory that is aligned as torch's memory is.

    The last bits of some of torch's sums depend on the alignment. With the copy, training goes on
    exactly as it would have gone on before the snapshot. Raises what `map_frames` raises.
    """
    frames = []
    for mapped in map_frames(path, digest):
        frame = torch.empty(mapped.nbytes, dtype=torch.uint8, device="cpu").numpy().data
        for target, part in zip(_chunks(frame), _chunks(mapped), strict=True):
            target[:] = part
        frames.append(frame)
    return frames


def _chunks(view: memoryview) -> Iterator[memoryview]:
    return (view[start : start + CHUNK] for start in range(0, view.nbytes, CHUNK))


# --- write ------------------------------------------------------------------------------

ALSO_LIMIT = 1 << 20
"""The most bytes of a value that is written only because a function in the snapshot uses it."""

GROUP_REMEDY = "new_group makes another one, torch.distributed.checkpoint writes models on one"


def write(
    context: Context, *, folder: str, wanted: Mapping[int, Sequence[str]], leave_out: bool
) -> Written:
    """Write variables of this rank to a new file in the snapshot's folder.

    `wanted` has the names by rank; names that are not bound on this rank are passed over. If a
    variable cannot be pickled, it is left out if `leave_out` is True, and otherwise nothing is
    written. In both cases the result has the reason.
    """
    namespace, rank = context.names, context.rank
    # Put the names that all ranks write first. Then a sharded tensor has the same number on all
    # ranks, and `assembled_tensors` can join its shards by this number.
    names = sorted(wanted[rank], key=lambda n: not all(n in each for each in wanted.values()))
    values = {name: namespace[name] for name in names if name in namespace}
    left_out = {}
    # Only if all values together cannot be pickled, try each of them alone, which takes longer.
    if _pickling_problem(dict(values), namespace):
        reasons = {name: _pickling_problem(value, namespace) for name, value in values.items()}
        left_out = {name: why for name, why in reasons.items() if why}
    if left_out and not leave_out:
        name, why = next(iter(left_out.items()))
        return Written(f"`{name}` cannot be pickled: {why}")
    for name in left_out:
        del values[name]
    also = _used_values(values, namespace)
    contents: dict[str, Any] = {"names": values, "also": also, "random": random_states()}
    contents["hooks"] = RemovableHandle.next_id
    pickled = _sketch(contents, namespace)
    contents["keyed"] = context.namespace.counterparts.keyed_objects(pickled.objects)
    # Write gradients separately, as the pickle of a tensor does not have its gradient.
    tensors = [item for item in pickled.objects if isinstance(item, torch.Tensor) and item.is_leaf]
    contents["grads"] = [(each, each.grad) for each in tensors if each.grad is not None]
    models = [item for item in pickled.objects if type(item) is DistributedDataParallel]
    contents["buckets"] = [(net, bucket_layout(net)) for net in models]
    writer = sharded.Writer()
    frames = pickle(contents, namespace, back_to_device=True, reduce=writer.reduce).frames
    shards = pickle(writer.shards, namespace, back_to_device=True).frames
    # Write three parts: a first frame with the number of the variables' frames, the frames of the
    # variables, and the frames of the shards.
    first = len(frames).to_bytes(8, "little")
    if problem := _folder_problem(folder):
        return Written(problem)
    try:
        size, digest = write_frames(_path_of(folder, rank), [first, *frames, *shards])
    except OSError as error:
        return Written(error.strerror or str(error))
    written = (*(name for name in wanted[rank] if name in values),)
    versions, meshes = versions_here(), (*writer.meshes,)
    return Written("", written, (*also,), left_out, size, digest, versions, meshes)


def _folder_problem(folder: str) -> str:
    if os.path.isdir(folder):
        return ""
    return (
        f"{socket.gethostname()} does not have the folder {os.path.dirname(folder)}, and snapshots "
        "of several machines need a folder that all of them share: set NBDIST_SNAPSHOT_DIR to such "
        "a folder"
    )


def _path_of(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.frames")


def _pickling_problem(value: Any, namespace: dict[str, Any]) -> str:
    """Return why a value cannot be pickled; "" if it can."""
    try:
        _sketch(value, namespace)
    except Exception as error:  # noqa: BLE001 (a user's __reduce__ can raise anything)
        why = f"{type(error).__name__}: {one_line(str(error), 120)}"
        return f"{why}; {GROUP_REMEDY}" if "ProcessGroup" in why else why
    return ""


def _sketch(value: Any, namespace: dict[str, Any], writer: sharded.Writer | None = None) -> Pickled:
    return pickle(value, namespace, sketch=True, reduce=(writer or sharded.Writer()).reduce)


def _used_values(values: Mapping[str, Any], namespace: dict[str, Any]) -> dict[str, Any]:
    """Return the global variables that functions and classes in `values` use, directly or not.

    Variables that are in `values` already are left out, and so are big values (`ALSO_LIMIT`),
    sharded values, and values that cannot be pickled.
    """
    used: dict[str, Any] = {}
    waiting = set(_sketch(values, namespace).needs)
    while waiting:
        name = waiting.pop()
        if name in values or name in used or name not in namespace:
            continue
        try:
            pickled = _sketch(namespace[name], namespace, writer := sharded.Writer())
        except Exception:  # noqa: BLE001 (a user's __reduce__ can raise anything)
            continue  # a function that uses this name will raise NameError after a restore
        if size_of(pickled.frames) <= ALSO_LIMIT and not writer.shards:
            used[name] = namespace[name]
            waiting |= pickled.needs
    return used


def random_states() -> dict[str, Any]:
    """Return the random states of Python and torch, and of numpy and the GPU if they are in use."""
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = numpy.random.get_state()
    if (on_gpu := accelerator.random_state()) is not None:
        states["cuda"] = on_gpu
    return states


# --- restore ----------------------------------------------------------------------------

File = tuple[int, str]
"""A file of a snapshot: the rank that has written the file, and the file's digest."""


def load(
    context: Context, folder: str, parts: Mapping[int, File], everyones: Sequence[File] = ()
) -> Loaded:
    """Read a rank's variables from its file of a snapshot, and keep them for `bind`.

    If the file cannot be read, the result says why. `bind` is a separate op, so that no rank binds
    anything if another rank's file is damaged.

    `parts` has, for each rank, the file that it reads. `everyones` is empty if each rank gets its
    own shards back. Otherwise it has all files of the snapshot: sharded tensors are joined from all
    files, and sharded again for this world.
    """
    try:
        return _load(context, folder, parts[context.rank], everyones)
    finally:
        sharded.forget()


def _load(context: Context, folder: str, part: File, everyones: Sequence[File]) -> Loaded:
    source, digest = part
    if problem := _folder_problem(folder):
        return Loaded(problem)
    try:
        contents, shards = _split(read_frames(_path_of(folder, source), digest))
        if everyones:
            shards = []  # release this memory before all files are mapped: it is not needed
        mapped = {rank: map_frames(_path_of(folder, rank), each) for rank, each in everyones}
    except Untrusted as error:
        return Loaded(distrust=str(error))
    except (Damaged, OSError, RuntimeError) as error:  # RuntimeError if memory is full
        return Loaded(damage=str(error))
    names = context.names
    try:
        if everyones:
            files = {rank: unpickle(_split(frames)[1], names) for rank, frames in mapped.items()}
            tensors = sharded.assembled_tensors(files, source)
        else:
            tensors = sharded.own_tensors(unpickle(shards, names))
        with sharded.restoring(tensors) as unsharded:
            restored = unpickle(contents, names)
            restored["unsharded"] = [*unsharded.values()]
        context.namespace.keep_received(Taken(restored), context.task_id)
    except Exception as error:  # noqa: BLE001 (a user's class can raise anything)
        return Loaded(f"{type(error).__name__}: {one_line(str(error), 200)}")
    return Loaded()


def _split(frames: list[memoryview]) -> tuple[list[memoryview], list[memoryview]]:
    """Split a file's frames into the frames of the variables and the frames of the shards."""
    end = 1 + int.from_bytes(frames[0], "little")
    return frames[1:end], frames[end:]


def bind(context: Context, *, names: Sequence[str] | None, with_random: bool) -> tuple[str, ...]:
    """Bind the variables that `load` has read: those in `names`, or all if `names` is None.

    Return the names of these variables. The snapshot may have further global variables, which its
    functions and classes use: they are bound, too, if this rank lacks them. With `with_random`, the
    random states are set, too.
    """
    namespace, contents = context.names, context.namespace.pop_received().values
    # Modules keep hooks by number. Count on from the snapshot's numbers, so that no new hook gets
    # the number of a restored hook.
    RemovableHandle.next_id = max(RemovableHandle.next_id, contents["hooks"])
    sharded.shard_modules(contents["unsharded"])
    restored = {n: value for n, value in contents["names"].items() if names is None or n in names}
    for tensor, grad in contents["grads"]:
        tensor.grad = grad
    for name, value in contents["also"].items():
        namespace.setdefault(name, value)
    # If only some variables are bound, pass on only the objects in these variables. If an object of
    # another variable were passed, `replace` would change this rank's object with the same key.
    keyed = contents.get("keyed", [])
    if names is not None:
        inside = {id(each) for each in _sketch(restored, namespace).objects}
        keyed = [each for each in keyed if id(each.value) in inside]
    instead, _ = context.namespace.counterparts.replace(restored, keyed)
    for net, layout in contents["buckets"]:
        set_bucket_layout(instead.get(id(net), net), layout)
    context.gained |= {*context.namespace.counterparts.register(keyed, instead)}
    context.bound |= restored.keys()
    if with_random:
        set_random_states(contents["random"])
    return (*restored,)


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set random states, so that the next random numbers are those that followed the snapshot."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "cuda" in states:
        accelerator.set_random_state(states["cuda"])
