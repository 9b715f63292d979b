"""Tests of `nbdist.worker.around`: a process that follows what tasks say of the notebook."""

from __future__ import annotations

import os
import sys
from multiprocessing import process
from pathlib import Path

import pytest

from nbdist.config import WorldConfig
from nbdist.wire.start import WorkerStart
from nbdist.wire.task import Surroundings
from nbdist.worker.around import Around, merged
from nbdist.world.spec import make_spec


@pytest.fixture
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Around:
    """What a worker starts with in a folder of the test's own, in this process."""
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setattr(process, "ORIGINAL_DIR", os.getcwd())
    monkeypatch.chdir(tmp_path)
    spec = make_spec(WorldConfig(n=1))[0]
    return Around(WorkerStart(0, 0, 1, spec, "", "", "", "", 1, {}), [])


def test_a_folder_in_another_place(
    around: Around, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below the notebook's first folder it is the one below this machine's; else itself."""
    (tmp_path / "below").mkdir()
    around.follow(Surroundings("/of/notebook/below", "/of/notebook", ("/of/notebook/lib", "/x")))
    assert os.getcwd() == process.ORIGINAL_DIR == str(tmp_path / "below")  # type: ignore[attr-defined]
    assert sys.path == [f"{tmp_path}/lib", "/x"]
    around.follow(Surroundings("/usr", "/of/notebook"))
    assert os.getcwd() == "/usr"
    assert capsys.readouterr().err == ""


def test_a_folder_that_is_not_there(
    around: Around, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so, once, and where the rank is; it goes on from there."""
    nowhere = Surroundings("/nowhere/at/all", "/nowhere")
    around.follow(nowhere)
    around.follow(nowhere)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith(f"has no folder /nowhere/at/all: this rank stays in {tmp_path}")
    around.follow(None)
    assert os.getcwd() == str(tmp_path)
    assert capsys.readouterr().err == ""


def test_variables(around: Around) -> None:
    """One that is in the notebook as at the start again is so here."""
    here, before = os.getcwd(), dict(os.environ)
    around.follow(Surroundings(here, here, environ={"HOME": "/odd", "NEW": "1", "PATH": None}))
    assert (os.environ["HOME"], os.environ["NEW"], "PATH" in os.environ) == ("/odd", "1", False)
    around.follow(None)
    assert dict(os.environ) == before


def test_a_folder_that_was_removed(around: Around, tmp_path: Path) -> None:
    """A rank whose folder has gone follows to the next."""
    (tmp_path / "gone").mkdir()
    around.follow(Surroundings(f"{tmp_path}/gone", str(tmp_path)))
    (tmp_path / "gone").rmdir()
    around.follow(None)
    assert os.getcwd() == str(tmp_path)


@pytest.mark.parametrize(
    ("own", "before", "after", "expected"),
    [
        ("abo", "ab", "xab", "xabo"),
        ("oab", "ab", "abx", "oabx"),
        ("oab", "ab", "b", "ob"),
        ("oab", "ab", "axb", "oabx"),
        ("a", "ab", "ab", "a"),
        ("oxab", "ab", "xab", "oxab"),
        ("o", "ab", "x", "xo"),
    ],
)
def test_a_path_with_entries_of_its_own(own: str, before: str, after: str, expected: str) -> None:
    """The notebook's changes come in, and what the rank has changed itself stays."""
    assert "".join(merged(own, before, after)) == expected
