"""Cells that run beside the one that runs: ipykernel 7 has subshells, each a thread of its own.

JupyterLab runs a notebook's cells in none, and those of a console in one where it was opened by
"New Subshell Console for Notebook".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def is_in_subshell(shell: InteractiveShell) -> bool:
    """Say whether the cell that asks runs in one."""
    parent: Any = getattr(shell, "get_parent", dict)()  # a terminal's shell has none
    return parent.get("header", {}).get("subshell_id") is not None


def refusal(name: str, others: Collection[str]) -> UsageError:
    """Say that this magic waits for the notebook's own thread, and which ones do not."""
    known = ", ".join(f"`{each}`" for each in sorted(others))
    return UsageError(
        f"`{name}` cannot run in a subshell, beside other cells; these can run: {known}."
    )
