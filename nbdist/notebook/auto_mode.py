"""Auto mode: plain cells run on the workers, and so does one with the tag `distributed`.

Around the kernel's `do_execute`, which sees what is silent, what is stored, and the cell's tags;
in a terminal around the shell's `run_cell`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.config import DEFAULT_POOL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from IPython.core.interactiveshell import InteractiveShell

TAG = "distributed"
"""Of a cell, in place of the magic: JupyterLab sends a cell's tags along."""

NOTE = "auto mode: `%%local` on the first line runs a cell here"
"""What every panel says while it is on."""


class AutoMode:
    """Whether it is on, and for which pool."""

    def __init__(self) -> None:
        self.pool: str | None = None

    def __repr__(self) -> str:
        return f"<AutoMode {'off' if self.pool is None else f'on for {self.pool}'}>"

    @property
    def is_on(self) -> bool:
        """Whether plain cells run on the workers."""
        return self.pool is not None

    def sent(self, code: str, tags: Iterable[str] = ()) -> str:
        """Give what is to be run in place of a cell that somebody has typed."""
        pool = DEFAULT_POOL if self.pool is None and TAG in tags else self.pool
        if pool is None or not is_plain(code):
            return code
        other = "" if pool == DEFAULT_POOL else f" --pool {pool}"
        return f"%%distributed --auto{other}\n{code}"


def is_plain(code: str) -> bool:
    """Say whether the cell has Python to run, and begins with no magic and no command."""
    for line in code.splitlines():
        text = line.strip()
        if text and not text.startswith("#"):
            return text[0] not in "%!"
    return False


class AutoCells:
    """What stands around the methods that run what somebody has typed."""

    def __init__(self, shell: InteractiveShell, mode: AutoMode) -> None:
        self._shell: Any = shell
        self._mode = mode

    def __repr__(self) -> str:
        return f"<AutoCells {self._mode}>"

    def do_execute(
        self,
        original: Callable[..., Any],
        code: str,
        silent: bool,  # noqa: FBT001 (as ipykernel calls it)
        store_history: bool = True,  # noqa: FBT001, FBT002
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Stand around the kernel's method of this name."""
        if store_history and not silent:
            code = self._mode.sent(code, self._tags())
        return original(code, silent, store_history, *args, **kwargs)

    def run_cell(
        self,
        original: Callable[..., Any],
        raw_cell: str,
        store_history: bool = False,  # noqa: FBT001, FBT002 (as IPython has it)
        silent: bool = False,  # noqa: FBT001, FBT002
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Stand around a terminal's method of this name."""
        if store_history and not silent:
            raw_cell = self._mode.sent(raw_cell)
        return original(raw_cell, store_history, silent, *args, **kwargs)

    def _tags(self) -> tuple[str, ...]:
        """Read the tags of the cell that the front end wants run."""
        metadata = self._shell.get_parent().get("metadata", {})
        tags = metadata.get("tags") if isinstance(metadata, dict) else None
        return tuple(tags) if isinstance(tags, list) else ()
