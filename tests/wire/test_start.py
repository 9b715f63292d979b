"""Tests of `nbdist.wire.start`: command, seats, device and files of a worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.seats import Position, Seat, fill
from nbdist.wire.start import WorkerStart, WorldSpec, over_file

WRAPPED = WorldSpec(4, "gloo", {}, "/", (), 1, "/venv/bin/python", wrap=("nice", "-n", "5"))
START = WorkerStart(3, 1, 2, WRAPPED, "/run/3.json", "token", "/run/store", "/run/over", 1, {})


def test_command_of_a_spawned_worker() -> None:
    """What wraps it stands before; the working directory is not on its path."""
    assert " ".join(WRAPPED.command) == "nice -n 5 /venv/bin/python -P -m nbdist.worker"


def test_seats_of_a_world() -> None:
    """On one node all, on several so many each."""
    assert WRAPPED.seat(3) == Seat(3, 4, 0, 1)
    assert replace(WRAPPED, seats=fill((2, 2))).seat(3) == Seat(1, 2, 1, 2)


@pytest.mark.parametrize(
    ("gpus", "device"), [((), "cpu"), (("4", "5"), "cuda:1"), (("4",), "cuda:0")]
)
def test_device_of_a_worker(gpus: tuple[str, ...], device: str) -> None:
    """Its own GPU, or its share of fewer."""
    assert replace(START, gpus=gpus).device == device
    intels = replace(START, world=replace(START.world, backend="cpu:gloo,xpu:xccl"))
    assert intels.device == "xpu:1"


def test_files_of_a_worker() -> None:
    """Beside its connection file."""
    assert START.stack_file == "/run/3.stack"
    assert over_file(START.over_path, 2) == Path("/run/over.over2")


def test_one_node_of_several() -> None:
    """It has its own ranks, and shows each all GPUs that it has; simulated ones share."""
    world = replace(WRAPPED, seats=(Position(0, 0), Position(1, 0), *fill((2,))[1:]), world_size=3)
    real = replace(world, node=0, gpus=("0", "1"))
    assert (real.here, real.gpus_of(2)) == ((0, 2), ("0", "1"))
    assert (replace(real, node=1).here, replace(real, node=None).here) == ((1,), (0, 1, 2))
    assert replace(world, gpus=("0", "1", "2")).gpus_of(1) == ("2",)
    assert replace(WRAPPED, node=0).here == (0, 1, 2, 3)


@pytest.mark.parametrize(("log_dir", "folder"), [("", None), ("/logs", Path("/logs/run/0"))])
def test_where_the_log_files_are(log_dir: str, folder: Path | None) -> None:
    """Beside torch's error file, which has a place also where there are none."""
    spec = WorldSpec(1, None, {}, "/", (), 1, "python", log_dir=log_dir)
    environ = {"TORCHELASTIC_ERROR_FILE": "/logs/run/0/error.json"}
    assert WorkerStart(0, 0, 1, spec, "", "", "", "", 1, environ).log_folder == folder
