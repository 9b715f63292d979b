"""Tests of `nbdist.world.workers`: what is known of workers, before any of them is there."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.config import WorldConfig
from nbdist.errors import WorldNotStarted
from nbdist.topology import Position
from nbdist.wire.messages import Healed
from nbdist.wire.work import Surroundings
from nbdist.world.spec import NotebookSurroundings, make_spec
from nbdist.world.states import State
from nbdist.world.workers import Workers
from nbdist.world.world import World


def test_before_the_start() -> None:
    """How many there will be, in what layout and group; nothing can be sent."""
    there = Workers(WorldConfig(layout="2x2", log_dir=""))
    assert (there.state, there.size, there.layout) == (State.STOPPED, 4, "2x2")
    assert (there.everyone, there.has_group, there.is_idle) == ((0, 1, 2, 3), True, True)
    assert there.resolve("3") == 3
    with pytest.raises(WorldNotStarted):
        _ = there.link
    assert not Workers(WorldConfig(1, backend="none", log_dir="")).has_group


def test_what_another_notebook_has_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which launcher the machines came, also where this process is in no allocation."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    there = Workers(WorldConfig(2, log_dir=""))
    memory = there.memory(there.config.patience)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert WorldConfig(**memory.options).launched_by == "slurm"


def test_ranks_that_have_other_numbers_now() -> None:
    """By node and process it is known who became whom, once for whoever asks."""
    there = Workers(WorldConfig(layout="2x1", log_dir=""))
    there.pids = {0: 100, 1: 101}
    there.take_healed(Healed({0: 101}, {0: ""}, (Position(1, 0),)))
    assert (there.size, there.pids) == (1, {0: 101})
    assert there.take_moved() == {1: 0}
    assert there.take_moved() == {}
    assert Workers(there.config).size == 1  # after a restart, too


pytestmark = pytest.mark.shared_world(2)

FOLDER, PATH = "__import__('os').getcwd()", "__import__('sys').path"


def value(name: str) -> str:
    return f"__import__('os').environ.get({name!r})"


@pytest.fixture(autouse=True)
def as_before(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test changes is for it alone."""
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("NBT_A", "NBT_B", "NBT_TOKEN", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)


def note(world: World) -> str:
    world.execute("pass")
    return world.session.surroundings.take_note()


def test_the_folder(world: World, tmp_path: Path) -> None:
    """Ranks go where the notebook goes, also new ones; one that has gone elsewhere stays there."""
    note(world)  # pytest has variables of its own for each test
    os.chdir(tmp_path)
    assert world.gather(FOLDER) == [str(tmp_path)] * 2
    world.execute("import os; os.chdir('/')", ranks=[1])
    (tmp_path / "below").mkdir()
    os.chdir("below")
    assert world.gather(FOLDER) == [str(tmp_path / "below"), "/"]
    world.replace([1])
    assert world.gather(FOLDER) == [str(tmp_path / "below")] * 2
    assert world.session.surroundings.take_note() == ""


def test_the_folder_that_was_removed(world: World, tmp_path: Path) -> None:
    """A notebook without a folder sends its cells all the same; ranks stay where they are."""
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    world.execute("pass")
    os.rmdir(tmp_path / "gone")
    assert world.gather("rank") == [0, 1]
    os.chdir(tmp_path)
    assert world.gather(FOLDER) == [str(tmp_path)] * 2


def test_the_path(world: World, tmp_path: Path) -> None:
    """What the notebook adds to `sys.path` is importable in the next cell; a rank's own stays."""
    (tmp_path / "nbt_beside.py").write_text("x = 7")
    sys.path.insert(0, str(tmp_path))
    world.execute("import sys, nbt_beside; sys.path += ['/own']; x = nbt_beside.x")
    assert world.gather("x") == [7, 7]
    sys.path.remove(str(tmp_path))
    sys.path.insert(0, "/first")
    sys.path.append("/last")
    (path, _) = world.gather(PATH)
    assert (path[0], path[-2:]) == ("/first", ["/own", "/last"])
    assert str(tmp_path) not in path


def test_the_environment(world: World) -> None:
    """Variables follow, named in a line once and without values; a rank's own stay."""
    note(world)
    os.environ["NBT_A"], os.environ["NBT_TOKEN"] = "1", "hidden"
    changed = "environment variables `NBT_A`, `NBT_TOKEN` changed in the notebook"
    assert note(world) == f"{changed}, and on the ranks too"
    assert note(world) == ""
    assert world.gather(value("NBT_A")) == ["1", "1"]
    world.execute("import os; os.environ['NBT_A'] = 'own'", ranks=[1])
    os.environ["NBT_A"] = "2"
    assert world.gather(value("NBT_A")) == ["2", "own"]
    del os.environ["NBT_A"]
    assert note(world).startswith("environment variable `NBT_A` changed")
    assert world.gather(value("NBT_A")) == [None, "own"]
    del os.environ["NBT_TOKEN"]
    assert world.gather(value("NBT_TOKEN")) == [None, None]


def test_variables_for_which_it_is_too_late(world: World) -> None:
    """What says which GPUs workers have, or is read at a start, takes effect with new workers."""
    note(world)
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["PYTHONHASHSEED"] = "7"
    said = note(world)
    assert "`CUDA_VISIBLE_DEVICES`, `PYTHONHASHSEED` changed in the notebook after the" in said
    assert said.endswith("`%dist_restart` gives it to them")
    assert world.gather(value("CUDA_VISIBLE_DEVICES")) == [None, None]


def test_variables_that_libraries_set(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sklearn or polars set when they are imported is sent, and nobody is told."""
    note(world)
    for name in ("KMP_INIT_AT_FORK", "_RJEM_MALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "FALSE")
    assert note(world) == ""
    assert world.gather(value("KMP_INIT_AT_FORK")) == ["FALSE", "FALSE"]


def test_on_other_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what `--copy-env` names is right there; of all else is said how to set it."""
    monkeypatch.chdir(tmp_path)
    config = WorldConfig(n=2, hosts="node1", copy_env="NBT_A*", env={"NBT_C": "1"})
    spec, _ = make_spec(config)
    found = NotebookSurroundings(config, spec)
    assert found.now() is None
    for name in "ABC":
        monkeypatch.setenv(f"NBT_{name}", "2")
    assert found.now() == Surroundings(str(tmp_path), str(tmp_path), None, {"NBT_A": "2"})
    said = found.take_note()
    assert "`NBT_A` changed in the notebook, and on the ranks too" in said
    assert said.endswith("`%dist_restart --env NBT_B=...` gives it to them")


def test_a_world_that_was_taken_over(tmp_path: Path) -> None:
    """Its ranks go to the folder of the notebook that has it now."""
    config = WorldConfig(n=2)
    spec = replace(make_spec(config)[0], cwd=str(tmp_path))
    assert NotebookSurroundings(config, spec).now() == Surroundings(os.getcwd(), str(tmp_path))
