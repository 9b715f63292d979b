"""Tests of `nbdist.worker.forked`: what forked workers must not have in common."""

from __future__ import annotations

import pytest

from nbdist.world.world import World

pytestmark = pytest.mark.shared_world

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


@pytest.mark.parametrize("nursery", [True, False], ids=["nursery", "spawn"])
def test_chance_is_every_workers_own(nursery: bool) -> None:  # noqa: FBT001
    """No rank repeats what another draws, nor one after a restart, replaced, or added."""
    with World(2, nursery=nursery, log_dir="") as world:
        drawn = draws(world)
        world.restart()
        drawn += draws(world)
        world.replace([1])
        drawn.append(draws(world)[1])
        world.scale(3)
        drawn.append(draws(world)[2])
    assert_all_different(drawn)


def test_temporary_folder_of_the_notebook(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A TMPDIR that was set after the fork server had looked for one counts."""
    folder = str(tmp_path_factory.mktemp("own"))
    with World(1, log_dir="") as world:
        monkeypatch.setenv("TMPDIR", folder)
        world.restart()
        world.execute("import tempfile; folder = tempfile.gettempdir()")
        assert world.gather("folder") == [folder]
