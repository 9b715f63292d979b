"""What all workers of a world have in common, worked out from what was asked for."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from nbdist import topology
from nbdist.wire.messages import WorldSpec


@dataclass(frozen=True)
class Asked:
    """What a world was asked to be; the arguments of `World`, which documents them."""

    n: int | str = "auto"
    backend: str | None = None
    gpus: str | None = None
    name: str | None = None
    pool: str = "default"
    log_dir: str | None = None
    nursery: bool = True


def make_spec(asked: Asked) -> tuple[WorldSpec, str, str]:
    """The spec, the name of its backend ("none" for no group), and a warning or "".

    From this process's environment, path and folder as they are now.  Raises UsageError
    for what cannot be.
    """
    visible = topology.visible_gpus(os.environ)
    chosen = visible if asked.gpus is None else topology.parse_gpus(asked.gpus, visible)
    cores = topology.usable_cores()
    size = topology.resolve(topology.parse_workers(str(asked.n)), len(chosen), cores)
    named = asked.backend and topology.parse_backend(asked.backend)
    used = named or topology.default_backend(len(chosen))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    warning = topology.check_start(size, len(chosen), cores, used, devices) or ""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    spec = WorldSpec(
        world_size=size,
        backend=None if used == "none" else used,
        environ=dict(os.environ),
        cwd=os.getcwd(),
        sys_path=tuple(sys.path),
        threads=int(threads) if threads.isdigit() else max(1, cores // size),
        python=sys.executable,
        gpus=chosen,
        name=asked.name or run_name(asked.pool),
        pool=asked.pool,
        log_dir=default_log_dir() if asked.log_dir is None else asked.log_dir,
        use_nursery=asked.nursery,
    )
    return spec, used, warning


def run_name(pool: str) -> str:
    """A name for the run of a world that was given none: when, and of which process."""
    of = "" if pool == "default" else f"-{pool}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{of}"


def default_log_dir() -> str:
    """`$NBDIST_LOG_DIR` (empty for no log files), else the user's state folder."""
    if "NBDIST_LOG_DIR" in os.environ:
        return os.environ["NBDIST_LOG_DIR"]
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(state).expanduser() / "nbdist")
