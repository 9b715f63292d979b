"""A client of the debugger that sends requests on the control channel, as JupyterLab does."""

from __future__ import annotations

import itertools
import time
from queue import Empty
from typing import Any

from tests.notebook.front_end import Notebook, Outcome
from tests.waiting import SOON

Message = dict[str, Any]

STEP = """%%distributed
def train_step(weight):
    gradient = weight * (rank + 1)
    dist.all_reduce(gradient)
    return gradient

weight = train_step(torch.ones(1))
print("weight", weight.item())"""
"""A cell in which each rank gets the sum of `rank + 1` over all ranks: two ranks print 3.0."""


class DebugClient:
    """Sends requests as JupyterLab's debugger does; receives its events and the output of cells."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook, self.client = notebook, notebook.client
        self.events: list[Message] = []
        self.outcome = Outcome()
        self._numbers = itertools.count()
        self._cell = ""
        self._is_over = True

    def request(self, command: str, **arguments: Any) -> Message:
        """Send a request that must succeed, and return the body of the response."""
        reply = self.ask(command, **arguments)
        assert reply.get("success"), reply
        return reply.get("body") or {}

    def ask(self, command: str, **arguments: Any) -> Message:
        """Send a request that may fail, and return the whole response."""
        content = {
            "type": "request",
            "seq": next(self._numbers),
            "command": command,
            "arguments": arguments,
        }
        message = self.client.session.msg("debug_request", content)
        self.client.control_channel.send(message)
        deadline = time.monotonic() + SOON
        while True:
            reply = self.client.get_control_msg(timeout=deadline - time.monotonic())
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return {**reply["content"]}

    def start(self) -> None:
        """Switch the debugger on, as a click in the toolbar does."""
        self.request("debugInfo")
        self.request("initialize", clientID="jupyterlab", adapterID="", pathFormat="path",
                     linesStartAt1=True, columnsStartAt1=True, supportsVariableType=True,
                     supportsVariablePaging=True, supportsRunInTerminalRequest=True)  # fmt: skip
        self.request("attach")

    def stop(self) -> None:
        """Switch the debugger off."""
        self.request("disconnect", restart=False, terminateDebuggee=False)

    def set_breakpoints(self, source: str, *lines: int) -> str:
        """Set breakpoints in the cell with this source, and return the path of the cell's file."""
        path: str = self.request("dumpCell", code=source)["sourcePath"]
        points = [{"line": line} for line in lines]
        self.request(
            "setBreakpoints", breakpoints=points, source={"path": path}, sourceModified=False
        )
        return path

    def begin(self, source: str) -> None:
        """Send a cell to the kernel without waiting for its end."""
        self.outcome, self._is_over = Outcome(), False
        self._cell = self.client.execute(source, stop_on_error=False)

    def next_event(self, name: str, timeout: float = SOON) -> Message:
        """Wait for the next event of this kind, and return its body."""
        deadline = time.monotonic() + timeout
        while not (matching := [each for each in self.events if each["event"] == name]):
            self._receive(deadline, f"no event {name!r}")
        self.events.remove(matching[0])
        return {**matching[0]["body"]}

    def finish(self, *, goes_on: bool = False) -> Outcome:
        """Wait until the cell has ended, and return its output.

        With `goes_on`, each rank that stops meanwhile is told to continue.
        """
        deadline = time.monotonic() + SOON
        while not self._is_over:
            self._receive(deadline, "the cell has not ended")
            for each in [each for each in self.events if goes_on and each["event"] == "stopped"]:
                self.events.remove(each)
                self.request("continue", threadId=each["body"]["threadId"])
        self.outcome.reply = self.notebook.reply_to(self._cell)
        return self.outcome

    def run(self, source: str) -> Outcome:
        self.begin(source)
        return self.finish()

    def _receive(self, deadline: float, problem: str) -> None:
        try:
            message = self.client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise AssertionError(f"{problem}: {self.outcome}, {self.events}") from None
        kind, content = message["msg_type"], message["content"]
        if kind == "debug_event":
            self.events.append(content)
        elif message["parent_header"].get("msg_id") == self._cell:
            if kind == "status" and content["execution_state"] == "idle":
                self._is_over = True
            self.notebook._record(self.outcome, kind, content)

    # --- what the page shows while a thread is stopped ------------------------------------

    def stack(self, thread: int) -> list[Message]:
        frames: list[Message] = self.request("stackTrace", threadId=thread)["stackFrames"]
        return frames

    def stopped(self) -> tuple[int, Message]:
        """Wait for a `stopped` event; return its thread and that thread's innermost frame."""
        thread = int(self.next_event("stopped")["threadId"])
        return thread, self.stack(thread)[0]

    def all_stopped(self, *ranks: int) -> tuple[int, Message]:
        """Let the page show each of these ranks in turn, and wait until that rank has stopped.

        Returns the thread of the last rank and its innermost frame, as `stopped` does.
        """
        thread, frame = self.stopped()
        for rank in ranks:
            title = f"rank {rank} · "
            if not frame["name"].startswith(title):
                self.evaluate(frame, f"%dist_debug -r {rank}")
            while not frame["name"].startswith(title):
                thread, frame = self.stopped()
        return thread, frame

    def variables(self, frame: Message) -> dict[str, Message]:
        """Return the variables in all scopes of a frame, by name."""
        scopes = self.request("scopes", frameId=frame["id"])["scopes"]
        by_name: dict[str, Message] = {}
        for scope in reversed(scopes):
            reference = scope["variablesReference"]
            for each in self.request("variables", variablesReference=reference)["variables"]:
                by_name[each["name"]] = each
        return by_name

    def evaluate(self, frame: Message, expression: str) -> str:
        body = self.request("evaluate", context="repl", expression=expression, frameId=frame["id"])
        return str(body["result"])
