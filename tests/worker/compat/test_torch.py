"""Tests of `nbdist.worker.compat.torch`: this torch, and a torch that lacks something."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbdist.errors import RanksReleased
from nbdist.worker.compat import torch as seam
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)


def test_missing_abilities_are_named_in_sentences() -> None:
    """Each sentence names torch's version; torch 2.13 and later versions lack nothing."""
    said = seam.check()
    assert all(text.startswith(f"torch {torch.__version__}: ") for text in said)
    assert all(text.endswith(".") for text in said)
    assert len(said) == sum(since > seam.VERSION for since in ((2, 9), (2, 11), (2, 13)))


def test_each_optimizers_step_has_the_known_code() -> None:
    """Every optimizer's `step` has the code by which a call inside of a step is recognized."""
    for kind in (torch.optim.SGD, torch.optim.Adam):
        kind([torch.zeros(1, requires_grad=True)])
        step: Any = kind.step
        assert step.__code__ is seam.STEP_CODE


def test_a_restored_group_is_in_torchs_tables_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_default_group` restores a group's entries in torch's tables, also the recorder's."""
    group: Any = object()
    tables = {name: {group: f"in {name}"} for name in seam.TABLES}
    kept = SimpleNamespace(**tables, tags_to_pg={}, group_count=0)
    default: list[object] = []
    torchs = SimpleNamespace(_world=kept, _update_default_pg=default.append)
    monkeypatch.setattr(seam, "distributed_c10d", torchs)
    monkeypatch.setattr(seam.c10d, "_register_process_group", lambda name, group: None)
    entries = seam.entries_of(group)
    for table in tables.values():
        table.clear()
    seam.set_default_group(group, entries)
    assert kept.pg_flight_recorder_hooks == {group: "in pg_flight_recorder_hooks"}
    assert default == [group]


def test_only_receives_can_be_ended(world: World) -> None:
    """Only gloo's receives can be ended; sends and collectives go on."""
    world.execute(
        "from nbdist.worker.compat.torch import end_receive\n"
        "reduced = dist.all_reduce(torch.ones(1), async_op=True)\n"
        "sent = dist.isend(torch.ones(1), (rank + 1) % world_size)\n"
        "assert not end_receive(reduced) and not end_receive(sent)\n"
        "dist.recv(t := torch.zeros(1), (rank - 1) % world_size)\n"
        "reduced.wait(), sent.wait()\n"
        "never = dist.irecv(t, tag=5)\n"
        "assert end_receive(never) and not never.wait()"
    )


WITHOUT_RECORDER = f"""#!{sys.executable}
import runpy, sys
import torch.distributed
from torch._C import _distributed_c10d as c10d
vars(c10d).pop("_dump_fr_trace_json", None)
sys.argv[1:] = []
runpy.run_module("nbdist.worker", run_name="__main__")
"""


@pytest.mark.world
def test_a_world_starts_without_flight_recorder(tmp_path: Path) -> None:
    """A world whose torch lacks Flight Recorder says so, and still releases a rank that waits."""
    python = tmp_path / "python"
    python.write_text(WITHOUT_RECORDER)
    python.chmod(0o755)
    with World(2, log_dir="", fork=False, python=str(python)) as world:
        missing = " ".join(world.engine.start_notes.missing)
        assert "ranks that wait in an asynchronous collective" in missing
        with pytest.raises(RanksReleased, match="barrier"):
            world.execute("if rank == 0: dist.barrier()")
        assert world.run(sum, [1, 2]).rank(0) == 3
