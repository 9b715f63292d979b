"""Computes digests of a rank's watched modules and optimizers, and compares them between ranks.

Runs in workers; `nbdist.tools.watch_op` calls this file for `--watch`.  In tensors of the dtypes in
`WIDE`, numbers that `%dist_diff` calls equal have equal digests: -0.0 and 0.0, and all NaNs.  For
that, digests are computed from copies, made piece by piece, in which such numbers have the same
bits.

The file also finds facts that may differ before parameters do: digests of random states and inputs,
and the number of collectives.  `Exchange` compares the digests of all ranks while they train,
through the store of the default process group.
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import DistStoreError
from torch.nn.parallel import DistributedDataParallel

from nbdist.output.wording import difference
from nbdist.tools.diff_op import bytes_of, comparable, fold, is_sharded, leaves, part_of
from nbdist.values.digests import digest_bytes, digest_pieces
from nbdist.wire.ops import ValueDigest
from nbdist.words import name_ranks
from nbdist.worker.compat import accelerator, models
from nbdist.worker.compat import torch as seam

FACTOR = 0x5851F42D4C957F2D

DIGEST_PIECE, DEVICE_PIECE = 1 << 20, 1 << 25
"""The bytes of floating-point numbers that are copied at a time, on the CPU and on other devices.

A copy of the first size stays in the processor's cache.  Measured on one core for 100 MB of
float32: a digest takes 20 ms with such copies, 10 ms without copies, and 50 ms with copies in new
memory.
"""

WIDE = {
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}
"""The dtype of the copy from which a digest is computed, by the dtype of the tensor.

Tensors of other dtypes are not copied.
"""

SMALL_TENSOR = 1 << 14
"""Tensors of up to this many bytes are copied to new memory, larger ones to spare tensors.

For so small a tensor, new memory takes less time than a view of a spare tensor.
"""

MAX_SAMPLED = 1024
"""About the number of elements of a large tensor that `sample_digest` reads."""

SpareTensors = dict[tuple[torch.device, torch.dtype], torch.Tensor]
"""Tensors for copies of pieces, by device and dtype; digests of several tensors reuse them."""

DigestsByPath = dict[str, dict[str, ValueDigest]]
"""For each watched expression, descriptions of its parts with their digests, by path."""


class WatchedValue(NamedTuple):
    """The value of a watched expression: a module, perhaps a DDP module, or an optimizer."""

    expression: str
    value: Any

    @property
    def is_module(self) -> bool:
        """Whether the value is a module, not an optimizer."""
        return isinstance(self.value, torch.nn.Module)

    @property
    def inner(self) -> Any:
        """The user's module inside of a DDP module; for any other value, the value itself.

        Hooks are added to this module: DDP copies the buffers of rank 0 to all ranks before it runs
        the forward of this module.
        """
        model = self.value
        return model.module if isinstance(model, DistributedDataParallel) else model


def unsupported_type(value: Any) -> str:
    """Return the name of a value's type if it cannot be watched; "" for modules and optimizers."""
    is_optimizer = callable(getattr(value, "step", None)) and hasattr(value, "param_groups")
    return "" if isinstance(value, torch.nn.Module) or is_optimizer else type(value).__qualname__


def parts_of(target: WatchedValue) -> tuple[dict[str, ValueDigest], int]:
    """Return descriptions of a module's parameters, or of an optimizer's states, by path.

    Also return the number of sharded tensors: they are left out, since ranks have different parts.
    """
    value = target.value
    return _describe_values(value.named_parameters() if target.is_module else _states(value))


def buffers_of(target: WatchedValue) -> dict[str, ValueDigest]:
    """Return descriptions of a module's buffers, with their digests, by path."""
    return _describe_values(target.value.named_buffers(), "buffer ")[0]


def has_buffers(target: WatchedValue) -> bool:
    """Return True for a module with buffers that can be compared.

    Return False for a compiled DDP module.  Its buffers may differ until DDP has copied the buffers
    of rank 0 to all ranks, and no hook runs after this copy.
    """
    if not target.is_module:
        return False
    is_unseen = isinstance(models.compiled_in(target.value), DistributedDataParallel)
    return not is_unseen and any(True for _ in target.value.buffers())


