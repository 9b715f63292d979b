"""What a worker has in its environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.worker.op import Context


def environ(_: Context) -> dict[str, str]:
    """Return all variables as they are now."""
    return dict(os.environ)
