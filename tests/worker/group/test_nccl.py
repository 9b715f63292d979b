"""Tests of `nbdist.worker.group.nccl`, without a GPU; the rest is in tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nbdist.worker.compat import torch as seam
from nbdist.worker.group.nccl import Pending, UnderWay, connect

GPU = torch.device("cuda:0")


class Backend:
    """What torch's has of this: connecting, which takes as long as the others take to come."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.connected: list[torch.device] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.wait()
        self.connected.append(device)


def test_all_come() -> None:
    """It is connected on the rank's device."""
    backend = Backend(lambda: None)
    connect(backend, GPU, timeout=5.0)
    assert backend.connected == [GPU]


def test_what_nccl_says_is_passed_on() -> None:
    """As an error of the thread that has asked."""

    def refuse() -> None:
        raise RuntimeError("Duplicate GPU detected")

    with pytest.raises(RuntimeError, match="Duplicate GPU"):
        connect(Backend(refuse), GPU, timeout=5.0)


def test_nobody_waits_for_ever(tmp_path: Path) -> None:
    """A rank that does not come in time, or has ended, is told of; the wait is left behind."""
    end = threading.Event()
    with pytest.raises(RuntimeError, match="connecting nccl took more than 0 s"):
        connect(Backend(end.wait), GPU, timeout=0.1)
    over = tmp_path / "over"
    over.touch()
    with pytest.raises(RuntimeError, match="called off: a rank cannot take part"):
        connect(Backend(end.wait), GPU, timeout=5.0, over=over)
    end.set()


def test_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest of what Flight Recorder has as active, and nothing of earlier generations."""
    active = [{"record_id": 7, "profiling_name": "nccl:all_reduce"}]
    monkeypatch.setattr(seam, "unfinished_of_nccl", lambda: active)
    under_way = UnderWay()
    assert under_way.pending() == Pending(1, 8, "all_reduce")
    active.insert(0, {"record_id": 9, "profiling_name": "nccl:broadcast"})
    assert under_way.pending() == Pending(2, 10, "broadcast")
    under_way.start_over()
    assert under_way.pending() == Pending()
    active.append({"record_id": 10, "profiling_name": "nccl:recv 0<-1"})
    assert under_way.pending() == Pending(1, 11, "recv 0<-1")
    active.clear()
    under_way.start_over()
    active.append({"record_id": 10, "profiling_name": "nccl:recv 0<-1"})
    assert under_way.pending().count == 1
