"""More than anybody can look at: nobody's memory is filled, and what is newest is there."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from nbdist.agent.backlog import SHOWN_KEPT
from nbdist.output.rank_transcript import SHOWN_AT_MOST
from nbdist.world.world import World
from tests.waiting import wait_until

pytestmark = pytest.mark.shared_world(2)

PAGE, PAGES = 900_000, 300

FLOOD = f"""
from IPython.display import HTML, display
from pathlib import Path
for page in range({PAGES}):
    display(HTML(f"{{page}} {{'x' * {PAGE}}}"))
"""


def megabytes_of_agent(world: World) -> float:
    """Of the one that is below the guard, beside the fork server."""
    found = psutil.Process(world.session.link.agents[0].pid).children()
    (agent,) = (each for each in found if "nbdist.agent" in each.cmdline())
    return float(agent.memory_info().rss / 2**20)


def test_displays_that_nobody_takes(world: World, tmp_path: Path) -> None:
    """They are kept up to a limit; then the notebook gets the newest, and how many it does not."""
    file, before = tmp_path / "shown", megabytes_of_agent(world)
    running = world.submit(world.task(f"{FLOOD}Path({str(file)!r}).touch()", ranks=[1]))
    wait_until(file.exists, "the rank has shown all of it")
    assert megabytes_of_agent(world) - before < 2.5 * SHOWN_KEPT / 2**20 < PAGES * PAGE / 2**20
    world.session.wait(running)
    assert running.error() is None
    said = [shown.plain for shown in running.transcript[1].displays]
    pages = said.count(said[-1])
    assert f"… {PAGES - pages} displays left out; the newest are kept" in said
    assert SHOWN_AT_MOST / 4 < PAGE * pages < SHOWN_AT_MOST
