"""Tests of `nbdist.notebook.commands.timeline`."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.notebook.commands.timeline import headline
from nbdist.wire.ops import RankTimes
from nbdist.world.timelines import timeline_of
from tests.notebook.front_end import Notebook

pytestmark = pytest.mark.shared_world


def test_the_straggler_is_named(kernel: Notebook) -> None:
    """In the head, in its row, and in the bars."""
    kernel.run("%dist_init -n 2")
    assert kernel.run("%dist_timeline").text == "no cell has run on these workers"
    kernel.run(
        "%%distributed\nimport time\nfor _ in range(3):\n    time.sleep(0.4 if rank else 0.01)\n"
        "    dist.all_reduce(torch.ones(256))"
    )
    shown = kernel.run("%dist_timeline")
    head, titles, first, second, bar, late_bar, legend, last = shown.text.splitlines()
    assert "3 collectives · rank 1 came last to 3 of them; others waited " in head
    assert titles.split("  ")[0] == "rank"
    assert first.split()[0] == "0"
    assert second.split()[-3] == "3"
    assert bar.count("░") > 30 > late_bar.count("░")
    assert legend.startswith("█ computing  ░ in collectives")
    assert last == "all_reduce x 3 (3 KiB)"
    html = shown.panel["text/html"]
    assert "░</span>" in html
    assert "<style" not in html


def test_one_rank_alone(kernel: Notebook) -> None:
    """It waits for nobody."""
    kernel.run("%%distributed\npass")
    head = kernel.run("%dist_timeline -r 0").text.splitlines()[0]
    assert re.fullmatch(r"1 rank · \d+\.\d s · 0 collectives", head)


def test_without_workers(typed: Callable[[str], str]) -> None:
    """There is nothing to ask."""
    with pytest.raises(Exception, match="needs workers"):
        typed("%dist_timeline")


def test_what_is_not_known_is_said() -> None:
    """Before torch 2.11, and where there was more than is kept."""
    old = timeline_of({0: RankTimes(1, 2, (), 0, (), is_recorded=False)})
    long = timeline_of({0: RankTimes(1, 2, (), 0, (), is_whole=False)})
    assert old is not None
    assert long is not None
    assert "which rank came last is not recorded before torch 2.11" in headline(old)
    assert "the last 0 collectives" in headline(long)


WORK = """\
import time
time.sleep(rank)
dist.all_reduce(torch.ones(256))
torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
"""


def test_a_profile(kernel: Notebook, tmp_path: Path) -> None:
    """One trace: a process for each rank, on one clock, and only what ran in the cell."""
    path = tmp_path / "trace.json"
    shown = kernel.run(f"%%distributed -n 2 --profile {path}\n{WORK}")
    assert shown.errors == []
    assert shown.streams == []
    said = shown.displays[-1]["data"]["text/plain"]
    assert said.startswith(f"{path} · ")
    assert said.endswith(" events of 2 ranks · ui.perfetto.dev opens it")
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    timed = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in timed} == {0, 1}
    linear = {e["pid"]: e["ts"] for e in timed if e["name"] == "aten::linear"}
    reduces = [(e["pid"], e["ts"], e["dur"]) for e in timed if e["name"] == "c10d::allreduce_"]
    begins = {pid: ts for pid, ts, _ in reduces}
    assert begins[1] - begins[0] > 200_000  # µs: rank 0 came, and rank 1 slept
    assert linear[0] > begins[1]
    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) > 0
    assert all(0 <= e["ts"] < 60e6 for e in timed)


def test_a_profile_of_a_cell_that_fails(kernel: Notebook, tmp_path: Path) -> None:
    """It is written too, compressed where its name says so, and over one of before."""
    path = tmp_path / "trace.json.gz"
    for _ in range(2):
        shown = kernel.run(f"%%distributed -r 0 --profile {path}\ntorch.ones(1)\n1 / 0")
        assert "ZeroDivisionError" in shown.error
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert {e["pid"] for e in events} == {0}
        assert "aten::ones" in {e["name"] for e in events}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--profile train.py", "needs a name that ends in .json"),
        ("--profile /nowhere/x.json", "there is no folder /nowhere"),
        ("--no-wait --profile", "not with `--no-wait`"),
    ],
)
def test_profiles_that_cannot_be(kernel: Notebook, options: str, said: str) -> None:
    """One line, and the cell does not run."""
    kernel.run("%%distributed\nx = 0")
    assert said in kernel.run(f"%%distributed {options}\nx = 1").error
    assert "0" in kernel.run("%%distributed\nx").text
