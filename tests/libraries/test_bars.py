"""Progress bars as libraries really draw them in the ranks; others are in `test_libraries`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbdist import World
from tests.libraries.bars import drawn

pytestmark = pytest.mark.shared_world(2)


def test_tqdm(world: World, tmp_path: Path) -> None:
    """Plain, auto, notebook and nested bars are rows of both ranks; the last state stays."""
    found = drawn(
        world,
        tmp_path,
        """
from tqdm import tqdm
from tqdm.auto import tqdm as auto
from tqdm.notebook import tqdm as of_notebook
for name, each in (("plain", tqdm), ("auto", auto), ("notebook", of_notebook)):
    for step in each(range(8), desc=name, mininterval=0):
        if step == 3 + rank:
            until_seen(name)
for epoch in tqdm(range(3), desc="epoch", mininterval=0):
    for step in tqdm(range(5), desc="step", leave=False, mininterval=0):
        if (epoch, step) == (1, 2 + rank):
            until_seen("epoch 1/3, step")
""",
    )
    assert (0, 1) in found.ranks
    line = r"\[0-1\] epoch 1/3, step \d+%( \(\d+-\d+\))? \d\d:\d\d(<\d\d:\d\d)?"
    assert any(re.fullmatch(line, said) for said in found.lines)
    for name, total in (("plain", 8), ("auto", 8), ("notebook", 8), ("epoch", 3)):
        assert found.stays(f"{name}: 100%|██████████| {total}/{total} [")
    assert "step" not in found.final


def test_rich(world: World, tmp_path: Path) -> None:
    """So are those of `track` and of a `Progress` with two tasks."""
    pytest.importorskip("rich", reason="rich is not installed")
    found = drawn(
        world,
        tmp_path,
        """
from rich.progress import Progress, track
for step in track(range(10), description="tracking"):
    if step == 5:
        until_seen("tracking")
with Progress() as progress:
    outer, inner = progress.add_task("outer", total=2), progress.add_task("inner", total=6)
    for around in range(2):
        progress.reset(inner)
        for step in range(6):
            progress.advance(inner)
            if (around, step) == (1, 3):
                until_seen("outer, inner")
        progress.advance(outer)
""",
    )
    assert (0, 1) in found.ranks
    assert found.stays("tracking ━")
    for name in ("tracking", "outer", "inner"):
        assert re.search(rf"^(rank \d  )?{name} +━+ 100% ", found.final, re.MULTILINE)


def test_datasets(world: World, tmp_path: Path) -> None:
    """So is that of `Dataset.map`."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    found = drawn(
        world,
        tmp_path,
        """
import time
import datasets

def slowly(row):
    if row["x"] == 20:
        time.sleep(0.5)  # what it waits between two drawings, and more
    if row["x"] == 30:
        until_seen("Map")
    return {"y": row["x"]}

rows = datasets.Dataset.from_dict({"x": list(range(40))})
rows.map(slowly, keep_in_memory=True)
""",
    )
    assert (0, 1) in found.ranks
    assert found.stays("Map: 100%|██████████| 40/40 [")


def test_lines_that_are_written_over(world: World, tmp_path: Path) -> None:
    """So are bars that a program draws itself, as Keras does, and lines that say how far it is."""
    found = drawn(
        world,
        tmp_path,
        r"""
for step in range(1, 9):
    print(f"\r{step}/8 [{'=' * step}>{'.' * (8 - step)}] - ETA: {8 - step}s - loss: 0.4", end="")
    if step == 4:
        until_seen("")
print()
for step in range(1, 9):
    print(f"\rstep {step} of 8", end="", flush=True)
    if step == 4:
        until_seen("step")
""",
    )
    assert found.names == {"", "step"}
    assert {row.bar.rest for table in found.tables for row in table.rows} == {"loss: 0.4", ""}
    assert (
        "── ranks 0-1 (same) ──\n8/8 [========>] - ETA: 0s - loss: 0.4\nstep 8 of 8" in found.final
    )
