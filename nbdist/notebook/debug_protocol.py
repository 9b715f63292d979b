"""Messages of the Debug Adapter Protocol, as JupyterLab and debugpy write them.

Used by the modules of the notebook's debugger, in the notebook's process.
"""

from __future__ import annotations

import json
from typing import Any

from nbdist.wire.places import PACKAGES

Message = dict[str, Any]
"""A request, a response or an event of the Debug Adapter Protocol."""

BEGINNINGS = ("/nbdist/agent/fork_server.py", "/nbdist/worker/__main__.py", "/runpy.py")
"""Ends of the paths of files in which a worker's process begins, as the module `__main__`."""

CLIENT: Message = {
    "clientID": "nbdist",
    "adapterID": "nbdist",
    "pathFormat": "path",
    "linesStartAt1": True,
    "columnsStartAt1": True,
    "supportsVariableType": True,
    "supportsVariablePaging": True,
}
"""The arguments of `initialize`, as JupyterLab sends them."""


FILE_NOT_FOUND = "Breakpoint in file that does not exist."
"""What debugpy says of a breakpoint in a file that the machine of the debugged process lacks."""


def is_library(frame: Message) -> bool:
    """Return True for a frame in a function of an installed package or of the standard library."""
    path = str((frame.get("source") or {}).get("path", ""))
    is_installed = PACKAGES.match(path) is not None and frame.get("name") != "<module>"
    return is_installed or is_outer(frame)


def is_outer(frame: Message) -> bool:
    """Return True for the frame in which a worker's process began."""
    path = str((frame.get("source") or {}).get("path", ""))
    return path.endswith(BEGINNINGS)


def refusal(response: Message) -> str:
    """Return why a rank cannot stop at a breakpoint of a `setBreakpoints` request, or ""."""
    points = (response.get("body") or {}).get("breakpoints", ())
    texts = [str(each.get("message", "")) for each in points if not each.get("verified")]
    text = next(filter(None, texts), "")
    return "the file is missing there" if text == FILE_NOT_FOUND else text


def copying(inner: Message) -> Message:
    """Return the arguments of `setExpression` that copy a local variable to the globals."""
    name = json.dumps(inner.get("dstVariableName", ""))
    return {
        "expression": f"globals()[{name}]",
        "value": inner.get("srcVariableName", ""),
        "frameId": inner.get("srcFrameId"),
    }


def reply_to(msg: Message, body: Any, like: Message | None = None) -> Message:
    """Return a response to a request, which has succeeded as the rank's response `like` has."""
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
