"""A script or executable that ranks run in the place of a cell's source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["file", "module", "executable"]


@dataclass(frozen=True, slots=True)
class Script:
    """`name` is how it was called: `train.py`, `pkg.mod`, `./x.sh`.

    `file` is where the notebook has found it ("" for a module that is no file), `root` the
    folder whose code counts as the script's own.  With `local_rank` it gets
    `--local-rank=N` before all other arguments.
    """

    kind: Kind
    name: str
    args: tuple[str, ...] = ()
    file: str = ""
    root: str = ""
    local_rank: bool = False
