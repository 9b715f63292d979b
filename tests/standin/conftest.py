"""Skips what needs the torch that the stand-in is written for."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

LEAST = (2, 15)
"""From then on a backend in Python can say its name, and what is renewed."""


def has_torch() -> bool:
    """Say whether torch is new enough, without importing it."""
    return tuple(map(int, re.findall(r"\d+", metadata.version("torch"))[:2])) >= LEAST


@pytest.fixture(scope="package", autouse=True)
def _needs_torch() -> None:
    if not has_torch():
        has = metadata.version("torch")
        pytest.skip(f"the stand-in for nccl needs torch {LEAST[0]}.{LEAST[1]}; this is {has}")
