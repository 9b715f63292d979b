"""The fixtures of the tests of magics, for the tests of tools."""

from __future__ import annotations

from tests.notebook.conftest import kernel, pools, typed

__all__ = ["kernel", "pools", "typed"]
