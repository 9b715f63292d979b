"""Files that are not on all hosts: snapshots and scripts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbdist.errors import UsageError, WorkerError
from nbdist.world.world import World
from tests.hosts.network import Host

Launch = Callable[..., World]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all hosts have."""
    with tempfile.TemporaryDirectory(dir="/run") as folder:
        yield Path(folder)


def test_snapshots_lie_where_all_hosts_have_them(
    launch: Launch, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is not there is named, with the way out; with a shared one they come back."""
    world = launch(hosts="node1:1,node2:1")
    world.execute("import torch\nx = torch.full((3,), float(rank + 1))")
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path))
    with pytest.raises(UsageError, match=r"node\d does not have the folder .*NBDIST_SNAPSHOT_DIR"):
        world.snapshot(name="one")
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(shared))
    world.snapshot(name="one")
    world.restart()
    world.restore(name="one")
    assert [each.tolist() for each in world.gather("x")] == [[1.0] * 3, [2.0] * 3]


def test_scripts_of_the_notebooks_folder(
    hosts: list[Host], launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not on other machines, which is said; `--sync-code` sends them along."""
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "train.py").write_text(
        "import sys\nimport beside\nfound = (sys.argv[1], beside.VALUE)\n"
    )
    monkeypatch.chdir(tmp_path)
    world = launch(hosts="node1:1,node2:1")
    with pytest.raises(WorkerError, match=r"node\d has no .*train\.py.*--sync-code"):
        world.run_script("train.py", "a")
    world.restart(sync_code=True)
    world.run_script("train.py", "a")
    assert world.gather("found") == [("a", 7)] * 2
