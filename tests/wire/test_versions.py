"""Tests of `nbdist.wire.versions`: whether two interpreters can send each other functions."""

from __future__ import annotations

import platform

import pytest

from nbdist.wire.versions import Difference, Versions, difference, versions_here

HERE = {"Python": "3.11.7", "torch": "2.13.0+cpu", "cloudpickle": "3.1.2"}


@pytest.mark.parametrize(
    ("there", "found"),
    [
        (HERE, None),
        ({"Python": "3.11.2", "torch": "2.13.1", "cloudpickle": "3.1.0"}, None),
        ({"Python": "3.11.7", "torch": ""}, None),
        ({}, None),
        (HERE | {"Python": "3.1.7", "torch": "1.0"}, Difference("Python", "3.1.7", "3.11.7")),
        (HERE | {"torch": "2.1.0"}, Difference("torch", "2.1.0", "2.13.0+cpu")),
        (HERE | {"cloudpickle": "3.0.0"}, Difference("cloudpickle", "3.0.0", "3.1.2")),
    ],
)
def test_the_first_that_differs(there: Versions, found: Difference | None) -> None:
    """In its minor version, and where both have it."""
    assert difference(there, HERE) == found
    assert difference(HERE, HERE | {"torch": ""}) is None


def test_this_interpreter() -> None:
    """It has all of them here."""
    assert versions_here()["Python"] == platform.python_version()
    assert all(versions_here().values())
