"""Lets multiprocessing children use functions and classes that were defined in cells.

A spawned child cannot import the worker's `__main__`, so what lives there must travel by
value: `DataLoader(num_workers=2, multiprocessing_context="spawn")` on a data set from a cell.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import cloudpickle


def pickle_cell_classes_by_value() -> None:
    """Teach multiprocessing's pickler, in this process, about `__main__`."""
    # A class attribute of a C class: mypy takes it for a method that must not change.
    setattr(ForkingPickler, "reducer_override", _reduce_cell_definition)  # noqa: B010


def _reduce_cell_definition(_pickler: ForkingPickler, value: Any) -> Any:
    if isinstance(value, FunctionType | type) and value.__module__ == "__main__":
        return cloudpickle.loads, (cloudpickle.dumps(value),)
    return NotImplemented
