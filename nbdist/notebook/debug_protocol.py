"""Reads and makes messages of the Debug Adapter Protocol, as JupyterLab and debugpy write them.

The modules of the notebook's debugger use this module in the notebook's process.
"""

from __future__ import annotations

import json
from typing import Any

from nbdist.wire.places import PACKAGES

Message = dict[str, Any]
"""A request, a response or an event of the Debug Adapter Protocol."""

BEGINNINGS = ("/nbdist/agent/fork_server.py", "/nbdist/worker/__main__.py", "/runpy.py")
"""The files with which a worker's process begins, by the ends of their paths.

Frames in these files are the outermost frames of a worker.  They are not shown to users.
"""

CLIENT: Message = {
    "clientID": "nbdist",
    "adapterID": "nbdist",
    "pathFormat": "path",
    "linesStartAt1": True,
    "columnsStartAt1": True,
    "supportsVariableType": True,
    "supportsVariablePaging": True,
}
"""The arguments of the request `initialize`, by which nbdist connects to a rank's debugger."""


FILE_NOT_FOUND = "Breakpoint in file that does not exist."
"""debugpy's message about a breakpoint in a file that the debugged process's machine lacks."""


def is_library(frame: Message) -> bool:
    """Return True for a frame in a function of an installed package or of the standard library.

    Also returns True for the frames in which a worker's process began (`is_outer`).
    """
    path = str((frame.get("source") or {}).get("path", ""))
    is_installed = PACKAGES.match(path) is not None and frame.get("name") != "<module>"
    return is_installed or is_outer(frame)


def is_outer(frame: Message) -> bool:
    """Return True for a frame in a file with which a worker's process begins (`BEGINNINGS`)."""
    path = str((frame.get("source") or {}).get("path", ""))
    return path.endswith(BEGINNINGS)


def refusal(response: Message) -> str:
    """Return why a rank cannot stop at one of its breakpoints.

    Returns "" if the rank can stop at all of them, or if debugpy gives no reason.  `response` is
    the rank's response to a request `setBreakpoints`.
    """
    points = (response.get("body") or {}).get("breakpoints", ())
    texts = [str(each.get("message", "")) for each in points if not each.get("verified")]
    text = next(filter(None, texts), "")
    return "the file is missing there" if text == FILE_NOT_FOUND else text


def copying(inner: Message) -> Message:
    """Return the arguments of a `setExpression` request that copies a local variable to a global.

    `inner` are the arguments of JupyterLab's request `copyToGlobals`, which debugpy does not know.
    """
    name = json.dumps(inner.get("dstVariableName", ""))
    return {
        "expression": f"globals()[{name}]",
        "value": inner.get("srcVariableName", ""),
        "frameId": inner.get("srcFrameId"),
    }


def reply_to(msg: Message, body: Any, like: Message | None = None) -> Message:
    """Return a response to the front end's request `msg`, with the given body if it is not None.

    `like` is the response of a rank: the returned response reports a failure, and has a message, if
    that response does.  Without `like`, it reports a success.
    """
    response: Message = {
        "type": "response",
        "seq": msg.get("seq", 0),
        "request_seq": msg.get("seq", 0),
        "command": msg.get("command", ""),
        "success": like is None or bool(like.get("success")),
    }
    if body is not None:
        response["body"] = body
    if like is not None and "message" in like:
        response["message"] = like["message"]
    return response


def failure(msg: Message, text: str) -> Message:
    return reply_to(msg, {}, {"success": False, "message": text})
