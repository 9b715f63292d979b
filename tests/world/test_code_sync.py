"""Tests of `nbdist.world.code_sync`: which files are sent, and how they come to other nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from nbdist.agent.code_folder import CodeFolder
from nbdist.errors import CodeNotSent
from nbdist.wire.messages import CodeHeld, GetCode, PutCode
from nbdist.world import code_sync
from nbdist.world.code_sync import CodeSync, missing_text
from nbdist.world.world import World

pytestmark = pytest.mark.world

LONG_AGO = 1_600_000_000 * 10**9


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    """Write files, and set the time of their last change to long ago."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        os.utime(path, ns=(LONG_AGO, LONG_AGO))


def listed(folder: Path) -> set[str]:
    """Return the paths of the files in a folder that are sent."""
    return {path for path, _ in code_sync._files_in(folder)}


def test_only_python_files_are_sent_without_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden folders and environments are left out, links are not; too many files are an error."""
    write(tmp_path, {"mine.py": "x = 1", "pkg/__init__.py": "", "pkg/deep/part.py": "y = 2"})
    write(tmp_path, {"config": "a: 1", "nb.ipynb": "", ".hidden/a.py": "", "venv/b.py": ""})
    write(tmp_path, {"__pycache__/c.py": "", "env/pyvenv.cfg": "", "env/d.py": ""})
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round").symlink_to(tmp_path)
    (tmp_path / "link.py").symlink_to("mine.py")
    os.mkfifo(tmp_path / "pipe.py")
    modules = {"mine.py", "pkg/__init__.py", "pkg/deep/part.py", "venv/b.py", "link.py"}
    assert listed(tmp_path) == modules
    monkeypatch.setattr(code_sync, "MAX_SEARCHED_FILES", 5)
    with pytest.raises(CodeNotSent, match="has more than 5 files: `git init` there, and list"):
        listed(tmp_path)


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., str]:
    """A function that runs git in a new repository, and returns what git writes."""

    def run(*words: str, stdin: str = "") -> str:
        command = ["git", "-C", str(tmp_path), "-c", "core.fsmonitor=false", *words]
        return subprocess.check_output(command, input=stdin, text=True).strip()

    try:
        run("init", "-q")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no git")
    return run


def test_a_look_runs_no_program_of_a_repository(tmp_path: Path, git: Callable[..., str]) -> None:
    """Git runs and fetches nothing that the configuration of another person's repository names."""
    ran = tmp_path / "ran"
    hook = tmp_path / "hooks" / "post-index-change"
    write(tmp_path, {"a.py": "1", "hooks/post-index-change": f"#!/bin/sh\ntouch {ran}-hook\n"})
    hook.chmod(0o700)
    # To read an ignore file that is not checked out, git would fetch the file's blob.
    ignore = git("hash-object", "-w", "--stdin", stdin="*.log\n")
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
    assert "a.py" in listed(tmp_path)
    assert [*tmp_path.glob("ran*")] == []


def test_files_that_git_ignores_are_not_sent(tmp_path: Path, git: Callable[..., str]) -> None:
    """Untracked files and files of submodules are sent; notebooks and Python's caches are not."""
    write(tmp_path, {"a.py": "1", "local.py": "2", "out/x": "3", "data.csv": "4", "nb.ipynb": ""})
    write(tmp_path, {"__pycache__/a.pyc": "", "sub/b.py": "", "sub/.gitignore": "*.log"})
    write(tmp_path, {"sub/c.log": "", "removed.py": ""})
    (tmp_path / ".gitignore").write_text("local.py\nout/\n")
    git("-C", "sub", "init", "-q")
    (tmp_path / "link").symlink_to("sub")
    (tmp_path / "empty").mkdir()
    git("add", "a.py", "removed.py")
    git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},empty")
    (tmp_path / "removed.py").unlink()
    assert listed(tmp_path) == {"a.py", "data.csv", ".gitignore", "sub/b.py", "sub/.gitignore"}
    assert listed(tmp_path / "out") == set()
    git("add", "-f", "local.py")
    assert "local.py" in listed(tmp_path)


# --- modules that another node lacks ------------------------------------------------------


