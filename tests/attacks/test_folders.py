"""Folders of the user beside nbdist's: logs, snapshots, sockets; and cleaners of /tmp.

The tests are about who may read and write files there, and which files are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from nbdist.agent.worker_output import ATTEMPT_FOLDER, RUNS_KEPT
from nbdist.errors import NoRuntimeFolder, ScaleError, UsageError, WorkerDied
from nbdist.system.folders import RuntimeFolder
from nbdist.world import dispatch
from nbdist.world.snapshot_store import SNAPSHOTS_PER_NAME, Snapshot
from nbdist.world.world import World
from tests.waiting import wait_until

pytestmark = [pytest.mark.shared_world, pytest.mark.own_agent]

SOMEBODY = 54321
"""The number of a user that the system does not know."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user for logs, with many old folders of the user."""
    folder = tmp_path_factory.mktemp("project")
    for number in range(RUNS_KEPT + 10):
        (folder / f"mine{number}" / "attempt_0").mkdir(parents=True)
        (folder / f"mine{number}" / "model.pt").write_text("mine")
    (folder / "keep").mkdir()  # a folder of snapshots with another name
    for each in folder.iterdir():
        os.utime(each, (1, 1))
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of another user")
@pytest.mark.parametrize("name", ["run", "exp/run"])
def test_a_link_of_another_user_is_no_log_folder(tmp_path: Path, name: str) -> None:
    """In a folder that users share, no log file is written through a link of another user."""
    theirs, logs = tmp_path / "theirs", tmp_path / "logs"
    theirs.mkdir()
    logs.mkdir()
    link = logs / Path(name).parts[0]
    link.symlink_to(theirs)
    World(1, log_dir=str(logs), name=name, show=False)  # links of the user are allowed
    os.lchown(link, SOMEBODY, SOMEBODY)
    said = f"`--name {name}`: {link} is a symbolic link of user {SOMEBODY}"
    with pytest.raises(UsageError, match=re.escape(said)):
        World(1, log_dir=str(logs), name=name, show=False)


@pytest.fixture(scope="module")
def started(logs: Path) -> Iterator[World]:
    """A world with its logs in `logs`, started by a user whose files everybody may write to."""
    before = os.umask(0)
    os.environ["NBDIST_LOG_LIMIT"] = "1M"
    try:
        with World(2, log_dir=str(logs), name="run") as world:
            yield world
    finally:
        os.umask(before)
        del os.environ["NBDIST_LOG_LIMIT"]


