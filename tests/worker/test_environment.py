"""Tests of `nbdist.worker.environment`: how the surroundings of user code follow the notebook."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import process
from os import environ
from pathlib import Path

import pytest
import torch

from nbdist.config import WorldConfig
from nbdist.wire.spec import WorkerStart
from nbdist.wire.work import Surroundings
from nbdist.worker.compat import accelerator
from nbdist.worker.control import change_threads
from nbdist.worker.environment import Around, OwnModules, change_environ, merge_paths, share_gpu
from nbdist.world.spec import make_spec
from tests.wire.test_spec import START


@pytest.mark.parametrize(
    ("gpus", "shares", "given"),
    [("MIG-8f6e", False, ["1", None]), ("0", True, ["1", "1"]), ("0", False, [None, None])],
)
def test_nccl_is_told_of_several_ranks_on_a_gpu(
    gpus: str, *, shares: bool, given: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL is allowed several ranks on a GPU if the ranks use MIG slices or share GPUs."""
    names = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE")
    for name in names:
        monkeypatch.setenv(name, "")
        del environ[name]
    monkeypatch.setattr(accelerator, "nccl_version", lambda: (2, 30, 7))
    world = replace(START.world, config=WorldConfig(share_gpus=shares))
    share_gpu(replace(START, world=world, gpus=()))
    assert [environ.get(name) for name in names[:2]] == [None, None]
    share_gpu(replace(START, world=world, gpus=(gpus,)))
    assert [environ.get(name) for name in names[:2]] == given


def test_variables_and_threads_that_a_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment variables and torch's threads change, unless the user has set them."""
    for name, value in (("NBT_SIZE", "2"), ("NBT_OWN", "mine"), ("NBT_SAME", "set")):
        monkeypatch.setenv(name, value)
    before = {"NBT_SIZE": "2", "NBT_OWN": "2", "NBT_SAME": "1"}
    change_environ(before, {"NBT_SIZE": "4", "NBT_OWN": "4", "NBT_SAME": "1"})
    assert [environ[name] for name in before] == ["4", "mine", "set"]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for number, found in ((1, 2), (2, 3)):
            change_threads(number, 3)
            assert torch.get_num_threads() == found
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Around:
    """A worker's surroundings, in a folder of the test and in this process."""
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setattr(process, "ORIGINAL_DIR", os.getcwd())
    monkeypatch.chdir(tmp_path)
    spec = make_spec(WorldConfig(n=1))[0]
    return Around(WorkerStart(0, spec, "", "", "", "", 1, {}), [])


