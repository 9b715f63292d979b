"""Tests of `nbdist.world.code_sync`: which files go along, and workers that have them elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from nbdist.agent.code_folder import CodeFolder
from nbdist.errors import CodeNotSent, WorkerError
from nbdist.wire.messages import CodeFile, GetCode, GetStatus, PutCode, digest_of
from nbdist.words import size_text
from nbdist.world import code_sync
from nbdist.world.code_sync import FULL_FOLDER, LARGEST, TRIES, CodeListing, CodeSync, missing_text
from nbdist.world.link import Link
from nbdist.world.world import World

pytestmark = pytest.mark.world

LONG_AGO = 1_600_000_000 * 10**9


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    """Files that were written long ago."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        os.utime(path, ns=(LONG_AGO, LONG_AGO))


def listed(folder: Path) -> CodeListing:
    """A listing that has looked once."""
    listing = CodeListing(folder)
    listing.look()
    return listing


def test_code_goes_along_and_the_rest_stays(tmp_path: Path) -> None:
    """Caches, environments, notebooks, checkpoints and large files."""
    write(tmp_path, {"mine.py": "x = 1", "pkg/__init__.py": "", "pkg/deep/part.py": "y = 2"})
    write(tmp_path, {"config": "a: 1", "venv/pyvenv": "", "big": bytes(LARGEST + 1)})
    for name in (".git/HEAD", "__pycache__/mine.cpython-311.pyc", "nb.ipynb", "checkpoints/a.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "model.pt").write_bytes(b"12345")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    listing = listed(tmp_path)
    assert {*listing.files} == {
        *("mine.py", "pkg/__init__.py", "pkg/deep/part.py", "config", "venv/pyvenv")
    }
    assert listing.files["mine.py"].digest == digest_of(b"x = 1")
    assert {*listing.left_out} == {"big", "model.pt", "checkpoints/"}
    said = listing.note()
    assert said.startswith("`--sync-code` leaves out big (1 MiB), model.pt (5 B) and checkpoints/")
    assert said.endswith("`!big` in .nbdistignore sends it.")


def test_a_linked_file_is_as_any_other(tmp_path: Path) -> None:
    """It is sent as what it leads to; a program stays one."""
    write(tmp_path, {"outside": "#!/bin/sh", "nb/data": "x"})
    (tmp_path / "outside").chmod(0o755)
    (tmp_path / "nb" / "run").symlink_to(tmp_path / "outside")
    files = listed(tmp_path / "nb").files
    assert files["run"] == CodeFile(digest_of(b"#!/bin/sh"), is_program=True)
    assert not files["data"].is_program


def test_the_ignore_file_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later of two lines; a folder that is asked for comes with all that is in it."""
    monkeypatch.setattr(code_sync, "MOST_BYTES", LARGEST)
    write(
        tmp_path, {"a.py": "1", "b.py": "2", "secret/key": "3", "weights/big": bytes(LARGEST + 1)}
    )
    write(tmp_path, {"weights/old": "x", "checkpoints/best": "4", "checkpoints/last": "5"})
    rules = "# mine\n*.py\n!b.py\nsecret/\n!weights/\nweights/old\n!checkpoints/best\n"
    (tmp_path / ".nbdistignore").write_text(rules)
    found = listed(tmp_path).files
    wanted = {"b.py", "weights/big", "checkpoints/best", "checkpoints/last", ".nbdistignore"}
    assert {*found} == wanted


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., str]:
    """Runs git in a new repository; returns what it writes."""

    def run(*words: str, said: str = "") -> str:
        command = ["git", "-C", str(tmp_path), "-c", "core.fsmonitor=false", *words]
        return subprocess.check_output(command, input=said, text=True).strip()

    try:
        run("init", "-q")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no git")
    return run


def test_a_look_runs_nothing_that_the_folder_names(tmp_path: Path, git: Callable[..., str]) -> None:
    """A repository of somebody else's: what its own configuration has git run or fetch, is not."""
    ran = tmp_path / "ran"
    hook = tmp_path / "hooks" / "post-index-change"
    write(tmp_path, {"a.py": "1", "hooks/post-index-change": f"#!/bin/sh\ntouch {ran}-hook\n"})
    hook.chmod(0o700)
    # The blob of an ignore file that is not checked out would be fetched to be read.
    ignore = git("hash-object", "-w", "--stdin", said="*.log\n")
    git("update-index", "--add", "--cacheinfo", f"100644,{ignore},.gitignore")
    git("update-index", "--skip-worktree", ".gitignore")
    (tmp_path / ".git" / "objects" / ignore[:2] / ignore[2:]).unlink()
    for name, value in {
        "core.hooksPath": str(hook.parent),
        "core.pager": f"touch {ran}-pager",
        "pager.ls-files": "true",
        "alias.ls-files": f"!touch {ran}-alias",
        "core.repositoryFormatVersion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.url": f"ext::touch {ran}-fetch",
        "remote.origin.promisor": "true",
        "protocol.ext.allow": "always",
        "core.fsmonitor": f"touch {ran}-fsmonitor;",
    }.items():
        git("config", name, value)
    listed(tmp_path)
    assert [*tmp_path.glob("ran*")] == []


def test_what_git_ignores_stays(tmp_path: Path, git: Callable[..., str]) -> None:
    """Also folders; but for what the ignore file asks for.  New files go along unasked."""
    write(tmp_path, {"a.py": "1", "local.py": "2", "out/x": "3", "wanted.py": "4"})
    (tmp_path / ".gitignore").write_text("local.py\nout/\nwanted.py\n")
    (tmp_path / ".nbdistignore").write_text("!wanted.py\n")
    listing = listed(tmp_path)
    assert {*listing.files} == {"a.py", "wanted.py", ".gitignore", ".nbdistignore"}
    assert listing.why_not("local.py") == "git or nbdist ignores it"
    (tmp_path / ".gitignore").write_text("out/\n")
    assert listing.look()
    assert "local.py" in listing.files


def test_a_folder_full_of_data_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its modules; with more still the rest is not looked at, which is said."""
    (tmp_path / "data").mkdir()
    for number in range(FULL_FOLDER + 1):
        (tmp_path / "data" / f"{number}.jpg").touch()
    write(tmp_path, {"data/load.py": "1"})
    listing = listed(tmp_path)
    assert {*listing.files} == {"data/load.py"}
    assert "data/" in listing.left_out
    monkeypatch.setattr(code_sync, "MOST_LOOKED_AT", FULL_FOLDER)
    assert "has looked at the first 500 files below" in listed(tmp_path).note()


def test_changes_are_found(tmp_path: Path) -> None:
    """New, edited, renamed, removed; of the same size, and in folders that are new."""
    write(tmp_path, {"a.py": "x = 1", "sub/b.py": "y = 1"})
    listing = listed(tmp_path)
    assert not listing.look()
    write(tmp_path, {"a.py": "x = 2"})
    assert listing.look()
    assert listing.files["a.py"].digest == digest_of(b"x = 2")
    write(tmp_path, {"sub/c.py": "z = 1"})
    assert listing.look()
    (tmp_path / "sub" / "c.py").rename(tmp_path / "d.py")
    assert listing.look()
    assert {*listing.files} == {"a.py", "sub/b.py", "d.py"}
    (tmp_path / "new").mkdir()
    assert not listing.look()
    write(tmp_path, {"new/e.py": "1"})
    assert listing.look()
    (tmp_path / "a.py").unlink()
    assert listing.look()
    assert {*listing.files} == {"sub/b.py", "d.py", "new/e.py"}
    assert not listing.look()


# --- modules that are lacking elsewhere ---------------------------------------------------


def test_a_module_that_is_missing_there(tmp_path: Path) -> None:
    """Where the notebook has it, and what brings it there; nothing of what is nowhere."""
    folder, other, installed = (tmp_path / name for name in ("nb", "src", "python3/site-packages"))
    files = (folder / "mine.py", folder / "pkg" / "__init__.py", folder / "pkg" / "part.py")
    for file in (*files, other / "own.py", installed / "package" / "__init__.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    path = ["", str(other), str(installed)]
    where = "is in the notebook's folder, which b does not have: `--sync-code` sends it."
    for missing, said in (
        ("'mine'", f"`mine.py` {where}"),
        ("'pkg.part'; 'pkg' is not a package", f"`pkg/part.py` {where}"),
        ("'pkg'", f"`pkg/__init__.py` {where}"),
        ("'own'", f"`own` is in {other}, which b does not have: install it there."),
        ("'package.sub'", "`package` is installed on the notebook's machine, but not on b."),
        ("'nowhere_at_all'", ""),
    ):
        assert missing_text(f"No module named {missing}", "b", folder, path, None) == said
    assert missing_text("invalid literal", "b", folder, path, None) == ""
    code = CodeSync(folder)
    code.listing.look()
    assert missing_text("No module named 'mine'", "b", folder, path, code) == ""
    (folder / ".nbdistignore").write_text("mine.py\n")
    code.listing.look()
    assert missing_text("No module named 'mine'", "b", folder, path, code) == (
        "`mine.py` is in the notebook's folder, but `--sync-code` leaves it out: git or nbdist "
        "ignores it. `!mine.py` in .nbdistignore sends it."
    )


# --- on nodes that do not see the folder ---------------------------------------------------


ELSEWHERE = """#!/bin/sh
exec unshare --mount --uts sh -c 'hostname elsewhere && mount -t tmpfs none "$0" && exec "$@"' \\
    {folder} {python} "$@"
"""
"""An interpreter on a machine of that name, where the folder is another, empty one."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The notebook's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "mine.py").write_text("def answer():\n    return 1\n")
    return tmp_path


@pytest.fixture
def link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """An agent that does not see the folder; needs root."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "--uts", "true"]).returncode:
        pytest.skip("no namespaces can be made here")
    with tempfile.TemporaryDirectory() as place:
        python = Path(place, "python")
        python.write_text(ELSEWHERE.format(folder=folder, python=sys.executable))
        python.chmod(0o755)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", str(python))
            link = Link()
            link.open()
            link.call(GetStatus())
        yield link
        link.close()


def elsewhere(link: Link, n: int, **options: object) -> World:
    """A world of that agent, not started yet."""
    world = World(n, log_dir="", **options)  # type: ignore[arg-type]
    world.session.adopt(link)
    return world


@pytest.mark.own_agent
def test_code_follows_the_notebook(link: Link, folder: Path) -> None:
    """Modules, data and the working folder; edited modules are imported anew, new ones found."""
    with elsewhere(link, 2, sync_code=True) as world:
        world.execute("import os, mine; from mine import answer; where = os.getcwd()")
        where = world.gather("where")
        assert where[0] == where[1] != str(folder)
        assert world.gather("answer(), mine.answer()") == [(1, 1)] * 2
        (folder / "mine.py").write_text("def answer():\n    return 2\n")
        assert world.gather("answer(), mine.answer()") == [(2, 2)] * 2
        (folder / "sub").mkdir()
        (folder / "sub" / "new.py").write_text("import mine\nbig = 10 * mine.answer()\n")
        (folder / "words.txt").write_text("hello")
        world.execute("from sub.new import big; text = open('words.txt').read()")
        assert world.gather("big, text") == [(20, "hello")] * 2
        (folder / "words.txt").unlink()
        assert world.gather("os.path.exists('words.txt')") == [False] * 2
        (folder / "mine.py").write_text("def answer(:\n")
        assert world.gather("mine.answer()") == [2] * 2  # as it was, with a line that says so
        world.restart()
        with pytest.raises(WorkerError, match="SyntaxError"):
            world.execute("import mine")
        assert Path(where[0]).exists()
    assert not Path(where[0]).exists()


def test_a_folder_that_is_shared_is_not_sent(folder: Path) -> None:
    """Workers on this machine work in it; edited modules are imported anew there too."""
    with World(1, log_dir="", sync_code=True) as world:
        world.execute("import os, mine")
        assert world.gather("(os.getcwd(), mine.answer())") == [(str(folder), 1)]
        assert world.session.code is not None
        assert world.session.code.is_shared
        (folder / "mine.py").write_text("def answer():\n    return 22\n")
        assert world.gather("mine.answer()") == [22]


@pytest.fixture
def node(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CodeFolder]:
    """What an agent elsewhere does with the files, without the agent."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("node")))
    node = CodeFolder()
    yield node
    node.close()


def bring(code: CodeSync, node: CodeFolder, changes: Iterable[str] = ()) -> None:
    """Bring the files there; `mine.py` becomes each of `changes` while it is being sent."""
    waiting = iter(changes)

    def asks(request: GetCode | PutCode) -> Iterator[None]:
        if isinstance(request, GetCode):
            request = request._replace(landmarks={})
            for text in islice(waiting, 1):
                (code.listing.folder / "mine.py").write_text(text)
        return node.take(request)
        yield

    list(code.bringing(asks))


def test_what_stays_is_said_once(folder: Path, node: CodeFolder) -> None:
    """And again when it is something else."""
    code = CodeSync(folder)
    for name, size in (("model.pt", 2000), ("other.pt", 9000)):
        (folder / name).write_bytes(bytes(size))
        bring(code, node)
        said = f"`--sync-code` leaves out {name} ({size_text(size)})"
        assert code.take_note().startswith(said)
        bring(code, node)
        assert code.take_note() == ""


def test_files_that_change_while_they_are_sent(folder: Path, node: CodeFolder) -> None:
    """They are sent as they are then; those that change again and again are not."""
    code = CodeSync(folder)
    bring(code, node, ["x = 1", "x = 2"])
    assert node.path
    assert (node.path / "mine.py").read_text() == "x = 2"
    (folder / "mine.py").write_text("")
    with pytest.raises(CodeNotSent, match="keep changing"):
        bring(code, node, map(str, range(TRIES)))
    shutil.rmtree(folder)
    with pytest.raises(CodeNotSent, match=f"folder: {folder}: No such file or directory"):
        bring(CodeSync(folder), node)


@pytest.fixture
def small(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Where agents put temporary files, with room for little; needs root."""
    place = tmp_path_factory.mktemp("small")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    monkeypatch.setenv("TMPDIR", str(place))
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.own_agent
def test_a_node_without_room(small: Path, link: Link, folder: Path) -> None:
    """The cell has not run, which is said with the folder; with less to send the next one does."""
    with elsewhere(link, 1, sync_code=True) as world:
        world.execute("import mine; ran = 0")
        for number in range(2):
            (folder / f"large{number}.txt").write_text("x" * 900_000)
        (folder / "mine.py").write_text("def answer():\n    return 2\n")
        with pytest.raises(CodeNotSent) as found:
            world.execute("ran += 1")
        said = str(found.value)
        assert said.startswith("`--sync-code` could not bring the notebook's folder to elsewhere: ")
        assert f"{small}/nbdist-code-" in said
        assert said.endswith(": No space left on device.")
        (folder / "large1.txt").unlink()
        assert world.gather("ran, mine.answer()") == [(0, 2)]
    assert [*small.iterdir()] == []
