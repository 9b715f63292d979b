"""The sources of the package, read and parsed once for all tests that look at them."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nbdist"


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's syntax tree, the module first."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def sources() -> dict[str, str]:
    """Return the text of each file of the package; the files are parsed by then.

    The collector is off meanwhile: with hundreds of thousands of nodes it would take three times
    as long as the parser, and as long again at each later collection.
    """
    paths = sorted(PACKAGE.rglob("*.py"))
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}
    gc.collect()
    gc.disable()
    for text in texts.values():
        nodes_of(text)
    gc.freeze()
    gc.enable()
    return texts
