"""Tests of `nbdist.notebook.commands.values` in a real notebook kernel."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook, body, lasting
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world

kernel = lasting("%load_ext nbdist", NBDIST_SNAPSHOT_DIR="{folder}")


@pytest.fixture
def notebook(kernel: Notebook) -> Notebook:
    """The notebook with two ready workers and no snapshots."""
    shutil.rmtree(kernel.folder)
    kernel.folder.mkdir()
    kernel.run("%dist_snapshot --every 0")
    if kernel.run("%%distributed -n 2\npass").errors:
        assert kernel.run("%dist_restart -n 2").errors == []
    return kernel


def test_restart_and_restore(notebook: Notebook) -> None:
    """After a restart a line says what brings the variables back; then they are the workers'."""
    notebook.run("step = 1")
    notebook.run("%%distributed\nstep = 10 + rank\nnote = 'kept'\nimport _thread\n"
                 "lock = _thread.allocate_lock()")  # fmt: skip
    said = notebook.run("%dist_snapshot --name night").text
    assert said.startswith("saved note and step of 2 ranks · snapshot `night` · ")
    assert "left out: lock (TypeError: cannot pickle '_thread.lock' object)" in said
    said = " · `%dist_restore --name night` restores note and step of "
    assert f"worker variables cleared{said}" in notebook.run("%dist_restart").text
    said = notebook.run("%dist_restore").text
    assert said.startswith("restored note and step on ranks 0-1 from `night@")
    assert body(notebook.run("%%distributed\nstep"))[1::2] == ["10", "11"]
    notebook.run("%%distributed\nstep += 1")
    notebook.run("%dist_restore step -r 1")
    assert body(notebook.run("%%distributed\nstep")) == ["── ranks 0-1 (same) ──", "11"]
    assert notebook.value("step, 'torch' in __import__('sys').modules") == (1, False)
    assert notebook.run("%dist_restore --name night --from-rank 0").errors == []
    assert body(notebook.run("%%distributed\nstep")) == ["── ranks 0-1 (same) ──", "10"]
    # Where a rank was restarted the error names the snapshot.
    error = notebook.run("%%distributed\nimport os\nif rank: os._exit(3)").error
    assert "`%dist_restore --name night` restores " in error


def test_every(notebook: Notebook) -> None:
    """`--every 2` takes one after each second cell that succeeds; a failure is one dim line."""
    folder = notebook.folder
    notebook.run("%%distributed\nx = 1")
    assert "again after every 2 cells" in notebook.run("%dist_snapshot --name auto --every 2").text
    for cell, taken in (("x = 2", 1), ("raise ValueError", 1), ("x = 3", 2)):
        notebook.run(f"%%distributed\n{cell}")
        assert len([each for each in (folder / "auto").iterdir() if each.name[0] != "."]) == taken
    shutil.rmtree(folder)
    folder.write_text("in the way")
    notebook.run("%%distributed\npass")
    failed = notebook.run("%%distributed\npass")
    assert failed.errors == []
    line = failed.displays[-1]["data"]["text/plain"]
    assert line.startswith("no snapshot `auto` after this cell: No snapshot was written: ")
    assert "\n" not in line
    folder.unlink()
    folder.mkdir()
    assert notebook.run("%dist_snapshot --every 0").text == "automatic snapshots are off"


def test_this_notebooks_newest(
    notebook: Notebook, fresh: Callable[..., Notebook], tmp_path: Path
) -> None:
    """Without a name that is restored, also by a later kernel of the same file, and no other's."""
    folder = notebook.folder
    notebook.run("%%distributed\nx = 'first'")
    notebook.run("%dist_snapshot x --name first")
    env = {"NBDIST_SNAPSHOT_DIR": str(folder), "JPY_SESSION_NAME": str(tmp_path / "My train.ipynb")}
    start = ("%load_ext nbdist", "%dist_init -n 2")
    other = fresh(*start, env=env)
    error = other.run("%dist_restore").error
    assert "No snapshot is known to be this notebook's. Available: `first`." in error
    assert "`%dist_restore --name first` restores one of them." in error
    lines = other.run("%dist_restore --list").text.splitlines()
    assert lines[0].split() == ["snapshot", "taken", "ranks", "size", "variables"]
    assert lines[1].startswith("first@")
    other.run("%%distributed\nx = 'second'")
    assert "snapshot `My-train` · " in other.run("%dist_snapshot").text
    other.run("%dist_snapshot x --name first")
    assert " from `first@" in notebook.run("%dist_restore").text
    assert body(notebook.run("%%distributed\nx"))[-1] == "'first'"
    assert notebook.run("%dist_restore --name My-train").text.endswith("this notebook did not save")
    assert "not save" not in notebook.run("%dist_restore --name first").text
    assert body(notebook.run("%%distributed\nx"))[-1] == "'first'"
    for cell in ("%unload_ext nbdist", *start):
        assert other.run(cell).errors == []
    assert " from `first@" in other.run("%dist_restore").text
    assert body(other.run("%%distributed\nx"))[-1] == "'second'"
    assert "removed `first@" in other.run("%dist_snapshot --remove first").text
    assert [each.name for each in folder.iterdir()] == ["My-train"]


def test_bad_input(notebook: Notebook) -> None:
    """Each mistake gets one error of one line that shows what is right."""
    for source, said in (
        ("%dist_snapshot --name a/b", "`a/b` is not a name"),
        ("%dist_snapshot rank nowhere --name a", "no rank has `nowhere`."),
        ("%dist_snapshot nowhere", "`%dist_snapshot --name nowhere`"),
        ("%dist_snapshot a.b rank", "`%dist_snapshot rank --name a.b`"),
        ("%dist_snapshot rank --every x", "`--every 1`"),
        ("%dist_snapshot --remove a", "There are no snapshots in "),
        ("%dist_restore", "`%dist_snapshot model step`"),
        ("%dist_restore a --from-rank x", "`--from x`"),
    ):
        assert said in notebook.run(source).error


def test_stop(notebook: Notebook) -> None:
    """Stop ends a snapshot that takes long; nothing of it is left, and the workers go on."""
    folder = notebook.folder
    notebook.run("%%distributed\nimport time\nclass Slow:\n    def __reduce__(self):\n"
                 "        time.sleep(30)\nslow = Slow()")  # fmt: skip
    request = notebook.client.execute("%dist_snapshot slow --name slow")
    wait_until(lambda: [*folder.glob("slow/.part-*")], "a part is being written")
    notebook.manager.interrupt_kernel()
    assert notebook.reply_to(request)["ename"] == "Interrupted"
    assert [each.name for each in (folder / "slow").iterdir()] == [".lock"]
    assert notebook.run("%%distributed\ndel slow").errors == []
