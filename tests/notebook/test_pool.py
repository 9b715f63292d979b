"""Tests of `nbdist.notebook.pool`: a notebook with several worlds, each in a pool."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist.errors import ForkedProcess
from nbdist.notebook.options import NbDist
from nbdist.notebook.pool import Pools
from tests.notebook.front_end import Notebook, body, lasting

pytestmark = pytest.mark.shared_world


pools = lasting(
    "%load_ext nbdist",
    "%dist_init --pool ps -n 1",
    "%%distributed --pool trainer -n 2\nmine = 'trainer'",
)


@pytest.fixture(scope="module")
def shell() -> InteractiveShell:
    """A shell that keeps its history in memory."""
    return InteractiveShell(config=Config({"HistoryManager": {"enabled": False}}))


def test_a_line_that_failed_has_gathered_nothing(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed `x = %dist_gather y` does not mark `x` as gathered.  A forked child has no pools."""
    pools = Pools(shell, NbDist(display="plain"))
    shell.user_ns.update(kept=1, theirs=2)
    pools.gathered.add(["theirs"])
    pools.notice_names(shell.run_cell("kept = %dist_gather theirs"))
    assert ("theirs" in pools.gathered, "kept" in pools.gathered) == (True, False)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(ForkedProcess):
        pools.find_or_make(None)


def test_each_pool_has_its_own_group_and_variables(pools: Notebook) -> None:
    """Each pool has its own group, variables and role, and gets the notebook's variables."""
    role = """import os
t = torch.ones(1); dist.all_reduce(t)
print(t.item(), *(os.environ[name] for name in ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")))"""
    pools.run("step = 7")
    for pool, expected in (("trainer", "2.0 trainer 1 2"), ("ps", "1.0 ps 0 1")):
        assert body(pools.run(f"%%distributed --pool {pool}\n{role}"))[-1] == expected
        printed = pools.run(f"%%distributed --pool {pool}\nprint(step)")
        assert body(printed)[-1] == "7"
        assert printed.text.startswith(f"pool {pool} · ")
        assert f"pool {pool} · " in str(printed.panel["text/html"])
    pools.run("%%distributed --pool ps\nstep = 8")
    assert body(pools.run("%%rank 1 --pool trainer\nprint(step)"))[-1] == "7"
    assert pools.run("%dist_gather step --pool ps --as steps").errors == []
    assert pools.value("steps") == [8]
    assert "NameError" in pools.run("%%distributed --pool ps\nmine").error


def test_suggested_magics_name_the_pool(pools: Notebook) -> None:
    """Magics in panels, notes and errors have `--pool` and so work as they are shown."""
    printed = pools.run("%%distributed --pool trainer\nfor number in range(300): print(number)")
    again = "%dist_output --pool trainer -r 0-1 --all"
    assert f"… 100 lines more: {again}" in printed.text
    assert again in printed.panel["text/html"]
    assert len(pools.run(again).text.splitlines()) == 2 * 301
    pools.run("%%rank 1 --pool trainer\nonly = 5\nprint(only)")
    lacking = pools.run("%%distributed --pool trainer\nonly").error
    (sync,) = re.findall("`(%dist_sync [^`]*)`", lacking)
    assert sync == "%dist_sync --pool trainer only --from 1"
    assert pools.run(sync).errors == []
    assert body(pools.run("%%distributed --pool trainer\nonly"))[-1] == "5"
    # A rank that did not run the last cell has no output to show.
    pools.run("%%rank 1 --pool trainer\nprint(only)")
    assert "ran on rank 1 only" in pools.run("%dist_output --pool trainer -r 0").error


def test_a_cell_only_waits_for_the_job_of_its_pool(pools: Notebook, tmp_path: Path) -> None:
    """A cell of another pool runs at once; a cell of the job's pool runs after the job."""
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


def test_a_death_in_one_pool_leaves_the_other_alone(pools: Notebook) -> None:
    """Dead workers of a pool are replaced; the other pool keeps its processes."""
    pids = pools.run("%%distributed --pool ps\nimport os; os.getpid()").text
    assert "rank 1 " in pools.run("%%rank 1 --pool trainer\nimport os; os._exit(3)").error
    assert pools.run("%%distributed --pool trainer\ndist.barrier()").errors == []
    assert pools.run("%%distributed --pool ps\nos.getpid()").text.split()[-1] == pids.split()[-1]


def test_a_pool_can_be_shut_down_alone(pools: Notebook) -> None:
    """`%dist_status` shows, and `%dist_shutdown` ends, all pools or the named pool."""
    displays = pools.run("%dist_status").displays
    heads = [each["data"]["text/plain"].split(" · ")[0] for each in displays]
    assert heads == ["pool ps", "pool trainer"]
    assert pools.run("%dist_status --pool ps").text.startswith("pool ps · 1 worker on ")
    assert "`%dist_restart --pool ps -n 3`" in pools.run("%dist_init --pool ps -n 3").error
    assert "--pool 1/2" in pools.run("%%distributed --pool 1/2\npass").error
    assert "none are running" in pools.run("%dist_gather x --pool other").error
    pools.run("%dist_shutdown --pool ps")
    assert pools.run("%dist_status --pool ps").text.startswith("no workers are running")
    assert pools.run("%%distributed --pool trainer\ndist.barrier()").errors == []
    assert pools.run("%dist_shutdown").text == "workers ended"
    assert pools.run("%dist_status").text.startswith("no workers are running")
