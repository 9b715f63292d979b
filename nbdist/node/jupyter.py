"""Raw Jupyter messages from a worker, turned into the classes of `nbdist.wire.messages`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from nbdist.wire.calls import CALL
from nbdist.wire.outputs import RECORD, Clear, Display, Failure, Output, Record, Update

OURS = (
    os.path.join("nbdist", "worker", "watching.py"),  # by which a worker knows that it waits
    os.path.join("nbdist", "wire", "calls.py"),
    f"{CALL}()",  # the line that stands for a cell
)
"""What frames of a traceback that are nobody's business have in them."""

ANSI = re.compile(r"\x1b\[[0-9;]*m")

ENDING = "`%dist_shutdown` ends all workers."


def output_from(message: Mapping[str, Any]) -> Output | None:
    """The message as an output; None for kinds that nbdist does not relay."""
    content = message["content"]
    match message["header"]["msg_type"]:
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
