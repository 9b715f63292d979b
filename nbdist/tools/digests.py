"""What a rank has of watched modules and optimizers: digests that cost one read of the memory.

And what may differ on a rank before those do: random states, what forward got, which modules ran;
and how ranks compare their digests beside the training, in the store where their group has met.
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
from nbdist.tools.diff_op import bytes_of, comparable, is_sharded, leaves, part_of
from nbdist.values.pickling import digest_of
from nbdist.wire.ops import Part
from nbdist.words import name_ranks
from nbdist.worker.compat import accelerator, models
from nbdist.worker.compat import torch as seam

ROW = 1024
"""Words of eight bytes that are summed before their sum gets a factor of its own."""

FACTOR = 0x5851F42D4C957F2D

SMALL = 1 << 14
"""Bytes up to which one call for all of them costs less than the sums."""

MOST_SAMPLED = 1024
"""Elements of a tensor that forward got which are looked at."""

MASK = (1 << 64) - 1

Parts = dict[str, dict[str, Part]]
"""By expression and path."""


class Target(NamedTuple):
    """What an expression leads to: a module with the DDP module around it, or an optimizer."""

    expression: str
    value: Any

    @property
    def is_module(self) -> bool:
        """Whether it is a module, and no optimizer."""
        return isinstance(self.value, torch.nn.Module)

    @property
    def inner(self) -> Any:
        """The module whose forward runs once DDP has sent rank 0's buffers."""
        model = self.value
        return model.module if isinstance(model, DistributedDataParallel) else model


def check(value: Any) -> str:
    """Say what it is, if it can be no target; "" where it can."""
    is_optimizer = callable(getattr(value, "step", None)) and hasattr(value, "param_groups")
    return "" if isinstance(value, torch.nn.Module) or is_optimizer else type(value).__qualname__


def parts_of(target: Target) -> tuple[dict[str, Part], int]:
    """Describe its parameters or states by path, and count those that are sharded."""
    value = target.value
    return _described(value.named_parameters() if target.is_module else _states(value))


def buffers_of(target: Target) -> dict[str, Part]:
    """Describe a module's buffers likewise."""
    return _described(target.value.named_buffers(), "buffer ")[0]


def has_buffers(target: Target) -> bool:
    """Return True for a module with buffers that can be compared.

    Where DDP sends them in code that is compiled no hook sees it.
    """
    if not target.is_module:
        return False
    is_unseen = isinstance(models.compiled_in(target.value), DistributedDataParallel)
    return not is_unseen and any(True for _ in target.value.buffers())


def share_parameters(targets: Iterable[Target], optimizer: Any) -> bool:
    """Return True if a step of this optimizer changes any of them."""
    watched = set[int]()
    for each in targets:
        found = each.value.parameters() if each.is_module else _parameters(each.value)
        watched.update(map(id, found))
    return any(id(each) in watched for each in _parameters(optimizer))


def names_of(targets: Iterable[Target]) -> dict[str, str]:
    """Name parameters by the expression and path under which optimizers keep their states."""
    targets = [*targets]
    modules = (each.value.named_parameters() for each in targets if each.is_module)
    names = {id(parameter): name for found in modules for name, parameter in found}
    return {
        f"{each.expression} state[{number}]": names[id(parameter)]
        for each in targets
        if not each.is_module
        for number, parameter in enumerate(_parameters(each.value))
        if id(parameter) in names
    }


