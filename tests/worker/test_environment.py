"""Tests of `nbdist.worker.environment`: what user code and libraries find in a worker."""

from __future__ import annotations

from dataclasses import replace
from os import environ

import pytest
import torch

from nbdist.worker.compat import accelerator
from nbdist.worker.control import change_environment, change_threads
from nbdist.worker.environment import share_gpu
from tests.wire.test_spec import START


@pytest.mark.parametrize(
    ("gpus", "shares", "given"),
    [
        (("MIG-8f6e",), False, ["1", None]),
        (("0",), True, ["1", "1"]),
        (("0",), False, [None, None]),
        ((), True, [None, None]),
    ],
)
def test_ranks_on_one_gpu(
    gpus: tuple[str, ...],
    shares: bool,  # noqa: FBT001
    given: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL takes several ranks that have slices of it, or are to share it."""
    names = ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE")
    for name in names:
        monkeypatch.setenv(name, "")
        del environ[name]
    monkeypatch.setattr(accelerator, "nccl_version", lambda: (2, 30, 7))
    world = replace(START.world, share_gpus=shares)
    share_gpu(replace(START, world=world, gpus=gpus))
    assert [environ.get(name) for name in names[:2]] == given


def test_variables_that_a_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those change that differ, and are what they were."""
    for name, value in (("NBT_SIZE", "2"), ("NBT_OWN", "mine"), ("NBT_SAME", "set")):
        monkeypatch.setenv(name, value)
    before = {"NBT_SIZE": "2", "NBT_OWN": "2", "NBT_SAME": "1"}
    change_environment(before, {"NBT_SIZE": "4", "NBT_OWN": "4", "NBT_SAME": "1"})
    assert [environ[name] for name in before] == ["4", "mine", "set"]


def test_threads_that_a_user_has_set_stay() -> None:
    """The number changes only where it is the one before."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        change_threads(1, 3)
        assert torch.get_num_threads() == 2
        change_threads(2, 3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