@pytest.fixture
def world(started: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world with an empty folder for its snapshots."""
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path / "snapshots"))
    return started


@pytest.fixture
def taken(world: World) -> Snapshot:
    """A snapshot, after which the variable in it has changed."""
    world.execute("x = 'then'")
    taken = world.snapshot(["x"], name="a")
    world.execute("x = 'now'")
    return taken


def test_the_users_folders_stay(world: World, logs: Path) -> None:
    """No start and no restart removes a folder that nbdist has not made, however old."""
    before = {*logs.iterdir()}
    assert len(before) == RUNS_KEPT + 12
    world.restart()
    assert {*logs.iterdir()} == before
    assert (logs / "mine0" / "model.pt").read_text() == "mine"


def test_files_of_a_run_are_private_and_limited(world: World, logs: Path, tmp_path: Path) -> None:
    """Logs have a limit; logs and snapshots belong to the user alone, whatever the umask."""
    world.execute(
        "import sys\nx = 1; print(2, file=sys.stderr)\n"
        "if rank == 0:\n    print('secret\\n' * 100_000)\n"
        "    get_ipython().display_pub.publish({'text/html': 'x' * 10_000_001})"
    )
    world.snapshot(["x"], name="a")
    run = logs / "run"
    found = [*run.rglob("*")]
    for name in ("stdout.log.1", "display-0"):
        assert any(each.name.startswith(name) for each in found)
    assert [each for each in run.iterdir() if not ATTEMPT_FOLDER.fullmatch(each.name)] == []
    found += [run, tmp_path / "snapshots", *(tmp_path / "snapshots").rglob("*")]
    assert len(found) > 12
    for each in found:
        assert stat.S_IMODE(each.stat().st_mode) & 0o077 == 0, each
    if os.geteuid() == 0:
        child = os.fork()
        if not child:  # as another user
            os.setgroups([])
            os.setgid(SOMEBODY)
            os.setuid(SOMEBODY)
            denied = 0
            for each in found:
                with contextlib.suppress(PermissionError):
                    os.close(os.open(each, os.O_RDONLY))
                    os._exit(1)
                denied += 1
            os._exit(0 if denied == len(found) else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_logs_are_written_through(world: World, tmp_path: Path) -> None:
    """Text of a rank is in its log at once, while its cell runs and after the cell has ended."""
    log, go_on = Path(world.logs[0]) / "stdout.log", tmp_path / "go on"
    cell = world.submit(
        world.task(
            "import os, threading, time\n"
            f"while not os.path.exists({str(go_on)!r}):\n"
            "    print('in the cell', flush=False); time.sleep(0.05)\n"
            "late = threading.Timer(0.3, print, ['after the cell'])\nlate.start()"
        )
    )
    wait_until(lambda: "in the cell" in log.read_text())
    go_on.touch()
    dispatch.wait(world.engine, cell)
    wait_until(lambda: "after the cell" in log.read_text())


def test_an_invalid_log_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid limit is refused before any start, in a line with an example of a valid limit."""
    for text in ("x", "1", "0M", "-1M"):
        monkeypatch.setenv("NBDIST_LOG_LIMIT", text)
        with pytest.raises(UsageError, match=rf"`NBDIST_LOG_LIMIT={text}`: .* such as 200M"):
            World(1)


# --- snapshots ----------------------------------------------------------------------------


def test_old_snapshots_go_and_folders_of_users_stay(world: World, tmp_path: Path) -> None:
    """The newest snapshots stay, and so do snapshots and folders that the user has changed."""
    root = tmp_path / "snapshots"
    mine = {"data", "20200101-000000", "20200101-000001"}
    for name in mine:
        (root / "a" / name).mkdir(parents=True)
        (root / "a" / name / "manifest.json").write_text("{}")
    for folder in (root, root / "a"):
        folder.chmod(0o700)
    (root / "b" / ".part-mine").mkdir(parents=True)
    world.execute("x = 1")
    kept = [world.snapshot(["x"], name="a").folder for _ in range(3)]
    (kept[0] / "notes.txt").write_text("mine")
    kept[1].rename(root / "a" / "best")
    shutil.copytree(kept[2], root / "a" / "20200101-000002")
    newest = [world.snapshot(["x"], name="a").folder for _ in range(SNAPSHOTS_PER_NAME + 1)][1:]
    there = {each.name for each in (root / "a").iterdir()}
    mine |= {kept[0].name, "best", "20200101-000002", ".lock"}
    assert there == mine | {folder.name for folder in newest}
    assert {each.name for each in (root / "b").iterdir()} == {".part-mine"}
    assert (kept[0] / "rank0.frames").exists()
    world.restore(name="a")


def chown(path: Path) -> None:
    """Give the path to another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, SOMEBODY, -1)


def link(path: Path) -> None:
    """Move the path away, and leave a symbolic link in its place."""
    root = next(folder for folder in path.parents if folder.name == "snapshots")
    away = root.with_name("away")
    path.rename(away)
    path.symlink_to(away)


def let_write(path: Path, who: int) -> None:
    """Let others write to the path: its group, or all."""
    path.chmod(path.stat().st_mode | who)


BY_GROUP, BY_ALL = partial(let_write, who=0o020), partial(let_write, who=0o002)
WRITES, LIES = r"others can write to .* \(mode 07?", "is a symbolic link"


@pytest.mark.parametrize(
    ("what", "attack", "said"),
    [
        ("..", chown, f"belongs to user {SOMEBODY}"),
        (".", BY_GROUP, f"{WRITES}[26]"),
        (".", link, LIES),
        ("manifest.json", BY_ALL, f"{WRITES}[06]"),
        ("rank1.frames", chown, f"belongs to user {SOMEBODY}"),
        ("rank1.frames", link, LIES),
    ],
)
def test_a_snapshot_that_others_can_write_is_refused(
    world: World, taken: Snapshot, what: str, attack: Callable[[Path], None], said: str
) -> None:
    """A snapshot that others could have written is refused in a line; no variable changes."""
    attack(Path(os.path.normpath(taken.folder / what)))
    with pytest.raises(UsageError, match=f"was not restored, because .*{said}.*`cp -r`") as told:
        world.restore(name="a", from_rank=1)
    assert "\n" not in str(told.value)
    assert world.gather("x") == ["now", "now"]


@pytest.mark.parametrize("what", ["manifest.json", "rank1.frames"])
def test_a_pipe_in_a_snapshot_is_refused(world: World, taken: Snapshot, what: str) -> None:
    """A pipe is refused without a wait; no snapshot is written if others can write beside it."""
    (taken.folder / what).unlink()
    os.mkfifo(taken.folder / what, 0o600)
    with pytest.raises(UsageError, match=f"{re.escape(what)} is no plain file"):
        world.restore(name="a")
    taken.folder.parent.chmod(0o777)
    with pytest.raises(UsageError, match=r"No snapshot was written: others can write to"):
        world.snapshot(["x"], name="a")


def test_ranks_check_snapshots_themselves(world: World, taken: Snapshot) -> None:
    """A file that others can write to after the notebook's check is refused by the ranks too."""
    part = taken.parts[0]
    own = dict.fromkeys(range(2), (0, part.digest))
    every = [(rank, part.digest) for rank, part in taken.parts.items()]
    for rank, everyones in ((1, every), (0, [])):
        file = taken.folder / f"rank{rank}.frames"
        file.chmod(0o602)
        said = world.call("snapshot.load", folder=str(taken.folder), parts=own, everyones=everyones)
        assert [each.distrust for each in said] == [f"others can write to {file} (mode 0602)"] * 2


def test_an_empty_or_a_missing_folder_costs_nothing(world: World) -> None:
    """A world whose runtime folder is emptied, then removed, runs cells and replaces its ranks."""
    world.execute("x = 10 + rank")
    folder = Path(world.engine.connection.link.agent.command.split()[-2])
    for take in ("contents", "folder"):
        for each in folder.iterdir():
            each.unlink()
        os.utime(folder, (1, 1))
        RuntimeFolder().close()  # another world's start keeps the folder
        assert folder.is_dir()
        if take == "folder":
            folder.rmdir()
        world.execute("dist.barrier()")
        with pytest.raises(WorkerDied):
            world.execute("import os\nif rank: os.kill(os.getpid(), 9)")
        world.execute("dist.barrier()\nx = globals().get('x', 10) + 1")
        with pytest.raises(Exception, match="early"):
            world.execute("if rank: raise ValueError('early')\ndist.barrier()")
        world.execute("dist.barrier()")
    assert world.gather("x") == [12, 11]
    shutil.rmtree(folder)
    world.restart()
    world.execute("dist.barrier()")
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 512 KiB in which worlds have their folders; needs root."""
    with tempfile.TemporaryDirectory(prefix="nbt-", dir="/tmp") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder]
        if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    """Write a file that leaves no room for another file in the folder."""
    found = folder / "big"
    with contextlib.suppress(OSError), found.open("wb", buffering=0) as file:
        while file.write(b"x" * 512):
            pass
    return found


def test_a_full_file_system_is_passed_over(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file system is passed over, and named if no other place is left."""
    fill(small)
    for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(variable, str(small))
    made = RuntimeFolder()
    made.close()
    assert made.path.parent == Path("/tmp")
    monkeypatch.setattr("nbdist.system.folders.LAST_PLACES", ())
    with pytest.raises(NoRuntimeFolder) as found:
        RuntimeFolder()
    assert f"({small}: No space left on device)" in str(found.value)
    assert "\n" not in str(found.value)
    assert [each.name for each in small.iterdir()] == ["big"]


def test_scaling_names_a_full_file_system(small: Path) -> None:
    """A worker that cannot start names the full folder; with room again it can start."""
    with World(1, log_dir="") as world:
        world.start()
        file = fill(small)
        with pytest.raises(ScaleError, match=f"No space left on device in {small}/nbdist-"):
            world.scale(2)
        assert world.gather("rank") == [0]
        file.unlink()
        world.scale(2)
        assert world.gather("rank") == [0, 1]
