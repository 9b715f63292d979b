"""The messages that the kernel publishes: marked with their place in the text, and limited in size.

Jupyter's server drops messages of more than some megabytes, and Stop would wait until such messages
have been sent. So displays and errors that are too large go to files in the rank's log folder.
Records of `logging` are published here too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.session import Session

from nbdist.output.events import (
    COMMS,
    MOVED_TYPE,
    RECORD_TYPE,
    TOPIC,
    TRACKED_TYPE,
    WARNED_TYPE,
    Record,
)
from nbdist.output.mimes import mime_of
from nbdist.system.folders import open_private
from nbdist.worker.process import write_mark

DISPLAYS = ("display_data", "execute_result", "update_display_data")
ORDERED = {
    *DISPLAYS,
    *COMMS,
    "clear_output",
    "error",
    MOVED_TYPE,
    RECORD_TYPE,
    TRACKED_TYPE,
    WARNED_TYPE,
}
"""Types of messages whose place in the text matters."""

MAX_DISPLAY_LENGTH = 10_000_000  # most characters of a mime type of a display that are sent

MAX_TASK_DISPLAYS = 30_000_000
"""Characters of a task's displays, after which data above `SMALL_DISPLAY` goes to files."""

SMALL_DISPLAY = 1_000_000

LONGEST_ERROR = 1 << 17
"""Characters of an error's message, and of a frame of its traceback, that are sent."""

MAX_BYTES_AHEAD = 2 << 20
"""Bytes of messages after which a rank waits until its agent has read them."""

OF_MESSAGE = 4 << 10
"""Bytes that each message counts in addition to its size: small messages take time too."""

MAX_FILES_LENGTH = 200_000_000  # characters that a rank may write to files of the log folder in all


class LargeOutputs:
    """Replaces large data of messages by a line, which names a file in `folder` with the data.

    Data that cannot be saved is dropped, such as after `MAX_FILES_LENGTH`. `host` is this machine's
    name if the notebook may be on another machine, else "".
    """

    def __init__(self, folder: Path | None, host: str = "") -> None:
        self._host = f"{host}:" if host else ""
        self.folder = folder
        self._file_room, self._files = MAX_FILES_LENGTH, 0
        self.remaining = MAX_TASK_DISPLAYS
        """Characters that the task may still display until `SMALL_DISPLAY` limits each display."""

    def limit_content(self, kind: str, content: Any) -> Any:
        """Return the content of a message, or a copy without its large data.

        Content of the wrong type is returned as it is: user code can publish anything.
        """
        fit = self._limit_error if kind == "error" else self._limit_display
        is_limited = isinstance(content, dict) and (kind == "error" or kind in DISPLAYS)
        return fit(content) if is_limited else content

    def _limit_display(self, content: dict[str, Any]) -> dict[str, Any]:
        data = content.get("data")
        if not isinstance(data, dict):
            return content
        texts = {kind: _as_text(value) for kind, value in data.items()}
        sizes = {kind: len(text) for kind, text in texts.items()}
        limit = MAX_DISPLAY_LENGTH if self.remaining > 0 else SMALL_DISPLAY
        large_kinds = [kind for kind, size in sizes.items() if size > limit]
        if not large_kinds:
            self.remaining -= sum(sizes.values())
            return content
        notes = []
        for kind in large_kinds:
            mime = mime_of(kind)
            suffix = f"{mime.suffix}.base64" if mime.is_base64 else mime.suffix
            path = self._save("display", suffix, texts[kind])
            notes.append(f"… {kind} of {sizes[kind]:,} characters, too much for a page{path}")
        plain = [] if "text/plain" in large_kinds else [str(data.get("text/plain", ""))]
        text = "\n".join(filter(None, [*plain, *notes]))
        return {**content, "data": {"text/plain": text}, "metadata": {}}

    def _limit_error(self, content: dict[str, Any]) -> dict[str, Any]:
        message, frames = content.get("evalue"), content.get("traceback")
        texts = [message, *(frames if isinstance(frames, list) else [])]
        if not any(isinstance(text, str) and len(text) > LONGEST_ERROR for text in texts):
            return content
        name = content.get("ename")
        path = self._save("error", "txt", "\n".join(map(str, [*texts[1:-1], f"{name}: {message}"])))
        excess = max(len(text) for text in texts if isinstance(text, str)) - LONGEST_ERROR
        message, *frames = [_shorten(str(text)) for text in texts]
        note = f"… {excess:,} characters of this error were left out{path}"
        return {**content, "evalue": message, "traceback": [*frames, note]}

    def _save(self, name: str, suffix: str, text: str) -> str:
        """Save text to a new file; return `: PATH` or `: HOST:PATH`, or "" if it was not saved."""
        if self.folder is None or len(text) > self._file_room:
            return ""
        path = self.folder / f"{name}-{self._files}.{suffix}"
        self._files += 1
        try:
            with open(path, "wb", opener=open_private) as file:
                file.write(text.encode("utf-8", "surrogatepass"))
        except OSError:
            with suppress(OSError):
                path.unlink()
            return ""
        self._file_room -= len(text)
        return f": {self._host}{path}"


