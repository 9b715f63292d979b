"""The messages that a worker's kernel publishes for the agent, on its iopub socket.

Text goes through a pipe, so marks in the text tell the agent where a message belongs. Jupyter's
server drops messages of more than some megabytes, and Stop would wait until such messages have been
sent. So displays and errors that are too large go to files in the rank's log folder. Records of
`logging` are published here, too.
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
"""Types of messages whose place in the printed text matters; each such message gets a mark."""

MAX_DISPLAY_LENGTH = 10_000_000  # characters of a display in one mime type; more goes to a file

MAX_TASK_DISPLAYS = 30_000_000
"""The characters that a task may display before a lower limit holds for its displays.

From then on, a display that is longer than `SMALL_DISPLAY` goes to a file.
"""

SMALL_DISPLAY = 1_000_000  # the lower limit, also in characters of a display in one mime type

LONGEST_ERROR = 1 << 17
"""The most characters that are sent of an error's message, and of each part of its traceback."""

MAX_BYTES_AHEAD = 2 << 20
"""After sending this many bytes of messages, a rank waits until its agent has read them."""

OF_MESSAGE = 4 << 10
"""Bytes that are added to the size of each message, because small messages take time, too."""

MAX_FILES_LENGTH = 200_000_000  # characters that a rank may write to files of large outputs, in all


class LargeOutputs:
    """Saves large data of messages to files in `folder`; the message then names the file.

    Data is dropped if it cannot be saved, or if the files would get longer than
    `MAX_FILES_LENGTH`. `host` is this machine's name if the notebook may be on another machine,
    and otherwise "".
    """

    def __init__(self, folder: Path | None, host: str = "") -> None:
        self._host = f"{host}:" if host else ""
        self.folder = folder
        self._file_room, self._files = MAX_FILES_LENGTH, 0
        self.remaining = MAX_TASK_DISPLAYS
        """How many characters the task may display until `SMALL_DISPLAY` is the limit."""

    def limit_content(self, kind: str, content: Any) -> Any:
        """Return a message's content; if it is too large, a short copy that says what is left out.

        `kind` is the Jupyter type of the message, such as "error". Only errors and displays are
        limited. Content of the wrong type is returned as it is, as user code can publish anything.
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
        """Save text to a new file, and return the end of a note: `: PATH` or `: HOST:PATH`.

        The file's name is `NAME-NUMBER.SUFFIX`. Returns "" if the text was not saved.
        """
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
    """Return a display's data as text: a text unchanged, and other data as JSON.

    Return "" for data that cannot become JSON.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return ""  # limits do not apply: the session refuses such data, or sends it in its own way


def _shorten(text: str) -> str:
    """Return the text, or its beginning and end if it is longer than `LONGEST_ERROR`."""
    excess = len(text) - LONGEST_ERROR
    if excess <= 0:
        return text
    # Add a digest: the notebook compares the ranks' texts, which may differ only in the part that
    # is left out.
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    half = LONGEST_ERROR // 2
    return f"{text[:half]} … {excess:,} characters left out, digest {digest} … {text[-half:]}"


class MarkingSession(Session):
    """A session that marks the place of each message of a type in `ORDERED`.

    The session writes a mark with a number to stdout, and puts the number in the message. The agent
    gets text and messages by two connections, and puts them in order by the marks.
    """

    token = ""
    announced_error: tuple[BaseException | None, Mapping[str, object]] = None, {}
    """The exception whose traceback is being shown, and fields to add to the message about it."""
    large_outputs = LargeOutputs(None)
    catch_up: Callable[[], None] | None = None
    """A function that waits until the agent has read all output.

    The session calls it after every `MAX_BYTES_AHEAD` bytes. Otherwise the queue of iopub, which
    has no limit, could use up all memory.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sent = 0
        self._sent_bytes = 0  # bytes sent since `catch_up` was last called
        self.shown_error: tuple[BaseException | None, int] = (None, 0)
        # While a thread sends a message and its mark, no other thread may send.
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
        """Send a message on a socket, as jupyter_client's `Session.send`; any thread may call this.

        Displays and errors that are too large are replaced by shorter ones (`LargeOutputs`). A
        message of a type in `ORDERED` gets a mark. Sends nothing and returns None in a forked
        child, and once the socket was closed because the process exits.
        """
        if os.getpid() != self.pid:
            # Send nothing from a forked child: if another thread held the lock at the fork, the
            # child would wait for the lock for ever.
            return None
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
                return None  # the process is exiting, and its main thread has closed the socket
            if is_ordered:
                self._sent_bytes += OF_MESSAGE + sum(
                    memoryview(each).nbytes for each in buffers or ()
                )
                # Write the mark only now: if the message cannot become JSON, `send` above raises an
                # error, and a mark without a message would be wrong.
                self.mark_place()
                if kind == "error":
                    self.shown_error = self.announced_error[0], self._sent
        if is_ordered and self._sent_bytes > MAX_BYTES_AHEAD and self.catch_up is not None:
            self._sent_bytes = 0
            self.catch_up()
        return sent

    def serialize(self, msg: Any, ident: Any = None) -> list[bytes]:
        """Return the frames of a message, and add their bytes to those that were sent.

        After `MAX_BYTES_AHEAD` bytes the session waits for the agent.
        """
        frames: list[bytes] = super().serialize(msg, ident)
        self._sent_bytes += sum(map(len, frames))
        return frames

    def mark_place(self) -> int:
        """Write the next mark to stdout, for this place in the text, and return its number."""
        with self._order_lock:
            self._sent += 1
            write_mark(self.token, self._sent)
            return self._sent

    def begin_task(self) -> None:
        """Forget the error that the last task has shown, and the size of its displays."""
        self.shown_error = None, 0
        self.large_outputs.remaining = MAX_TASK_DISPLAYS

    def pop_error_number(self, error: BaseException | None) -> int:
        """Return the number of the message that has shown this error; 0 if no message has shown it.

        Afterwards the session has no reference to the error, so its frames can be freed.
        """
        (shown, number), self.shown_error = self.shown_error, (None, 0)
        return number if shown is error else 0


# --- records of `logging` for the notebook -------------------------------------------------------

MAX_LOG_RECORDS = 10_000  # records of a cell that are sent; further records are only counted


class Records:
    """Sends the records of all loggers of this process to the notebook, from every thread.

    Records of `own_logger`, by which ipykernel logs each Jupyter message, are left out.
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
        """Wrap the method by which `logging` handles the records of all loggers; called once."""
        handle = logging.Logger.callHandlers

        def relay_and_handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            self.relay(record)
            handle(logger, record)

        logging.Logger.callHandlers = relay_and_handle  # type: ignore[assignment, method-assign]

    def begin_task(self, level: int | None) -> None:
        """From now on send records of this level and above; with None send no records."""
        self.end_task()
        self._level, self._sent = level, 0

    def end_task(self) -> None:
        """If the task had records beyond the limit, send one record that says how many."""
        dropped, self._dropped = self._dropped, 0
        if dropped:
            text = (
                f"{dropped:,} records more were not sent: {MAX_LOG_RECORDS:,} a cell and rank are"
            )
            self._send_record(logging.makeLogRecord({"name": "nbdist", "msg": text, "levelno": 30}))

    def relay(self, record: logging.LogRecord) -> None:
        """Send a record to the notebook, unless its level is too low or its logger is `own_logger`.

        After `MAX_LOG_RECORDS` records of a task, further records are only counted. A forked child
        sends no records.
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
    """Return a copy of a record with its formatted message.

    The arguments of the message are left out, because they may not be picklable.
    """
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
