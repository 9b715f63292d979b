"""Which versions two processes must have in common to send each other functions and values."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

Versions = Mapping[str, str]
"""By what it is the version of; "" where it is not there."""


class Difference(NamedTuple):
    """What differs, and its two versions."""

    what: str
    there: str
    here: str

    @property
    def why(self) -> str:
        """Why that cannot be; Python's functions crash another one, not only fail there."""
        return f"functions and values go to the same minor version of {self.what} only"


@cache
def versions_here() -> Versions:
    """Look at this interpreter; nothing is imported."""
    found = {"Python": platform.python_version()}
    for package in ("torch", "cloudpickle"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def difference(there: Versions, here: Versions) -> Difference | None:
    """Find the first that is not of the same minor version in both, where both have it."""
    for what, ours in here.items():
        theirs = there.get(what, "")
        if theirs and ours and theirs.split(".")[:2] != ours.split(".")[:2]:
            return Difference(what, theirs, ours)
    return None
