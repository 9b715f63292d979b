"""Tests of `nbdist.terminal.__main__`: the command `nbdist` as people type it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.notebook.command import find_commands
from nbdist.terminal.__main__ import main
from nbdist.world.world import World
from tests.notebook.front_end import Notebook
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world(1)


def test_status_and_top(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of each world, with processor time, while a cell runs."""
    running = world.submit(world.task("import time\ntime.sleep(600)"))
    try:
        command = [sys.executable, "-m", "nbdist.terminal", "status"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=SOON)
    finally:
        world.interrupt()
        world.session.wait(running)
    assert (shown.stderr, shown.returncode) == ("", 0)
    # Whoever else works here may have worlds too.
    lines = shown.stdout.splitlines()
    (at,) = (i for i, line in enumerate(lines) if f" {world.pids[0]} " in line)
    title, headings, row = lines[at - 2 : at + 1]
    assert title.startswith("1 worker · gloo · ")
    assert headings.split()[:4] == ["rank", "state", "pid", "device"]
    for text in ("busy ", " % ", "line 2: time.sleep(600)"):
        assert text in row
    assert main(["top", "-n", "2", "-d", "0.5"]) == 0  # so many looks, one below the other
    text = capsys.readouterr().out
    assert text.count(f" {world.pids[0]} ") == 2
    assert "\x1b" not in text


@pytest.mark.parametrize("words", [[], ["stop"], ["top", "-d", "0"], ["top", "-d", "x"]])
def test_what_is_no_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused with a line of help, as any command does."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: nbdist" in capsys.readouterr().err


def test_a_reader_that_has_enough(world: World) -> None:
    """`nbdist top | head -1` ends, and says nothing of it."""
    command = f"{sys.executable} -m nbdist.terminal top -d 0.5 | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=SOON
    )
    assert (done.returncode, done.stderr) == (0, "")
    # Of whichever world comes first here.
    assert re.fullmatch(
        r".* workers? .*· gloo · .*notebook (pid \d+|detached).*\n|no workers yet .*\n", done.stdout
    )


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
