"""Measure how long a group of two plain processes takes to be released and connected again.

`python -m tests.gpu.renewals RANK FILE DEVICE NAME` is one process.  A group of nccl2 is revoked
and reconfigured, a group of the legacy class is aborted and made again; both use nbdist's adapters
alone.  Each process writes the medians, in milliseconds, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from nbdist.worker.compat.nccl import Seat, adapter_of, nccl_of, when_nccl2_is_made

TIMES, SIZE, TIMEOUT = 10, 2, timedelta(seconds=30)


def run(rank: int, file: str, device: torch.device, name: str) -> dict[str, object]:
    store = dist.FileStore(file, SIZE)
    when_nccl2_is_made(lambda create, asked: create(asked))
    dist.init_process_group(name, store=store, rank=rank, world_size=SIZE)
    group = dist.group.WORLD
    assert group is not None
    backend, took = nccl_of(group), list[tuple[float, float]]()
    adapter = adapter_of(backend)

    def meet(what: str) -> None:
        store.set(f"{what}/{rank}", "")
        store.wait([f"{what}/{each}" for each in range(SIZE)], TIMEOUT)

    for number in range(1, TIMES + 1):
        place = dist.PrefixStore(f"number{number}", store)
        seat = Seat(place, range(SIZE), rank, number, device)
        meet(f"connecting{number}")
        began = time.monotonic()
        backend = adapter.renew(group, seat, TIMEOUT) if number > 1 else backend
        adapter.connect(backend, seat, TIMEOUT)()
        dist.all_reduce(total := torch.ones(4, device=device))
        assert total[0].item() == SIZE
        connected = time.monotonic() - began
        if rank == 0:
            dist.all_reduce(torch.ones(1 << 20, device=device))  # no other rank joins
        meet(f"waiting{number}")
        began = time.monotonic()
        aborting = threading.Thread(target=adapter.abort, args=([backend],))
        aborting.start()
        if device.type == "cuda":
            torch.cuda.synchronize()
        aborting.join()
        took.append((time.monotonic() - began, connected))
    released, connected = (1000 * median(each) for each in zip(*took[1:], strict=True))
    return {"class": type(backend).__name__, "released": released, "connected": connected}


if __name__ == "__main__":
    where = torch.device(sys.argv[3])
    if where.type == "cuda":
        where = torch.device("cuda", int(sys.argv[1]) % torch.cuda.device_count())
        torch.cuda.set_device(where)
    print(json.dumps(run(int(sys.argv[1]), sys.argv[2], where, sys.argv[4])), flush=True)  # noqa: T201
    os._exit(0)  # do not wait for threads of a backend
