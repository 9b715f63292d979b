"""Records of the workers' `logging`, given to the loggers of this process.

A record of local rank 0 on node1 comes to the logger `nbdist.node1.0`, so that handlers and
levels that the user has set there, on `nbdist` or on the root logger, apply.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

from nbdist.output.events import Record

ROOT = "nbdist"


def wanted_level() -> int | None:
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
    listening = [each for each in (logging.getLogger(ROOT), *own) if each.hasHandlers()]
    return min((each.getEffectiveLevel() for each in listening), default=None)


def hand_over(record: Record) -> None:
    """Have this process's handlers handle it, if there are any."""
    logger = logging.getLogger(f"{ROOT}.{record.host}.{record.local_rank}")
    if not logger.isEnabledFor(record.level) or not logger.hasHandlers():
        return
    try:
        logger.handle(as_logged(record))
    except Exception:  # noqa: BLE001 (a user's handler or filter can raise anything)
        # As logging does about a handler's error: it must not end a cell that it has no part in.
        if logging.raiseExceptions:
            traceback.print_exc(file=sys.stderr)


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
