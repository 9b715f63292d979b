"""Completion and inspection in cells of the workers while a cell runs in the notebook.

ipykernel 7 receives requests in a thread of its own, which passes them to the main thread; there
they would wait until the cell has ended.  Those that the workers can answer are answered in that
thread's place.  With ipykernel 6 there is no such thread: they wait.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nbdist.notebook.idle import is_in_subshell
from nbdist.wire.control import Complete, Completions, Description, Inspect, Question

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.notebook.completion import Completion


class WhileBusy:
    """Looks at requests before the main thread gets them; one at a time is answered here."""

    def __init__(self, shell: InteractiveShell, completion: Completion) -> None:
        self._shell = shell
        self._kernel: Any = getattr(shell, "kernel", None)
        self._completion = completion
        self._runs_cell = False
        self._is_asked = threading.Lock()

    def __repr__(self) -> str:
        return f"<WhileBusy, {'a cell runs' if self._runs_cell else 'idle'}>"

    @property
    def is_possible(self) -> bool:
        """Whether requests arrive in another thread."""
        return getattr(self._kernel, "shell_channel_thread", None) is not None

    def begin(self) -> None:
        """Look at requests from now on."""
        self._shell.events.register("pre_execute", self._begin_cell)
        self._shell.events.register("post_execute", self._end_cell)
        self._receive_with(self._receive)

    def end(self) -> None:
        """Have everything as it was."""
        self._shell.events.unregister("pre_execute", self._begin_cell)
        self._shell.events.unregister("post_execute", self._end_cell)
        self._runs_cell = False
        self._receive_with(self._kernel.shell_channel_thread_main)

    def _receive_with(self, receive: Any) -> None:
        stream = self._kernel.shell_stream
        loop = self._kernel.shell_channel_thread.io_loop
        loop.add_callback(lambda: stream.on_recv(receive, copy=False))

    def _begin_cell(self) -> None:
        if not is_in_subshell(self._shell):
            self._runs_cell = True

    def _end_cell(self) -> None:
        if not is_in_subshell(self._shell):
            self._runs_cell = False

    # --- in the thread that receives ----------------------------------------------------------

    async def _receive(self, message: list[Any]) -> None:
        asked = self._asked(message) if self._runs_cell else None
        if asked is None or not self._is_asked.acquire(blocking=False):
            await self._kernel.shell_channel_thread_main(message)
            return
        answering = threading.Thread(target=self._answer, args=asked, name="nbdist-answer")
        answering.daemon = True
        answering.start()

    def _asked(self, message: list[Any]) -> tuple[Any, dict[str, Any], Question] | None:
        """Read a question that the workers can answer: who asks, the request's header, itself."""
        session = self._kernel.session
        try:
            sender, frames = session.feed_identities(message, copy=False)
            request = session.deserialize(frames, content=False, copy=False)  # checks who signed
            header, content = request["header"], session.unpack(request["content"])
        except (ValueError, TypeError, LookupError):  # ipykernel tells what is wrong with it
            return None
        question: Question
        match header["msg_type"]:
            case "complete_request":
                question = Complete(content["code"], content["cursor_pos"])
            case "inspect_request":
                detail = content.get("detail_level", 0)
                question = Inspect(content["code"], content["cursor_pos"], detail)
            case _:
                return None
        if header.get("subshell_id") or not self._completion.is_ours(question):
            return None
        return sender, header, question

    # --- in a thread of its own ---------------------------------------------------------------

    def _answer(self, sender: Any, header: dict[str, Any], question: Question) -> None:
        answer: Completions | Description | None = None
        try:
            with suppress(RuntimeError):  # a table that the running cell has changed meanwhile
                answer = self._completion.answer(question)
        finally:
            self._is_asked.release()
        nothing: Completions | Description = Description({})
        if isinstance(question, Complete):
            nothing = Completions((), question.cursor, question.cursor)
        reply = (answer or nothing).reply()
        kind = header["msg_type"].replace("_request", "_reply")
        loop = self._kernel.shell_channel_thread.io_loop
        with suppress(RuntimeError):  # the kernel ends
            loop.add_callback(self._send, kind, reply, sender, header)

    def _send(self, kind: str, reply: dict[str, Any], sender: Any, header: dict[str, Any]) -> None:
        """Send the reply, and the states that say it is complete, and that the cell goes on."""
        kernel, parent = self._kernel, {"header": header}
        kernel.session.send(kernel.shell_stream, kind, reply, parent, sender)
        topic = f"kernel.{kernel.ident}.status".encode()
        for state in ("idle", "busy") if self._runs_cell else ("idle",):
            content = {"execution_state": state}
            kernel.session.send(kernel.iopub_socket, "status", content, parent, topic)
