"""Tests of `nbdist.terminal.worlds`: worlds are found, shown and ended by commands."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pexpect
import psutil
import pytest

from nbdist import __version__
from nbdist.terminal.__main__ import main
from nbdist.terminal.worlds import (
    HEADINGS,
    NONE,
    WORLD_STATUS_TIMEOUT,
    Before,
    as_lines,
    cpu_since,
    printable,
    row_of,
    table,
    title,
)
from nbdist.wire.places import RankPosition
from nbdist.wire.queries import QUERY_SOCKET, DescribeRanks, WorldInfo
from nbdist.wire.status import WorkerStatus
from nbdist.world import agents, dispatch
from nbdist.world.agents import RunningWorld, ask_all, runtime_folders
from nbdist.world.world import World
from tests.waiting import SOON
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

COMMAND = [sys.executable, "-m", "nbdist.terminal"]


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2, name="exp") as started:
        yield started


def ours() -> list[WorldInfo]:
    """Return the worlds of this process: other tests and programs have worlds too."""
    infos = [each.info for each in ask_all(DescribeRanks(), WORLD_STATUS_TIMEOUT)]
    return [each for each in infos if each.notebook == os.getpid()]


def test_status_shows_ranks_while_a_cell_runs(world: World) -> None:
    """`nbdist status` shows a table with what each rank of a world does while a cell runs."""
    source = "import time\nprint('loss', rank)\ntime.sleep(600)"
    running = world.submit(world.task(source, execution_count=5))
    ends, rows = [f"line 3: time.sleep(600)  loss {rank}" for rank in (0, 1)], [""]
    try:
        while not all(map(str.endswith, rows, ends)):  # a line comes in several pieces
            shown = subprocess.run(
                [*COMMAND, "status"], capture_output=True, text=True, timeout=SOON
            )
            assert (shown.stderr, shown.returncode) == ("", 0)
            # Other programs on this machine may have worlds too.
            lines = shown.stdout.splitlines()
            (at,) = (i for i, line in enumerate(lines) if f" {world.pids[0]} " in line)
            title, headings, *rows = lines[at - 2 : at + 2]
    finally:
        world.interrupt()
        dispatch.wait(world.engine, running)
    assert title.startswith("2 workers · gloo · exp · ")
    assert " · cell 5 · " in title
    assert headings.split()[:4] == ["rank", "state", "pid", "device"]
    for rank, row in enumerate(rows):
        assert row.split()[:2] == [str(rank), "busy"]
        assert f" {world.pids[rank]} " in row
        assert " MiB " in row
        assert " % " in row


@pytest.mark.parametrize("name", ["status --follow", "top -f", "top -d"])
def test_a_pipe_gets_one_table_below_the_other(world: World, name: str) -> None:
    """A pipe gets table after table; a reader that closes the pipe ends the command silently."""
    command = f"{' '.join(COMMAND)} {name} 0.5 | grep --line-buffered -m 2 ' {world.pids[0]} '"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=SOON
    )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 2)
    assert "\x1b" not in done.stdout


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in the place of runtime folders, without a world."""
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "nbdist-other"
    folder.mkdir(mode=0o700)
    yield folder
    (folder / QUERY_SOCKET).unlink(missing_ok=True)
    folder.rmdir()


def test_folders_that_others_can_open_are_skipped(
    place: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders that others can open are skipped; folders elsewhere are found by their agents."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / QUERY_SOCKET))
        assert place in runtime_folders()
        place.chmod(0o755)
        assert place not in runtime_folders()
    place.chmod(0o700)
    assert world.pids
    here = [folder for folder in runtime_folders() if folder.parent == place.parent]
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, "/nonexistent")
    assert (known := {*here} - {place})
    assert known <= {*runtime_folders()}


@pytest.mark.parametrize("said", [b"", b"garbage", b'{"Refused": {"why": ""}}\n'])
def test_a_socket_that_is_no_world_is_skipped(place: Path, said: bytes) -> None:
    """A socket without the answer of a world is skipped, whatever it sends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / QUERY_SOCKET))
        server.listen()
        server.settimeout(20)

        def answer() -> None:
            end, _ = server.accept()
            with end:
                end.recv(10)
                end.sendall(said)

        answering = threading.Thread(target=answer)
        answering.start()
        assert place not in [each.folder for each in ask_all(DescribeRanks(), WORLD_STATUS_TIMEOUT)]
        answering.join()


def test_a_row_describes_a_world() -> None:
    """A row shows a world's notebook, or since when it is detached, and a day that is not today."""
    cell = "for step in range(10_000_000): train(model, step)"
    now = time.time()
    info = WorldInfo(__version__, "vm", "default", "exp", 8, "busy", cell, now, 0, now, guard=5)
    row = dict(zip(HEADINGS, row_of(RunningWorld(Path("/x"), 6, info)), strict=True))
    clock = time.strftime("%H:%M", time.localtime(now))
    assert row["cell"] == cell[:40]
    shown = row["since"], row["notebook"], row["process"]
    assert shown == (clock, f"detached since {clock}", "6")
    old = replace(info, cell="", began=0.0, notebook=7)
    row = dict(zip(HEADINGS, row_of(RunningWorld(Path("/x"), 6, old)), strict=True))
    assert row["notebook"] == "7"
    assert row["since"].split()[1] in ("Jan", "Dec")


