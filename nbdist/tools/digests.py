"""Digests of watched modules and optimizers on a rank, for `--watch`, and their exchange.

Runs in workers, called by `nbdist.tools.watch_op`.  A digest reads the memory once; floating-point
numbers are copied in pieces for it.  Numbers that `%dist_diff` calls equal have equal digests: -0.0
and 0.0, and all NaNs.  Other facts may differ before parameters do: random states, inputs, the
number of collectives.  `Exchange` compares the ranks' digests during the training, in the store
where the ranks have met.
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
"""Bytes of floating-point numbers that are copied at a time, on the CPU and on other devices.

The copy stays in the processor's cache: a digest of 100 MB of float32 takes 20 ms of a core, and
10 ms without copies (bfloat16: 34 and 10 ms); with copies in new memory a digest takes 50 ms."""

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
"""By type of numbers: the type of their copy.  Tensors of other types keep their bits."""

SMALL_TENSOR = 1 << 14
"""Bytes of a tensor up to which new memory for its copy costs less than viewing a spare tensor."""

MAX_SAMPLED = 1024
"""About how many elements are read of a large tensor that is an argument of a forward."""

SpareTensors = dict[tuple[torch.device, torch.dtype], torch.Tensor]
"""Memory for copies of pieces, which the digests of several tensors share."""

DigestsByPath = dict[str, dict[str, ValueDigest]]
"""Digests of parts, by expression and path."""


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
        """The user's module inside of a DDP module, or the value itself.

        DDP sends rank 0's buffers before it runs this module's forward.
        """
        model = self.value
        return model.module if isinstance(model, DistributedDataParallel) else model


def unsupported_type(value: Any) -> str:
    """Return "" for a module or an optimizer, and the name of the type for any other value."""
    is_optimizer = callable(getattr(value, "step", None)) and hasattr(value, "param_groups")
    return "" if isinstance(value, torch.nn.Module) or is_optimizer else type(value).__qualname__


def parts_of(target: WatchedValue) -> tuple[dict[str, ValueDigest], int]:
    """Describe a module's parameters or an optimizer's states by path.

    Also return the number of sharded tensors, which are left out.
    """
    value = target.value
    return _describe_values(value.named_parameters() if target.is_module else _states(value))


def buffers_of(target: WatchedValue) -> dict[str, ValueDigest]:
    """Describe a module's buffers by path."""
    return _describe_values(target.value.named_buffers(), "buffer ")[0]


def has_buffers(target: WatchedValue) -> bool:
    """Return True for a module with buffers that can be compared.

    Return False for a compiled DDP module: no hook can see when it sends rank 0's buffers.
    """
    if not target.is_module:
        return False
    is_unseen = isinstance(models.compiled_in(target.value), DistributedDataParallel)
    return not is_unseen and any(True for _ in target.value.buffers())


def share_parameters(targets: Iterable[WatchedValue], optimizer: Any) -> bool:
    """Return True if the optimizer has a parameter of one of these targets."""
    watched = set[int]()
    for each in targets:
        parameters = each.value.parameters() if each.is_module else _parameters(each.value)
        watched.update(map(id, parameters))
    return any(id(each) in watched for each in _parameters(optimizer))