def _as_text(value: object) -> str:
    """Return data of a display as text, data that is no text as JSON; "" if JSON cannot hold it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return ""  # count no characters: the session refuses the data, or sends it in its own way


def _shorten(text: str) -> str:
    """Return the text, or its beginning and end if it is longer than `LONGEST_ERROR`."""
    excess = len(text) - LONGEST_ERROR
    if excess <= 0:
        return text
    # Add a digest, so that texts that differ only in the part left out stay different.
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    half = LONGEST_ERROR // 2
    return f"{text[:half]} … {excess:,} characters left out, digest {digest} … {text[-half:]}"


class MarkingSession(Session):
    """Writes a mark to stdout for each ordered message, and gives the message the mark's number."""

    token = ""
    announced_error: tuple[BaseException | None, Mapping[str, object]] = None, {}
    """The exception that is being shown, and fields for the `Failure` in its message."""
    large_outputs = LargeOutputs(None)
    catch_up: Callable[[], None] | None = None
    """Waits until the agent has read all messages, because iopub's queue has no limit."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sent = 0
        self._sent_bytes = 0  # bytes sent since `catch_up` was last called
        self.shown_error: tuple[BaseException | None, int] = (None, 0)
        # No other thread may send a message between another message and its mark.
        self._order_lock = threading.RLock()

    def send(
        self,
        stream: Any,
        msg_or_type: Any,
        content: Any = None,
        parent: Any = None,
        ident: Any = None,
        buffers: Any = None,
        track: bool = False,  # noqa: FBT001, FBT002
        header: Any = None,
        metadata: Any = None,
    ) -> Any:
        """Send a message, its data limited; mark its place if it is ordered; on any thread."""
        if os.getpid() != self.pid:
            return None  # a forked child: another thread may have held the lock at the fork
        msg = msg_or_type
        if isinstance(msg, str):
            msg = self.msg(msg, content=content, parent=parent, header=header, metadata=metadata)
        kind = msg["header"]["msg_type"]
        is_ordered = kind in ORDERED
        msg["content"] = self.large_outputs.limit_content(kind, msg["content"])
        with self._order_lock:
            if is_ordered:
                fields = self.announced_error[1] if kind == "error" else {}
                mark = {"number": self._sent + 1, "time_ns": time.time_ns(), **fields}
                ident, msg["metadata"] = TOPIC, {**(msg.get("metadata") or {}), "nbdist": mark}
            try:
                sent = super().send(stream, msg, ident=ident, buffers=buffers, track=track)
            except zmq.ZMQError as error:
                if error.errno != zmq.ENOTSOCK:
                    raise
                return None  # the main thread has closed the socket, as the process ends
            if is_ordered:
                self._sent_bytes += OF_MESSAGE + sum(
                    memoryview(each).nbytes for each in buffers or ()
                )
                # Write the mark last: a message that cannot become JSON has raised by now.
                self.mark_place()
                if kind == "error":
                    self.shown_error = self.announced_error[0], self._sent
        if is_ordered and self._sent_bytes > MAX_BYTES_AHEAD and self.catch_up is not None:
            self._sent_bytes = 0
            self.catch_up()
        return sent

    def serialize(self, msg: Any, ident: Any = None) -> list[bytes]:
        """Return the frames of a message, as any session does, and count the bytes."""
        frames: list[bytes] = super().serialize(msg, ident)
        self._sent_bytes += sum(map(len, frames))
        return frames

    def mark_place(self) -> int:
        """Write a mark to stdout for this place in the text, and return its number."""
        with self._order_lock:
            self._sent += 1
            write_mark(self.token, self._sent)
            return self._sent

    def begin_task(self) -> None:
        """Forget the error that was shown, and reset the limit of displays."""
        self.shown_error = None, 0
        self.large_outputs.remaining = MAX_TASK_DISPLAYS

    def pop_error_number(self, error: BaseException | None) -> int:
        """Return the number of the message that showed an error, 0 if no message did.

        Drop the reference to the error that was shown.
        """
        (shown, number), self.shown_error = self.shown_error, (None, 0)
        return number if shown is error else 0


# --- records of `logging` for the notebook -------------------------------------------------------

MAX_LOG_RECORDS = 10_000  # records of a cell that are sent; further records are only counted


class Records:
    """Sends records of this process's loggers to the notebook, from every thread.

    Records of `own_logger` are not sent: the kernel logs each of its messages there.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], own_logger: str) -> None:
        self._send = send
        self._own_logger = own_logger
        self._level: int | None = None
        self._sent = self._dropped = 0
        self._pid = os.getpid()
        self._host = socket.gethostname()

    def __repr__(self) -> str:
        return f"<Records from level {self._level}, {self._sent} sent, {self._dropped} dropped>"

    def watch(self) -> None:
        """Wrap the method of `logging` that handles the records of all loggers; called once."""
        handle = logging.Logger.callHandlers

        def relay_and_handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            self.relay(record)
            handle(logger, record)

        logging.Logger.callHandlers = relay_and_handle  # type: ignore[assignment, method-assign]

    def begin_task(self, level: int | None) -> None:
        """Send records of this level and above from now on; None sends no records."""
        self.end_task()
        self._level, self._sent = level, 0

    def end_task(self) -> None:
        """Send a record with the number of records that were left out, if any were."""
        dropped, self._dropped = self._dropped, 0
        if dropped:
            text = (
                f"{dropped:,} records more were not sent: {MAX_LOG_RECORDS:,} a cell and rank are"
            )
            self._send_record(logging.makeLogRecord({"name": "nbdist", "msg": text, "levelno": 30}))

    def relay(self, record: logging.LogRecord) -> None:
        """Send a record, if its level is high enough and fewer than `MAX_LOG_RECORDS` were sent.

        A forked child sends nothing, and records of `own_logger` are not sent.
        """
        level = self._level
        if level is None or record.levelno < level or record.name == self._own_logger:
            return
        if os.getpid() != self._pid:
            return
        if self._sent >= MAX_LOG_RECORDS:
            self._dropped += 1
            return
        self._sent += 1
        self._send_record(record)

    def _send_record(self, record: logging.LogRecord) -> None:
        self._send(plain_record(record, self._host)._asdict())


def plain_record(record: logging.LogRecord, host: str) -> Record:
    """Return a record with formatted text instead of arguments, which may not be picklable."""
    try:
        message = record.getMessage()
    except Exception as error:  # noqa: BLE001 (arguments that do not fit, or have a bad __str__)
        message = f"{record.msg!r:.1000} ({type(error).__name__} while it was formatted)"
    return Record(
        host=host,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        rank=int(os.environ.get("RANK", "0")),
        name=str(record.name),
        level=int(record.levelno),
        level_name=str(record.levelname),
        message=message,
        created=float(record.created),
        pathname=str(record.pathname),
        line=int(record.lineno),
        function=str(record.funcName),
        thread=str(record.threadName),
        pid=os.getpid(),
        exception=_format_exception(record),
        stack=str(record.stack_info or ""),
    )


def _format_exception(record: logging.LogRecord) -> str:
    if record.exc_text:
        return str(record.exc_text)
    if not isinstance(record.exc_info, tuple) or record.exc_info[0] is None:
        return ""
    try:
        return logging.Formatter().formatException(record.exc_info)
    except Exception as error:  # noqa: BLE001 (the exception's __str__ is the user's)
        return f"{record.exc_info[0].__name__} ({type(error).__name__} while it was formatted)"
