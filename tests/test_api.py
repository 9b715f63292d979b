"""Tests of the Python API as people use it, mostly in plain scripts."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

import nbdist
from nbdist.errors import UsageError
from nbdist.notebook.command import find_commands
from tests.waiting import SOON

ROOT = Path(__file__).parent.parent


PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def run_script(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run a script as `python train.py` in a folder."""
    script = folder / "train.py"
    script.write_text(source)
    return subprocess.run(
        [sys.executable, script.name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PATH, "NBDIST_LOG_DIR": ""},
        capture_output=True,
        text=True,
        timeout=2 * SOON,
        stdin=subprocess.DEVNULL,
    )


TORCHRUNX = """
import torch
import torch.nn as nn
import nbdist


def train(model: nn.Module, num_steps: int = 5) -> nn.Module:
    rank = torch.distributed.get_rank()
    ddp_model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp_model.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs = torch.randn(5, 10) + rank
        labels = torch.randn(5, 10)
        outputs = ddp_model(inputs)
        loss = nn.functional.mse_loss(outputs, labels)
        loss.backward()
        optimizer.step()
    return ddp_model.module


model = nn.Linear(10, 10)
before = model.weight.clone()
with nbdist.World(n=2) as world:
    results = world.run(train, model, num_steps=3)
trained_model: nn.Module = results.rank(0)
torch.save(trained_model.state_dict(), "output.pth")

also = results.index(hostname="localhost", local_rank=0)
assert also is trained_model
loaded = torch.load("output.pth")
assert torch.equal(loaded["weight"], results.rank(1).weight)
assert not torch.equal(loaded["weight"], before)
assert torch.equal(model.weight, before)
print("done")
"""
"""The example of torchrunx, line by line, but with the names of nbdist."""


STAGES = """
import os
import psutil

me = psutil.Process()


def ended():
    assert me.children(recursive=True) == [], me.children(recursive=True)
    return me.memory_info().rss


@nbdist.distributed(n=3)
def on_three(seed):
    '''Fill memory on three.'''
    import torch
    return float(torch.empty(25 * 2**20).fill_(seed).sum() > 0) + int(os.environ["WORLD_SIZE"])


before = ended()
assert list(on_three(1)) == [4.0] * 3
print(on_three.__name__, on_three.__doc__, ended() - before < 8 * 2**20)
"""


@pytest.mark.own_agent
def test_a_script_uses_worlds_one_after_the_other(tmp_path: Path) -> None:
    """A script without a `__main__` guard trains a copy of its model on ranks and saves the copy.

    A world of another size runs next in the process, and leaves no workers and no memory behind.
    """
    done = run_script(tmp_path, TORCHRUNX + STAGES)
    assert (done.stdout, done.stderr) == ("done\non_three Fill memory on three. True\n", "")


FAILING = """
import os
import threading
import nbdist

class BadShard(ValueError):
    pass

def train(shard):
    print("training on", shard)
    if os.environ["RANK"] == "1":
        raise BadShard(f"bad {shard}")

with nbdist.World(2) as world:
    world.execute("print('hello'); rank")
    try:
        world.run(train, threading.Lock())
    except nbdist.UsageError as error:
        print(error)
    try:
        world.execute("raise KeyError(rank)", ranks=[1])
    except KeyError as error:
        print(error)
    try:
        world.run(train, 1)
    except BadShard as error:
        print(error)
    world.run(train, 2)
"""


def by_rank(lines: list[str]) -> dict[int, list[str]]:
    """Return the texts of each rank from lines such as `[0-1] hello`, in any order of ranks."""
    said: dict[int, list[str]] = {}
    for line in lines:
        ranks, _, text = line.removeprefix("[").partition("] ")
        first, _, last = ranks.partition("-")
        for rank in range(int(first), int(last or first) + 1):
            said.setdefault(rank, []).append(text)
    return said


