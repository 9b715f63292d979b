"""Records of `logging` on their way to the notebook, while a logger there wants them.

`Logger.callHandlers` is wrapped; a handler of ours on the root logger would make
`logging.basicConfig()` in a cell do nothing, and silence logging's handler of last resort.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from nbdist.output.events import Record

MOST = 10_000
"""Records of one cell; of more it is only said how many there were."""

Send = Callable[[dict[str, Any]], None]


class Records:
    """Sends what this process's loggers handle, from every thread.

    But for `own_logger`, to which the kernel writes each of its messages.
    """

    def __init__(self, send: Send, own_logger: str) -> None:
        self._send = send
        self._own_logger = own_logger
        self._level: int | None = None
        self._sent = self._dropped = 0
        self._pid = os.getpid()
        self._host = socket.gethostname()

    def __repr__(self) -> str:
        return f"<Records from level {self._level}, {self._sent} sent, {self._dropped} dropped>"

    def watch(self) -> None:
        """Wrap the method that all loggers call."""
        handle = logging.Logger.callHandlers

        def relay_and_handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            self.take(record)
            handle(logger, record)

        logging.Logger.callHandlers = relay_and_handle  # type: ignore[assignment, method-assign]

    def begin_task(self, level: int | None) -> None:
        """Send records from this level on; none for None."""
        self.end_task()
        self._level, self._sent = level, 0

    def end_task(self) -> None:
        """Say how many there were too many."""
        dropped, self._dropped = self._dropped, 0
        if dropped:
            said = f"{dropped:,} records more were not sent: {MOST:,} a cell and rank are"
            self._pass_on(logging.makeLogRecord({"name": "nbdist", "msg": said, "levelno": 30}))

    def take(self, record: logging.LogRecord) -> None:
        """Send a record, if the notebook wants it; a forked child sends nothing."""
        level = self._level
        if level is None or record.levelno < level or record.name == self._own_logger:
            return
        if os.getpid() != self._pid:
            return
        if self._sent >= MOST:
            self._dropped += 1
            return
        self._sent += 1
        self._pass_on(record)

    def _pass_on(self, record: logging.LogRecord) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._send(asdict(plain(record, self._host, local_rank)))


def plain(record: logging.LogRecord, host: str, local_rank: int) -> Record:
    """Give the record with its text made here: what it is made of need not travel."""
    return Record(
        host=host,
        local_rank=local_rank,
        rank=int(os.environ.get("RANK", "0")),
        name=str(record.name),
        level=int(record.levelno),
        level_name=str(record.levelname),
        message=_message(record),
        created=float(record.created),
        pathname=str(record.pathname),
        line=int(record.lineno),
        function=str(record.funcName),
        thread=str(record.threadName),
        pid=os.getpid(),
        exception=_exception(record),
        stack=str(record.stack_info or ""),
    )


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 (arguments that do not fit, or have a bad __str__)
        return f"{record.msg!r:.1000} ({type(error).__name__} while it was formatted)"


def _exception(record: logging.LogRecord) -> str:
    if record.exc_text:
        return str(record.exc_text)
    if not isinstance(record.exc_info, tuple) or record.exc_info[0] is None:
        return ""
    try:
        return logging.Formatter().formatException(record.exc_info)
    except Exception as error:  # noqa: BLE001 (the exception's __str__ is the user's)
        return f"{record.exc_info[0].__name__} ({type(error).__name__} while it was formatted)"
