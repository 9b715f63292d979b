"""Tests of `nbdist.wire.start`: command, seats, device and files of a worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.topology import Seat
from nbdist.wire.start import WorkerStart, WorldSpec, over_file

WRAPPED = WorldSpec(4, "gloo", {}, "/", (), 1, "/venv/bin/python", wrap=("nice", "-n", "5"))
START = WorkerStart(3, 1, 2, WRAPPED, "/run/3.json", "token", "/run/store", "/run/over", 1, {})


def test_command_of_a_spawned_worker() -> None:
    """What wraps it stands before; the working directory is not on its path."""
    assert " ".join(WRAPPED.command) == "nice -n 5 /venv/bin/python -P -m nbdist.worker"


def test_seats_of_a_world() -> None:
    """On one node all, on several so many each."""
    assert WRAPPED.seat(3) == Seat(3, 4, 0, 1)
    assert replace(WRAPPED, per_node=2).seat(3) == Seat(1, 2, 1, 2)


@pytest.mark.parametrize(
    ("gpus", "device"), [((), "cpu"), (("4", "5"), "cuda:1"), (("4",), "cuda:0")]
)
def test_device_of_a_worker(gpus: tuple[str, ...], device: str) -> None:
    """Its own GPU, or its share of fewer."""
    assert replace(START, gpus=gpus).device == device


def test_files_of_a_worker() -> None:
    """Beside its connection file."""
    assert START.stack_file == "/run/3.stack"
    assert over_file(START.over_path, 2) == Path("/run/over.over2")
