"""What a front end asks of the kernel by code of its own, such as VS Code's list of variables."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbdist.worker.op import Context


def answer(context: Context, source: str) -> str:
    """Run code beside the user's cells, and return what it prints; raises what it raises."""
    shell: Any = context.shell
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(shell.transform_cell(source), "<front end>", "exec"), shell.user_ns)
    return said.getvalue()
