"""A cell as it was typed: checked as Python, with the notebook's lines, and which cell it is."""

from __future__ import annotations

import ast
import re
import warnings
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


REMEDIES = {
    "'return' outside function": "The last line of a cell is its value: leave `return` out.",
    "'yield' outside function": "`yield` belongs in a function: `print` shows values one by one.",
}
"""What to do instead, by what Python says."""


class CellSyntaxError(UsageError, SyntaxError):
    """The cell is not Python; shown as IPython shows a syntax error, without a traceback."""

    def __init__(self, error: SyntaxError, shown: list[str]) -> None:
        line = f" (line {error.lineno} of the cell)" if error.lineno else ""
        remedy = REMEDIES.get(error.msg, "")
        super().__init__(f"{error.msg}{line}; nothing has run. {remedy}".rstrip())
        self._shown = [*shown, f"Nothing has run on the workers. {remedy}".rstrip()]

    def _render_traceback_(self) -> list[str]:
        return self._shown


def check_source(shell: InteractiveShell, first_line: str, cell: str) -> str:
    """Give the cell as Python, magics transformed; raises when it is none, before anything runs."""
    source = in_notebook_lines(first_line, cell)
    try:
        python: str = shell.transform_cell(source)
        is_code = _compiles_to_code(python)
    except SyntaxError as error:
        lines = source.splitlines()
        error.filename = "<cell>"  # also where Python's tokenizer has found it
        if error.text is None and 0 < (error.lineno or 0) <= len(lines):
            error.text = lines[(error.lineno or 0) - 1]
        shown = shell.SyntaxTB.structured_traceback(type(error), error, None)
        raise CellSyntaxError(error, shown) from None
    if not is_code:
        name = first_line.split()[0] if first_line else "%%distributed"
        raise UsageError(
            f"`{name}`: the cell has no code, so nothing has run. "
            "`%dist_init -n 4` starts workers without a cell."
        )
    return python


def _compiles_to_code(python: str) -> bool:
    """Compile all of it, as `return 5` parses; False for comments alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks give them
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        module = compile(python, "<cell>", "exec", ast.PyCF_ONLY_AST | flags)
        compile(module, "<cell>", "exec", flags)
    assert isinstance(module, ast.Module)
    return bool(module.body)


def in_notebook_lines(first_line: str, cell: str) -> str:
    """Make the source to send: the magic's line as a comment, so that lines have their numbers.

    Not where another cell magic comes next, which must be on the first line; nor where
    `first_line` is "", as nobody has typed one.  It is indented as the cell's first line is:
    by so much IPython moves all lines of a cell that was cut out of a function.
    """
    is_whole = not first_line or cell.lstrip().startswith("%%")
    indent = re.match(r"\s*?([ \t]*)(?=\S|$)", cell)
    return cell if is_whole else f"{indent[1] if indent else ''}# {first_line}\n{cell}"


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
