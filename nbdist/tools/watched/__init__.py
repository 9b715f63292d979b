"""The ranks' side of `--watch`: begins and ends what looks at a rank's steps, imported then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nbdist.wire.ops import Watched

if TYPE_CHECKING:
    from nbdist.tools.watched.watch import Watch
    from nbdist.worker.namespace import Context

_watches: list[Watch] = []
"""The one there is: from `begin` to `end`, or the next that begins."""


def begin(
    context: Context, wanted: Sequence[str], every: int, exchange: Sequence[Any]
) -> dict[str, str]:
    """Watch from now on, until the next cell has ended; return what can be no target, and why."""
    from nbdist.tools.watched.exchange import Exchange
    from nbdist.tools.watched.parts import check
    from nbdist.tools.watched.watch import Watch

    _end()
    refused = {}
    for expression in wanted:
        try:
            refused[expression] = check(eval(expression, context.names))
        except Exception:  # noqa: BLE001 (the cell may make it)
            continue
    refused = {expression: why for expression, why in refused.items() if why}
    if not refused:
        key, ranks, waits = exchange
        watch = Watch(context, wanted, every, Exchange(key, ranks, context.rank, waits=waits))
        _watches.append(watch)
        watch.open()
    return refused


def end(context: Context) -> Watched | None:
    """End it, and bring what this rank has noted."""
    watch = _end()
    return None if watch is None else watch.result()


def _end() -> Watch | None:
    if not _watches:
        return None
    watch = _watches.pop()
    watch.close()
    return watch
