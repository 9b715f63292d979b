"""An agent's connections to a worker on unix sockets, for tasks, requests and the kernel's iopub.

Jupyter messages of the kernel are validated and turned into the classes of
`nbdist.output.events`.  Runs in the agent; `nbdist.agent.worker` uses this file.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from jupyter_client.connect import write_connection_file
from jupyter_client.session import Session
from zmq.eventloop.zmqstream import ZMQStream

from nbdist.output import events
from nbdist.wire import control
from nbdist.wire.frames import NO_VALUES, BadFrame, FrameCutter, fits, framed, pack
from nbdist.wire.spec import WorkerStart
from nbdist.wire.work import MAX_TASK_MESSAGE_BYTES, InputReply, SigintSent, TaskMessage, said_from
from nbdist.words import one_line

# --- messages ---------------------------------------------------------------------------------

log = logging.getLogger("nbdist.agent")

HIDDEN_FILES = (
    os.path.join("nbdist", "worker", "group", "gloo.py"),  # wraps torch's `Work.wait`
    os.path.join("nbdist", "worker", "ops", "run.py"),
    os.path.join("nbdist", "worker", "kernel.py"),  # replaces `input`
    os.path.join("nbdist", "worker", "main.py"),
)
"""Files of nbdist whose frames are removed from tracebacks."""

ANSI = re.compile(r"\x1b\[[0-9;]*m")

WIDGETS = "jupyter.widget"  # the comm targets of widgets begin with this
NO_COMM = "(`{}` wants a connection to the page, which ranks cannot open)"
BAD_WIDGET = "(a message of a widget was dropped: {})"
TOO_DEEP = "(a `{}` was dropped: it has more than {} levels of lists and dictionaries)"
MODEL_NAMES = ("_model_name", "_model_module", "_model_module_version")
"""Entries of a widget's state that must be strings; a page finds the widget's class by them."""

MAX_LEVELS = 100
"""The deepest nesting of JSON that is sent on; `pickle` and `json` fail at some hundreds."""

ENDING = "`%dist_shutdown` ends all workers."


class KernelMessage(NamedTuple):
    """A Jupyter message of a worker.

    A mark in the worker's stdout shows where in the text the message belongs.  `number` is the
    number of this mark, or 0 if the message has no mark.  `extras` has the metadata that nbdist has
    added in the worker, such as the time of an error.  `metadata` has all other metadata.  If the
    message is nested too deep (`is_too_deep`), `content` and `metadata` are empty.
    """

    kind: str
    content: Mapping[str, Any]
    number: int
    extras: Mapping[str, Any]
    buffers: Sequence[bytes | memoryview] = ()
    metadata: Mapping[str, Any] = NO_VALUES
    is_too_deep: bool = False


class BadWidgetMessage(ValueError):
    """Raised for a widget's message that no page could use; the text says why."""


def message_from(session: Session, frames: list[bytes]) -> KernelMessage | None:
    """Return the Jupyter message in these frames.

    Logs a warning and returns None if the frames are no Jupyter message.
    """
    try:
        raw = session.deserialize(session.feed_identities(frames)[1], content=False)
        metadata = {**raw["metadata"]}
        extras = metadata.pop("nbdist", {})
        # Return the message even if its content is unusable, because later output waits for it.
        content = _unpack_content(session, raw["content"])
        is_too_deep = content is None or is_deeper(metadata, MAX_LEVELS)
        return KernelMessage(
            str(raw["header"]["msg_type"]),
            {} if is_too_deep else {**content},
            int(extras.get("number", 0)),
            extras,
            raw["buffers"],
            NO_VALUES if is_too_deep else metadata,
            is_too_deep,
        )
    except Exception as error:  # noqa: BLE001 (for garbage, these calls can raise anything)
        log.warning("dropped %d frames of a worker's: %.200r", len(frames), error)
        return None


def _unpack_content(session: Session, content: bytes) -> Any:
    """Return the content of a message; None if it is nested deeper than `MAX_LEVELS`."""
    try:
        value = session.unpack(content)
    except RecursionError:
        return None
    return None if is_deeper(value, MAX_LEVELS) else value


