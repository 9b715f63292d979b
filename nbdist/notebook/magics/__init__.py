"""The magics, by what they concern: each parses its line, and a desk does the work."""

from __future__ import annotations

from nbdist.notebook.magics.cells import CellMagics
from nbdist.notebook.magics.environ import EnvironMagics
from nbdist.notebook.magics.logs import LogMagics
from nbdist.notebook.magics.looks import LookMagics
from nbdist.notebook.magics.memory import MemoryMagics
from nbdist.notebook.magics.scaling import ScalingMagics
from nbdist.notebook.magics.scripts import ScriptMagics
from nbdist.notebook.magics.snapshots import SnapshotMagics
from nbdist.notebook.magics.values import ValueMagics
from nbdist.notebook.magics.workers import WorkerMagics

__all__ = ["ALL_MAGICS"]

ALL_MAGICS = (
    CellMagics,
    WorkerMagics,
    ValueMagics,
    LookMagics,
    EnvironMagics,
    ScriptMagics,
    ScalingMagics,
    MemoryMagics,
    SnapshotMagics,
    LogMagics,
)