def names_of(targets: Iterable[WatchedValue]) -> dict[str, str]:
    """Return the names of parameters by the beginning of their states' paths in an optimizer.

    Such a beginning is `optimizer state[3]`; the name is the parameter's in a watched module.
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
    """Return a digest of all parts together, which is equal on ranks with equal parts."""
    by_path = [(e, p, x.kind, x.digest) for e, of in parts.items() for p, x in of.items()]
    return digest_bytes(repr(by_path).encode())


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _states(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in leaves(optimizer).items():
        if "['params']" not in path:
            yield path, leaf
    # An optimizer's state has only numbers for the parameters, so compare their shapes instead.
    for number, group in enumerate(optimizer.param_groups):
        shapes = " ".join(str(tuple(each.shape)) for each in group["params"])
        yield f"param_groups[{number}]['params']", f"{len(group['params'])}: {shapes}"


def _describe_values(
    named: Iterable[tuple[str, Any]], kind: str = ""
) -> tuple[dict[str, ValueDigest], int]:
    """Describe values with their digests; wait only once for all sums of each device."""
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
    """Yield a tensor's contents in logical order as bytes; use each piece before the next.

    Floating-point numbers are copied by `_canonical_copy`.
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
    """Return a copy, in `out` if given, whose bits differ only where numbers differ.

    In the copy -0.0 is 0.0, and all NaNs are equal.  A tensor of a type not in `WIDE` is returned.
    """
    if (wide := WIDE.get(numbers.dtype)) is None:
        return numbers
    if numbers.dtype is not wide:
        numbers = numbers.to(wide) if out is None else out.copy_(numbers)
    copy = torch.add(numbers, 0.0, out=out)
    # A sum is NaN if a number is NaN.  On other devices, reading the sum would wait for the device.
    if not copy.is_cpu or (total := copy.sum().item()) != total:
        copy.masked_fill_(copy != copy, torch.nan)
    return copy


# --- facts that can differ before parts do: random states, inputs, collectives ------------------


def generator_digests() -> dict[str, str]:
    """Return a digest of each random state that training commonly uses."""
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

    If a tensor is on a device, the digest is a tensor on that device.  Of a large tensor the
    digest has only some elements, evenly spaced.
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
"""The most comparisons in a cell: each adds some 300 bytes to the file where local ranks meet."""

MEET_TIMEOUT, MEET_POLL_INTERVAL = 600.0, 0.5
"""Seconds that a rank waits for ranks whose cell is running, and between two checks whether their
cells have ended."""


class RanksDiffer(Exception):
    """Ends the cell for `--stop-on-difference`: ranks differ, or a rank did not come to compare."""


class Exchange:
    """Compares the digests of ranks in a cell; each rank has an exchange with the same `key`.

    A comparison has a name `when`, the same on all ranks.  With `waits` each rank waits for the
    others in each comparison (`--stop-on-difference`); without, the last rank to come compares.
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
        """Store this rank's digest; return the name of a comparison that found a difference, or "".

        A difference raises RanksDiffer if the exchange `waits`, too many comparisons RuntimeError.
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
                self._warn(f"watch: {text}")  # shown while the cell runs
        return self.first_difference()

    def first_difference(self) -> str:
        """Return the name of the comparison in which ranks were found to differ, or ""."""
        key = f"{self._key}/found"
        if self._store is None or not self._store.check([key]):
            return ""
        return str(self._store.get(key).decode())

    def end(self) -> None:
        """Let ranks stop waiting for this rank, because the cell of this rank has ended."""
        if self._waits and self._store is not None:
            self._store.set(f"{self._key}/ended", str(self._rank))

    def _compare_together(self, key: str, when: str) -> str:
        """Wait for all ranks, and raise RanksDiffer on each of them if they differ.

        Return "" if they agree, or if another rank's cell has ended.  Also raise RanksDiffer if a
        rank does not come within `MEET_TIMEOUT`.
        """
        until = time.monotonic() + MEET_TIMEOUT
        keys = {f"{key}/{rank}": rank for rank in self._ranks}
        while True:
            try:  # another error means that a rank has died
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
        # All ranks have stored a digest of this comparison, so they have read all earlier digests.
        self._stored_keys.append(f"{key}/{self._rank}")
        if len(self._stored_keys) > 2:
            self._forget(self._stored_keys.popleft())
        if text:
            self._store.set(f"{self._key}/found", when)
            raise RanksDiffer(f"{text}; `%dist_debug` looks at this step")
        return ""

    def _difference(self, key: str, when: str) -> str:
        """Return a text on which ranks differ, at which step; "" if all agree."""
        text = difference({rank: self._store.get(f"{key}/{rank}") for rank in self._ranks})
        return text and f"{text} at step {when}"

    def _forget(self, *keys: str) -> None:
        with suppress(NotImplementedError, RuntimeError):  # etcd's store cannot delete
            for each in keys:
                self._store.delete_key(each)
