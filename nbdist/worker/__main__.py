"""Entry point of a worker that the agent spawns instead of forking it, as with `--no-fork`.

`python -m nbdist.worker` reads a pickled `WorkerStart` from stdin and becomes the worker.
`python -m nbdist.worker about` prints facts about torch and the GPUs as JSON. `nbdist doctor` runs
this command in another process, because `nbdist doctor` must run even without torch.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from typing import Any


def become_spawned_worker() -> None:
    """Read a `WorkerStart` from stdin, and become the worker that it describes; never returns.

    Before user code runs, stdin becomes /dev/null, so that this code finds no input there.
    """
    from nbdist.worker.main import become_worker
    from nbdist.worker.process import die_with_parent

    die_with_parent(os.getppid())
    worker_start = pickle.load(sys.stdin.buffer)
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, 0)
    os.close(null_device)
    become_worker(worker_start)


def describe_torch() -> dict[str, Any]:
    """Import torch and return facts on its build and the GPUs, for `nbdist doctor`.

    The keys of the result are `torch` (the version), `device` (the platform of the build, such as
    `CUDA 12.8` or `CPU`), `gpus` (their names), `gloo` (whether torch has gloo), `nccl` (the
    version of nccl and the name of its backend class, "" without nccl), and `said` (the texts of
    the UserWarnings that came while torch was imported and the GPUs were listed).
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        import torch.distributed as dist

        from nbdist.worker.compat import accelerator

        gpus = accelerator.names()
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    has_groups, nccl = dist.is_available(), ""
    if has_groups and dist.is_nccl_available():
        from nbdist.worker.compat.nccl import plain_class

        nccl = f"{'.'.join(map(str, accelerator.nccl_version()))} ({plain_class()})"
    return {
        "torch": torch.__version__,
        "device": next((f"{kind} {number}" for kind, number in versions.items() if number), "CPU"),
        "gpus": gpus,
        "gloo": has_groups and dist.is_gloo_available(),
        "nccl": nccl,
        "said": [str(each.message) for each in caught if each.category is UserWarning],
    }


if sys.argv[1:] == ["about"]:
    sys.stdout.write(json.dumps(describe_torch()))
else:
    become_spawned_worker()
