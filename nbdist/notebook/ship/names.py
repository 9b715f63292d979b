"""Which global names the source of a cell reads, and which it binds; pure.

`nbdist.notebook.ship.plan` asks it before a cell goes to the workers.  The source has
been through IPython's input transformer, so magics and `!` lines are calls of
`get_ipython()` with strings; names inside these strings count.
"""

from __future__ import annotations

import ast
import functools

from nbdist.notebook.ship.binding import Binding
from nbdist.notebook.ship.scopes import Flow


def names_used(source: str) -> frozenset[str]:
    """Global names that a cell reads before it has certainly bound them.

    In doubt a name counts as used: what depends on a condition may not have been bound,
    and a function may be called as soon as something mentions it.  Raises SyntaxError.
    """
    flow = Flow()
    flow.read(_parse(source).body)
    return frozenset(flow.used)


def names_bound(source: str) -> frozenset[str]:
    """Names that a cell may bind, or delete, at global level.  Raises SyntaxError."""
    return frozenset(Binding.of(_parse(source).body).all_globals)


def dotted_names(source: str) -> frozenset[tuple[str, ...]]:
    """What the cell reaches through dots from a name: `xml.dom.minidom` as three parts."""
    chains = (_chain(node) for node in ast.walk(_parse(source)) if isinstance(node, ast.Attribute))
    return frozenset(chain for chain in chains if chain)


@functools.lru_cache(maxsize=8)
def _parse(source: str) -> ast.Module:
    # Several questions are asked about one source.
    return ast.parse(source)


def _chain(node: ast.expr) -> tuple[str, ...]:
    match node:
        case ast.Name(id=name):
            return (name,)
        case ast.Attribute(value=inner, attr=name):
            start = _chain(inner)
            return (*start, name) if start else ()
        case _:
            return ()
