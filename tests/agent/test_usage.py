"""Tests of `nbdist.agent.inspect`: what workers use is told while a cell runs, then no more.

NVIDIA's library is read by names as CUDA has them, or is not there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.agent.inspect import GpuGauge
from nbdist.wire.views import Gpu
from nbdist.world.result import usage_text
from nbdist.world.world import World
from tests.waiting import SOON
from tests.worlds import NewWorld

STAND_IN = """
from types import SimpleNamespace
opened = 0
class NVMLError(Exception): pass
NAMES = NAMES_HERE
def nvmlInit():
    global opened
    opened += 1
    if not NAMES: raise NVMLError("no driver")
def nvmlShutdown():
    global opened
    opened -= 1
def nvmlDeviceGetCount(): return len(NAMES)
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetHandleByUUID(uuid): return 1
def nvmlDeviceGetName(index): return NAMES[index].encode()
def nvmlDeviceGetUUID(index): return f"GPU-{index}f00-1"
def nvmlDeviceGetMemoryInfo(index): return SimpleNamespace(used=10 + index, total=80)
def nvmlDeviceGetUtilizationRates(index):
    if index == 1: raise NVMLError("not supported")
    return SimpleNamespace(gpu=97)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes one that has found GPUs of these names."""

    def make(*names: str):
        (tmp_path / "pynvml.py").write_text(STAND_IN.replace("NAMES_HERE", repr(names)))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "pynvml", raising=False)
        import pynvml

        return pynvml

    yield make
    sys.modules.pop("pynvml", None)


def test_by_their_names(library):
    """A number, the beginning of an UUID, a slice; memory, and time where it is counted."""
    nvml = library("H200", "H200", "H200")
    gauge = GpuGauge()
    found = gauge.read(["0", "1", "GPU-2f", "MIG-x", "GPU-7", "5"], {})
    assert found["0"] == Gpu(10, 80, 97)
    assert found["1"] == found["MIG-x"] == Gpu(11, 80, None)
    assert found["GPU-2f"] == Gpu(12, 80, 97)
    assert len(found) == 4
    assert nvml.opened == 1
    gauge.close()
    assert nvml.opened == 0
    assert gauge.read(["0"], {}) == {}


def test_where_cuda_counts_otherwise(library):
    """Of GPUs that differ a number says nothing, unless both count by their places."""
    library("H200", "T4")
    assert GpuGauge().read(["0"], {}) == {}
    assert [*GpuGauge().read(["0", "GPU-1"], {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})] == ["0", "GPU-1"]


def test_without_a_driver(library):
    """Nothing is known, and nothing is to be closed."""
    nvml = library()
    gauge = GpuGauge()
    assert gauge.read(["0"], {}) == {}
    gauge.close()
    assert nvml.opened == 1


def test_without_the_library(monkeypatch: pytest.MonkeyPatch):
    """Nor is it missed where there is no GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gauge = GpuGauge()
    assert gauge.read([], {}) == gauge.read(["0"], {}) == {}
    gauge.close()


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(2) as started:
        yield started


@pytest.mark.shared_world
def test_while_a_cell_runs(world: World, tmp_path: Path) -> None:
    """Each rank's memory comes by itself, and is less on the rank that has less."""
    gate = tmp_path / "gate"
    running = world.submit(
        world.task(
            "import os, time\nbig = torch.ones((1 + 200 * rank) * 2**20, dtype=torch.uint8)\n"
            f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"
        )
    )
    deadline, more = time.monotonic() + SOON, 0
    for _ in world.follow(running):
        if len(running.usage) == 2:
            more = running.usage[1].memory - running.usage[0].memory
        if more > 150 << 20 or time.monotonic() > deadline:  # it may be counted as it is filled
            gate.touch()
    assert not running.error()
    assert 150 << 20 < more < 250 << 20
    assert usage_text(running.usage.values()).startswith("cpu ")
    world.execute("del big")