@pytest.mark.world
@pytest.mark.own_agent
def test_a_world_is_listed_and_ended_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    """`nbdist ps` lists a world, and `nbdist kill` ends it by its name."""
    victim = f"victim-{os.getpid()}"
    with World(1, log_dir="", backend="none", name=victim) as world:
        pids = [*world.pids.values()]
        assert victim in [each.name for each in ours()]
        assert main(["ps"]) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = (line for line in lines if line.startswith(f"{victim} "))
        (agent,) = (each.agent for each in agents.worlds() if each.info.name == victim)
        assert line.split()[1:4] == ["default", "1", "ready"]
        assert line.split()[-2:] == [str(os.getpid()), str(agent)]
        assert main(["kill", victim]) == 0
        assert capsys.readouterr().out == f"`{victim}` ended\n"
        assert not any(map(psutil.pid_exists, pids))
    assert victim not in [each.name for each in ours()]
    assert main(["kill", victim]) == 2
    assert "none of your worlds on this machine has this name" in capsys.readouterr().err


MIB = 2**20
BUSY = WorkerStatus(
    *(0, 100, "here", "busy", 12.4, 200 * MIB, "cpu", RankPosition(line=2, operation="barrier")),
    cpu_seconds=1.0,
    cell=7,
    last_line="loss \x1b[31m0.5\x1b[0m\x1b]0;pwned\x07",
)
IDLE = WorkerStatus(1, 101, "here", "idle", 0.0, 100 * MIB, "cpu", cpu_seconds=5.0)
SEEN = WorldInfo(
    *(__version__, "here", "default", "exp"),
    notebook=42,
    notebook_name="/home/me/train.ipynb",
    backend="gloo",
    at=10.0,
    ranks=(BUSY, IDLE),
)


def test_title_and_table_describe_a_world() -> None:
    """The title has notebook, cell and memory; the table has each rank's state and last line."""
    assert title(SEEN) == "2 workers · gloo · exp · train.ipynb (pid 42) · cell 7 · cpu 100-200 MiB"
    other = replace(SEEN, pool="eval", name="20261122-095518-5413", notebook_name="", ranks=())
    assert title(other) == "pool eval · no workers yet · gloo · notebook pid 42"
    assert title(replace(other, notebook=0)).endswith("gloo · notebook detached")
    headings, first, second = table(SEEN, {0: 99.5})
    assert headings == ("rank", "state", "pid", "device", "memory", "cpu", "where", "last line")
    assert first[4:-1] == ("200 MiB", "100 %", "waits in barrier, line 2")
    assert first[1] == "busy 12 s"
    assert first[-1].startswith("loss 0.5")
    assert second == ("1", "idle", "101", "cpu", "100 MiB", "", "", "")


def test_lines_fit_into_the_terminal() -> None:
    """Lines are cut to the width, texts first, and have no control characters."""
    lines = [*as_lines([(SEEN, {0: 99.0}), (SEEN, {})], 30)]
    assert (len(lines), lines[4]) == (9, "")
    assert {len(line) for line in lines if line.endswith("…")} == {30}
    lines = [*as_lines([(SEEN, {0: 99.0})], 64)]
    assert "busy 12 s  100  cpu     200 MiB  99 %  waits i…  loss 0.5…" in lines[2]
    assert max(map(len, lines)) == 64
    assert all(sign.isprintable() for line in as_lines([(SEEN, {})], 200) for sign in line)
    assert "\x1b" not in printable("\x1b[2J\x1b]52;c;aGk=\x07 a\rb\u202e")
    assert [*as_lines([], 20)] == [NONE[:20]]
    # No column of an idle rank can be cut, so the lines are.
    idle = replace(SEEN, ranks=(IDLE,))
    assert {len(line) for line in as_lines([(idle, {})], 20)} == {20}


def test_cpu_is_counted_between_two_looks() -> None:
    """CPU is in per cent of a core between two looks; a new process of a rank starts at 0."""
    before: Before = {}
    assert cpu_since(before, SEEN) == {}
    later = replace(SEEN, at=12.0, ranks=(replace(BUSY, cpu_seconds=3.0), IDLE))
    assert cpu_since(before, later) == {0: 100.0, 1: 0.0}
    assert cpu_since(before, later) == {}
    anew = replace(SEEN, at=13.0, ranks=(replace(BUSY, cpu_seconds=0.5),))
    assert cpu_since(before, anew) == {0: 0.0}


# --- drawn over and over in a terminal --------------------------------------------------


@pytest.mark.parametrize(("height", "left_out"), [(300, ""), (4, r"\d+ more lines")])
def test_top_redraws_the_terminal(world: World, height: int, left_out: str) -> None:
    """`top` draws each picture over the last one, as far as there is room; Ctrl-C ends it."""
    # pytest loads readline, which sets LINES and COLUMNS: they would override the terminal's size.
    environ = {name: os.environ[name] for name in os.environ.keys() - {"LINES", "COLUMNS"}}
    size = {"dimensions": (height, 120), "encoding": "utf-8", "timeout": SOON}
    shown = pexpect.spawn(sys.executable, [*COMMAND[1:], "top", "-f", "0.5"], env=environ, **size)
    try:
        for _ in range(2):
            shown.expect_exact("\x1b[H")
            shown.expect_exact("\x1b[J")
            assert shown.before.count("\n") < height
            assert re.search(left_out or f" {world.pids[0]} ", shown.before)
        shown.send("\x03")
        shown.expect(pexpect.EOF)
    finally:
        shown.close()
    assert shown.exitstatus == 0
