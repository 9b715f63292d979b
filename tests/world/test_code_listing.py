"""Tests of `nbdist.world.code_sync`: which files go along, and how changes are found."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.wire.messages import CodeFile, digest_of
from nbdist.world import code_sync
from nbdist.world.code_sync import FULL_FOLDER, LARGEST, CodeListing

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
    """The later of two lines; a folder that is asked for comes with all that is in it.

    What is asked for takes no room from the rest.
    """
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


def test_two_changes_in_one_moment(tmp_path: Path) -> None:
    """A file that has only just changed is read again, as its times may not show the next."""
    write(tmp_path, {"old.py": "x = 1"})
    (tmp_path / "new.py").write_text("x = 1")
    listing = listed(tmp_path)
    assert listing._stamps["new.py"] is None
    os.utime(tmp_path / "new.py", ns=(LONG_AGO, LONG_AGO))
    assert not listing.look()
    assert None not in (listing._stamps["new.py"], listing._stamps["old.py"])
