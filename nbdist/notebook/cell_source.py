"""A cell as it was typed: checked as Python, with the notebook's lines, and which cell it is."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class CellSyntaxError(UsageError):
    """The cell is not Python; shown as IPython shows a syntax error, without a traceback."""

    def __init__(self, error: SyntaxError, shown: list[str]) -> None:
        super().__init__(f"{error.msg} (line {error.lineno} of the cell); nothing has run.")
        self._shown = shown

    def _render_traceback_(self) -> list[str]:
        return [*self._shown, "Nothing has run on the workers."]


def check_source(shell: InteractiveShell, first_line: str, cell: str) -> str:
    """Give the cell as Python, magics transformed; raises when it is none, before anything runs."""
    python: str = shell.transform_cell(in_notebook_lines(first_line, cell))
    try:
        module = compile(
            python, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
    except SyntaxError as error:
        shown = shell.SyntaxTB.structured_traceback(type(error), error, None)
        raise CellSyntaxError(error, shown) from None
    assert isinstance(module, ast.Module)
    if not module.body:
        name = first_line.split()[0] if first_line else "%%distributed"
        raise UsageError(
            f"`{name}`: the cell holds no code, so nothing has run. "
            "`%dist_init -n 4` starts workers without a cell."
        )
    return python


def in_notebook_lines(first_line: str, cell: str) -> str:
    """Make the source to send: the magic's line as a comment, so that lines have their numbers.

    Not where another cell magic comes next, which must be on the first line; nor where
    `first_line` is "", as nobody has typed one.
    """
    is_whole = not first_line or cell.lstrip().startswith("%%")
    return cell if is_whole else f"# {first_line}\n{cell}"


def execution_count(shell: InteractiveShell) -> int:
    """Give the number of the cell that is running: IPython has stored its input already."""
    inputs = shell.history_manager.input_hist_parsed  # type: ignore[union-attr]
    return max(1, len(inputs) - 1)


def cell_key(shell: InteractiveShell, source: str) -> str:
    """Identify a cell: by the front end's id of it, else by its source."""
    return cell_id(shell) or source


def cell_id(shell: InteractiveShell) -> str:
    """Give the front end's id of the cell that is running; "" where it gives none."""
    parent: Any = getattr(shell, "get_parent", dict)()  # a terminal's shell has none
    return str(parent.get("metadata", {}).get("cellId") or "")
