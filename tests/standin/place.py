"""A folder to be put on PYTHONPATH, with which torch is given the stand-in when it is imported."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

METADATA = "Metadata-Version: 2.1\nName: nccl-standin\nVersion: 0\n"

ENTRY_POINT = "[torch.backends]\nnccl-standin = tests.standin.backend:install\n"


def make(folder: Path) -> str:
    """Make what an installed package would have; return PYTHONPATH with it."""
    about = folder / "nccl_standin-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(METADATA)
    (about / "entry_points.txt").write_text(ENTRY_POINT)
    return os.pathsep.join([str(folder), str(ROOT)])
