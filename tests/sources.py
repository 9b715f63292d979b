"""The sources of the package, read and parsed once for all tests that look at them."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nbdist"


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """The module, and all that is in it."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def sources() -> dict[str, str]:
    """The text of each file of the package, whose nodes are there then.

    Hundreds of thousands of them, at which the collector would look three times as long as it
    takes to make them, and again at each later collection.
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
