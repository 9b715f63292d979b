"""Rows of the first training step: in a fresh world, and beside launchers that import anew."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.harness import Figure
from tests.bench.lab import Lab
from tests.bench.notebook import CellFailed
from tests.bench.starting import HEAD_START, LOAD, megabytes

RANKS = 4
MEMORY_RANKS = 8

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1000, 900), nn.ReLU(), nn.Linear(900, 100))

def step(wrap):
    model = wrap(make())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 1000)).sum().backward()
    optimizer.step()
    return model
"""
"""1 M parameters."""

DDP = "from torch.nn.parallel import DistributedDataParallel as wrap"
FSDP2 = "from torch.distributed.fsdp import fully_shard as wrap"
KINDS = {"DDP": (DDP, 0.4), "FSDP2": (FSDP2, 0.6)}

SCRIPT = """
import os, sys, time
import torch.distributed as dist

def work():
    import torch
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    started = time.perf_counter()
    {wrap}
    {step}
    took = time.perf_counter() - started
    with open(f"{said}/{{dist.get_rank()}}", "w") as file:
        file.write(str(took))
    dist.destroy_process_group()
"""
LAUNCH = """
from accelerate import notebook_launcher
notebook_launcher(work, num_processes={ranks})
"""


def training(lab: Lab) -> Iterator[Figure]:
    """The first training step of a fresh world, and what a worker takes with a model."""
    for kind, (wrap, budget) in KINDS.items():
        what = f"first {kind} step of a fresh world, n={RANKS}"
        runs = range(lab.runs)
        yield Figure("training", what, "s", tuple(_step_once(lab, wrap) for _ in runs), budget)
        for peer in (_notebook_launcher, _torchrun):
            values = tuple(peer(lab, wrap) for _ in runs)
            what = f"peer: {peer.__name__.strip('_')}, {kind}, its group is there"
            yield Figure("training", what, "s", values)
    what = f"PSS per worker with a DDP model, n={MEMORY_RANKS}"
    yield Figure("training", what, "MB", tuple(_memory_once(lab) for _ in range(lab.runs)), 80)


def _step_once(lab: Lab, wrap: str) -> float:
    """The cell of the first step, in a world that has done nothing else."""
    with lab.notebook() as notebook:
        notebook.run(LOAD)
        time.sleep(HEAD_START)  # this is what is measured: a user who types
        notebook.run(f"%dist_init -n {RANKS}")
        return notebook.run(f"%%distributed\n{MODEL}\n{wrap}\nmodel = step(wrap)").seconds


def _memory_once(lab: Lab) -> float:
    with lab.notebook() as notebook:
        notebook.run(LOAD)
        time.sleep(HEAD_START)
        notebook.run(f"%%distributed -n {MEMORY_RANKS}\n{MODEL}\n{DDP}\nmodel = step(wrap)")
        notebook.run("%%distributed\nimport os\npid = os.getpid()", "%dist_gather pid --as pids")
        pids = [int(pid) for pid in re.findall(r"\d+", notebook.run("print(pids)").printed)]
        return sum(map(megabytes, pids)) / len(pids)


def _notebook_launcher(lab: Lab, wrap: str) -> float:
    """The slowest rank's step, in processes that accelerate forked from the notebook."""
    with lab.notebook() as notebook, lab.new_folder() as said:
        notebook.run(MODEL + _script(said, wrap) + LAUNCH.format(ranks=RANKS))
        return _slowest(said)


def _torchrun(lab: Lab, wrap: str) -> float:
    with lab.new_folder() as said:
        script = said / "script.py"
        script.write_text(f"{MODEL}{_script(said, wrap)}\nwork()\n", encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise CellFailed(done.stderr)
        return _slowest(said)


def _script(said: Path, wrap: str) -> str:
    return SCRIPT.format(said=said, wrap=wrap, step="step(wrap)")


def _slowest(said: Path) -> float:
    times = [float((said / str(rank)).read_text()) for rank in range(RANKS)]
    return max(times)
