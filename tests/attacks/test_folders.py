"""Folders of the user's beside nbdist's: logs, snapshots, sockets; and what cleaners of /tmp do.

Who may read and write what is in these, and what is removed of them.
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
from nbdist.world.snapshot_store import SNAPSHOTS_PER_NAME, Snapshot
from nbdist.world.world import World
from tests.waiting import wait_until

pytestmark = [pytest.mark.shared_world, pytest.mark.own_agent]

SOMEBODY = 54321
"""A user of whom nobody has heard."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's, full of old folders of the user's."""
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
def test_a_link_of_another_user_among_the_logs(tmp_path: Path, name: str) -> None:
    """In a folder that users share: no log file is written where the link leads."""
    theirs, logs = tmp_path / "theirs", tmp_path / "logs"
    theirs.mkdir()
    logs.mkdir()
    link = logs / Path(name).parts[0]
    link.symlink_to(theirs)
    World(1, log_dir=str(logs), name=name, show=False)  # the user's own links are theirs to make
    os.lchown(link, SOMEBODY, SOMEBODY)
    said = f"`--name {name}`: {link} is a symbolic link of user {SOMEBODY}"
    with pytest.raises(UsageError, match=re.escape(said)):
        World(1, log_dir=str(logs), name=name, show=False)


@pytest.fixture(scope="module")
def started(logs: Path) -> Iterator[World]:
    """A world with its logs there, started by a user whose files everybody may write to."""
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
    """No start, and no restart, removes what nbdist has not made, however old it is."""
    before = {*logs.iterdir()}
    assert len(before) == RUNS_KEPT + 12
    world.restart()
    assert {*logs.iterdir()} == before
    assert (logs / "mine0" / "model.pt").read_text() == "mine"


def test_what_is_in_a_run(world: World, logs: Path, tmp_path: Path) -> None:
    """It is limited, and the user's alone, whatever the umask, as snapshots are."""
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
    """What a rank says is in its file while its cell runs, and after it, at once."""
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
    world.session.wait(cell)
    wait_until(lambda: "after the cell" in log.read_text())


def test_a_limit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what one looks like, before anything is started."""
    for text in ("x", "1", "0M", "-1M"):
        monkeypatch.setenv("NBDIST_LOG_LIMIT", text)
        with pytest.raises(UsageError, match=rf"`NBDIST_LOG_LIMIT={text}`: .* such as 200M"):
            World(1)


# --- snapshots ----------------------------------------------------------------------------


def test_a_name_that_is_the_users_folder(world: World, tmp_path: Path) -> None:
    """The user's folders stay in it; of the snapshots the newest ones, and what the user kept."""
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
    """It belongs to somebody else."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, SOMEBODY, -1)


def link(path: Path) -> None:
    """It lies elsewhere."""
    root = next(folder for folder in path.parents if folder.name == "snapshots")
    away = root.with_name("away")
    path.rename(away)
    path.symlink_to(away)


def let_write(path: Path, who: int) -> None:
    """Others may write to it, of its group or all."""
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
def test_what_others_could_have_written(
    world: World, taken: Snapshot, what: str, attack: Callable[[Path], None], said: str
) -> None:
    """It is refused in one line that says which file and what to do; nothing is bound."""
    attack(Path(os.path.normpath(taken.folder / what)))
    with pytest.raises(UsageError, match=f"was not restored, because .*{said}.*`cp -r`") as told:
        world.restore(name="a", from_rank=1)
    assert "\n" not in str(told.value)
    assert world.gather("x") == ["now", "now"]


@pytest.mark.parametrize("what", ["manifest.json", "rank1.frames"])
def test_a_pipe_in_a_files_place(world: World, taken: Snapshot, what: str) -> None:
    """Nobody waits for it; where others can write no snapshot is written, or restored."""
    (taken.folder / what).unlink()
    os.mkfifo(taken.folder / what, 0o600)
    with pytest.raises(UsageError, match=f"{re.escape(what)} is no plain file"):
        world.restore(name="a")
    taken.folder.parent.chmod(0o777)
    with pytest.raises(UsageError, match=r"No snapshot was written: others can write to"):
        world.snapshot(["x"], name="a")


def test_the_ranks_look_themselves(world: World, taken: Snapshot) -> None:
    """What changes hands after the notebook has looked is read by no rank, of any rank."""
    part = taken.parts[0]
    own = dict.fromkeys(range(2), (0, part.digest))
    every = [(rank, part.digest) for rank, part in taken.parts.items()]
    for rank, everyones in ((1, every), (0, [])):
        file = taken.folder / f"rank{rank}.frames"
        file.chmod(0o602)
        said = world.call("snapshot.load", folder=str(taken.folder), parts=own, everyones=everyones)
        assert [each.distrust for each in said] == [f"others can write to {file} (mode 0602)"] * 2


def test_an_empty_or_a_missing_folder_costs_nothing(world: World) -> None:
    """With everything in it taken, then itself: cells run, ranks are replaced, all starts anew."""
    world.execute("x = 10 + rank")
    folder = Path(world.session.link.agent.command.split()[-2])
    for take in ("contents", "folder"):
        for each in folder.iterdir():
            each.unlink()
        os.utime(folder, (1, 1))
        RuntimeFolder().close()  # another world's start leaves it alone
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
    """A file system with room for little, where worlds have their folders; needs root."""
    with tempfile.TemporaryDirectory(prefix="nbt-", dir="/tmp") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", folder]
        if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> Path:
    """A file in it that leaves no room for another."""
    found = folder / "big"
    with contextlib.suppress(OSError), found.open("wb", buffering=0) as file:
        while file.write(b"x" * 512):
            pass
    return found


def test_a_full_place(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over; and where nothing else is left, named."""
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


def test_a_place_that_gets_full(small: Path) -> None:
    """Who cannot start says where there is no room; with room again it can."""
    with World(1, log_dir="") as world:
        world.start()
        file = fill(small)
        with pytest.raises(ScaleError, match=f"No space left on device in {small}/nbdist-"):
            world.scale(2)
        assert world.gather("rank") == [0]
        file.unlink()
        world.scale(2)
        assert world.gather("rank") == [0, 1]
