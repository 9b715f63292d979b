"""What the kernel sends: marked with its place among the text, and no larger than a page takes.

Jupyter's server drops what exceeds some megabytes, and Stop would wait behind it.  So what is too
large goes into the rank's log folder instead.
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

from nbdist.output.events import COMMS, MOVED, RECORD, TOPIC, TRACKED, WARNED, Record
from nbdist.system.folders import open_private
from nbdist.worker.process import write_mark

DISPLAYS = ("display_data", "execute_result", "update_display_data")
ORDERED = {*DISPLAYS, *COMMS, "clear_output", "error", MOVED, RECORD, TRACKED, WARNED}
"""Messages whose place among the text matters."""

LARGEST = 10_000_000  # characters of one kind of data of a display that are passed on

MOST_IN_A_TASK = 30_000_000
"""Characters of a task's displays; after so many those above `SMALL` go into files."""

SMALL = 1_000_000

LONGEST_ERROR = 1 << 17
"""Characters of an error's message, and of a frame of its traceback, that are passed on."""

MOST_AHEAD = 2 << 20  # bytes after which a rank waits until its agent has taken in all of them

OF_MESSAGE = 4 << 10
"""Bytes that each message counts for besides: small ones take the agent time too."""

MOST_IN_FILES = 200_000_000  # characters that are kept in files of a rank, from its start on
_SUFFIXES = {"text/html": "html", "image/svg+xml": "svg", "image/png": "png.base64"}


class LargeOutputs:
    """Replaces what is too large by a line that says where it is; `folder` None keeps nothing.

    `host` is the machine's name where the notebook may be on another one.
    """

    def __init__(self, folder: Path | None, host: str = "") -> None:
        self._host = f"{host}:" if host else ""
        self.folder = folder
        self._room, self._files = MOST_IN_FILES, 0
        self.left = MOST_IN_A_TASK
        """Characters that the task may still show."""

    def fitting(self, kind: str, content: Any) -> Any:
        """Return the content itself, or one with less in it; cells can publish anything."""
        fit = self._fitting_error if kind == "error" else self._fitting_display
        is_limited = isinstance(content, dict) and (kind == "error" or kind in DISPLAYS)
        return fit(content) if is_limited else content

    def _fitting_display(self, content: dict[str, Any]) -> dict[str, Any]:
        data = content.get("data")
        if not isinstance(data, dict):
            return content
        texts = {kind: _as_text(said) for kind, said in data.items()}
        sizes = {kind: len(text) for kind, text in texts.items()}
        most = LARGEST if self.left > 0 else SMALL
        large = [kind for kind, size in sizes.items() if size > most]
        if not large:
            self.left -= sum(sizes.values())
            return content
        notes = []
        for kind in large:
            path = self._keep("display", _SUFFIXES.get(kind, "txt"), texts[kind])
            notes.append(f"… {kind} of {sizes[kind]:,} characters, too much for a page{path}")
        plain = [] if "text/plain" in large else [str(data.get("text/plain", ""))]
        text = "\n".join(filter(None, [*plain, *notes]))
        return {**content, "data": {"text/plain": text}, "metadata": {}}

    def _fitting_error(self, content: dict[str, Any]) -> dict[str, Any]:
        message, frames = content.get("evalue"), content.get("traceback")
        texts = [message, *(frames if isinstance(frames, list) else [])]
        if not any(isinstance(text, str) and len(text) > LONGEST_ERROR for text in texts):
            return content
        name = content.get("ename")
        path = self._keep("error", "txt", "\n".join(map(str, [*texts[1:-1], f"{name}: {message}"])))
        left = max(len(text) for text in texts if isinstance(text, str)) - LONGEST_ERROR
        message, *frames = [_cut(str(text)) for text in texts]
        note = f"… {left:,} characters of this error were left out{path}"
        return {**content, "evalue": message, "traceback": [*frames, note]}

    def _keep(self, name: str, suffix: str, text: str) -> str:
        """Write a file, if there is room; `: PATH`, or "" where it is nowhere."""
        self._room -= len(text)
        if self.folder is None or self._room < 0:
            return ""
        path = self.folder / f"{name}-{self._files}.{suffix}"
        self._files += 1
        with suppress(OSError):
            with open(path, "wb", opener=open_private) as file:
                file.write(text.encode("utf-8", "surrogatepass"))
            return f": {self._host}{path}"
        return ""


