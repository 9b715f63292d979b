"""`python -m nbdist.worker`: a worker that was spawned, not forked, by its `WorkerStart` on stdin.

`python -m nbdist.worker about`: what only torch knows of a machine, as JSON.  `nbdist doctor` runs
it, in a process that ends at once: torch may load CUDA here.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from typing import Any


def spawned() -> None:
    """Become the worker; users' code finds stdin empty."""
    from nbdist.worker.main import become_worker
    from nbdist.worker.process import die_with_parent

    die_with_parent(os.getppid())
    worker_start = pickle.load(sys.stdin.buffer)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    become_worker(worker_start)


def about() -> dict[str, Any]:
    """Import torch, and look.

    `device` is what this build is for, such as `CUDA 12.8`; `nccl` is "" where there is none;
    `said` is what torch has warned of.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        import torch
        import torch.distributed as dist

        from nbdist.worker.compat import accelerator

        gpus = accelerator.names()
    built = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    has_groups, nccl = dist.is_available(), ""
    if has_groups and dist.is_nccl_available():
        from nbdist.worker.compat.nccl import plain_class

        nccl = f"{'.'.join(map(str, accelerator.nccl_version()))} ({plain_class()})"
    return {
        "torch": torch.__version__,
        "device": next((f"{kind} {each}" for kind, each in built.items() if each), "CPU"),
        "gpus": gpus,
        "gloo": has_groups and dist.is_gloo_available(),
        "nccl": nccl,
        "said": [str(each.message) for each in said if each.category is UserWarning],
    }


if sys.argv[1:] == ["about"]:
    sys.stdout.write(json.dumps(about()))
else:
    spawned()