@pytest.mark.own_agent
def test_an_error_in_a_script_can_be_caught_and_is_short(tmp_path: Path) -> None:
    """A script can catch a rank's error by its class; an uncaught error has a short traceback.

    The output of ranks is printed with their numbers.
    """
    done = run_script(tmp_path, FAILING)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    said, caught = [], []
    for line in done.stdout.splitlines():
        (said if line.startswith("[") else caught).append(line)
    assert by_rank(said) == {
        0: ["hello", "0", "training on 1", "training on 2"],
        1: ["hello", "1", "training on 1", "training on 2"],
    }
    assert caught[0].startswith("`shard` (thread lock) cannot be sent to the workers: ")
    assert re.fullmatch(r"rank 1 failed after .+: KeyError: 1", caught[1])
    assert re.fullmatch(r"rank 1 failed, of 2, after .+: BadShard: bad 1", caught[2])
    assert lines[0] == "Traceback (most recent call last):"
    assert re.findall(r'^  File .+/(\w+\.py)"', done.stderr, re.M) == ["train.py", "world.py"]
    assert "nbdist.errors.WorkerError: rank 1 failed, of 2, " in done.stderr
    (place,) = [line for line in lines if line.startswith("File ")]
    assert place.startswith(f"File {tmp_path}/train.py:12, in train(shard)")
    assert lines[-1] == "BadShard: bad 2"
    assert len(lines) < 20


SLOW = """
import nbdist
from nbdist.world import lifecycle
lifecycle.QUIET_SECONDS = 0.0
with nbdist.World(2, fork=False) as world:
    print("result", list(world.run(lambda: 1)))
"""


@pytest.mark.own_agent
def test_a_long_start_is_shown_in_a_terminal(tmp_path: Path) -> None:
    """A terminal shows a line with the number of ready workers, until all workers are ready."""
    # In another folder, because workers import no modules from the working directory at start.
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, time\n"
        "while os.environ.get('RANK') == '1' and not os.path.exists('gate'):\n"
        "    time.sleep(0.01)\n"
    )
    (tmp_path / "train.py").write_text(SLOW)
    script = pexpect.spawn(
        sys.executable,
        ["train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{PATH}", "NBDIST_LOG_DIR": ""},
        timeout=SOON,
        encoding="utf-8",
    )
    try:
        script.expect_exact("\rstarting 2 workers: 1 ready")
        (tmp_path / "gate").touch()
        script.expect_exact(" \rresult [1, 1]\r\n")
        script.expect(pexpect.EOF)
    finally:
        script.close(force=True)


@pytest.mark.world
def test_run_calls_a_function_on_new_workers() -> None:
    """`nbdist.run` calls a function on each rank of a new world, which ends with the call."""
    results = nbdist.run(lambda seed: (seed, int(os.environ["WORLD_SIZE"])), seed=1)
    assert list(results) == [(1, len(results))] * len(results)


@pytest.mark.world
def test_all_arguments_of_a_decorated_function_are_its_own() -> None:
    """`rank=` reaches the function; for another function `nbdist.run` says what selects ranks."""
    assert list(nbdist.distributed(n=1)(lambda rank: rank)(rank=4)) == [4]
    with pytest.raises(UsageError, match=r"which has no `rank`. `with nbdist.World\(\) as world"):
        nbdist.run(lambda seed: seed, 1, rank=0)


def test_distributed_keeps_the_function_and_its_name() -> None:
    """`distributed`, with and without options, keeps the function, its name and its docstring."""

    def train() -> None:
        """Trains."""

    for made in (nbdist.distributed(train), nbdist.distributed(n=4, backend="gloo")(train)):
        assert inspect.unwrap(made) is train
        assert (made.__name__, made.__doc__) == ("train", "Trains.")


def test_nbdist_has_exactly_its_public_names() -> None:
    """Each public name exists, and a wrong name raises AttributeError as in any module."""
    for name in nbdist.__all__:
        assert getattr(nbdist, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = nbdist.nothing
    # `nbdist.<tab>` shows the public names alone, and the help of nbdist names existing magics.
    assert [name for name in dir(nbdist) if not name.startswith("_")] == sorted(
        name for name in nbdist.__all__ if not name.startswith("_")
    )
    named = re.findall(r"^    (%%?\w+)", nbdist.__doc__ or "", re.MULTILINE)
    assert "%%distributed" in named
    assert set(named) <= {each.shown_name for each in find_commands()}
