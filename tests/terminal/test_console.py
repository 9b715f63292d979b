"""Tests of `nbdist.terminal.__main__`: the command `nbdist` as people type it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from nbdist.notebook.command import find_commands
from nbdist.terminal.__main__ import main
from tests.notebook.front_end import Notebook
from tests.waiting import SOON

pytestmark = pytest.mark.world


@pytest.mark.parametrize("words", [[], ["stop"], ["top", "-d", "0"], ["top", "-d", "x"]])
def test_what_is_no_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused with a line of help, as any command does."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: nbdist" in capsys.readouterr().err


@pytest.mark.unit
@pytest.mark.parametrize(
    ("words", "instead"),
    [(["k8s", "10.0.0.1:1", "-j", "2x4"], 'copy the Job of the section "Kubernetes" in')],
)
def test_removed_commands(
    words: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says what to do in place of a command of earlier versions."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"nbdist: `nbdist {words[0]}` was removed: {instead}")
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of IPython's default profile, for this test alone."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    return tmp_path / "profile_default"


def said(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(words)
    shown = capsys.readouterr()
    return code, shown.out + shown.err


@pytest.mark.own_agent
def test_a_notebook_without_load_ext(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`%%distributed` works in the first cell of a kernel, and in that of a restarted one."""
    assert said("enable", "--yes", capsys=capsys)[0] == 0
    notebook = Notebook(env={"NBDIST_PRESTART": "0"})
    try:
        assert "── ranks 0-1" in notebook.run("%%distributed -n 2\nworld_size").text
        notebook.manager.restart_kernel(now=True)
        notebook.client.wait_for_ready(timeout=SOON)
        place = "split the cell at line 2."
        assert notebook.run("x = 1\n%%distributed\nx").error.endswith(place)
        assert notebook.run("%dist_status").text.startswith("no workers are running")
    finally:
        notebook.close()


def test_it_asks(
    profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No, and no answer at all, change nothing; yes writes all magics."""
    file = profile / "ipython_config.json"
    for answer in ("n\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        code, text = said("enable", capsys=capsys)
        assert (code, file.exists()) == (1, False)
        assert f"Write this into {file}? [y/N]" in text
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert said("enable", capsys=capsys)[0] == 0
    magics = json.loads(file.read_text())["MagicsManager"]["lazy_magics"]
    below = ("%distributed", "%rank", "%local")  # what IPython makes of them below other lines
    names = [*below, *(each.name for each in find_commands())]
    assert magics == dict.fromkeys(names, "nbdist")


def test_it_is_taken_back(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What else stands in the file stays, and where there is nothing else, no file does."""
    file = profile / "ipython_config.json"
    profile.mkdir()
    mine = {"MagicsManager": {"lazy_magics": {"mine": "my_package"}}, "TerminalIPythonApp": {}}
    file.write_text(json.dumps(mine))
    assert said("enable", "-y", capsys=capsys)[0] == 0
    assert json.loads(file.read_text())["MagicsManager"]["lazy_magics"]["mine"] == "my_package"
    assert said("disable", capsys=capsys)[0] == 0
    assert json.loads(file.read_text()) == mine
    file.unlink()
    for word in (["enable", "-y"], ["disable"]):
        assert said(*word, capsys=capsys)[0] == 0
    assert [*profile.iterdir()] == []
    told = (1, f"there is nothing of nbdist in {file}\n")
    assert said("disable", capsys=capsys) == told


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("ipython_config.json", "{", "cannot be read"),
        ("ipython_config.json", '{"MagicsManager": []}', "is not an IPython configuration"),
        ("ipython_config.py", "c.MagicsManager.lazy_magics = {}", "itself; add to it"),
    ],
)
def test_what_would_be_lost(
    profile: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, why: str
) -> None:
    """A file that cannot be read, or that would no longer count, is left alone."""
    profile.mkdir()
    (profile / name).write_text(text)
    code, answer = said("enable", "-y", capsys=capsys)
    assert code == 2
    assert why in answer
    assert {each.name: each.read_text() for each in profile.iterdir()} == {name: text}
    (profile / name).unlink()
    (profile / "ipython_config.py").write_text(f"#  {text}\n")
    assert said("enable", "-y", capsys=capsys)[0] == 0
    assert said("enable", "--profile", "../x", capsys=capsys)[0] == 2
