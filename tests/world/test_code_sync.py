"""Tests of `nbdist.world.code_sync`: which files go along, and how they come to other nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from nbdist.agent.code_folder import CodeFolder
from nbdist.errors import CodeNotSent
from nbdist.wire.messages import CodeHeld, GetCode, PutCode
from nbdist.words import size_text
from nbdist.world import code_sync
from nbdist.world.code_sync import FULL_FOLDER, LARGEST, CodeListing, CodeSync, missing_text
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
    """Caches, environments, notebooks, checkpoints, large files; links are files."""
    write(tmp_path, {"mine.py": "x = 1", "pkg/__init__.py": "", "pkg/deep/part.py": "y = 2"})
    write(tmp_path, {"config": "a: 1", "venv/pyvenv": "", "big": bytes(LARGEST + 1)})
    write(tmp_path, {".git/HEAD": "", "__pycache__/mine.cpython-311.pyc": "", "nb.ipynb": ""})
    write(tmp_path, {"checkpoints/a.json": "", "env/pyvenv.cfg": "", "model.pt": b"12345"})
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round").symlink_to(tmp_path)
    (tmp_path / "run").symlink_to(Path(".git", "HEAD"))
    os.mkfifo(tmp_path / "pipe")
    listing = listed(tmp_path)
    modules = ("mine.py", "pkg/__init__.py", "pkg/deep/part.py")
    assert {*listing.files} == {*modules, "config", "venv/pyvenv", "run"}
    assert {*listing.left_out} == {"big", "model.pt", "checkpoints/"}
    said = listing.note()
    assert said.startswith("`--sync-code` leaves out big (1 MiB), model.pt (5 B) and checkpoints/")
    assert said.endswith("`!big` in .nbdistignore sends it.")


def test_the_ignore_file_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later of two lines; a folder that is asked for comes with all that is in it."""
    monkeypatch.setattr(code_sync, "MOST_BYTES", LARGEST)
    write(tmp_path, {"a.py": "1", "b.py": "2", "secret/key": "3", "weights/old": "x"})
    write(
        tmp_path, {"weights/big": bytes(LARGEST + 1), "checkpoints/best": "", "checkpoints/c": ""}
    )
    rules = "# mine\n*.py\n!b.py\nsecret/\n!weights/\nweights/old\n!checkpoints/best\n"
    (tmp_path / ".nbdistignore").write_text(rules)
    wanted = {"b.py", "weights/big", "checkpoints/best", "checkpoints/c", ".nbdistignore"}
    assert {*listed(tmp_path).files} == wanted


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
    listing.look()
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
    for change in (
        lambda: write(tmp_path, {"a.py": "x = 2"}),
        lambda: write(tmp_path, {"sub/c.py": "z = 1"}),
        lambda: (tmp_path / "sub" / "c.py").rename(tmp_path / "d.py"),
        lambda: write(tmp_path, {"new/e.py": "1"}),
        lambda: (tmp_path / "a.py").unlink(),
    ):
        before = listing.files
        listing.look()
        assert listing.files == before
        change()
        listing.look()
        assert listing.files != before
        (tmp_path / "new").mkdir(exist_ok=True)  # is nothing yet
    assert {*listing.files} == {"sub/b.py", "d.py", "new/e.py"}


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


# --- how it comes to nodes ------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The notebook's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "mine.py").write_text("def answer():\n    return 1\n")
    return tmp_path


def test_a_folder_that_is_shared_is_not_sent(folder: Path) -> None:
    """Workers on this machine work in it; edited modules are imported anew there too."""
    with World(1, log_dir="", sync_code=True) as world:
        world.execute("import os, mine")
        assert world.gather("(os.getcwd(), mine.answer())") == [(str(folder), 1)]
        assert world.session.code.is_shared
        (folder / "mine.py").write_text("def answer():\n    return 22\n")
        assert world.gather("mine.answer()") == [22]
        (folder / "mine.py").write_text("def answer(:\n")
        assert world.gather("mine.answer()") == [22]  # as it was, with a line that says so


@pytest.fixture
def node(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CodeFolder]:
    """What an agent elsewhere does with the files, without the agent."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("node")))
    node = CodeFolder()
    yield node
    node.close()


def bring(code: CodeSync, node: CodeFolder) -> list[str]:
    """Bring the files there, and return which were sent."""
    sent: list[str] = []

    def asks(request: GetCode | PutCode) -> Generator[None, None, CodeHeld]:
        sent.extend(request.files if isinstance(request, PutCode) else ())
        is_get = isinstance(request, GetCode)
        return node.take(request._replace(landmarks={}) if is_get else request)
        yield

    list(code.bringing(asks))
    return sorted(sent)


def test_only_what_has_changed_is_sent(folder: Path, node: CodeFolder) -> None:
    """To another agent all; a program as one; what stays is said once."""
    write(folder, {"mine.py": "1", "run": "sh"})
    (folder / "run").chmod(0o755)
    code = CodeSync(folder)
    assert bring(code, node) == ["mine.py", "run"]
    assert os.access(node.path / "run", os.X_OK)
    assert bring(code, node) == []
    write(folder, {"mine.py": "2"})
    assert bring(code, node) == ["mine.py"]
    assert (node.path / "mine.py").read_text() == "2"
    code.forget()
    assert bring(code, node) == ["mine.py", "run"]
    for name, size in (("model.pt", 2000), ("other.pt", 9000)):
        (folder / name).write_bytes(bytes(size))
        bring(code, node)
        said = f"`--sync-code` leaves out {name} ({size_text(size)})"
        assert code.take_note().startswith(said)
        bring(code, node)
        assert code.take_note() == ""
    compiled = node.path / "__pycache__" / "mine.of-a-cell.pyc"
    compiled.mkdir(parents=True)
    (folder / "mine.py").unlink()
    with pytest.raises(CodeNotSent, match=r"mine\.of-a-cell\.pyc: Is a directory"):
        bring(code, node)
    shutil.rmtree(compiled.parent)
    assert bring(code, node) == ["run"]
    shutil.rmtree(folder)
    with pytest.raises(CodeNotSent, match=f"folder: {folder}: No such file or directory"):
        bring(CodeSync(folder), node)
