"""Skips the tests of this folder if torch is older than the stand-in needs."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

LEAST = (2, 15)
"""The first torch in which a Python backend can give its name and be connected again."""


def has_torch() -> bool:
    """Say whether torch is new enough, without importing it."""
    return tuple(map(int, re.findall(r"\d+", metadata.version("torch"))[:2])) >= LEAST


@pytest.fixture(scope="package", autouse=True)
def _needs_torch() -> None:
    if not has_torch():
        has = metadata.version("torch")
        pytest.skip(f"the stand-in for nccl needs torch {LEAST[0]}.{LEAST[1]}; this is {has}")
