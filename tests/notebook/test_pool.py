"""Tests of `nbdist.notebook.pool`: worlds side by side, each with a group of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist.errors import ForkedProcess
from nbdist.notebook.options import NbDist
from nbdist.notebook.pool import Pools, Routine
from nbdist.world.snapshot_store import Part, Snapshot
from tests.notebook.front_end import Notebook, body, lasting

pytestmark = pytest.mark.shared_world

ROLE = """import os
print(*(os.environ[name] for name in ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")))"""


pools = lasting(
    "%load_ext nbdist",
    "%dist_init --pool ps -n 1",
    "%%distributed --pool trainer -n 2\nmine = 'trainer'",
)


@pytest.fixture(scope="module")
def shell() -> InteractiveShell:
    """That keeps its history in memory."""
    config = Config()
    config.HistoryManager.enabled = False
    return InteractiveShell(config=config)


def test_a_line_that_failed_has_gathered_nothing(shell: InteractiveShell) -> None:
    """What the notebook had under the name stays its own."""
    pools = Pools(shell, NbDist(display="plain"))
    shell.user_ns.update(kept=1, theirs=2)
    pools.gathered.add(["theirs"])
    pools.notice_names(shell.run_cell("kept = %dist_gather theirs"))
    assert ("theirs" in pools.gathered, "kept" in pools.gathered) == (True, False)


def test_in_a_forked_child(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no workers that it could use."""
    pools = Pools(shell, NbDist(display="plain"))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(ForkedProcess):
        pools.at(None)


def test_each_has_a_group_of_its_own(pools: Notebook) -> None:
    """A collective of one pool has its ranks alone, and roles stand in the environment."""
    total = "t = torch.ones(1); dist.all_reduce(t); print(t.item(), world_size)"
    assert body(pools.run(f"%%distributed --pool trainer\n{total}"))[-1] == "2.0 2"
    assert body(pools.run(f"%%distributed --pool ps\n{total}"))[-1] == "1.0 1"
    trainers = body(pools.run(f"%%distributed --pool trainer\n{ROLE}"))
    assert [line for line in trainers if line.startswith("trainer")] == [
        "trainer 0 2",
        "trainer 1 2",
    ]
    assert body(pools.run(f"%%rank 0 --pool ps\n{ROLE}"))[-1] == "ps 0 1"


def test_each_has_variables_of_its_own(pools: Notebook) -> None:
    """What one binds the other does not have; what the notebook has goes to both."""
    pools.run("step = 7")
    for pool in ("trainer", "ps"):
        assert body(pools.run(f"%%distributed --pool {pool}\nprint(step)"))[-1] == "7"
    pools.run("%%distributed --pool ps\nstep = 8")
    assert body(pools.run("%%distributed --pool trainer\nprint(step)"))[-1] == "7"
    assert pools.run("%dist_gather step --pool ps --as steps").errors == []
    assert pools.value("steps") == [8]
    assert "NameError" in pools.run("%%distributed --pool ps\nmine").error


def test_each_waits_for_its_own_alone(pools: Notebook, tmp_path: Path) -> None:
    """A cell of the other one runs at once; one of this pool after it, with what it has bound."""
    waits = f"while not os.path.exists({str(tmp_path / 'enough')!r}): time.sleep(0.05)"
    pools.run(f"%%distributed --pool ps --no-wait -o first\nimport os, time\n{waits}\nlate = 1")
    other = pools.run("%%distributed --pool trainer\n'late' in globals()")
    panel = other.displays[0]["transient"]
    other.updates[:] = [each for each in other.updates if each["transient"] == panel]
    assert body(other)[-1] == "False"
    assert pools.value("first.done()") is False
    (tmp_path / "enough").touch()
    assert pools.run("%%distributed --pool ps\nassert late == 1").errors == []
    assert pools.value("first.done()") is True


def test_a_failure_in_one_is_no_matter_to_the_other(pools: Notebook) -> None:
    """The dead of one pool are replaced there; the other keeps its processes."""
    pids = pools.run("%%distributed --pool ps\nimport os; os.getpid()").text
    assert "rank 1 " in pools.run("%%rank 1 --pool trainer\nimport os; os._exit(3)").error
    assert pools.run("%%distributed --pool trainer\ndist.barrier()").errors == []
    assert pools.run("%%distributed --pool ps\nos.getpid()").text.split()[-1] == pids.split()[-1]


def test_status_shows_all(pools: Notebook) -> None:
    """One table for each pool, or that of one."""
    displays = pools.run("%dist_status").displays
    assert [display["data"]["text/plain"].split(" · ")[0] for display in displays] == [
        "pool ps",
        "pool trainer",
    ]
    assert pools.run("%dist_status --pool ps").text.startswith("pool ps · 1 worker on ")


def test_what_is_asked_wrongly(pools: Notebook) -> None:
    """One line, with the pool in the remedy."""
    assert "`%dist_restart --pool ps -n 3`" in pools.run("%dist_init --pool ps -n 3").error
    assert "--pool 1/2" in pools.run("%%distributed --pool 1/2\npass").error
    assert "none are running" in pools.run("%dist_gather x --pool other").error


def test_one_is_ended_the_other_stays(pools: Notebook) -> None:
    """`%dist_shutdown --pool` ends one, without it all are ended."""
    pools.run("%dist_shutdown --pool ps")
    assert pools.run("%dist_status --pool ps").text.startswith("no workers are running")
    assert pools.run("%%distributed --pool trainer\ndist.barrier()").errors == []
    assert pools.run("%dist_shutdown").text == "workers ended"
    assert pools.run("%dist_status").text.startswith("no workers are running")


def test_every_third_cell():
    """Counted from the one that set it up; never where nothing did."""
    assert [Routine().is_due() for _ in range(3)] == [False] * 3
    routine = Routine(every=3)
    assert [routine.is_due() for _ in range(7)] == [False, False, True, False, False, True, False]


def test_a_hint_while_the_snapshot_is_there(tmp_path: Path):
    """How what was lost is brought back; nothing once the folder is gone."""
    routine = Routine()
    assert routine.hint == ""
    part = Part(("model", "x"), (), 10, "")
    routine.newest = Snapshot("epoch-3", "20200101-120000", tmp_path, 0.0, {0: part})
    assert routine.hint.startswith("`%dist_restore --name epoch-3` restores model and x of 19")
    routine.newest = Snapshot("epoch-3", "20200101-120000", tmp_path / "gone", 0.0, {0: part})
    assert routine.hint == ""
