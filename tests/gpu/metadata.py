"""What an installed nbdist has beside its code, for a checkout that is not installed.

Launchers are found through entry points, which are read from a distribution's metadata.
Building one would take hatchling; they are two text files.
"""

from __future__ import annotations

import tomllib
from pathlib import Path


def write_metadata(project: Path, folder: Path) -> Path:
    """Make `nbdist-*.dist-info` in a folder that is going to be on `sys.path`; where it is."""
    about = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    made = folder / f"nbdist-{about['version']}.dist-info"
    made.mkdir()
    head = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    (made / "METADATA").write_text(head, encoding="utf-8")
    groups = {"console_scripts": about["scripts"], **about["entry-points"]}
    sections = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in groups.items()
    ]
    (made / "entry_points.txt").write_text("\n".join(sections), encoding="utf-8")
    return made
