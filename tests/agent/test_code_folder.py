"""Tests of `nbdist.agent.code_folder`: a node's copy of the notebook's folder, and its removal."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.agent.code_folder import CODE_FOLDER_PREFIX, CodeFolder, remove_dead_folders
from nbdist.wire.messages import CodeHeld, GetCode, Landmark, PutCode
from nbdist.wire.spec import WorldSpec


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which code folders are created."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def code(parent: Path) -> Iterator[CodeFolder]:
    """The code folder of a node that has no code yet."""
    code = CodeFolder()
    yield code
    code.close()


def bring(code: CodeFolder, texts: dict[str, str], kind: bytes = tarfile.REGTYPE) -> CodeHeld:
    """Send `texts`, as members of type `kind`, to a node without them; return its last answer."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, text in texts.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(text), 0o700 if path == "run" else 0o600
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info, io.BytesIO(text.encode()))
    digest = repr((texts, kind))
    assert not code.answer(GetCode(digest, None)).is_here
    *_, held = map(code.answer, PutCode.of(digest, zlib.compress(packed.getvalue())))
    assert held.is_here == (not held.problem)
    return held


def found(code: CodeFolder) -> dict[str, str]:
    """Return the text of each file in the code folder, by its relative path."""
    return {
        str(path.relative_to(code.path)): path.read_text()
        for path in code.path.rglob("*")
        if path.is_file()
    }


def compile_a(code: CodeFolder) -> None:
    """Write a compiled module, as Python does when `a.py` is imported."""
    (code.path / "__pycache__").mkdir()
    (code.path / "__pycache__" / "a.cpython-311.pyc").write_text("")


def test_files_are_as_the_notebook_has_them(
    code: CodeFolder, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are added, changed and removed by an archive; an equal file is not written again."""
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    assert bring(code, {"a.py": "1", "b.py": "2"}) == CodeHeld("b", is_here=True)
    assert stat.S_IMODE(code.path.stat().st_mode) == 0o700
    assert found(code) == {"a.py": "1", "b.py": "2"}
    before = (code.path / "a.py").stat()
    assert not bring(code, {"a.py": "1", "d/e.py": "new", "run": "sh"}).problem
    assert found(code) == {"a.py": "1", "d/e.py": "new", "run": "sh"}
    assert (code.path / "a.py").stat() == before
    assert os.access(code.path / "run", os.X_OK)
    bring(code, {"a.py": "1"})
    assert found(code) == {"a.py": "1"}
    assert not (code.path / "d").exists()
    bring(code, {})
    assert [*code.path.iterdir()] == []
    code.close()
    assert [*parent.iterdir()] == []


def test_what_user_code_has_changed_is_replaced(code: CodeFolder) -> None:
    """The next archive replaces a changed file and drops its compiled module; open files stay."""
    bring(code, {"a.py": "1", "b.py": "1"})
    compile_a(code)
    (code.path / "a.py").write_text("mine")
    with (code.path / "a.py").open() as in_use:
        bring(code, {"a.py": "1"})
        assert in_use.read() == "mine"
    assert found(code) == {"a.py": "1"}


def test_a_file_that_cells_have_written_stays(code: CodeFolder, parent: Path) -> None:
    """`close` removes the code, and no cleanup removes a folder with other files of the user."""
    bring(code, {"a.py": "1"})
    compile_a(code)
    (code.path / "out").mkdir()
    weights = code.path / "out" / "model.pt"
    weights.write_text("weights")
    code.close()
    there = {each for each in weights.parents[2].rglob("*") if each != weights.parents[1]}
    assert there == {weights.parent, weights}
    remove_dead_folders(parent)
    assert weights.exists()


def test_a_damaged_archive_is_refused(code: CodeFolder) -> None:
    """The node reports a damaged archive, keeps the files that it has, and takes the next archive.

    The archive is cut, has a wrong byte, or is no tar file.
    """
    bring(code, {"a.py": "1"})
    tar = io.BytesIO()
    tarfile.open(fileobj=tar, mode="w").close()
    whole = zlib.compress(tar.getvalue())
    for archive in (whole[:-9], whole[:-1] + bytes([whole[-1] ^ 1]), zlib.compress(b"x" * 600)):
        assert not code.answer(GetCode("damaged", None)).is_here
        held = code.answer(PutCode("damaged", archive, is_last=True))
        assert not held.is_here
        assert held.problem.startswith("the archive arrived damaged (")
        assert found(code) == {"a.py": "1"}
    assert not bring(code, {"a.py": "2"}).problem
    assert found(code) == {"a.py": "2"}


def test_names_that_lead_out_are_refused(code: CodeFolder, parent: Path) -> None:
    """An archive is refused as a whole if a member is a link, a device or leads out of the folder.

    No file is written through a link that is in the folder.
    """
    for name in ("../out.py", "/out.py", "a/../../out.py"):
        assert f"'{name}' was refused" in bring(code, {"b.py": "1", name: "1"}).problem
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        assert "'c.py' was refused" in bring(code, {"c.py": ""}, kind).problem
    assert [*parent.iterdir()] == []
    bring(code, {"a.py": "1"})
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (code.path / "sub").symlink_to(elsewhere)
    held = bring(code, {"a.py": "1", "sub/b.py": "2"})
    assert "'sub/b.py' was refused: it leads out of the folder" in held.problem
    (code.path / "a.py").unlink()
    (elsewhere / "c.py").write_text("theirs")
    (code.path / "a.py").symlink_to(elsewhere / "c.py")
    bring(code, {"a.py": "2"})
    assert [each.read_text() for each in elsewhere.iterdir()] == ["theirs"]


def test_the_folder_of_a_killed_agent_is_removed(code: CodeFolder, parent: Path) -> None:
    """The folder of a live agent stays, and so does a user's folder with the same prefix."""
    killed = CodeFolder()
    bring(killed, {"a.py": "1"})
    (parent / f"{CODE_FOLDER_PREFIX}mine").mkdir()
    bring(code, {"a.py": "1"})
    remove_dead_folders(parent)
    assert killed.path.exists()
    os.close(killed._claim)  # as the kernel does at a process's end
    remove_dead_folders(parent)
    assert not killed.path.exists()
    assert (parent / f"{CODE_FOLDER_PREFIX}mine").exists()
    assert found(code) == {"a.py": "1"}


def test_a_shared_folder_is_used_as_it_is(code: CodeFolder, parent: Path) -> None:
    """A folder shared with the notebook is used as it is, but not a mere copy of the folder."""
    folder = parent / "nb"
    folder.mkdir()
    (folder / "a.py").write_text("1")
    path = ("", str(folder), f"{folder}/src", f"{folder}2", "/usr/lib")
    spec = WorldSpec(1, None, {}, str(folder), path, 1, "python")
    get = GetCode("digest", Landmark.of(str(folder / "a.py")))
    assert code.answer(get).is_shared
    assert (code.path, code.with_folder(spec)) == (None, spec)
    shutil.copytree(folder, parent / "copy")
    shutil.rmtree(folder)
    (parent / "copy").rename(folder)
    assert not code.answer(get).is_shared
    bring(code, {"a.py": "1"})
    here, moved = str(code.path), code.with_folder(spec)
    assert moved.cwd == here
    assert moved.sys_path == ("", here, f"{here}/src", f"{folder}2", "/usr/lib")
    assert code.with_folder(moved) == moved
