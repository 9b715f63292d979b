"""Jupyter messages from a worker: read, and turned into the classes of `nbdist.output.events`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jupyter_client.session import Session

from nbdist.output.events import (
    MOVED,
    RECORD,
    Clear,
    Connections,
    Display,
    Failure,
    MimeBundle,
    Moved,
    Output,
    Record,
    Update,
)

log = logging.getLogger("nbdist.agent")

OURS = (
    os.path.join("nbdist", "worker", "group", "gloo.py"),  # by which a worker knows that it waits
    os.path.join("nbdist", "worker", "ops", "call.py"),
    os.path.join("nbdist", "worker", "kernel.py"),  # which is what `input` is there
    os.path.join("nbdist", "worker", "tasks.py"),
)
"""What frames of a traceback that are not of interest have in them."""

ANSI = re.compile(r"\x1b\[[0-9;]*m")

WIDGET = "application/vnd.jupyter.widget-view+json"

NO_WIDGETS = "(a widget: widgets of workers cannot be shown)"

WIDGETS = "jupyter.widget"
"""How the names of connections begin that belong to widgets."""

NO_COMM = "(`{}` wants a connection to the page, which ranks cannot open)"

ENDING = "`%dist_shutdown` ends all workers."


@dataclass(frozen=True, slots=True)
class Message:
    """One that has arrived whole; `number` is its place among those with marks, 0 for none."""

    kind: str
    content: Mapping[str, Any]
    answers: str
    number: int
    time_ns: int
    kinds: tuple[str, ...]
    connections: Connections
    buffers: tuple[bytes | memoryview, ...] = ()
    account: tuple[str, ...] = ()


def message_from(session: Session, frames: list[bytes]) -> Message | None:
    """Read a message; None, and a line in the log, for bytes that are none.

    The worker's user can have its sockets carry anything.
    """
    try:
        raw = session.deserialize(session.feed_identities(frames)[1])
        ours = raw["metadata"].get("nbdist", {})
        return Message(
            str(raw["header"]["msg_type"]),
            {**raw["content"]},
            str(raw["parent_header"].get("msg_id", "")),
            int(ours.get("number", 0)),
            int(ours.get("time_ns", 0)),
            tuple(map(str, ours.get("kinds", ()))),
            ours.get("connections", ""),
            tuple(raw["buffers"]),
            tuple(map(str, ours.get("account", ()))),
        )
    except Exception as error:  # noqa: BLE001 (garbage can make each of these raise anything)
        log.warning("dropped %d frames of a worker's: %s", len(frames), short(error))
        return None


def short(error: Exception) -> str:
    """Write the error in one short line, for the log."""
    return f"{type(error).__name__}: {error}"[:200]


def output_from(message: Message) -> Output | None:
    """Read it as an output; None for kinds that nbdist does not relay, and for malformed ones.

    A worker's user can publish what he likes.
    """
    try:
        return _output(message)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning("dropped a malformed %s: %s", message.kind, short(error))
        return None


def _output(message: Message) -> Output | None:
    content = message.content
    match message.kind:
        case "error":
            return _failure(message)
        case "execute_result":
            return Display(*_bundles(content), is_result=True)
        case "display_data":
            return Display(*_bundles(content), _display_id(content))
        case "update_display_data" if display_id := _display_id(content):
            return Update(*_bundles(content), display_id)
        case "clear_output":
            return Clear(bool(content.get("wait")))
        case "comm_open" if not (target := str(content["target_name"])).startswith(WIDGETS):
            return Display({"text/plain": NO_COMM.format(target)}, {})
        case kind if kind == MOVED:
            return Moved(int(content["done"]), int(content["total"]))
        case kind if kind == RECORD:
            return Record(**content)
        case _:
            return None


def _shown(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what can be shown of a display: a page has no model of a worker's widget."""
    if WIDGET not in data:
        return data
    rest = {kind: said for kind, said in data.items() if kind != WIDGET}
    return {**rest, "text/plain": f"{data.get('text/plain', '')} {NO_WIDGETS}".lstrip()}


def _bundles(content: Mapping[str, Any]) -> tuple[MimeBundle, MimeBundle]:
    """Return the data, whose text is text, and the metadata."""
    data = {
        mime: value if _is_text(value) or not mime.startswith(("text/", "image/")) else str(value)
        for mime, value in content["data"].items()
    }
    return _shown(data), {**(content.get("metadata") or {})}


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(part, str) for part in value)
    )


def _display_id(content: Mapping[str, Any]) -> str | None:
    found = (content.get("transient") or {}).get("display_id")
    return None if found is None else str(found)


def _failure(message: Message) -> Failure:
    content = message.content
    traceback = tuple(map(str, content.get("traceback") or ()))
    name, said = str(content["ename"]), str(content.get("evalue", ""))
    ours = message.time_ns, message.kinds, message.connections, message.account
    return as_shown(Failure(name, said, traceback, *ours))


def as_shown(failure: Failure) -> Failure:
    """Return the same without what is not of interest."""
    traceback = tuple(frame for frame in failure.traceback if not _is_ours(frame))
    if failure.name != "SystemExit":
        return replace(failure, traceback=traceback)
    # IPython explains at length how to leave a terminal.
    message = "" if failure.message == "None" else failure.message
    said = f"sys.exit({message}) ended the cell on this rank; the worker is still running."
    traceback = (f"{said} {ENDING}",)
    return replace(failure, message=message, traceback=traceback)


def _is_ours(frame: str) -> bool:
    plain = ANSI.sub("", frame)
    return any(part in plain for part in OURS)
