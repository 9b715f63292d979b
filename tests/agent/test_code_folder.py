"""Tests of `nbdist.agent.code_folder`: what a node writes of the notebook's folder, and removes."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.agent.code_folder import PREFIX, CodeFolder, drop_dead
from nbdist.wire.code_tree import CodeFile, CodePart, Landmark, digest_of
from nbdist.wire.messages import CodeHeld, GetCode, PutCode
from nbdist.wire.spec import WorldSpec

NOTEBOOKS = "/notebooks/folder"


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are unpacked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def code(parent: Path) -> Iterator[CodeFolder]:
    """One that holds nothing yet."""
    code = CodeFolder()
    yield code
    code.close()


def bring(code: CodeFolder, programs: tuple[str, ...] = (), **files: str) -> CodeHeld:
    """Send files as the notebook does: what is missing, in one part."""
    return bring_paths(code, {f"{name}.py": text for name, text in files.items()}, programs)


def bring_paths(
    code: CodeFolder, texts: dict[str, str], programs: tuple[str, ...] = ()
) -> CodeHeld:
    """The same, by path."""
    contents = {digest_of(text.encode()): text.encode() for text in texts.values()}
    files = {
        path: CodeFile(digest_of(text.encode()), path in programs) for path, text in texts.items()
    }
    lacks = code.look(GetCode((), files)).lacks
    return code.take(PutCode(CodePart({digest: contents[digest] for digest in lacks}, files)))


def found(code: CodeFolder) -> dict[str, str]:
    """What is there, without what nbdist has for itself."""
    assert code.path is not None
    return {
        str(path.relative_to(code.path)): path.read_text()
        for path in code.path.rglob("*")
        if path.is_file() and not path.name.startswith(".nbdist")
    }


def test_files_are_as_the_notebook_has_them(code: CodeFolder, parent: Path) -> None:
    """New, changed, renamed and removed ones; only what is missing is asked for."""
    assert bring(code, a="1", b="2") == CodeHeld(code._host)
    assert code.path is not None
    assert stat.S_IMODE(code.path.stat().st_mode) == 0o700
    assert found(code) == {"a.py": "1", "b.py": "2"}
    files = {"c.py": CodeFile(digest_of(b"1")), "d/e.py": CodeFile(digest_of(b"new"))}
    assert code.look(GetCode((), files)).lacks == (digest_of(b"new"),)
    bring_paths(code, {"c.py": "1", "d/e.py": "new", "run": "sh"}, programs=("run",))
    assert found(code) == {"c.py": "1", "d/e.py": "new", "run": "sh"}
    assert os.access(code.path / "run", os.X_OK)
    bring(code, c="1")
    assert not (code.path / "d").exists()
    code.close()
    assert [*parent.iterdir()] == []


def test_what_user_code_has_changed_is_sent_again(code: CodeFolder) -> None:
    """Before the next start; and Python's own copy of a changed module goes."""
    bring(code, a="1")
    assert code.path is not None
    (code.path / "__pycache__").mkdir()
    compiled = code.path / "__pycache__" / "a.cpython-311.pyc"
    compiled.write_text("")
    (code.path / "a.py").write_text("mine")
    bring(code, a="1")
    assert found(code) == {"a.py": "1"}


def test_what_is_missing_still_is_told(code: CodeFolder) -> None:
    """Nothing has been changed then."""
    bring(code, a="1")
    files = {"a.py": CodeFile(digest_of(b"2"))}
    assert code.take(PutCode(CodePart({}, files))).lacks == (digest_of(b"2"),)
    assert found(code) == {"a.py": "1"}


def test_a_file_that_cells_have_written_stays(code: CodeFolder) -> None:
    """The code goes, and from then on the folder is the user's."""
    bring(code, a="1")
    path = code.path
    assert path is not None
    (path / "__pycache__").mkdir()
    (path / "__pycache__" / "a.cpython-311.pyc").write_text("")
    (path / "out").mkdir()
    (path / "out" / "model.pt").write_text("weights")
    code.close()
    assert sorted(str(each.relative_to(path)) for each in path.rglob("*")) == [
        "out",
        "out/model.pt",
    ]
    drop_dead(path.parent)
    assert (path / "out" / "model.pt").exists()


def test_names_that_lead_out_are_refused(code: CodeFolder, parent: Path) -> None:
    """By their steps, or by a link that is there."""
    held = bring_paths(code, {"../out.py": "1"})
    assert "'../out.py' was refused" in held.problem
    bring(code, a="1")
    assert code.path is not None
    (parent / "elsewhere").mkdir()
    (code.path / "sub").symlink_to(parent / "elsewhere")
    held = bring_paths(code, {"a.py": "1", "sub/b.py": "2"})
    assert "'sub/b.py' was refused: it leads out of the folder" in held.problem
    (code.path / "a.py").unlink()
    (parent / "elsewhere" / "c.py").write_text("theirs")
    (code.path / "a.py").symlink_to(parent / "elsewhere" / "c.py")
    bring(code, a="2")
    assert (parent / "elsewhere" / "c.py").read_text() == "theirs"
    assert [*(parent / "elsewhere").iterdir()] == [parent / "elsewhere" / "c.py"]


def test_no_room(code: CodeFolder, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem is told, with the place."""
    nowhere = parent / "gone"
    monkeypatch.setattr(tempfile, "tempdir", str(nowhere))
    assert bring(code, a="1").problem.startswith(f"{nowhere}/{PREFIX}")


def test_what_a_killed_agent_left_goes(code: CodeFolder, parent: Path) -> None:
    """What another one holds stays, and so does a folder of that name that is not ours."""
    killed = CodeFolder()
    bring(killed, a="1")
    assert killed.path is not None
    (parent / f"{PREFIX}mine").mkdir()
    bring(code, a="1")
    drop_dead(parent)
    assert killed.path.exists()
    os.close(killed._claim)  # as the kernel does at a process's end
    drop_dead(parent)
    assert not killed.path.exists()
    assert (parent / f"{PREFIX}mine").exists()
    assert found(code) == {"a.py": "1"}


def test_a_shared_folder_is_used_as_it_is(code: CodeFolder, parent: Path) -> None:
    """Nothing is written, and workers stay where they were to be."""
    folder = parent / "nb"
    folder.mkdir()
    (folder / "a.py").write_text("1")
    files = {"a.py": CodeFile(digest_of(b"1"))}
    spec = WorldSpec(1, None, {}, str(folder), ("",), 1, "python")
    get = GetCode((Landmark.of(str(folder / "a.py")),), files)
    assert code.look(get).is_shared
    assert code.take(PutCode(CodePart({}, files))).is_shared
    assert (code.path, code.moved(spec)) == (None, spec)
    copy = parent / "copy"
    shutil.copytree(folder, copy)
    shutil.rmtree(folder)
    copy.rename(folder)
    assert not code.look(get).is_shared
    bring(code, a="1")
    moved = code.moved(WorldSpec(1, None, {}, NOTEBOOKS, ("",), 1, "python"))
    assert moved.cwd == str(code.path)
