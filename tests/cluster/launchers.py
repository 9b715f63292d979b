"""A launcher of the tests' own: the example of the README, installed as a package is."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent.parent / "README.md"


def example() -> str:
    """The launcher that the README shows."""
    text = README.read_text()
    found = re.search(r"```python\n(# my_launcher\.py\n.*?)```", text, re.DOTALL)
    assert found, "the README shows no launcher"
    return found[1]


def install(folder: Path) -> None:
    """Have it in a folder that is on a path, under the name that the README gives it."""
    (folder / "my_launcher.py").write_text(example())
    metadata = folder / "my_launcher-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_launcher\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[nbdist.launchers]\nhere = my_launcher:HereLauncher\n"
    )
