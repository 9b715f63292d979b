"""A cell as it was typed: checked as Python, with the notebook's lines, and which cell it is."""

from __future__ import annotations

import ast
import re
import warnings
from typing import TYPE_CHECKING, Any

from nbdist.errors import UsageError
from nbdist.notebook.cell_text import AT, MAGICS, misplaced
from nbdist.notebook.shipping.free_names import names_bound
from nbdist.notebook.shipping.magic_strings import names_in_commands
from nbdist.words import format_ranks, name_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Container

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.world.names import NameTable
    from nbdist.world.world import World

LOADING = ("load_ext", "reload_ext", "unload_ext")

REMEDIES = {
    "'return' outside function": "The last line of a cell is its value: leave `return` out.",
    "'yield' outside function": "`yield` belongs in a function: `print` shows values one by one.",
}
"""What to do instead, by what Python says."""

_WORD = re.compile(r"\s*([^\W\d]\w*)([ \t]+[^=\s].*)?\s*")
"""A cell of one line that may be a magic without its `%`."""


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
        module = _compiled(python)
    except SyntaxError as error:
        lines = source.splitlines()
        error.filename = "<cell>"  # also where Python's tokenizer has found it
        if error.text is None and 0 < (error.lineno or 0) <= len(lines):
            error.text = lines[(error.lineno or 0) - 1]
        shown = shell.SyntaxTB.structured_traceback(type(error), error, None)
        raise CellSyntaxError(error, shown) from None
    if "run_line_magic" in python:
        check_magics(module)
    if not module.body:
        name = first_line.split()[0] if first_line else "%%distributed"
        raise UsageError(
            f"`{name}`: the cell has no code, so nothing has run. "
            "`%dist_init -n 4` starts workers without a cell."
        )
    return python


def is_python(shell: InteractiveShell, cell: str) -> bool:
    """Say whether a cell is Python, with its magics transformed."""
    try:
        _compiled(shell.transform_cell(cell))
    except SyntaxError:
        return False
    return True


def as_magic(shell: Any, cell: str, world: World | None) -> str:
    """Write `cd /tmp` as `%cd /tmp` where IPython, or a rank of the world, takes it for that.

    IPython does that for cells of one line; a magic's line above would make it two.
    """
    found = _WORD.fullmatch(cell)
    names = world.session.names if world else None
    if found is None or (names and names.ranks_with(found[1])):
        return cell
    if shell.find_line_magic(found[1]):
        is_meant = shell.prefilter_manager.prefilter_lines(cell.strip()) != cell.strip()
    else:
        alias = re.compile(rf"%?alias(?:_magic)?[ \t]+{found[1]}\b")
        past = world.session.past.tasks if world and found[2] else ()
        is_meant = any(alias.search(task.text) for task in past)
    return f"%{cell.lstrip()}" if is_meant else cell


def check_commands(
    python: str, names: NameTable, ranks: Collection[int], ours: Container[str]
) -> None:
    """Raise UsageError where a command would fill in a variable that one of the ranks lacks.

    That rank would give `{name}` to its shell as it stands.
    """
    for name in names_in_commands(python):
        have = names.ranks_with(name)
        lacking = [rank for rank in ranks if rank not in have]
        if have and lacking and name not in ours and name not in names_bound(python):
            raise UsageError(
                f"`{name}`, which a command fills in, is on {name_ranks(have)} and not on "
                f"{name_ranks(lacking)}: `%dist_sync {name} --from {have[0]}` copies it, or begin "
                f"the cell with `%%rank {format_ranks(have)}`. Nothing has run."
            )


def _compiled(python: str) -> ast.Module:
    """Compile all of it, as `return 5` parses; return it parsed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks give them
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        module = compile(python, "<cell>", "exec", ast.PyCF_ONLY_AST | flags)
        compile(module, "<cell>", "exec", flags)
    assert isinstance(module, ast.Module)
    return module


def check_magics(module: ast.Module) -> None:
    """Raise UsageError where the cell has a magic that only the notebook has."""
    for node in ast.walk(module):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="run_line_magic"),
                args=[ast.Constant(str(name)), ast.Constant(str(text))],
            ):
                if name.lstrip("%") in MAGICS and name.startswith("%"):
                    raise not_first(name, text if text.startswith(AT) else f"{AT}{node.lineno}")
                if name.startswith("dist_") or name in MAGICS:
                    raise UsageError(
                        f"line {node.lineno}: `%{name}` is for the notebook, not for the ranks: "
                        "put it in a cell of its own, or last in this one. Nothing has run."
                    )
                if name in LOADING and text.split()[:1] == ["nbdist"]:
                    raise UsageError(
                        f"line {node.lineno}: `%{name} nbdist` is for the notebook, not for the "
                        "ranks: take it out of this cell. Nothing has run."
                    )


def not_first(name: str, where: str) -> UsageError:
    """Make the error of a cell magic that is below other lines; `name` begins with one `%`."""
    return UsageError(f"%{name} must be the first line of its cell: split the cell {where}.")


def refuse_place(shell: InteractiveShell, name: str, text: str) -> None:
    """Raise that error, as the line magic `%distributed`, which IPython makes of such a line.

    `text` says where where `transform_first_lines` has made it; else that is found in the cell.
    """
    cell = [*shell.history_manager.input_hist_raw][-1]  # type: ignore[union-attr]
    found = misplaced(cell.splitlines(keepends=True))
    where = f"{AT}{found[1]}" if found else "there"
    raise not_first(name, text if text.startswith(AT) else where)


def in_notebook_lines(first_line: str, cell: str) -> str:
    """Make the source to send: the magic's line as a comment, so that lines have their numbers.

    Not where another cell magic comes next, which must be on the first line; nor where
    `first_line` is "" in auto mode.  It is indented as the cell's first line is:
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