def is_deeper(value: object, levels: int) -> bool:
    """Return True if lists and dictionaries are nested deeper than `levels`."""
    level: list[Any] = [[value]]
    for _ in range(levels + 1):
        parts = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for part in parts for each in part if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def output_from(message: KernelMessage) -> events.Output | None:
    """Return the output that a message shows; None if it shows none or is malformed.

    If a widget's message is of no use to a page, or if a message is nested too deep, the output is
    a line of text that says so.
    """
    if message.is_too_deep:
        return _line(TOO_DEEP.format(message.kind, MAX_LEVELS))
    try:
        if message.kind in events.COMMS:
            output: events.Output | None = _comm(message)
        else:
            output = _output(message.kind, message.content, message.extras)
        if output is not None and not fits(output, type(output)):
            raise TypeError("a field is of another type")
    except BadWidgetMessage as error:
        return _line(BAD_WIDGET.format(error))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        log.warning("dropped a malformed %s: %.200r", message.kind, error)
        return None
    return output


def _output(
    kind: str, content: Mapping[str, Any], extras: Mapping[str, Any]
) -> events.Output | None:
    display_id = (content.get("transient") or {}).get("display_id")
    display = None if display_id is None else str(display_id)
    match kind:
        case "error":
            failure = events.Failure(
                str(content["ename"]),
                str(content.get("evalue", "")),
                tuple(map(str, content.get("traceback") or ())),
                int(extras.get("time_ns", 0)),
                tuple(map(str, extras.get("kinds", ()))),
                extras.get("connections", ""),
                tuple(map(str, extras.get("account", ()))),
            )
            return user_failure(failure)
        case "execute_result":
            return events.Display(*_bundles(content), is_result=True)
        case "display_data":
            return events.Display(*_bundles(content), display)
        case "update_display_data" if display:
            return events.DisplayUpdate(*_bundles(content), display)
        case "clear_output":
            return events.Clear(bool(content.get("wait")))
        case events.MOVED_TYPE:
            return events.TransferProgress(int(content["done"]), int(content["total"]))
        case events.RECORD_TYPE:
            return events.Record(**content)
        case events.TRACKED_TYPE:
            return _tracked(content)
        case events.WARNED_TYPE:
            return events.Warned(one_line(str(content["text"])))
    return None


def _tracked(content: Mapping[str, Any]) -> events.Tracked:
    curves = {name: tuple(map(float, each)) for name, each in content["curves"].items()}
    for name, flat in curves.items():
        name.encode()  # raises ValueError for lone surrogates, which no page can show
        if len(flat) % events.OF_POINT or not all(map(math.isfinite, flat)):
            raise ValueError("points are no numbers")
        steps, *_, odd = (flat[at :: events.OF_POINT] for at in range(events.OF_POINT))
        # A point that stands for several steps begins at a multiple of its width.  This may be
        # below -MAX_STEP, so larger steps are allowed here than in `track`.
        if any(abs(step) > 4 * events.MAX_STEP for step in steps):
            raise ValueError("too large a step")
        if any(number < 0 for number in (*flat[1 :: events.OF_POINT], *odd)):
            raise ValueError("a negative count")
    counted = {name: int(number) for name, number in content["counted"].items()}
    if any(number > 2**53 for number in counted.values()):
        raise ValueError("too large a count")
    return events.Tracked(curves, counted)


def _bundles(content: Mapping[str, Any]) -> tuple[events.MimeBundle, events.MimeBundle]:
    """Return the data of a display by mime type, and the metadata of the display.

    Data of texts and images that is neither a string nor a list of strings becomes a string.
    """
    data: dict[str, Any] = {**content["data"]}
    for mime, value in data.items():
        lines = value if isinstance(value, list) else [value]
        if mime.startswith(("text/", "image/")) and not all(isinstance(x, str) for x in lines):
            data[mime] = str(value)
    return data, {**(content.get("metadata") or {})}


def _comm(message: KernelMessage) -> events.Output:
    """Return a rank's comm message to a widget in the page as an output.

    If the message opens a comm that does not belong to a widget, the output is a line of text which
    says that ranks cannot open the comm.
    """
    content, kind = message.content, message.kind
    target = str(content["target_name"]) if kind == "comm_open" else ""
    if target and not target.startswith(WIDGETS):
        return _line(NO_COMM.format(target))
    buffers = tuple(map(bytes, message.buffers))
    data: Any = content.get("data") if kind != "comm_close" else None
    data = data or {}
    _check_widget(data, is_open=bool(target))
    return events.Comm(kind, content["comm_id"], data, message.metadata, buffers, target)  # type: ignore[arg-type]


