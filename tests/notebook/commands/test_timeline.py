"""Tests of `nbdist.notebook.commands.timeline`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nbdist.notebook.commands.timeline import headline
from nbdist.wire.ops import RankTimes
from nbdist.world.timelines import timeline_of
from tests.notebook.front_end import Notebook

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def kernel() -> Iterator[Notebook]:
    notebook = Notebook("%load_ext nbdist")
    yield notebook
    notebook.close()


def test_the_straggler_is_named(kernel: Notebook) -> None:
    """In the head, in its row, and in the bars."""
    kernel.run("%dist_init -n 2")
    assert kernel.run("%dist_timeline").text == "no cell has run on these workers"
    kernel.run(
        "%%distributed\nimport time\nfor _ in range(3):\n    time.sleep(0.15 if rank else 0.01)\n"
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
    assert head == "1 rank · 0.0 s · 0 collectives"


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
