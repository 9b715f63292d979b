"""Rows of starts and restarts, of the first training step, and of memory."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.bench.lab import CellFailed, Figure, Lab, Notebook, Sent

LOAD = "%load_ext nbdist"
TIMED_LOAD = """
import time
started = time.perf_counter()
get_ipython().run_line_magic("load_ext", "nbdist")
print(time.perf_counter() - started)
"""
ALL_REDUCE = """%%distributed{options}
value = torch.ones(1)
dist.all_reduce(value)
print("sum", value.item())
"""
NOTEBOOK_LAUNCHER = """
def work():
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == {ranks}
    dist.destroy_process_group()

from accelerate import notebook_launcher
notebook_launcher(work, num_processes={ranks})
"""

START_BUDGETS = {4: 2.4, 8: 2.8, 32: 6}
WARM_BUDGETS = {4: 0.5, 8: 0.8}
HEAD_START = 5.0
RESTART_BUDGETS = {8: 0.7}
MEMORY_RANKS = 8


def load(lab: Lab) -> Iterator[Figure]:
    """`%load_ext nbdist`, as the kernel sees it."""
    yield Figure("load", LOAD, "ms", tuple(_load_once(lab) for _ in range(lab.runs)), 150)


def _load_once(lab: Lab) -> float:
    with lab.notebook() as notebook:
        return 1000 * float(notebook.run(TIMED_LOAD).printed)


def start(lab: Lab) -> Iterator[Figure]:
    """The first distributed result of a fresh notebook, cold and with the fork server ready."""
    yield Figure("start", "limit: import torch", "s", tuple(map(_import_torch, range(lab.runs))))
    values = tuple(_notebook_launcher_once(lab, 4) for _ in range(lab.runs))
    yield Figure("start", "peer: accelerate's notebook_launcher, n=4", "s", values)
    for ranks in (1, 2, 4, 8, 16, 32):
        values = tuple(_start_once(lab, ranks) for _ in range(lab.runs))
        yield Figure("start", f"first all_reduce, n={ranks}", "s", values, START_BUDGETS.get(ranks))
    for ranks, budget in WARM_BUDGETS.items():
        values = tuple(_warm_start_once(lab, ranks) for _ in range(lab.runs))
        what = f"the same {HEAD_START:.0f} s after %load_ext, n={ranks}"
        yield Figure("start", what, "s", values, budget)


def _import_torch(_run: int) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=60)
    return time.perf_counter() - started


def _notebook_launcher_once(lab: Lab, ranks: int) -> float:
    with lab.notebook() as notebook:
        return notebook.run(NOTEBOOK_LAUNCHER.format(ranks=ranks)).seconds


def _start_once(lab: Lab, ranks: int) -> float:
    with lab.notebook() as notebook:
        return _checked(notebook.run(LOAD, ALL_REDUCE.format(options=f" -n {ranks}")), ranks)


def _warm_start_once(lab: Lab, ranks: int) -> float:
    with lab.notebook() as notebook:
        notebook.run(LOAD)
        time.sleep(HEAD_START)  # a user who types first
        return _checked(notebook.run(ALL_REDUCE.format(options=f" -n {ranks}")), ranks)


def _checked(sent: Sent, ranks: int) -> float:
    if not any(f"sum {ranks}.0" in shown.text for shown in sent.displays):
        raise CellFailed(f"no sum of {ranks} ranks among {[each.text for each in sent.displays]}")
    return sent.seconds


def start_world(notebook: Notebook, ranks: int) -> None:
    """Load nbdist and start a world, for rows that measure something else."""
    notebook.run(LOAD, f"%%distributed -n {ranks}\npass")


def restart(lab: Lab) -> Iterator[Figure]:
    """`%dist_restart`, to a working all_reduce."""
    for ranks in (4, 8):
        with lab.notebook() as notebook:
            start_world(notebook, ranks)
            cells = ("%dist_restart", ALL_REDUCE.format(options=""))
            values = tuple(_checked(notebook.run(*cells), ranks) for _ in range(lab.runs))
        what = f"%dist_restart + all_reduce, n={ranks}"
        yield Figure("restart", what, "s", values, RESTART_BUDGETS.get(ranks))


def memory(lab: Lab) -> Iterator[Figure]:
    """What each worker takes, shared pages divided among those who share them."""
    n, ours = MEMORY_RANKS, tuple(_memory_once(lab) for _ in range(lab.runs))
    yield Figure("memory", f"PSS per worker, n={n}", "MB", ours, 60)
    with lab.notebooks(n) as kernels:
        for kernel in kernels:
            kernel.run("import torch")
        plain = tuple(megabytes(kernel.pid) for kernel in kernels)
    yield Figure("memory", f"peer: plain ipykernel with torch, {n} of them", "MB", plain)


def _memory_once(lab: Lab) -> float:
    with lab.notebook() as notebook:
        start_world(notebook, MEMORY_RANKS)
        return _of_workers(notebook)


def _of_workers(notebook: Notebook) -> float:
    notebook.run("%%distributed\nimport os\npid = os.getpid()", "%dist_gather pid --as pids")
    pids = [int(pid) for pid in re.findall(r"\d+", notebook.run("print(pids)").printed)]
    return sum(map(megabytes, pids)) / len(pids)


def megabytes(pid: int) -> float:
    """Return a process's PSS: a page that n processes share counts 1/n (proc(5), smaps_rollup)."""
    return float(psutil.Process(pid).memory_full_info().pss / 1e6)