def _as_text(said: object) -> str:
    """Return what is sent of data of a display: it may be JSON, such as plotly's."""
    if isinstance(said, str):
        return said
    try:
        return json.dumps(said)
    except (TypeError, ValueError):
        return ""  # the session knows what to do with it


def _cut(text: str) -> str:
    """Return the text, or its beginning and end."""
    left = len(text) - LONGEST_ERROR
    if left <= 0:
        return text
    # Ranks whose texts differ in what is left out are not to look the same.
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    half = LONGEST_ERROR // 2
    return f"{text[:half]} … {left:,} characters left out, digest {digest} … {text[-half:]}"


class MarkingSession(Session):
    """Marks in stdout where each ordered message belongs, and numbers the message alike."""

    token = ""
    announced: tuple[BaseException | None, Mapping[str, object]] = None, {}
    """While an exception is shown: itself, and more fields of the `Failure` in its message."""
    large = LargeOutputs(None)
    catch_up: Callable[[], None] | None = None
    """Waits until the agent has taken in all that was sent, which nothing else limits."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sent = 0
        self._ahead = 0  # bytes since that was last waited for
        self.shown: tuple[BaseException | None, int] = (None, 0)
        # The mark and its message must not be parted by another thread's.
        self._in_order = threading.RLock()

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
        """Send as any kernel does; called from every thread that publishes."""
        if os.getpid() != self.pid:
            return None  # a forked child would wait for a lock that another thread held
        msg = msg_or_type
        if isinstance(msg, str):
            msg = self.msg(msg, content=content, parent=parent, header=header, metadata=metadata)
        kind = msg["header"]["msg_type"]
        is_ordered = kind in ORDERED
        msg["content"] = self.large.fitting(kind, msg["content"])
        with self._in_order:
            if is_ordered:
                about = self.announced[1] if kind == "error" else {}
                ours = {"number": self._sent + 1, "time_ns": time.time_ns(), **about}
                ident, msg["metadata"] = TOPIC, {**(msg.get("metadata") or {}), "nbdist": ours}
            try:
                sent = super().send(stream, msg, ident=ident, buffers=buffers, track=track)
            except zmq.ZMQError as error:
                if error.errno != zmq.ENOTSOCK:
                    raise
                return None  # the main thread has closed it meanwhile, as the process ends
            if is_ordered:
                self._ahead += OF_MESSAGE + sum(memoryview(each).nbytes for each in buffers or ())
                # Afterwards: a message that cannot be written as JSON has raised by now.
                self.place()
                if kind == "error":
                    self.shown = self.announced[0], self._sent
        if is_ordered and self._ahead > MOST_AHEAD and self.catch_up is not None:
            self._ahead = 0
            self.catch_up()
        return sent

    def serialize(self, msg: Any, ident: Any = None) -> list[bytes]:
        """Count the bytes too."""
        frames: list[bytes] = super().serialize(msg, ident)
        self._ahead += sum(map(len, frames))
        return frames

    def place(self) -> int:
        """Mark a place in the text, and return its number."""
        with self._in_order:
            self._sent += 1
            write_mark(self.token, self._sent)
            return self._sent

    def begin_task(self) -> None:
        """Forget the error that was shown, and allow as much to be shown again."""
        self.shown = None, 0
        self.large.left = MOST_IN_A_TASK

    def number_of(self, error: BaseException | None) -> int:
        """Return the number of the message about what ended the task, 0 for none."""
        (of, number), self.shown = self.shown, (None, 0)  # it must not be kept alive here
        return number if of is error else 0


# --- records of `logging` on their way to the notebook, while a logger there wants them -------

MOST = 10_000  # records of one cell; of more it is only said how many there were


class Records:
    """Sends what this process's loggers handle, from every thread.

    But for `own_logger`, to which the kernel writes each of its messages.
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
        """Wrap the method that all loggers call, once."""
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
        """Send how many records were left out."""
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
        self._send(plain(record, self._host)._asdict())


def plain(record: logging.LogRecord, host: str) -> Record:
    """Return the record with its text made here: what it is made of need not be sendable."""
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
        exception=_exception(record),
        stack=str(record.stack_info or ""),
    )


def _exception(record: logging.LogRecord) -> str:
    if record.exc_text:
        return str(record.exc_text)
    if not isinstance(record.exc_info, tuple) or record.exc_info[0] is None:
        return ""
    try:
        return logging.Formatter().formatException(record.exc_info)
    except Exception as error:  # noqa: BLE001 (the exception's __str__ is the user's)
        return f"{record.exc_info[0].__name__} ({type(error).__name__} while it was formatted)"
