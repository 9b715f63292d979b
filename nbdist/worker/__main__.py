"""Entry point of a worker that the agent spawns instead of forking it, such as with `--no-fork`.

`python -m nbdist.worker` reads a pickled `WorkerStart` from stdin and becomes the worker.
`python -m nbdist.worker about` prints facts about torch and the GPUs as JSON. `nbdist doctor` runs
it as a process of its own, because importing torch may load CUDA.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from typing import Any


def spawned() -> None:
    """Become the worker that stdin describes; user code then finds stdin empty."""
    from nbdist.worker.main import become_worker
    from nbdist.worker.process import die_with_parent

    die_with_parent(os.getppid())
    worker_start = pickle.load(sys.stdin.buffer)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    become_worker(worker_start)


def about() -> dict[str, Any]:
    """Import torch, and return what this build of torch can do, and on which GPUs.

    `device` is what the build is for, such as `CUDA 12.8` or `CPU`; `nccl` is "" if it has no nccl;
    `said` are the warnings of torch while it was imported.
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
