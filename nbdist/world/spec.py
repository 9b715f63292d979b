"""What all workers of a world have in common, worked out from what was asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nbdist import topology
from nbdist.wire.messages import WorldSpec


def make_spec(
    n: int | str,
    backend: str | None,
    gpus: str | None,
    *,
    name: str,
    log_dir: str,
    nursery: bool,
) -> tuple[WorldSpec, str, str]:
    """The spec, the name of its backend ("none" for no group), and a warning or "".

    From this process's environment, path and folder as they are now.  Raises UsageError
    for what cannot be.
    """
    visible = topology.visible_gpus(os.environ)
    chosen = visible if gpus is None else topology.parse_gpus(gpus, visible)
    cores = topology.usable_cores()
    size = topology.resolve(topology.parse_workers(str(n)), len(chosen), cores)
    named = backend and topology.parse_backend(backend)
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
        name=name,
        log_dir=log_dir,
        use_nursery=nursery,
    )
    return spec, used, warning


def default_log_dir() -> str:
    """`$NBDIST_LOG_DIR` (empty for no log files), else the user's state folder."""
    if "NBDIST_LOG_DIR" in os.environ:
        return os.environ["NBDIST_LOG_DIR"]
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(state).expanduser() / "nbdist")
