"""Tests of `nbdist.world.code_sync`: workers have the notebook's files where they do not see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from nbdist.agent.code_folder import CodeFolder
from nbdist.errors import CodeNotSent, WorkerError
from nbdist.wire.messages import GetCode, GetStatus, PutCode
from nbdist.words import size_text
from nbdist.world.code_sync import TRIES, CodeSync
from nbdist.world.link import Link
from nbdist.world.world import World

pytestmark = pytest.mark.own_agent

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


def test_a_folder_that_is_gone(folder: Path, node: CodeFolder) -> None:
    """One line with its name."""
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
