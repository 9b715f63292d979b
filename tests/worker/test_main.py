"""Tests of `nbdist.worker.main`: how a worker begins, and how it ends when it may."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.world.world import World
from tests.waiting import SOON
from tests.worlds import NewWorld

LAST = """
import atexit, ctypes
from pathlib import Path

libc = ctypes.CDLL(None)
libc.fopen.restype, libc.fputs.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_void_p)

def last():
    Path(f"{folder}/{rank}.txt").write_text(f"in a group: {dist.is_initialized()}")
    libc.fputs(b"not flushed", libc.fopen(f"{folder}/{rank}.c".encode(), b"w"))

_ = atexit.register(last)
"""


@pytest.mark.parametrize("backend", ["gloo", "none"])
def test_exit_handlers_run(new_world: NewWorld, tmp_path: Path, backend: str) -> None:
    """After the group has been left, also one that user code has made; C code's output too."""
    with new_world(2, backend=backend) as world:
        world.execute(f"folder = {str(tmp_path)!r}\n{LAST}")
        if backend == "none":
            world.execute("dist.init_process_group('gloo')")
        world.execute("dist.all_reduce(torch.ones(1))")
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == "in a group: False"
        assert (tmp_path / f"{rank}.c").read_text() == "not flushed"


def test_nobody_sits_at_a_terminal(new_world: NewWorld) -> None:
    """Libraries that look for a prompt find none, and nobody is told how to leave."""
    with new_world(1) as world:
        world.execute("import sys, warnings")
        assert world.gather("[hasattr(sys, name) for name in ('ps1', 'ps2')]") == [[False, False]]
        running = world.submit(world.task("warnings.warn('To exit: use quit', stacklevel=1)"))
        world.session.wait(running)
        assert running.transcript[0].line_count == 0


pytestmark = pytest.mark.shared_world

TYPING_SECONDS = 2.5

DRAW = """
import multiprocessing.process, os, random, tempfile
import numpy

drawn = {
    "seed": torch.initial_seed(),
    "torch": torch.randn(3).tolist(),
    "random": random.random(),
    "numpy": numpy.random.rand(),
    "name": next(tempfile._get_candidate_names()),
    "key": multiprocessing.process.current_process().authkey.hex(),
}
torch_was_ready_for_gpus = torch.cuda.is_initialized()
"""


def draws(world: World) -> list[dict[str, object]]:
    """What each rank draws first, from every source of chance."""
    assert not world.execute(DRAW).errors
    assert not any(world.gather("torch_was_ready_for_gpus"))
    return world.gather("drawn")


def assert_all_different(drawn: list[dict[str, object]]) -> None:
    """No two draws have anything in common."""
    for source in drawn[0]:
        values = [str(each[source]) for each in drawn]
        assert len(set(values)) == len(values), (source, values)


def test_chance_is_every_workers_own(new_world: NewWorld) -> None:
    """No rank repeats what another draws, nor one after a restart, replaced, or added."""
    with new_world(2, fork=False) as spawned:
        assert_all_different(draws(spawned))
    with new_world(2) as world:
        drawn = draws(world)
        world.restart()
        drawn += draws(world)
        world.replace([1])
        drawn.append(draws(world)[1])
        world.scale(3)
        drawn.append(draws(world)[2])
    assert_all_different(drawn)


@pytest.fixture(scope="module")
def warm(new_world: NewWorld) -> Iterator[World]:
    """A world whose fork server has imported all that it does while it is idle."""
    with new_world(2) as world:
        deadline, typing = time.monotonic() + SOON, TYPING_SECONDS
        while not all(_has_all_for_training(world)):
            assert time.monotonic() < deadline
            time.sleep(typing)  # nothing is imported while workers start
            typing *= 2
            world.restart()
        yield world


def test_first_step_needs_no_imports(warm: World) -> None:
    """A restart some time later brings what a training imports."""
    assert not warm.execute(STEP).errors
    assert warm.gather("new") == [[], []]


def test_chance_when_all_is_imported(warm: World) -> None:
    """What was imported meanwhile, numpy's generator for one, draws differently everywhere."""
    warm.restart()
    drawn = draws(warm)
    warm.restart()
    assert_all_different(drawn + draws(warm))


def test_variables_of_torch_that_are_set_later(
    warm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch reads on import counts, also when it has been imported long ago."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    warm.restart()
    warm.execute("from torch._dynamo import config; disabled = config.disable")
    assert warm.gather("disabled") == [True, True]


def test_folders_that_are_set_later(
    warm: World, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """TMPDIR counts, and torch's cache, which does not keep workers from being forked."""
    own, cache = (str(tmp_path_factory.mktemp(name)) for name in ("own", "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    monkeypatch.setenv("TMPDIR", own)
    warm.restart()
    assert all(_has_all_for_training(warm))
    warm.execute("import tempfile")
    warm.execute("from torch._inductor.runtime.cache_dir_utils import cache_dir")
    assert warm.gather("cache_dir(), tempfile.gettempdir()") == [(cache, own)] * 2


def _has_all_for_training(world: World) -> list[bool]:
    world.execute("import sys; has_all = 'torch.utils.serialization' in sys.modules")
    return world.gather("has_all")


STEP = """
import sys
before = set(sys.modules)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def step(wrap):
    model = wrap(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()

step(DistributedDataParallel)
step(fully_shard)
new = sorted(set(sys.modules) - before)
"""