def test_a_missing_module_gets_a_hint(tmp_path: Path) -> None:
    """The hint says where the notebook has the module or file, and how a node gets it."""
    folder, other, installed = (tmp_path / name for name in ("nb", "src", "python3/site-packages"))
    files = (folder / "mine.py", folder / "pkg" / "__init__.py", folder / "pkg" / "part.py")
    for file in (*files, other / "own.py", installed / "package" / "__init__.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    path = ["", str(other), str(installed)]
    where = "is in the notebook's folder, which b does not have: `--sync-code` sends it."
    for missing, hint in (
        ("'mine'", f"`mine.py` {where}"),
        ("'pkg.part'; 'pkg' is not a package", f"`pkg/part.py` {where}"),
        ("'pkg'", f"`pkg/__init__.py` {where}"),
        ("'own'", f"`own` is in {other}, which b does not have: install it there."),
        ("'package.sub'", "`package` is installed on the notebook's machine, but not on b."),
        ("'nowhere_at_all'", ""),
    ):
        assert missing_text(f"No module named {missing}", "b", folder, path, None) == hint
    assert missing_text("invalid literal", "b", folder, path, None) == ""
    # A missing file gets a hint only with `--sync-code`.
    (folder / "config.yaml").touch()
    no_file = "[Errno 2] No such file or directory: 'config.yaml'"
    (tmp_path / "data.csv").touch()
    assert missing_text(no_file, "b", folder, path, None) == ""
    code = CodeSync(folder)
    list(code.send_changes(has_all_files))
    assert missing_text("No module named 'mine'", "b", folder, path, code) == ""
    assert missing_text(no_file.replace("config", "none"), "b", folder, path, code) == ""
    for elsewhere in ("../data.csv", "./config.yaml"):
        message = no_file.replace("config.yaml", elsewhere)
        assert missing_text(message, "b", folder, path, code) == ""
    assert missing_text(no_file, "b", folder, path, code) == (
        "`config.yaml` is in the notebook's folder, but `--sync-code` leaves it out: it sends what "
        "git does not ignore, and without git Python files only. `git add -f config.yaml`, after "
        "`git init`, sends it."
    )


def has_all_files(request: GetCode | PutCode, _: float) -> Generator[None, None, CodeHeld]:
    """Answer as a node that has all files."""
    return CodeHeld("b", is_here=True)
    yield


# --- how files come to nodes ----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The notebook's folder, with a module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "mine.py").write_text("def answer():\n    return 1\n")
    return tmp_path


def test_a_shared_folder_is_not_sent(folder: Path) -> None:
    """Workers on the notebook's machine use the folder itself, and import edited modules again."""
    with World(1, log_dir="", sync_code=True) as world:
        world.execute("import os, mine")
        assert world.gather("(os.getcwd(), mine.answer())") == [(str(folder), 1)]
        assert world.engine.code.is_shared
        (folder / "mine.py").write_text("def answer():\n    return 22\n")
        assert world.gather("mine.answer()") == [22]
        (folder / "mine.py").write_text("def answer(:\n")
        assert world.gather("mine.answer()") == [22]  # the edited module is not valid Python


@pytest.fixture
def node(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CodeFolder]:
    """The code folder of an agent on another node, without the agent."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("node")))
    node = CodeFolder()
    yield node
    node.close()


def bring(code: CodeSync, node: CodeFolder) -> int:
    """Send the changes to the node; return how many messages were needed."""
    requests: list[GetCode | PutCode] = []

    def ask_node(request: GetCode | PutCode, _: float) -> Generator[None, None, CodeHeld]:
        requests.append(request)
        is_get = isinstance(request, GetCode)
        return node.answer(request._replace(landmark=None) if is_get else request)
        yield

    list(code.send_changes(ask_node))
    return len(requests)


def test_each_kind_of_change_is_sent(folder: Path, node: CodeFolder) -> None:
    """A new, edited, renamed or removed file is noticed, also with equal size or in a new folder.

    Without a change no node is asked; after `forget` nodes are asked again.
    """
    write(folder, {"mine.py": "x = 1", "sub/b.py": "y = 1", "run.py": "sh"})
    (folder / "run.py").chmod(0o755)
    code = CodeSync(folder)
    assert bring(code, node) == 2
    assert os.access(node.path / "run.py", os.X_OK)
    for change in (
        lambda: write(folder, {"mine.py": "x = 2"}),
        lambda: write(folder, {"sub/c.py": "z = 1"}),
        lambda: (folder / "sub" / "c.py").rename(folder / "d.py"),
        lambda: write(folder, {"new/e.py": "1"}),
        lambda: (folder / "run.py").unlink(),
    ):
        assert bring(code, node) == 0
        change()
        assert bring(code, node) == 2
        assert {*node.path.rglob("*.py")} == {node.path / path for path in listed(folder)}
        (folder / "new").mkdir(exist_ok=True)  # an empty folder is no change
    assert (node.path / "mine.py").read_text() == "x = 2"
    (folder / "d.py").touch()  # a second change soon after may keep the times
    assert [bring(code, node), bring(code, node)] == [1, 1]
    code.forget()
    assert bring(code, node) == 1


def test_a_file_that_had_just_changed_is_compared_once_more(
    folder: Path, node: CodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change may keep the file's times, so one comparison follows, even a minute later."""
    code, now = CodeSync(folder), time.time_ns()
    (folder / "mine.py").touch()
    assert bring(code, node) == 2
    monkeypatch.setattr(time, "time_ns", lambda: now + 60 * 10**9)
    assert [bring(code, node), bring(code, node)] == [1, 0]


def test_the_error_says_why_files_were_not_sent(
    folder: Path, node: CodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the largest files, a path that the node cannot write, or a removed folder."""
    write(folder, {f"{size}.py": bytes(size << 10) for size in (1, 2, 3, 4)})
    code = CodeSync(folder)
    with monkeypatch.context() as patched:
        patched.setattr(code_sync, "MAX_SYNC_BYTES", 8 << 10)
        with pytest.raises(CodeNotSent) as caught:
            bring(code, node)
    assert str(caught.value) == (
        "`--sync-code` could not bring the notebook's folder: its files have 10 KiB, and at most "
        "8 KiB are sent; the largest are 4.py (4 KiB), 3.py (3 KiB), 2.py (2 KiB). Add what ranks "
        "do not need to .gitignore, after `git rm --cached FILE` if git tracks it, or move it to "
        "another folder."
    )
    assert bring(code, node) == 2
    (node.path / "4.py").unlink()
    (node.path / "4.py").mkdir()
    write(folder, {"4.py": "new"})
    with pytest.raises(CodeNotSent, match=r"to .*: /.*4\.py: Is a directory"):
        bring(code, node)
    (node.path / "4.py").rmdir()
    assert bring(code, node) == 2
    shutil.rmtree(folder)
    with pytest.raises(CodeNotSent, match=f"folder: {folder}: No such file or directory"):
        bring(code, node)
