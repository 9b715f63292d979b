"""Notebooks for the tests of tools, as those of the magics have them."""

from __future__ import annotations

from tests.notebook.conftest import kernel, pools, typed

__all__ = ["kernel", "pools", "typed"]
