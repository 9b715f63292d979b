"""Progress bars as libraries really draw them in the ranks; others are in `test_libraries`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from nbdist import World
from tests.libraries.bars import drawn
from tests.worlds import NewWorld

pytestmark = [pytest.mark.shared_world, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def started(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as world:
        yield world


@pytest.fixture
def world(started: World) -> World:
    """Two ranks."""
    return started


def test_tqdm(world: World) -> None:
    """Plain, auto, notebook and nested bars are rows of both ranks; the last state stays."""
    found = drawn(
        world,
        """
import time
from tqdm import tqdm
from tqdm.auto import tqdm as auto
from tqdm.notebook import tqdm as of_notebook
for name, each in (("plain", tqdm), ("auto", auto), ("notebook", of_notebook)):
    for _ in each(range(8), desc=name, mininterval=0):
        time.sleep(0.03)
for _ in tqdm(range(3), desc="epoch", mininterval=0):
    for _ in tqdm(range(5), desc="step", leave=False, mininterval=0):
        time.sleep(0.03)
""",
    )
    for name in ("plain", "auto", "notebook", "epoch 1/3, step"):
        assert found.is_seen_moving(name)
    assert (0, 1) in found.ranks
    line = r"\[0-1\] epoch 1/3, step \d+%( \(\d+-\d+\))? \d\d:\d\d(<\d\d:\d\d)?"
    assert any(re.fullmatch(line, said) for said in found.lines)
    for name, total in (("plain", 8), ("auto", 8), ("notebook", 8), ("epoch", 3)):
        assert found.final.count(f"{name}: 100%|██████████| {total}/{total} [") == 2
    assert "step" not in found.final


def test_rich(world: World) -> None:
    """So are those of `track` and of a `Progress` with two tasks."""
    pytest.importorskip("rich", reason="rich is not installed")
    found = drawn(
        world,
        """
import time
from rich.progress import Progress, track
for _ in track(range(10), description="tracking"):
    time.sleep(0.05)
with Progress() as progress:
    outer, inner = progress.add_task("outer", total=2), progress.add_task("inner", total=6)
    for _ in range(2):
        progress.reset(inner)
        for _ in range(6):
            time.sleep(0.05)
            progress.advance(inner)
        progress.advance(outer)
""",
    )
    assert found.is_seen_moving("tracking")
    assert found.is_seen_moving("outer, inner")
    assert (0, 1) in found.ranks
    assert (
        len(
            re.findall(
                r"^(?:rank \d  )?(?:tracking|outer|inner) ━+ 100% ", found.final, re.MULTILINE
            )
        )
        >= 3
    )


def test_datasets(world: World) -> None:
    """So is that of `Dataset.map`."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    found = drawn(
        world,
        """
import time
import datasets
rows = datasets.Dataset.from_dict({"x": list(range(40))})
rows.map(lambda row: time.sleep(0.01) or {"y": row["x"]}, keep_in_memory=True)
""",
    )
    assert found.is_seen_moving("Map")
    assert (0, 1) in found.ranks
    assert found.final.count("Map: 100%|██████████| 40/40 [") == 2


def test_lines_that_are_written_over(world: World) -> None:
    """So are bars that a program draws itself, as Keras does, and lines that say how far it is."""
    found = drawn(
        world,
        r"""
import time
for step in range(1, 9):
    print(f"\r{step}/8 [{'=' * step}>{'.' * (8 - step)}] - ETA: {8 - step}s - loss: 0.4", end="")
    time.sleep(0.04)
print()
for step in range(1, 9):
    print(f"\rstep {step} of 8", end="", flush=True)
    time.sleep(0.04)
""",
    )
    assert found.names == {"", "step"}
    assert found.is_seen_moving("step")
    assert {row.bar.rest for table in found.tables for row in table.rows} == {"loss: 0.4", ""}
    assert (
        "── ranks 0-1 (same) ──\n8/8 [========>] - ETA: 0s - loss: 0.4\nstep 8 of 8" in found.final
    )
