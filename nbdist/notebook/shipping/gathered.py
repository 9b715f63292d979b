"""Which variables of the notebook are the ranks' values, as gather has bound them.

`Pools` has one for all pools: what one has gathered is sent to none by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from nbdist.values.identity import Identity, is_atomic

_NOTHING = object()


class Gathered:
    """Says `name in gathered` as long as the notebook has not bound the name itself."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self._values: dict[str, Identity] = {}
        self._of_this_cell: set[str] = set()

    def __repr__(self) -> str:
        return f"<Gathered {[name for name in self._values if name in self]}>"

    def __contains__(self, name: object) -> bool:
        value = self._values.get(name) if isinstance(name, str) else None
        return value is not None and value.is_still(self._namespace.get(str(name), _NOTHING))

    @property
    def has_any(self) -> bool:
        """Whether there is anything to look after."""
        return bool(self._values)

    def add(self, names: Iterable[str]) -> None:
        """Note that these have been bound to what ranks have."""
        for name in names:
            self._values[name] = Identity(self._namespace[name])
            self._of_this_cell.add(name)

    def bound_in_notebook(self, names: Iterable[str]) -> None:
        """Note that a cell has ended that may have bound these names to something else.

        That it bound one to an equal number or text counts too, unless it has gathered it.
        """
        for name in self._values.keys() & set(names):
            may_be_equal = is_atomic(self._namespace.get(name)) and name not in self._of_this_cell
            if may_be_equal or name not in self:
                del self._values[name]
        self._of_this_cell.clear()


def assigned_in(source: str) -> frozenset[str]:
    """Find the names of `x = %dist_gather y` in a cell, as IPython has made Python of it."""
    if "run_line_magic('dist_gather'" not in source:
        return frozenset()
    return frozenset(
        target.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and _is_gather(node.value)
        for targets in node.targets
        for target in ast.walk(targets)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    )


def _is_gather(value: ast.expr) -> bool:
    match value:
        case ast.Call(func=ast.Attribute(attr="run_line_magic"), args=[ast.Constant(name), *_]):
            return bool(name == "dist_gather")
    return False


def gathered_text(name: str) -> str:
    """Say why the ranks do not have it, and what sends it."""
    return (
        f"`{name}` was gathered from the ranks, so it is not sent by itself; "
        f"`%dist_push {name}` sends it"
    )
