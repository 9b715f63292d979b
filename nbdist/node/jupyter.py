"""Raw Jupyter messages from a worker, turned into the classes of `nbdist.wire.messages`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.wire.calls import CALL
from nbdist.wire.outputs import RECORD, Clear, Display, Done, Failure, Output, Record, Update
from nbdist.wire.payload import Payload, SegmentRef

OURS = (
    os.path.join("nbdist", "worker", "watching.py"),  # by which a worker knows that it waits
    os.path.join("nbdist", "wire", "calls.py"),
    f"{CALL}()",  # the line that stands for a cell
)
"""What frames of a traceback that are nobody's business have in them."""

ANSI = re.compile(r"\x1b\[[0-9;]*m")

ENDING = "`%dist_shutdown` ends all workers."


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's execute_reply: the end of the cell that had this request."""

    request_id: str
    done: Done


def output_from(message: Mapping[str, Any]) -> Output | Reply | None:
    """The message as an output or reply; None for kinds that nbdist does not relay."""
    content = message["content"]
    match message["header"]["msg_type"]:
        case "execute_reply":
            return Reply(message["parent_header"]["msg_id"], _done(content))
        case "error":
            return _failure(content, message["metadata"]["nbdist"])
        case "execute_result":
            return Display(content["data"], content["metadata"], is_result=True)
        case "display_data":
            display_id = content.get("transient", {}).get("display_id")
            return Display(content["data"], content["metadata"], display_id)
        case "update_display_data":
            return Update(content["data"], content["metadata"], content["transient"]["display_id"])
        case "clear_output":
            return Clear(bool(content.get("wait")))
        case kind if kind == RECORD:
            return Record(**content)
        case _:
            return None


def _failure(content: Mapping[str, Any], ours: Mapping[str, Any]) -> Failure:
    name, message = content["ename"], content["evalue"]
    traceback = tuple(frame for frame in content["traceback"] if not _is_ours(frame))
    if name == "SystemExit":
        # IPython explains at length how to leave a terminal.
        message = "" if message == "None" else message
        said = f"SystemExit({message})"
        traceback = (f"{said}: it ended the cell on this rank; the worker lives on. {ENDING}",)
    return Failure(name, message, traceback, ours["time_ns"], tuple(ours.get("kinds", ())))


def _is_ours(frame: str) -> bool:
    plain = ANSI.sub("", frame)
    return any(part in plain for part in OURS)


def _done(content: Mapping[str, Any]) -> Done:
    ours = content.get("nbdist", {})
    values = None
    if "segment" in ours:
        path, sizes = ours["segment"]
        values = Payload(segment=SegmentRef(path, tuple(sizes)))
    elif "frames" in ours:
        values = Payload(frames=tuple(bytes.fromhex(frame) for frame in ours["frames"]))
    return Done(
        status=content["status"],
        seconds=ours.get("seconds", 0.0),
        bound=frozenset(ours.get("bound", ())),
        imported=frozenset(ours.get("imported", ())),
        values=values,
    )