def share_parameters(targets: Iterable[WatchedValue], optimizer: Any) -> bool:
    """Return True if the optimizer has a parameter that a target has too."""
    watched = set[int]()
    for each in targets:
        parameters = each.value.parameters() if each.is_module else _parameters(each.value)
        watched.update(map(id, parameters))
    return any(id(each) in watched for each in _parameters(optimizer))


def names_of(targets: Iterable[WatchedValue]) -> dict[str, str]:
    """Return, for the states of watched optimizers, the names of the parameters they belong to.

    A key is the beginning of the path of a parameter's states, such as `optimizer state[3]`.  The
    value is the name that the parameter has in a watched module.
    """
    targets = [*targets]
    modules = (each.value.named_parameters() for each in targets if each.is_module)
    names = {id(parameter): name for named in modules for name, parameter in named}
    return {
        f"{each.expression} state[{number}]": names[id(parameter)]
        for each in targets
        if not each.is_module
        for number, parameter in enumerate(_parameters(each.value))
        if id(parameter) in names
    }


def digest_of_all(parts: DigestsByPath) -> str:
    """Return one digest of all parts; it is equal on ranks on which all parts are equal."""
    by_path = [(e, p, x.kind, x.digest) for e, of in parts.items() for p, x in of.items()]
    return digest_bytes(repr(by_path).encode())


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _states(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in leaves(optimizer).items():
        if "['params']" not in path:
            yield path, leaf
    # A `state_dict` of an optimizer has numbers instead of parameters: describe the shapes instead.
    for number, group in enumerate(optimizer.param_groups):
        shapes = " ".join(str(tuple(each.shape)) for each in group["params"])
        yield f"param_groups[{number}]['params']", f"{len(group['params'])}: {shapes}"


def _describe_values(
    named: Iterable[tuple[str, Any]], kind: str = ""
) -> tuple[dict[str, ValueDigest], int]:
    """Return descriptions of values with their digests, by path; leave out sharded tensors.

    Also return the number of sharded tensors.  `named` has (path, value) for each value, and `kind`
    is put before the dtype of each tensor.  The sums that `fold` computes on a GPU are copied to
    the CPU all at once, since each copy waits for the GPU.
    """
    parts: dict[str, ValueDigest] = {}
    sums: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    spare: SpareTensors = {}
    sharded = 0
    for path, leaf in named:
        if is_sharded(leaf):
            sharded += 1
            continue
        if (tensor := comparable(leaf)) is None:
            parts[path] = part_of(leaf)
            continue
        text, digest = f"{kind}{str(tensor.dtype)[6:]} {tuple(tensor.shape)}", ""
        if tensor.is_cpu:
            digest = digest_pieces(each.numpy().data for each in _pieces(tensor, spare))
        else:
            folded = torch.cat([*map(fold, _pieces(tensor, spare))])
            sums.setdefault(tensor.device, []).append((path, folded))
        parts[path] = ValueDigest(text, digest, size=tensor.nbytes, count=tensor.numel())
    for of_device in sums.values():
        sizes = [each.numel() for _, each in of_device]
        every = torch.cat([each for _, each in of_device]).cpu()
        for (path, _), each in zip(of_device, torch.split(every, sizes), strict=True):
            parts[path] = replace(parts[path], digest=digest_bytes(each.numpy().data))
    return parts, sharded


def _pieces(tensor: torch.Tensor, spare: SpareTensors) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in logical order, in pieces of bytes, copied by `_canonical_copy`.

    The next piece may overwrite the memory of a piece, so callers must use each piece at once.
    """
    if (wide := WIDE.get(tensor.dtype)) is None or tensor.nbytes <= SMALL_TENSOR:
        yield bytes_of(_canonical_copy(tensor))
        return
    device = tensor.device
    piece_length = (DIGEST_PIECE if device.type == "cpu" else DEVICE_PIECE) // wide.itemsize
    size = min(piece_length, tensor.numel())
    copy = spare.get((device, wide))
    if copy is None or copy.numel() < size:
        copy = spare[device, wide] = torch.empty(size, dtype=wide, device=device)
    flat = tensor.detach().contiguous().reshape(-1)
    for start in range(0, flat.numel(), piece_length):
        piece = flat[start : start + piece_length]
        yield bytes_of(_canonical_copy(piece, copy[: piece.numel()]))


def _canonical_copy(numbers: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy, in `out` if given, in which equal numbers have equal bits.

    In the copy -0.0 is 0.0, and all NaNs have the same bits.  A tensor of a dtype that is not in
    `WIDE` is returned itself.
    """
    if (wide := WIDE.get(numbers.dtype)) is None:
        return numbers
    if numbers.dtype is not wide:
        numbers = numbers.to(wide) if out is None else out.copy_(numbers)
    copy = torch.add(numbers, 0.0, out=out)
    # The sum is NaN if any number is NaN.  On a GPU, NaNs are always replaced, since reading the
    # sum would wait for the GPU.
    if not copy.is_cpu or (total := copy.sum().item()) != total:
        copy.masked_fill_(copy != copy, torch.nan)
    return copy


# --- facts that can differ before parts do: random states, inputs, collectives ------------------


def generator_digests() -> dict[str, str]:
    """Return digests of the random states of torch, Python, numpy and the GPU, by their names.

    The GPU is left out if this rank has not used it.
    """
    states = {"torch": digest_bytes(torch.get_rng_state().numpy().data)}
    states["random"] = digest_bytes(repr(random.getstate()).encode())
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state()
        states["numpy"] = digest_bytes(state[1].data) + f"{state[2:]}"
    if (on_gpu := accelerator.random_state()) is not None:
        states["the GPU"] = digest_bytes(on_gpu.numpy().data)
    return states


def count_collectives() -> int:
    """Count the collectives that this rank's gloo backends have begun; 0 before torch 2.11."""
    groups = seam.recorded_groups().values()
    return sum(int(each["last_enqueued_collective"]) for each in groups)


def sample_digest(args: Any) -> tuple[torch.Tensor | int, str]:
    """Return a digest of a forward's arguments, and the shapes of their first tensors.

    The digest of a large tensor is computed from some elements, evenly spaced.  If an argument is
    on a GPU, the digest is a tensor there, since reading it now would wait for the GPU.
    """
    digests, shapes, plain = list[torch.Tensor](), list[str](), 0
    for leaf in leaves(args).values():
        if isinstance(leaf, torch.Tensor):
            shapes.append(f"{str(leaf.dtype)[6:]} {tuple(leaf.shape)}")
            if (tensor := comparable(leaf)) is not None and tensor.numel():
                some = tensor.reshape(-1)[:: max(1, tensor.numel() // MAX_SAMPLED)]
                if some.device.type == "cpu":
                    plain = zlib.crc32(bytes_of(_canonical_copy(some)).numpy().data, plain)
                else:
                    words = fold(bytes_of(_canonical_copy(some)))
                    factors = (torch.arange(words.numel(), device=words.device) * 2 + 1) * FACTOR
                    digests.append((words * factors).sum())
        elif isinstance(leaf, int | float | str | bool):
            plain = zlib.crc32(repr(leaf).encode(), plain)
    text = ", ".join(shapes[:3])
    if not digests:
        return plain, text
    device = digests[0].device
    total = digests[0]
    for each in digests[1:]:
        total = total * FACTOR + each.to(device)
    return total + plain, text


# --- how ranks compare their digests ------------------------------------------------------------

MAX_COMPARISONS = 100_000
"""The most comparisons in a cell.

On a single machine the store of the ranks is a file, to which each comparison adds some 300 bytes.
"""

MEET_TIMEOUT, MEET_POLL_INTERVAL = 600.0, 0.5
"""For `--stop-on-difference`: the seconds that a rank waits for other ranks in a comparison.

Every `MEET_POLL_INTERVAL` seconds the rank checks whether the cell of another rank has ended.
"""


class RanksDiffer(Exception):
    """Ends a cell with `--stop-on-difference`: ranks differ, or a rank did not compare in time."""


class Exchange:
    """Compares the digests of all ranks while a cell runs; each rank has an exchange of its own.

    The exchanges of a cell have the same `key`, and each comparison has the same name `when` on all
    ranks.  With `waits` (`--stop-on-difference`) each rank waits in each comparison until all ranks
    have stored their digests.  Otherwise the last rank that stores its digest compares.
    """

    def __init__(
        self, key: str, ranks: Sequence[int], rank: int, warn: Callable[[str], None], *, waits: bool
    ) -> None:
        self._key, self._ranks, self._rank, self._waits = f"nbdist/{key}", ranks, rank, waits
        self._warn = warn
        self._store: Any = None
        self._stored_keys: deque[str] = deque()
        self.times = 0

    def compare(self, when: str, digest: str) -> str:
        """Store this rank's digest, and compare if all ranks have stored theirs.

        `when` is the name of the comparison.  Return the name of the first comparison that has
        found a difference, "" if none has so far.  If the exchange `waits`, raise RanksDiffer on a
        difference.  Raise RuntimeError after too many comparisons.
        """
        if len(self._ranks) < 2:
            return ""
        if self.times >= MAX_COMPARISONS:
            raise RuntimeError(f"only the first {MAX_COMPARISONS:,} comparisons were made")
        self.times += 1
        if self._store is None:
            self._store = seam.default_store()
        key = f"{self._key}/{when}"
        self._store.set(f"{key}/{self._rank}", digest)
        if self._waits:
            return self._compare_together(key, when)
        if self._store.add(key, 1) == len(self._ranks):
            text = self._difference(key, when)
            self._forget(key, *(f"{key}/{rank}" for rank in self._ranks))
            if text:
                self._store.set(f"{self._key}/found", when)
                self._warn(f"watch: {text}")
        return self.first_difference()

    def first_difference(self) -> str:
        """Return the name of the comparison that has found a difference; "" if none has."""
        key = f"{self._key}/found"
        if self._store is None or not self._store.check([key]):
            return ""
        return str(self._store.get(key).decode())

    def end(self) -> None:
        """Tell ranks that wait for this rank that its cell has ended, so that they stop waiting."""
        if self._waits and self._store is not None:
            self._store.set(f"{self._key}/ended", str(self._rank))

    def _compare_together(self, key: str, when: str) -> str:
        """Wait until all ranks have stored a digest; raise RanksDiffer if the digests differ.

        Also raise RanksDiffer if a rank stores no digest within `MEET_TIMEOUT`.  Return "" if all
        ranks agree, or if the cell of another rank has ended.
        """
        until = time.monotonic() + MEET_TIMEOUT
        keys = {f"{key}/{rank}": rank for rank in self._ranks}
        while True:
            try:  # any other error than DistStoreError is raised, such as after a rank's death
                self._store.wait([*keys], timedelta(seconds=MEET_POLL_INTERVAL))
                break
            except DistStoreError:
                if self._store.check([f"{self._key}/ended"]):
                    return ""
            if time.monotonic() > until:
                missing = [rank for each, rank in keys.items() if not self._store.check([each])]
                why = f"{name_ranks(missing)} did not come to step {when} in {MEET_TIMEOUT:.0f} s"
                raise RanksDiffer(why)
        text = self._difference(key, when)
        # All ranks have come to this comparison, so no rank will read the digests of earlier ones.
        # Delete this rank's old digests, since a store in memory would grow.
        self._stored_keys.append(f"{key}/{self._rank}")
        if len(self._stored_keys) > 2:
            self._forget(self._stored_keys.popleft())
        if text:
            self._store.set(f"{self._key}/found", when)
            raise RanksDiffer(f"{text}; `%dist_debug` looks at this step")
        return ""

    def _difference(self, key: str, when: str) -> str:
        """Return a text on which ranks differ at which step; "" if all digests are equal."""
        text = difference({rank: self._store.get(f"{key}/{rank}") for rank in self._ranks})
        return text and f"{text} at step {when}"

    def _forget(self, *keys: str) -> None:
        with suppress(NotImplementedError, RuntimeError):  # a store of etcd cannot delete
            for each in keys:
                self._store.delete_key(each)
