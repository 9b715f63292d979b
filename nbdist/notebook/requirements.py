"""Refuses, before anything is started, libraries that nbdist does not run with."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from nbdist.errors import WrongVersion

REQUIREMENT = re.compile(r"([\w.-]+)\s*([^;]*)$")
"""A requirement of nbdist itself, without a marker: the name and the range."""


@cache
def check_libraries() -> None:
    """Raise WrongVersion for the first library that is out of the range of pyproject.toml.

    By what is installed: nothing is imported, torch least of all.  A library that is not
    there is not looked at; the workers' Python may be another one.
    """
    for name, wanted in _ranges():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not is_within(found, wanted):
            raise WrongVersion(name, found, wanted)


def is_within(found: str, wanted: str) -> bool:
    """Say whether a version is in a range; builds of one (`2.8.0a0+nv25`) are that version."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(found).base_version
    except InvalidVersion:  # a name of the user's own, which says nothing
        return True
    return SpecifierSet(wanted).contains(release)


def _ranges() -> list[tuple[str, str]]:
    try:
        lines = requires("nbdist") or []
    except PackageNotFoundError:  # run from its folder, without having been installed
        return []
    return [(found[1], found[2].strip()) for line in lines if (found := REQUIREMENT.match(line))]
