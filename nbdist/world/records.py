"""Records of the workers' `logging`, given to the loggers of this process.

A record of local rank 0 on node1 comes to the logger `nbdist.node1.0`, so that handlers and
levels that the user has set there, on `nbdist` or on the root logger, apply: but not those of the
root logger that write where what ranks write is shown.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator

from nbdist.output.events import Record

ROOT = "nbdist"


def wanted_level(*, is_shown: bool) -> int | None:
    """Say from which level on records are handled here; None where none would be.

    Without a handler logging itself would print them, which the worker's has done.
    """
    known = logging.Logger.manager.loggerDict
    loggers = [
        logger
        for name, logger in [*known.items()]
        if name.startswith(f"{ROOT}.") and isinstance(logger, logging.Logger)
    ]
    # A logger that has neither a level nor handlers is as the one above it.
    own = [logger for logger in loggers if logger.handlers or logger.level]
    listening = [each for each in (logging.getLogger(ROOT), *own) if any(_handlers(each, is_shown))]
    return min((each.getEffectiveLevel() for each in listening), default=None)


def hand_over(record: Record, *, is_shown: bool) -> None:
    """Have this process's handlers handle it, if there are any.

    Where what ranks write `is_shown`, handlers of the root logger that write to the same place,
    as that of `logging.basicConfig`, do not: they would say it twice, and without its rank.
    """
    logger = logging.getLogger(f"{ROOT}.{record.host}.{record.local_rank}")
    handlers = [*_handlers(logger, is_shown)]
    if not logger.isEnabledFor(record.level) or not handlers:
        return
    try:
        logged = as_logged(record)
        if logger.filter(logged):
            for handler in handlers:
                if logged.levelno >= handler.level:
                    handler.handle(logged)
    except Exception:  # noqa: BLE001 (a user's handler or filter can raise anything)
        # As logging does about a handler's error: it must not end a cell that it has no part in.
        if logging.raiseExceptions:
            traceback.print_exc(file=sys.stderr)


def _handlers(logger: logging.Logger, is_shown: bool) -> Iterator[logging.Handler]:  # noqa: FBT001
    """Yield those of a logger and of those above it, as logging finds them."""
    each: logging.Logger | None = logger
    while each is not None:
        is_root = each.parent is None
        for handler in each.handlers:
            if not (is_root and is_shown and _writes_here(handler)):
                yield handler
        each = each.parent if each.propagate else None


def _writes_here(handler: logging.Handler) -> bool:
    """Say whether it writes where this process does; rich's has a console."""
    stream = getattr(handler, "stream", getattr(getattr(handler, "console", None), "file", None))
    ours = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return stream is not None and any(stream is each for each in ours)


def as_logged(record: Record) -> logging.LogRecord:
    """Return it as logging has it, with the worker's `host`, `rank` and `local_rank`."""
    file = os.path.basename(record.pathname)
    return logging.makeLogRecord(
        {
            "name": record.name,
            "msg": record.message,
            "args": None,
            "levelno": record.level,
            "levelname": record.level_name,
            "pathname": record.pathname,
            "filename": file,
            "module": os.path.splitext(file)[0],
            "lineno": record.line,
            "funcName": record.function,
            "created": record.created,
            "msecs": record.created % 1 * 1000,
            "threadName": record.thread,
            "process": record.pid,
            "processName": f"rank{record.rank}",
            "exc_text": record.exception or None,
            "stack_info": record.stack or None,
            "host": record.host,
            "rank": record.rank,
            "local_rank": record.local_rank,
        }
    )