def _check_widget(data: object, *, is_open: bool) -> None:
    """Raise BadWidgetMessage if a page cannot use `data`, the data of a widget's message.

    A message that opens a widget (`is_open`) must have the widget's state.
    """
    if not isinstance(data, dict):
        raise BadWidgetMessage("its data is no dictionary")
    state = data.get("state", None if is_open else {})
    if not isinstance(state, dict):
        raise BadWidgetMessage("its state is no dictionary")
    for name in MODEL_NAMES:
        if not isinstance(state.get(name, None if is_open else ""), str):
            raise BadWidgetMessage(f"`{name}` in its state is no text")
    paths = data.get("buffer_paths", [])
    if not isinstance(paths, list) or not all(map(_is_path, paths)):
        raise BadWidgetMessage("its `buffer_paths` is no list of paths")


def _is_path(path: object) -> bool:
    """Return True for the path of a buffer in a widget's state, such as `["image", "data", 0]`."""
    return isinstance(path, list) and path != [] and all(isinstance(x, str | int) for x in path)


def _line(text: str) -> events.Display:
    return events.Display({"text/plain": text}, {})


def user_failure(failure: events.Failure) -> events.Failure:
    """Return the failure without the frames of `HIDDEN_FILES` in its traceback.

    The traceback of a SystemExit is replaced by a sentence that says what `sys.exit` did.
    """
    plain = ((frame, ANSI.sub("", frame)) for frame in failure.traceback)
    traceback = tuple(
        frame for frame, text in plain if not any(part in text for part in HIDDEN_FILES)
    )
    if failure.name != "SystemExit":
        return failure._replace(traceback=traceback)
    # IPython's own text explains how to leave a terminal, which does not apply here.
    message = "" if failure.message == "None" else failure.message
    text = f"sys.exit({message}) ended the cell on this rank; the worker is still running."
    traceback = (f"{text} {ENDING}",)
    return failure._replace(message=message, traceback=traceback)


# --- connections ------------------------------------------------------------------------------

PORTS = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}  # suffixes of socket names

SUBSCRIBE_TIMEOUT = 10.0  # seconds for the iopub subscription to take effect
RETRY_SECONDS = 0.02  # seconds between two `Announce` requests


