"""A cell's source on its way to the workers: checked here, numbered as in the notebook."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

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


def check_source(shell: InteractiveShell, magic: str, cell: str) -> str:
    """The cell as Python, magics transformed; raises when it is none, before anything runs."""
    source = in_notebook_lines(magic, cell)
    python: str = shell.transform_cell(source)
    try:
        module = compile(
            python, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
    except SyntaxError as error:
        shown = shell.SyntaxTB.structured_traceback(type(error), error, None)
        raise CellSyntaxError(error, shown) from None
    assert isinstance(module, ast.Module)
    if not module.body:
        name = magic.split()[0]
        raise UsageError(
            f"`{name}`: the cell holds no code, so nothing has run. "
            "`%dist_init -n 4` starts workers without a cell."
        )
    return python


def in_notebook_lines(magic: str, cell: str) -> str:
    """The source to send: the magic's line as a comment, so that lines have their numbers.

    Not where another cell magic comes next, which must be on the first line.
    """
    return cell if cell.lstrip().startswith("%%") else f"# {magic}\n{cell}"
