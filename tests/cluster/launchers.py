"""A launcher of the tests' own: the example of the manual, installed as a package is."""

from __future__ import annotations

import re
from pathlib import Path

MANUAL = Path(__file__).parents[2] / "docs" / "machines.md"


def example(kind: str = "python", begin: str = "# my_launcher.py") -> str:
    """The launcher that the manual shows, or its entry point."""
    begin = re.escape(f"```{kind}\n{begin}")
    found = re.search(rf"(?<=\n){begin}.*?(?=```)", MANUAL.read_text(), re.DOTALL)
    assert found, "the manual shows no launcher"
    return found[0].partition("\n")[2]


def install(folder: Path) -> None:
    """Have it in a folder that is on a path, under the name that the manual gives it."""
    (folder / "my_launcher.py").write_text(example())
    metadata = folder / "my_launcher-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_launcher\nVersion: 1\n")
    points = example("toml", "[project.entry-points.").replace("project.entry-points.", "")
    (metadata / "entry_points.txt").write_text(points.replace('"', ""))
