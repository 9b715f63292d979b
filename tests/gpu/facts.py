"""What machine, driver and versions a report is about."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from tests.gpu.lab import smi

PACKAGES = ("ipykernel", "ipython", "jupyter_client", "pyzmq", "cloudpickle", "psutil", "pytest")

TORCH = """
import torch
print(torch.__version__)
print(torch.version.cuda or "none")
print(".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none")
"""

ASK_TIMEOUT = 120.0


def machine_facts(environ: Mapping[str, str]) -> dict[str, str | list[str]]:
    """Looked up without torch or CUDA in this process."""
    torch, cuda, nccl = _torch(environ)
    gpus = smi("--query-gpu=name,memory.total,driver_version,compute_mode,mig.mode.current")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "nbdist": _commit(),
        "torch": torch,
        "CUDA": cuda,
        "NCCL": nccl,
        "GPUs (name, MiB, driver, compute mode, MIG)": gpus or ["none"],
        "Python": f"{platform.python_version()}, {sys.executable}",
        "kernel": platform.release(),
        "cores, memory": f"{len(os.sched_getaffinity(0))}, {memory:.0f} GiB",
        "packages": [f"{name} {_version(name)}" for name in PACKAGES],
    }


def _torch(environ: Mapping[str, str]) -> list[str]:
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TORCH],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=ASK_TIMEOUT,
        check=False,
    )
    lines = answer.stdout.split()
    last = (answer.stderr.strip().splitlines() or [""])[-1]
    return lines if len(lines) == 3 else [f"cannot be imported: {last}", "", ""]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _commit() -> str:
    """The checkout's, where git is there and it is one."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT,
            check=False,
        )
    except OSError:
        return "unknown"
    return answer.stdout.strip() or "unknown"
