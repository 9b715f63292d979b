"""Tests of `nbdist.worker.kernel`: a warning names the cell's line that led to it."""

from __future__ import annotations

import pytest

from nbdist.output.layout import final_layout
from nbdist.output.text import panel_text
from nbdist.wire.work import Source
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

WARNS = """# %%distributed
import warnings
weight = torch.zeros(1, requires_grad=True)
scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight], lr=0.1), 1)

def careless():
    warnings.warn("not like this", stacklevel=2)

careless()
scheduler.step()
warnings.warn_explicit("from elsewhere", UserWarning, "elsewhere.py", 7)
"""


def shown(world: World, source: str) -> str:
    """The text of a cell, the seventh of its notebook."""
    running = world.submit(world.task(Source(source), execution_count=7))
    world.session.wait(running)
    running.result()
    text = panel_text(final_layout(running.transcript))
    world.session.let_go(running)
    return text


def test_warnings_name_the_cells_line(world: World) -> None:
    """All ranks say the same, and it is shown once; where in a library it arose is said too."""
    _head, header, *lines = shown(world, WARNS).split("\n")
    assert header == "── ranks 0-1 (same) ──"
    assert lines[:2] == ["Cell In[7], line 9: UserWarning: not like this", "  careless()"]
    assert lines[2].startswith("Cell In[7], line 10: UserWarning: Detected call of `lr_scheduler")
    assert lines[3] == "  scheduler.step()"
    assert lines[4].startswith("Cell In[7], line 11: UserWarning: from elsewhere")
    assert lines[5].endswith("(elsewhere.py:7)")


def test_not_in_a_cell(world: World) -> None:
    """A warning to which no cell has led is worded as ever."""
    source = """
import threading, time, warnings
thread = threading.Thread(
    target=warnings.warn_explicit, args=("quiet", UserWarning, "elsewhere.py", 7)
)
thread.start()
thread.join()
"""
    assert "\nelsewhere.py:7: UserWarning: quiet" in shown(world, source)
