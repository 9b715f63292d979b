"""Tests of `nbdist.terminal.picture`: a world as lines, and nothing that a terminal obeys."""

from __future__ import annotations

from dataclasses import replace

from nbdist.terminal.picture import NONE, CpuMeter, as_lines, printable, table, title
from nbdist.wire.places import Place, WorkerStatus
from nbdist.wire.seen import WorldSeen

MIB = 2**20
BUSY = WorkerStatus(
    *(0, 100, "here", "busy", 12.4, 200 * MIB, "cpu", Place(line=2, operation="barrier")),
    cpu_seconds=1.0,
    cell=7,
    last_line="loss \x1b[31m0.5\x1b[0m\x1b]0;pwned\x07",
)
IDLE = WorkerStatus(1, 101, "here", "idle", 0.0, 100 * MIB, "cpu", cpu_seconds=5.0)
SEEN = WorldSeen("here", 42, "/home/me/train.ipynb", 10.0, "default", "exp", "gloo", (BUSY, IDLE))


def test_title():
    """Which notebook, which cell, and what all use; names that say nothing are left out."""
    said = "2 workers · gloo · exp · train.ipynb (pid 42) · cell 7 · cpu 100-200 MiB"
    assert title(SEEN) == said
    other = replace(SEEN, pool="eval", name="20261122-095518-5413", notebook="", workers=())
    assert title(other) == "pool eval · no workers yet · gloo · notebook pid 42"


def test_table():
    """What each does, its processor time, and its last line."""
    headings, first, second = table(SEEN, {0: 99.5})
    assert headings == ("rank", "state", "pid", "device", "memory", "cpu", "where", "last line")
    assert first[1:2] + first[4:] == (
        *("busy 12 s", "200 MiB", "100 %", "waits in barrier, line 2"),
        *(first[-1],),
    )
    assert first[-1].startswith("loss 0.5")
    assert second == ("1", "idle", "101", "cpu", "100 MiB", "", "", "")


def test_nothing_that_a_terminal_obeys():
    """Is left of what a worker has written."""
    assert all(sign.isprintable() for line in as_lines([(SEEN, {})], 200) for sign in line)
    assert "\x1b" not in printable("\x1b[2J\x1b]52;c;aGk=\x07 a\rb\u202e")


def test_lines_fit():
    """And say so where they are cut; a world after the other."""
    lines = [*as_lines([(SEEN, {}), (SEEN, {})], 30)]
    assert len(lines) == 9
    assert lines[4] == ""
    assert {len(line) for line in lines if line.endswith("…")} == {30}
    assert [*as_lines([], 20)] == [NONE[:20]]


def test_processor_time():
    """Per cent of a core between two looks; a new process under an old number starts at nothing."""
    meter = CpuMeter()
    assert meter.read(SEEN) == {}
    later = replace(SEEN, at=12.0, workers=(replace(BUSY, cpu_seconds=3.0), IDLE))
    assert meter.read(later) == {0: 100.0, 1: 0.0}
    assert meter.read(later) == {}
    anew = replace(SEEN, at=13.0, workers=(replace(BUSY, cpu_seconds=0.5),))
    assert meter.read(anew) == {0: 0.0}
