"""What stands below `%load_ext nbdist` in the same cell: run as it would be in the next one.

IPython has read the whole cell before nbdist was there: what it made of `%%distributed` is a line
magic, with the lines below it for the notebook.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from nbdist.notebook.border.first_line import transform_first_lines
from nbdist.notebook.wrapping import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell


class RestOfCell:
    """Stands around the shell's `run_code` until the cell that has loaded nbdist has ended.

    Does nothing where that cell has no magic of ours below.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        self._is_running = self._has_run = False
        self._wrapped = Wrapped(shell, "run_code", self._run_code)
        for event in ("pre_run_cell", "post_run_cell"):
            shell.events.register(event, self._end)

    def __repr__(self) -> str:
        return f"<RestOfCell {'was run' if self._has_run else 'is to be run'}>"

    async def _run_code(
        self,
        original: Callable[..., Any],
        code: CodeType,
        result: ExecutionResult | None = None,
        **options: Any,
    ) -> bool:
        """Run the next statement of the cell, or once all of the rest; True where it has failed."""
        if self._has_run and not self._is_running:
            return False
        if self._is_running or not (rest := self._rest(result)):
            failed: bool = await original(code, result, **options)
            return failed
        self._is_running = self._has_run = True
        try:
            nodes, compiler = ast.parse(rest).body, self._shell.compile
            run = self._shell.run_ast_nodes
            failed = await run(nodes, code.co_filename, compiler=compiler, result=result)
        finally:
            self._is_running = False
        return failed

    def _rest(self, result: ExecutionResult | None) -> str:
        """Give the cell as nbdist has it read, if that is otherwise; else ""."""
        cell = str(getattr(getattr(result, "info", None), "raw_cell", None) or "")
        lines = cell.splitlines(keepends=True)
        is_ours = transform_first_lines(lines) != lines
        return str(self._shell.transform_cell(cell)) if is_ours else ""

    def _end(self, *_: object) -> None:
        """Called at IPython's events: the cell has ended, or nbdist was loaded outside of one."""
        if self._is_running:
            return
        self._wrapped.undo()
        for event in ("pre_run_cell", "post_run_cell"):
            self._shell.events.unregister(event, self._end)
