"""Tests of `nbdist.tools.plot`, and its op: `track`, `%dist_plot`, `--plot`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nbdist.errors import UsageError
from nbdist.tools.plot import NOTHING_TRACKED
from nbdist.world.world import World
from tests.notebook.front_end import Notebook
from tests.output.lab import Panel

pytestmark = pytest.mark.shared_world(2)

TRACKS = """%%distributed -n 2
for step in range(5):
    track(loss=torch.tensor(1.0 / (1 + step) + rank), lr=0.1)
"""

LOGS = """%%distributed --plot err,acc,rate
from tqdm.auto import tqdm
for epoch in range(2):
    bar = tqdm(range(3))
    for step in bar:
        bar.set_postfix(err=1.00001 + step + rank, speed=2.5)
        bar.set_postfix_str("acc=0.5, name=x")
"""


def test_curves_of_all_cells_are_drawn(kernel: Notebook) -> None:
    """Curves are in their cell's panel, and `%dist_plot` draws all cells, also before a restart."""
    assert kernel.run("%dist_plot").text == NOTHING_TRACKED
    shown = kernel.run(TRACKS)
    assert len(Panel(shown.panel["text/html"]).images) == 2
    assert shown.text.splitlines()[:3] == [
        "2 ranks",
        "── tracked ──",
        "loss median 0.7 · step 4 · 0.2 to 1.2 on 2 ranks",
    ]
    kernel.run("%dist_restart")
    assert "loss median 0.7 · step 9 · 0.2 to 1.2 on 2 ranks" in kernel.run(TRACKS).text
    shown = kernel.run("%dist_plot loss")
    assert len(Panel(shown.panel["text/html"]).images) == 1
    rows = [row.split() for row in shown.text.splitlines()[2:]]
    assert rows[0] == ["0", "1.5", "1", "2"]
    assert rows[-1] == ["9", "0.7", "0.2", "1.2"]
    assert "step 9" in kernel.run("%dist_plot lr,loss").text.splitlines()[0]
    said = "no numbers of `los`. Tracked: `loss`, `lr`. `track(loss=loss)` in a cell"
    assert said in kernel.run("%dist_plot los").error
    # Cells use a `track` that the notebook has defined itself.
    kernel.run("def track(**numbers): return 'mine'")
    shown = kernel.run("%%distributed\nprint(track(loss=1))")
    assert shown.text.splitlines()[1:] == ["── ranks 0-1 (same) ──", "mine"]
    kernel.run("del track")
    kernel.run("%%distributed\nfrom nbdist import track")


def test_plot_tracks_the_numbers_of_bars(kernel: Notebook) -> None:
    """`--plot` tracks numbers of bars with all digits, and only in the cell with this option."""
    shown = kernel.run(LOGS)
    panel, note = shown.texts[-2:]
    panel = shown.updates[-1]["data"]["text/plain"] if shown.updates else panel
    assert "err median 3.5 · step 5 · 3 to 4 on 2 ranks" in panel
    assert "acc 0.5 · step 5 · 2 ranks equal" in panel
    assert note == (
        "`--plot`: no bar of tqdm and no log of transformers or Lightning had rate; "
        "logged were speed. `track(loss=loss)` tracks any number."
    )
    shown = kernel.run(LOGS.replace(" --plot err,acc,rate", ""))
    assert "tracked" not in shown.text
    for options, said in (
        ("--plot ,", "give the names of numbers, such as `--plot loss,lr`"),
        ("--no-wait --plot loss", "not with `--no-wait`. `track(loss=loss)` in the cell works"),
    ):
        assert said in kernel.run(f"%%distributed {options}\npass").error


ODD = ("track(**{'\\ud800': 1})", "track(step=1e308, loss=1)", "track(step=10**400, loss=1)")


@pytest.mark.parametrize("odd", ODD)
def test_refused_numbers_leave_workers_and_curves(kernel: Notebook, odd: str) -> None:
    """A refused number is an error of the cell; variables stay, and curves are drawn."""
    shown = kernel.run(f"%%distributed\nkept = rank\ntrack(before=1)\n{odd}")
    assert "ValueError: track" in shown.seen
    assert kernel.run("%%distributed\nprint(kept)").text.splitlines()[2::2] == ["0", "1"]
    assert "before 1" in kernel.run("%dist_plot").text


def test_tracked_numbers_become_a_table(world: World) -> None:
    """`tracked` returns a table of steps and ranks, and `track` can be given the step."""
    world.execute("import nbdist\nfor i in range(3): nbdist.track(step=10 * i, acc=rank + i / 10)")
    assert world.tracked("acc").to_dict("list") == {
        "step": [0, 10, 20],
        "rank 0": [0.0, 0.1, 0.2],
        "rank 1": [1.0, 1.1, 1.2],
    }
    with pytest.raises(UsageError, match=r"no numbers of `other`\. Tracked: "):
        world.tracked("other")


def test_a_call_of_track_takes_microseconds(world: World) -> None:
    """A call of `track` in a loop takes less than 30 microseconds of a processor."""
    source = (
        "import time\nbegun = time.thread_time()\n"
        "for i in range(20_000): track(loss=0.5, lr=0.1)\n"
        "took = (time.thread_time() - begun) / 20_000"
    )
    world.execute(source)
    assert max(world.gather("took")) < 30e-6


def test_plot_without_workers_is_no_error(typed: Callable[[str], str]) -> None:
    """Without workers `%dist_plot` says that nothing was tracked, and is no error."""
    assert typed("%dist_plot") == f"{NOTHING_TRACKED}\n"
