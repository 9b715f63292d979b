"""A launcher of the tests' own: the example of the manual, installed as a package is."""

from __future__ import annotations

import re
from pathlib import Path

MANUAL = Path(__file__).parents[2] / "docs" / "machines.md"


def example() -> str:
    """The launcher that the manual shows."""
    text = MANUAL.read_text()
    found = re.search(r"```python\n(# my_launcher\.py\n.*?)```", text, re.DOTALL)
    assert found, "the manual shows no launcher"
    return found[1]


def install(folder: Path) -> None:
    """Have it in a folder that is on a path, under the name that the manual gives it."""
    (folder / "my_launcher.py").write_text(example())
    metadata = folder / "my_launcher-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_launcher\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[nbdist.launchers]\nhere = my_launcher:HereLauncher\n"
    )
