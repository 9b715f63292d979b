"""torch's own nccl2, without nbdist, passes what its stand-in passes.  Not run on a GPU yet."""

from __future__ import annotations

import os

import pytest

from nbdist.wire.worker_environ import MULTI_RANK_NCCL, sharing_variables
from tests.gpu import lab
from tests.standin.conftest import has_torch
from tests.standin.processes import CHECKS, Said, both


@pytest.fixture(scope="module")
def said(gpu: str, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What two ranks have said of each check, which share a GPU where there is only one."""
    if gpu == "cpu" or not has_torch():
        pytest.skip("nccl2 is in torch from 2.15 on, with CUDA")
    shared = sharing_variables(0, MULTI_RANK_NCCL, os.environ) if lab.gpus() < 2 else {}
    return both(tmp_path_factory.mktemp("contract"), gpu, {**os.environ, **shared})


@pytest.mark.parametrize("check", CHECKS)
def test_contract(said: Said, check: str) -> None:
    """Both ranks pass it."""
    said.passed(check)
