"""Notebooks for the tests of tools, as those of the magics have them."""

from __future__ import annotations

from tests.notebook.conftest import (
    kernel,
    kernels,
    pools,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    typed,
)

__all__ = ["kernel", "kernels", "pools", "pytest_runtest_setup", "pytest_runtest_teardown", "typed"]
