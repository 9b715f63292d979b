"""The stand-in does what nccl2 does; tests/gpu has the real one pass the same checks."""

from __future__ import annotations

import os

import pytest

from tests.standin import place
from tests.standin.processes import CHECKS, Said, both

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """What two ranks have said of each check."""
    folder = tmp_path_factory.mktemp("standin")
    return both(folder, "cpu", {**os.environ, "PYTHONPATH": place.make(folder)})


@pytest.mark.parametrize("check", CHECKS)
def test_contract(said: Said, check: str) -> None:
    """Both ranks pass it."""
    said.passed(check)
