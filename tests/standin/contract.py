"""Checks of nccl2 and the stand-in: `python -m tests.standin.contract RANK SIZE FILE DEVICE`.

Two ranks run each check at the same time, in plain processes, and write a line of JSON for each.
With a CUDA device the checks are about torch's own nccl2 (tests/gpu).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from nbdist.worker.compat.nccl import when_nccl2_is_made

Check = Callable[["Rank"], None]

SHORT, LONG = timedelta(seconds=1), timedelta(seconds=60)


class Rank:
    """A process of the contract: its device, and the store in which all processes meet."""

    def __init__(self, rank: int, size: int, file: str, device: str) -> None:
        self.rank, self.size = rank, size
        here = "cpu" if device == "cpu" else f"cuda:{rank % torch.cuda.device_count()}"
        self.device = torch.device(here)
        self.store = dist.FileStore(file, size)
        self._uuid = 0

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        else:
            from tests.standin.device import DEVICE

            DEVICE.synchronize()

    def meet(self, what: str) -> None:
        """Wait for all ranks, without a collective."""
        self.store.set(f"{what}/{self.rank}", "")
        self.store.wait([f"{what}/{each}" for each in range(self.size)], LONG)

    def backend_of(self, group: dist.ProcessGroup) -> Any:
        backend = group._get_backend(self.device)
        if self.device.type == "cuda":
            backend.bound_device_id = self.device
        return backend

    def options(self, backend: Any, timeout: timedelta = LONG) -> Any:
        """Return options with the handles of all ranks and a number that is not in use."""
        self._uuid += 1
        self.store.set(f"{self._uuid}/{self.rank}", backend.get_reconfigure_handle())
        options = c10d.ReconfigureOptions()
        keys = [f"{self._uuid}/{each}" for each in range(self.size)]
        options.handles = [each.decode() for each in self.store.multi_get(keys)]
        options.uuid, options.timeout = self._uuid, timeout
        return options

    def connect(self, *groups: dist.ProcessGroup) -> None:
        for group in groups:
            backend = self.backend_of(group)
            backend.reconfigure(self.options(backend)).wait()

    def ones(self, length: int = 4) -> torch.Tensor:
        return torch.ones(length, device=self.device)

    def works(self, group: dist.ProcessGroup | None = None) -> None:
        """Check that all ranks meet in a collective, with the right result."""
        t = self.ones() * self.rank
        dist.all_reduce(t, group=group)
        assert t.tolist() == [sum(range(self.size))] * 4, t

    def pending(self) -> list[str]:
        return [each["profiling_name"] for each in self.recorded() if not each["retired"]]

    def recorded(self) -> list[dict[str, Any]]:
        dump = c10d._dump_fr_trace_json(True, False, "nccl2")  # noqa: FBT003
        found: list[dict[str, Any]] = json.loads(dump).get("entries", [])
        return found

    def alone(self, group: dist.ProcessGroup | None = None) -> dist.Work | None:
        """Begin a collective on the first rank alone."""
        if self.rank:
            return None
        return dist.all_reduce(self.ones(), group=group, async_op=True)

    def abort(self, *groups: dist.ProcessGroup) -> None:
        """Abort all groups at once, in other threads, while this thread waits for its stream."""
        threads = [threading.Thread(target=self.backend_of(each).abort) for each in groups]
        for thread in threads:
            thread.start()
        self.synchronize()
        for thread in threads:
            thread.join()


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def test_no_collective_begins_before_connecting(own: Rank) -> None:
    """A backend that is not connected has a name and abilities, and begins no collective."""
    backend = own.backend_of(world())
    assert (backend.name(), backend.supports_reconfigure) == ("nccl2", True)
    with pytest.raises(RuntimeError, match="has not been initialized"):
        dist.all_reduce(own.ones())
    own.connect(world())
    assert backend.get_error() == c10d.ErrorType.SUCCESS
    own.works()


def test_collectives_give_the_right_results(own: Rank) -> None:
    """Each collective gives the right result on each rank."""
    size, rank = own.size, own.rank
    t = own.ones() * rank
    dist.broadcast(t, 1)
    assert t.tolist() == [1] * 4
    parts = [own.ones() for _ in range(size)]
    dist.all_gather(parts, own.ones() * rank)
    assert [each[0].item() for each in parts] == [*range(size)]
    t = own.ones() * rank
    dist.all_reduce(t, dist.ReduceOp.MAX)
    assert t[0].item() == size - 1
    t = own.ones()
    dist.reduce_scatter_tensor(t, torch.arange(4.0 * size, device=own.device))
    assert t.tolist() == [size * (4.0 * rank + each) for each in range(4)]
    whole = own.ones(4 * size)
    dist.all_gather_into_tensor(whole, own.ones() * rank)
    assert whole.tolist() == [float(each) for each in range(size) for _ in range(4)]
    given, t = torch.arange(float(size), device=own.device) + 10 * rank, own.ones(size)
    dist.all_to_all_single(t, given)
    assert t.tolist() == [10.0 * each + rank for each in range(size)]
    dist.scatter(t, [own.ones(size) * each for each in range(size)] if rank == 0 else None)
    assert t[0].item() == rank
    t = own.ones() * rank
    dist.reduce(t, 0)
    assert rank or t[0].item() == sum(range(size))
    dist.gather(own.ones() * rank, parts if rank == 0 else None)
    assert rank or [each[0].item() for each in parts] == [*range(size)]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": each} for each in range(size)]
    if rank < 2:
        t = own.ones() * rank
        dist.send(t, 1) if rank == 0 else dist.recv(t, 0)
        assert t[0].item() == 0
    dist.barrier()


def test_collectives_with_unequal_parts_have_their_names(own: Rank) -> None:
    """Collectives with unequal parts, and messages, have the names that verdicts look for."""
    size, rank = own.size, own.rank
    t, parts = own.ones(size * (rank + 1)) * rank, [own.ones(each + 1) for each in range(size)]
    whole, sizes = torch.cat(parts), [each + 1 for each in range(size)]
    dist.all_to_all_single(whole, t, sizes, [rank + 1] * size)
    assert whole.tolist() == [float(each) for each in range(size) for _ in range(each + 1)]
    dist.all_gather(parts, t[: rank + 1].clone())
    assert torch.equal(torch.cat(parts), whole)
    dist.send(t[:1], 1) if rank == 0 else dist.recv(t[:1], 0)
    way = "send 0->1" if rank == 0 else "recv 1<-0"
    names = [each["profiling_name"] for each in own.recorded()[-3:]]
    assert names == [f"nccl2:{each}" for each in ("all_to_all_single", "all_gather", way)]
    assert own.recorded()[-2]["output_sizes"] == [[each] for each in sizes]


def test_a_rank_runs_ahead_of_its_collectives(own: Rank) -> None:
    """A rank that begins a collective goes on; the result comes when all ranks have come."""
    if own.rank:
        own.store.wait(["begun"], LONG)
    t = own.ones() * (own.rank + 1)
    dist.all_reduce(t)
    if not own.rank:
        assert [each for each in own.pending() if each.endswith("all_reduce")]
        own.store.set("begun", "")
    assert t[0].item() == sum(range(1, own.size + 1))
    wait_until(lambda: not own.pending())


def test_an_abort_ends_pending_collectives(own: Rank) -> None:
    """The stream goes on, no collective begins, and pending collectives never count as done."""
    own.alone()
    own.abort(world())
    backend = own.backend_of(world())
    assert backend.get_error() == c10d.ErrorType.COMM_ERROR
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(own.ones())
    assert own.rank or own.pending()
    own.meet("aborted")
    own.connect(world())
    assert backend.get_error() == c10d.ErrorType.SUCCESS
    own.works()


def test_connecting_again_ends_pending_collectives(own: Rank) -> None:
    """Connecting a backend again ends the collective in which a rank waits."""
    work = own.alone()
    own.connect(world())
    own.synchronize()
    if work is not None:
        with pytest.raises(dist.DistBackendError):
            work.wait()
    own.works()


def test_connecting_fails_if_a_rank_does_not_come(own: Rank) -> None:
    """If a rank does not come, connecting fails in time, and all ranks together can try again."""
    backend = own.backend_of(world())
    options = own.options(backend, SHORT)
    if own.rank == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            backend.reconfigure(options).wait()
        assert time.monotonic() - began < LONG.total_seconds() / 2
    own.meet("failed")
    own.connect(world())
    own.works()


def test_a_used_number_is_refused(own: Rank) -> None:
    """A connection under a used number is refused, and does no harm."""
    backend = own.backend_of(world())
    options = own.options(backend, SHORT)
    backend.reconfigure(options).wait()
    again = own.options(backend, SHORT)
    again.uuid = options.uuid
    with pytest.raises(RuntimeError):
        backend.reconfigure(again).wait()
    own.meet("refused")
    own.connect(world())
    own.works()


def test_groups_are_aborted_alone_or_together(own: Rank) -> None:
    """A group that waits in its first collective is aborted alone; then both are, at once."""
    other = dist.new_group()
    own.connect(other)
    own.alone(other)
    own.abort(other)
    own.works()
    own.meet("one")
    own.connect(other)
    own.works(other)
    own.alone()
    own.alone(other)
    own.abort(world(), other)
    own.meet("both")
    own.connect(world(), other)
    own.works()
    own.works(other)


def test_a_collective_over_its_timeout_ends(own: Rank) -> None:
    """A collective that exceeds its timeout ends with an error, and the process does not end."""
    backend = own.backend_of(world())
    backend.set_timeout(SHORT)
    own.alone()
    if own.rank == 0:
        wait_until(lambda: backend.get_error() == c10d.ErrorType.TIMEOUT)
    own.synchronize()
    own.meet("timed out")
    backend.set_timeout(LONG)
    own.connect(world())
    own.works()


def test_connecting_again_adds_no_threads(own: Rank) -> None:
    """Connecting again, even often, leaves the number of threads as before."""
    own.connect(world())
    before = threads()
    for _ in range(5):
        own.alone()
        own.connect(world())
        own.works()
    wait_until(lambda: threads() <= before)


CHECKS: list[Check] = [each for name, each in globals().items() if name.startswith("test_")]


def threads() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Threads"))


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG.total_seconds()
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(own: Rank, checks: Iterable[Check] = CHECKS) -> None:
    """Form the group, and run the checks until a check fails."""
    if own.device.type == "cuda":
        torch.cuda.set_device(own.device)
    options: Any = {"store": own.store, "rank": own.rank, "world_size": own.size}
    when_nccl2_is_made(lambda create, asked: create(asked))
    dist.init_process_group("nccl", **options)
    for check in checks:
        began, why = time.monotonic(), ""
        try:
            own.meet(check.__name__)
            check(own)
        except Exception:  # noqa: BLE001 (whatever it is, it is told)
            why = traceback.format_exc()
        seconds = time.monotonic() - began
        print(json.dumps({"check": check.__name__, "why": why, "seconds": seconds}), flush=True)  # noqa: T201
        if why:
            break


if __name__ == "__main__":
    run(Rank(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
    sys.stdout.flush()

    os._exit(0)  # without waiting for threads of the backend