TRAINING_RANKS = 4
MODEL_RANKS = 8

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
"""A model of 1 M parameters."""

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
        what = f"first {kind} step of a fresh world, n={TRAINING_RANKS}"
        runs = range(lab.runs)
        yield Figure("training", what, "s", tuple(_step_once(lab, wrap) for _ in runs), budget)
        for peer in (_notebook_launcher, _torchrun):
            values = tuple(peer(lab, wrap) for _ in runs)
            what = f"peer: {peer.__name__.strip('_')}, {kind}, its group is there"
            yield Figure("training", what, "s", values)
    values = tuple(_start_and_step_once(lab) for _ in range(lab.runs))
    what = f"start and first DDP step, right after %load_ext, n={TRAINING_RANKS}"
    yield Figure("training", what, "s", values)
    what = f"PSS per worker with a DDP model, n={MODEL_RANKS}"
    yield Figure(
        "training", what, "MB", tuple(_model_memory_once(lab) for _ in range(lab.runs)), 80
    )


def _step_once(lab: Lab, wrap: str) -> float:
    with lab.notebook() as notebook:
        notebook.run(LOAD)
        time.sleep(HEAD_START)  # a user who types first
        notebook.run(f"%dist_init -n {TRAINING_RANKS}")
        return notebook.run(f"%%distributed\n{MODEL}\n{wrap}\nmodel = step(wrap)").seconds


def _start_and_step_once(lab: Lab) -> float:
    with lab.notebook() as notebook:
        cell = f"%%distributed -n {TRAINING_RANKS}\n{MODEL}\n{DDP}\nmodel = step(wrap)"
        return notebook.run(LOAD, cell).seconds


def _model_memory_once(lab: Lab) -> float:
    with lab.notebook() as notebook:
        notebook.run(LOAD)
        time.sleep(HEAD_START)
        notebook.run(f"%%distributed -n {MODEL_RANKS}\n{MODEL}\n{DDP}\nmodel = step(wrap)")
        return _of_workers(notebook)


def _notebook_launcher(lab: Lab, wrap: str) -> float:
    with lab.notebook() as notebook, lab.new_folder() as said:
        notebook.run(MODEL + _script(said, wrap) + LAUNCH.format(ranks=TRAINING_RANKS))
        return _slowest(said)


def _torchrun(lab: Lab, wrap: str) -> float:
    with lab.new_folder() as said:
        script = said / "script.py"
        script.write_text(f"{MODEL}{_script(said, wrap)}\nwork()\n", encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={TRAINING_RANKS}", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise CellFailed(done.stderr)
        return _slowest(said)


def _script(said: Path, wrap: str) -> str:
    return SCRIPT.format(said=said, wrap=wrap, step="step(wrap)")


def _slowest(said: Path) -> float:
    times = [float((said / str(rank)).read_text()) for rank in range(TRAINING_RANKS)]
    return max(times)
