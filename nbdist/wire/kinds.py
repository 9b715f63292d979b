"""What kind of variable a value is, where that matters to people: it can be trained, or is big."""

from __future__ import annotations

import sys
from typing import Any

MODULE, OPTIMIZER, TENSOR, OTHER = range(4)
"""In the order in which people want to hear of them."""


def kind_of(value: Any) -> int:
    """Say which of these it is, without importing torch."""
    torch = sys.modules.get("torch")
    for kind, path in enumerate(("nn.Module", "optim.Optimizer", "Tensor")):
        found: Any = torch
        for step in path.split("."):
            found = getattr(found, step, None)
        if isinstance(found, type) and isinstance(value, found):
            return kind
    return OTHER