def digest_of_all(parts: Parts) -> str:
    """Return one digest of what ranks are to have alike."""
    by_path = [(e, p, x.kind, x.digest) for e, of in parts.items() for p, x in of.items()]
    return digest_of(repr(by_path).encode())


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _states(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in leaves(optimizer).items():
        if "['params']" not in path:
            yield path, leaf
    # Numbers of parameters look the same whichever they are.
    for number, group in enumerate(optimizer.param_groups):
        shapes = " ".join(str(tuple(each.shape)) for each in group["params"])
        yield f"param_groups[{number}]['params']", f"{len(group['params'])}: {shapes}"


def _described(found: Iterable[tuple[str, Any]], kind: str = "") -> tuple[dict[str, Part], int]:
    """Make digests, those of all tensors of a device with one look at it."""
    parts: dict[str, Part] = {}
    sums: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    sharded = 0
    for path, leaf in found:
        if is_sharded(leaf):
            sharded += 1
            continue
        if (tensor := comparable(leaf)) is None:
            parts[path] = part_of(leaf)
            continue
        text, digest = f"{kind}{str(tensor.dtype)[6:]} {tuple(tensor.shape)}", ""
        if tensor.device.type == "cpu" and tensor.nbytes <= SMALL:
            digest = digest_of(bytes_of(tensor).numpy().data)
        else:
            sums.setdefault(tensor.device, []).append((path, fold(tensor)))
        parts[path] = Part(text, digest, size=tensor.nbytes, count=tensor.numel())
    for of_device in sums.values():
        digests = torch.stack([each for _, each in of_device]).tolist()
        for (path, _), digest in zip(of_device, digests, strict=True):
            parts[path] = replace(parts[path], digest=f"{digest & MASK:x}")
    return parts, sharded


def fold(tensor: torch.Tensor) -> torch.Tensor:
    """Sum up the words of a tensor where it is, row by row, each row with its own odd factor.

    No change of one word alone gives the same sum; those of several words of a row might cancel.
    """
    data = bytes_of(tensor)
    if data.storage_offset() % 8:
        data = data.clone()
    words, rest = data[: data.numel() // 8 * 8].view(torch.int64), data[data.numel() // 8 * 8 :]
    full = words.numel() // ROW * ROW
    sums = torch.cat([words[:full].view(-1, ROW).sum(1), words[full:], rest.to(torch.int64)])
    factors = (torch.arange(sums.numel(), device=sums.device) * 2 + 1) * FACTOR
    return (sums * factors).sum()


# --- what can differ before parts do ----------------------------------------------------------


def generators() -> dict[str, str]:
    """Return a digest of each random state that training commonly uses."""
    found = {"torch": digest_of(torch.get_rng_state().numpy().data)}
    found["random"] = digest_of(repr(random.getstate()).encode())
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state()
        found["numpy"] = digest_of(state[1].data) + f"{state[2:]}"
    if (on_gpu := accelerator.random_state()) is not None:
        found["the GPU"] = digest_of(on_gpu.numpy().data)
    return found


def collectives() -> int:
    """Count the collectives that this rank's gloo backends have begun."""
    groups = seam.recorded_groups().values()
    return sum(int(each["last_enqueued_collective"]) for each in groups)


def sampled(args: Any) -> tuple[torch.Tensor | int, str]:
    """Return a digest of what forward got, still on its device, and its shapes.

    Of large tensors it has some elements, as far apart as they can be.
    """
    digests, shapes, plain = list[torch.Tensor](), list[str](), 0
    for leaf in leaves(args).values():
        if isinstance(leaf, torch.Tensor):
            shapes.append(f"{str(leaf.dtype)[6:]} {tuple(leaf.shape)}")
            if (tensor := comparable(leaf)) is not None and tensor.numel():
                some = tensor.reshape(-1)[:: max(1, tensor.numel() // MOST_SAMPLED)]
                if some.device.type == "cpu":
                    plain = zlib.crc32(bytes_of(some).numpy().data, plain)
                else:
                    digests.append(fold(some))
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


# --- how ranks compare them ---------------------------------------------------------------------

MOST_TIMES = 100_000
"""Comparisons in a cell; the file in which local ranks meet grows by some 300 bytes with each."""

MEET_TIMEOUT, LOOK_EVERY = 600.0, 0.5
"""Seconds that a rank waits for others which have not ended their cell, and between two looks."""


class RanksDiffer(Exception):
    """What is watched differs, as `--stop-on-difference` wants to know at once."""


class Exchange:
    """One rank's side; `when` a comparison takes place is the same text on all ranks."""

    def __init__(
        self, key: str, ranks: Sequence[int], rank: int, warn: Callable[[str], None], *, waits: bool
    ) -> None:
        self._key, self._ranks, self._rank, self._waits = f"nbdist/{key}", ranks, rank, waits
        self._warn = warn
        self._store: Any = None
        self._left: deque[str] = deque()
        self.times = 0

    def compare(self, when: str, digest: str) -> str:
        """Leave a digest; return when ranks have differed first, as far as is known, or ""."""
        if len(self._ranks) < 2:
            return ""
        if self.times >= MOST_TIMES:
            raise RuntimeError(f"only the first {MOST_TIMES:,} comparisons were made")
        self.times += 1
        if self._store is None:
            self._store = seam.default_store()
        key = f"{self._key}/{when}"
        self._store.set(f"{key}/{self._rank}", digest)
        if self._waits:
            return self._compare_together(key, when)
        if self._store.add(key, 1) == len(self._ranks):
            said = self._difference(key, when)
            self._forget(key, *(f"{key}/{rank}" for rank in self._ranks))
            if said:
                self._store.set(f"{self._key}/found", when)
                self._warn(f"watch: {said}")  # while the cell runs
        return self.found()

    def found(self) -> str:
        """Return when they have differed, if the last one to come has seen it; or ""."""
        key = f"{self._key}/found"
        if self._store is None or not self._store.check([key]):
            return ""
        return str(self._store.get(key).decode())

    def end(self) -> None:
        """End the wait of other ranks for this one, whose cell has ended."""
        if self._waits and self._store is not None:
            self._store.set(f"{self._key}/ended", str(self._rank))

    def _compare_together(self, key: str, when: str) -> str:
        """Wait until all ranks are here; RanksDiffer, on all of them, where they differ."""
        until = time.monotonic() + MEET_TIMEOUT
        keys = {f"{key}/{rank}": rank for rank in self._ranks}
        while True:
            try:  # a wait that ends where a rank has died
                self._store.wait([*keys], timedelta(seconds=LOOK_EVERY))
                break
            except DistStoreError:
                if self._store.check([f"{self._key}/ended"]):
                    return ""
            if time.monotonic() > until:
                late = [rank for each, rank in keys.items() if not self._store.check([each])]
                why = f"{name_ranks(late)} did not come to step {when} in {MEET_TIMEOUT:.0f} s"
                raise RanksDiffer(why)
        said = self._difference(key, when)
        # All have read what they left the time before the last.
        self._left.append(f"{key}/{self._rank}")
        if len(self._left) > 2:
            self._forget(self._left.popleft())
        if said:
            self._store.set(f"{self._key}/found", when)
            raise RanksDiffer(f"{said}; `%dist_debug` looks at this step")
        return ""

    def _difference(self, key: str, when: str) -> str:
        """Say which ranks differ from the most that agree; "" where all do."""
        said = difference({rank: self._store.get(f"{key}/{rank}") for rank in self._ranks})
        return said and f"{said} at step {when}"

    def _forget(self, *keys: str) -> None:
        with suppress(NotImplementedError, RuntimeError):  # etcd's cannot
            for each in keys:
                self._store.delete_key(each)
