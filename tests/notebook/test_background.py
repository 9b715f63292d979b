"""Tests of `nbdist.notebook.jobs`: cells of two pools that nobody waits for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook, body
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """A notebook with two pools of one worker each."""
    start = ("%dist_init -n 1", "%dist_init --pool other -n 1")
    notebook = Notebook("%load_ext nbdist", *start)
    yield notebook
    notebook.close()


def test_a_pool_waits_for_its_own_alone(notebook: Notebook, tmp_path: Path) -> None:
    """A cell of the other one runs at once; one of this pool after it, with what it has bound."""
    waits = f"while not os.path.exists({str(tmp_path / 'enough')!r}): time.sleep(0.05)"
    notebook.run(f"%%distributed --no-wait -o first\nimport os, time\n{waits}\nlate = 1")
    other = notebook.run("%%distributed --pool other\n'late' in globals()")
    panel = other.displays[0]["transient"]
    other.updates[:] = [each for each in other.updates if each["transient"] == panel]
    assert body(other)[-1] == "False"
    assert other.text.startswith("rank 0 · ")
    assert notebook.value("first.done()") is False
    (tmp_path / "enough").touch()
    assert notebook.run("%%distributed\nassert late == 1").errors == []
    assert notebook.value("first.done()") is True


def test_stop_while_idle_is_for_all(notebook: Notebook) -> None:
    """Each pool's cell is stopped, and Stop means nothing between cells afterwards."""
    for pool in ("default", "other"):
        sleep = "import time; print('begun'); time.sleep(600)"
        notebook.run(f"%%distributed --no-wait --pool {pool} -o {pool}\n{sleep}")
    begun = 0
    while begun < 4:  # of each the cell's end and a line, at least
        message = notebook.client.get_iopub_msg(timeout=SOON)
        begun += message["msg_type"] == "update_display_data"
    notebook.manager.interrupt_kernel()
    for pool in ("default", "other"):
        stopped = notebook.run(f"{pool}.wait()").error
        assert stopped == "KeyboardInterrupt: Stopped on rank 0. No variables were lost."
    assert notebook.run("%%distributed\nlate").errors == []