class FrameConnection(asyncio.Protocol):
    """The agent's side of a connection to a worker.

    `on_frame` is called with each frame.  `on_lost` is called once: with None when the connection
    is closed, or before that with a BadFrame if the data cannot be cut into frames, or if
    `on_frame` raises one.  Data that comes after a BadFrame is ignored.
    """

    def __init__(
        self, on_frame: Callable[[bytes], None], on_lost: Callable[[BadFrame | None], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._cutter = FrameCutter(MAX_TASK_MESSAGE_BYTES)
        self._is_lost = False

    def data_received(self, data: bytes) -> None:
        if self._is_lost:
            return
        try:
            for frame in self._cutter.feed(data):
                self._on_frame(frame)
        except BadFrame as error:
            self._is_lost = True
            self._on_lost(error)

    def connection_lost(self, _: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._on_lost(None)


class KernelClient:
    """The agent's connections to a worker's kernel.

    For each iopub message with a mark in stdout, `on_output` is called with the number of the mark
    and the output that the message shows.  The output is None if the message shows none or is
    malformed.
    """

    def __init__(
        self, start: WorkerStart, on_output: Callable[[int, events.Output | None], None]
    ) -> None:
        self._start = start
        self._on_output = on_output
        self._base = start.connection_file.removesuffix(".json")
        self._session = Session()
        self._iopub: ZMQStream | None = None
        self._tasks: asyncio.WriteTransport | None = None
        self._control: asyncio.WriteTransport | None = None
        self._request_count = 0
        self._answers: dict[int, asyncio.Future[control.ControlReply]] = {}

    def write_connection_file(self) -> None:
        """Write the kernel's connection file; raises ChildProcessError if that fails."""
        ports: dict[str, Any] = {f"{channel}_port": port for channel, port in PORTS.items()}
        try:
            write_connection_file(
                self._start.connection_file,
                ip=self._base,
                key=self._session.key,
                transport="ipc",
                signature_scheme=self._session.signature_scheme,
                **ports,
            )
        except OSError as error:  # such as a full disk
            folder = Path(self._start.connection_file).parent
            raise ChildProcessError(f"{error.strerror} in {folder}") from error

    async def connect(
        self, on_message: Callable[[TaskMessage], None], on_lost: Callable[[BadFrame | None], None]
    ) -> None:
        """Connect to the worker, and wait until iopub is subscribed, so that no output is missed.

        `on_message` gets the worker's messages about tasks.  `on_lost` is called when the
        connection for tasks is lost (`FrameConnection`).
        If the subscription is not confirmed within `SUBSCRIBE_TIMEOUT`, logs a warning and goes on.
        Raises OSError if the worker no longer listens on its socket for tasks.
        """
        subscribed = asyncio.Event()
        # The worker takes its first connection for tasks, and the second for requests.
        self._tasks = await self._open(lambda frame: on_message(said_from(frame)), on_lost)
        on_control_lost = partial(log.debug, "rank %d can be asked no more: %s", self._start.rank)
        self._control = await self._open(self._read_answer, on_control_lost)
        # All sockets share one context, because each further context would start two threads, and
        # zmq aborts the process if a thread cannot be started.
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        socket.rcvhwm = 0
        socket.connect(f"ipc://{self._base}-{PORTS['iopub']}")
        socket.setsockopt(zmq.SUBSCRIBE, events.TOPIC)
        self._iopub = iopub = ZMQStream(socket)
        iopub.on_recv(lambda _: subscribed.set())
        deadline = time.monotonic() + SUBSCRIBE_TIMEOUT
        while not subscribed.is_set() and time.monotonic() < deadline:
            self._request(control.Announce())
            # Ask again after a timeout: the worker may have published its answer before the
            # subscription took effect.
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await subscribed.wait()
        if not subscribed.is_set():
            log.warning("rank %d has not published its state in time", self._start.rank)
        iopub.on_recv(self._read_message)

    async def _open(
        self, on_frame: Callable[[bytes], None], on_lost: Callable[[BadFrame | None], None]
    ) -> asyncio.WriteTransport:
        protocol, path = partial(FrameConnection, on_frame, on_lost), self._start.task_socket
        return (await asyncio.get_running_loop().create_unix_connection(protocol, path))[0]

    def send(self, message: bytes | InputReply | SigintSent | events.Comm) -> None:
        """Send a packed task, a message about the running task, or a page's message to a widget."""
        if self._tasks is not None:
            self._tasks.write(framed(message if isinstance(message, bytes) else pack(message)))

    async def ask(
        self, request: control.ControlRequest, timeout: float, exited: asyncio.Future[int]
    ) -> control.ControlReply | None:
        """Send a request to the worker's control thread, and return the answer.

        Returns None if no answer comes in `timeout` seconds, if the worker exits (`exited`), or if
        there is no connection.
        """
        if self._control is None:
            return None
        number = self._request(request)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            futures = (answer, exited)
            await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            del self._answers[number]

    def shut_down(self) -> None:
        """Close the connection for tasks, so that the idle worker exits."""
        if self._tasks is not None:
            self._tasks.close()

    def close(self) -> None:
        """Close all connections, and remove their sockets and the connection file."""
        for transport in (self._tasks, self._control):
            if transport is not None:
                transport.close()
        self._control = None  # from now on `ask` returns None
        if self._iopub is not None:
            self._iopub.close(linger=0)
        files = [f"{self._base}-{port}" for port in PORTS.values()]
        for file in (*files, self._start.connection_file, self._start.task_socket):
            Path(file).unlink(missing_ok=True)

    def _request(self, request: control.ControlRequest) -> int:
        assert self._control is not None
        self._request_count += 1
        self._control.write(framed(pack((self._request_count, request))))
        return self._request_count

    def _read_message(self, frames: list[bytes]) -> None:
        if (message := message_from(self._session, frames)) and message.number > 0:
            self._on_output(message.number, output_from(message))

    def _read_answer(self, frame: bytes) -> None:
        try:
            number, answer = control.answer_from(frame)
        except BadFrame as error:
            log.warning("rank %d answered what cannot be read: %s", self._start.rank, error)
            return
        future = self._answers.get(number)
        if future is not None and not future.done():
            future.set_result(answer)
