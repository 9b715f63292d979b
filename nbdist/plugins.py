"""The entry points by which packages extend nbdist, and the versions that nbdist requires.

All processes may call the functions, which find entry points but import none of their modules.
The groups of entry points are:

nbdist.commands      a magic, made with `nbdist.notebook.command.command`, under its name
nbdist.cell_options  an option of `%%distributed`: a `nbdist.notebook.command.CellOption`
nbdist.ops           a module of ops, the functions that tasks call on workers
nbdist.launchers     a class that starts agents on machines: `nbdist.cluster.launcher`
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

COMMANDS_GROUP, CELL_OPTIONS_GROUP = "nbdist.commands", "nbdist.cell_options"
OPS_GROUP, LAUNCHERS_GROUP = "nbdist.ops", "nbdist.launchers"

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def entry_points(*groups: str) -> dict[str, EntryPoint]:
    """Return the entry points of these groups by name.

    If several packages have an entry point of one name, that of the first package on `sys.path`
    wins.  In a checkout nbdist's own entry points, read from pyproject.toml, win over all others.
    `importlib.metadata.entry_points` is not used, since it takes four times as long.
    """
    points: dict[str, EntryPoint] = {}
    if PROJECT.exists():
        import tomllib

        project = tomllib.loads(PROJECT.read_text(encoding="utf-8")).get("project", {})
        nbdist_groups = project["entry-points"] if project.get("name") == "nbdist" else {}
        for group in groups:
            for name, value in nbdist_groups.get(group, {}).items():
                points[name] = EntryPoint(name, value, group)
    for about in _metadata_folders():
        for point in Distribution.at(about).entry_points:
            if point.group in groups:
                points.setdefault(point.name, point)
    return points


def _metadata_folders() -> Iterator[Path]:
    """Yield the metadata folders of packages on `sys.path` that have entry points for nbdist."""
    for folder in sys.path:
        with suppress(OSError):
            for name in os.listdir(folder or os.curdir):
                if name.endswith((".dist-info", ".egg-info")):
                    about = os.path.join(folder, name)
                    with suppress(OSError), open(f"{about}/entry_points.txt", "rb") as file:
                        if b"[nbdist." in file.read():
                            yield Path(about)


# --- what nbdist requires ----------------------------------------------------------------------

REQUIREMENT = re.compile(r"([\w.-]+)\s*([^;]*)$")
"""Matches a requirement without an environment marker: the package's name, and the versions."""


class Requirement(NamedTuple):
    """A package that nbdist requires; `installed` is its version here, "" if it is missing."""

    name: str
    version_range: str
    installed: str

    @property
    def is_within(self) -> bool:
        """Whether a version in the `version_range`, or one that cannot be parsed, is installed."""
        return bool(self.installed) and is_within(self.installed, self.version_range)


def requirements() -> Iterator[Requirement]:
    """Yield the requirements in nbdist's metadata, except those that have an environment marker.

    Yields nothing if nbdist is not installed, as in a checkout that is only on `sys.path`.
    """
    try:
        texts = requires("nbdist") or []
    except PackageNotFoundError:
        return
    for name, version_range in (each.groups() for each in map(REQUIREMENT.match, texts) if each):
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = ""
        yield Requirement(name, version_range.strip(), installed)


def is_within(installed: str, version_range: str) -> bool:
    """Return True if a version is in a range such as `>=2.4`; 2.8.0a0+nv25 counts as 2.8.0.

    A version that cannot be parsed counts as in the range.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        release = Version(installed).base_version
    except InvalidVersion:  # such as the name of a branch, whose version is unknown
        return True
    return SpecifierSet(version_range).contains(release)