def test_a_rank_follows_the_notebooks_folder(
    around: Around, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank changes to the folder that corresponds to the notebook's folder.

    That is the folder with the same path relative to the first folder, or with the same absolute
    path. If the rank has neither folder, the rank stays where it is, and a line says so once.
    """
    (tmp_path / "below").mkdir()
    around.follow(Surroundings("/of/notebook/below", "/of/notebook", ("/of/notebook/lib", "/x")))
    assert os.getcwd() == process.ORIGINAL_DIR == str(tmp_path / "below")  # type: ignore[attr-defined]
    assert sys.path == [f"{tmp_path}/lib", "/x"]
    around.follow(Surroundings("/usr", "/of/notebook"))
    assert os.getcwd() == "/usr"
    around.follow(Surroundings(f"{tmp_path}/below", str(tmp_path)))
    (tmp_path / "below").rmdir()
    around.follow(None)
    assert (os.getcwd(), capsys.readouterr().err) == (str(tmp_path), "")
    for _ in range(2):
        around.follow(Surroundings("/nowhere/at/all", "/nowhere"))
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith(f"has no folder /nowhere/at/all: this rank stays in {tmp_path}")
    around.follow(None)
    assert (os.getcwd(), capsys.readouterr().err) == (str(tmp_path), "")


def test_a_rank_enters_a_folder_that_appears_later(
    around: Around, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that could not change to the notebook's folder says so once, and tries again."""
    folder = tmp_path / "new"
    new = Surroundings("/of/notebook/new", "/of/notebook")
    for _ in range(2):
        around.follow(new)
    assert (os.getcwd(), len(capsys.readouterr().err.splitlines())) == (str(tmp_path), 1)
    folder.mkdir()
    around.follow(new)
    assert (os.getcwd(), capsys.readouterr().err) == (str(folder), "")
    os.chdir(tmp_path)
    around.follow(new)
    assert os.getcwd() == str(tmp_path), "the rank's own change stays"


def test_environment_variables_follow_the_notebook(around: Around) -> None:
    """Environment variables follow the notebook, and are restored once it undoes its changes."""
    here, before = os.getcwd(), dict(os.environ)
    around.follow(Surroundings(here, here, environ={"HOME": "/odd", "NEW": "1", "PATH": None}))
    assert (os.environ["HOME"], os.environ["NEW"], "PATH" in os.environ) == ("/odd", "1", False)
    around.follow(None)
    assert dict(os.environ) == before


def test_a_path_keeps_the_ranks_own_entries() -> None:
    """A rank's `sys.path` gets the notebook's changes, and keeps the rank's own changes."""
    for own, before, after, expected in (
        ("abo", "ab", "xab", "xabo"),
        ("oab", "ab", "abx", "oabx"),
        ("oab", "ab", "b", "ob"),
        ("oab", "ab", "axb", "oabx"),
        ("a", "ab", "ab", "a"),
        ("oxab", "ab", "xab", "oxab"),
        ("o", "ab", "x", "xo"),
    ):
        assert "".join(merge_paths(own, before, after)) == expected


SECOND = 10**9


class Edited:
    """A module's file that is edited at will, on a clock of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = time.time_ns() - 100 * SECOND
        self.write()

    def write(self) -> int:
        """Write contents that are dated 10 s after the last; return the time 1 s later, in ns."""
        self.now += 10 * SECOND
        self.path.write_text(f"value = {self.now}\n")
        os.utime(self.path, ns=(self.now, self.now))
        return self.now + SECOND


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edited]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Edited(tmp_path / "edited_by_test.py")
    sys.modules.pop("edited_by_test", None)


@pytest.fixture
def own() -> Iterator[OwnModules]:
    own = OwnModules()
    sys.meta_path.insert(0, own)
    yield own
    sys.meta_path.remove(own)


def told(own: OwnModules, before: int) -> tuple[str, ...]:
    return own.pop_edited_files(before, reloads=False)


def test_an_edit_of_a_users_module_is_reported_once(own: OwnModules, module: Edited) -> None:
    """An edit of a user's module is reported once, but not after a reload or without the file."""
    found = importlib.import_module("edited_by_test")
    sys.modules.pop("colorsys", None)
    importlib.import_module("colorsys")
    assert told(own, module.now + SECOND) == ()
    assert [*own._sources] == ["edited_by_test"]
    for _ in range(2):
        after = module.write()
        assert told(own, after - 2 * SECOND) == ()  # the edit came after the task had begun
        assert told(own, after) == (module.path.name,)
        assert told(own, after) == ()
    after = module.write()
    importlib.reload(found)
    assert told(own, after) == ()
    module.path.unlink()
    assert told(own, time.time_ns()) == ()


def test_a_touched_file_is_not_edited(own: OwnModules, module: Edited) -> None:
    """A file with the same contents is not edited; `__init__.py` is named with its folder."""
    folder = module.path.parent / "package_of_test"
    folder.mkdir()
    package = Edited(folder / "__init__.py")
    importlib.import_module("edited_by_test")
    importlib.import_module(folder.name)
    assert told(own, module.now + SECOND) == ()
    text, after = module.path.read_text(), module.now + 50 * SECOND
    for written in (text, "value = 0\n", text):
        module.path.write_text(written)
        os.utime(module.path, ns=(after, after))
        assert told(own, after) == ((module.path.name,) if written != text else ())
        after += SECOND
    assert told(own, package.write()) == ("package_of_test/__init__.py",)
    del sys.modules[folder.name]


def test_an_edit_during_the_importing_task_is_reported_later(
    own: OwnModules, module: Edited
) -> None:
    """An edit that is made while the importing task runs is reported with the next task."""
    importlib.import_module("edited_by_test")
    module.now = time.time_ns() + 50 * SECOND
    after = module.write()
    assert told(own, after - 20 * SECOND) == ()
    assert told(own, after) == (module.path.name,)


def test_autoreload_reloads_earlier_edits_and_reports_none(
    own: OwnModules, module: Edited, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turning `%autoreload` on reloads modules edited before; then no edit is reported."""
    found = importlib.import_module("edited_by_test")
    told(own, module.now)
    after = module.write()
    assert own.pop_edited_files(after, reloads=True) == ()
    assert found.value == module.now
    edited = module.write()  # for `%autoreload` itself
    assert own.pop_edited_files(edited, reloads=True) == ()
    assert found.value != module.now
    assert told(own, edited) == ()
    module.path.write_text("value = = 1")
    os.utime(module.path, ns=(edited + SECOND, edited + SECOND))
    assert own.pop_edited_files(edited + 2 * SECOND, reloads=True) == ()
    assert "[autoreload of edited_by_test failed: " in capsys.readouterr().err


@pytest.mark.parametrize("imported", [("below", "above"), ("above",)])
@pytest.mark.parametrize("names", [("a_of_test", "b_of_test"), ("b_of_test", "a_of_test")])
def test_a_module_is_reloaded_after_what_it_imports(
    own: OwnModules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, str], imported: tuple[str, ...],
) -> None:  # fmt: skip
    """A module that imports a value of another module has the new value if both were edited."""
    monkeypatch.syspath_prepend(str(tmp_path))
    below, above = names
    texts = {below: "value = {0}", above: f"from {below} import value\nnumber = {{0}}"}
    start = time.time_ns() - 100 * SECOND

    def write(number: int, *edited: str) -> int:
        for name in edited:
            file, at = tmp_path / f"{name}.py", start + 10 * number * SECOND
            file.write_text(texts[name].format(number))
            os.utime(file, ns=(at, at))
        return at + SECOND

    after = write(1, *names)
    for which in imported:
        importlib.import_module(below if which == "below" else above)
    own.reload(after)
    for number, edited in ((2, names), (3, (below,)), (4, names)):
        after = write(number, *edited)
        own.reload(after)
        assert told(own, after) == ()
        assert sys.modules[below].value == number
        assert sys.modules[above].value == (2 if number == 3 else number)
    for name in names:
        del sys.modules[name]


def test_reload_imports_an_edited_module_once(own: OwnModules, module: Edited) -> None:
    """`reload` imports an edited module anew, once for each edit, which is not reported then."""
    edited = importlib.import_module("edited_by_test")
    assert told(own, module.now + SECOND) == ()
    module.write()
    own.reload(time.time_ns())
    assert edited.value == module.now
    edited.value = "mine"
    own.reload(time.time_ns())
    assert edited.value == "mine"
    assert told(own, module.now + SECOND) == ()
