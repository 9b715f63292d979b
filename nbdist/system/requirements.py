"""What nbdist requires, by what is installed: nothing is imported, torch least of all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple

REQUIREMENT = re.compile(r"([\w.-]+)\s*([^;]*)$")
"""A requirement of nbdist itself, without a marker: the name and the range."""


class Requirement(NamedTuple):
    """A package that nbdist requires: its name, the range, and the version here, "" for none."""

    name: str
    wanted: str
    found: str

    @property
    def is_within(self) -> bool:
        """Whether there is one, in the range."""
        return bool(self.found) and is_within(self.found, self.wanted)


def requirements() -> Iterator[Requirement]:
    """Look at each; at none where nbdist is run from its folder and was not installed."""
    try:
        ours = requires("nbdist") or []
    except PackageNotFoundError:
        return
    for name, wanted in (each.groups() for each in map(REQUIREMENT.match, ours) if each):
        try:
            found = version(name)
        except PackageNotFoundError:
            found = ""
        yield Requirement(name, wanted.strip(), found)


def is_within(found: str, wanted: str) -> bool:
    """Return True for a version in a range; builds of one (`2.8.0a0+nv25`) are that version."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(found).base_version
    except InvalidVersion:  # a name of the user's own, which says nothing
        return True
    return SpecifierSet(wanted).contains(release)
