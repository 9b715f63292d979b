"""IPython's own `%debug` and `%pdb`, where what failed is a distributed cell."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from nbdist.config import DEFAULT_POOL
from nbdist.errors import Interrupted, NbdistError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.notebook.pools import Pools


class RanksDebugger:
    """Leads to the rank that failed: in the notebook there are only nbdist's own calls."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def __repr__(self) -> str:
        return f"<RanksDebugger of {self._pools}>"

    def debug(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stand around `InteractiveShell.debugger`, which IPython calls for both magics."""
        shell = self._pools.shell
        is_wanted = bool(args or kwargs) or shell.call_pdb
        error = _last_error()
        if not is_wanted or not isinstance(error, NbdistError | Interrupted):
            return original(*args, **kwargs)
        if isinstance(error, UsageError) and shell.call_pdb:
            return None  # nothing has run that could be looked at
        failed = [pool for pool in self._pools if pool.failed is not None]
        name = max(failed, key=lambda pool: pool.failed_at).name if failed else DEFAULT_POOL
        return shell.run_line_magic("dist_debug", "" if name == DEFAULT_POOL else f"--pool {name}")


def _last_error() -> BaseException | None:
    found: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return found
