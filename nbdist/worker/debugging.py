"""Debugs a worker by debugpy, only while the notebook's debugger is switched on.

The agent asks the control thread to `open` the debugger, and connects to the returned socket.  The
socket is a Unix socket in the world's private folder, so that no port is opened and no other user
can connect; it accepts a single connection.  The agent passes messages of the Debug Adapter
Protocol between this socket and the notebook (`nbdist.agent.debugger_relay`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from types import FrameType

from nbdist.worker.compat import debugpy

ACCEPT_TIMEOUT = 5.0  # seconds for the agent to connect
CLOSE_TIMEOUT = 6.0  # seconds for the last session to end, also one that still waits for the agent


class CannotDebug(Exception):
    """Raised if this worker cannot be debugged; the text says why."""


class RankDebugger:
    """The debugger of this process; `DEBUGGER` is the only one."""

    def __init__(self) -> None:
        self._open_lock = threading.Lock()  # two requests of the agent may call `open` at once
        self._session: debugpy.DebugSession | None = None
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<RankDebugger {'on' if self._session else 'off'}>"

    @property
    def is_on(self) -> bool:
        """Whether a client is connected and this process is being traced."""
        return self._session is not None

    def open(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        """Listen at `path` for one connection, which a new session then serves.

        `loop` is the main thread's.  Closes the connection of the last session first, and waits up
        to `CLOSE_TIMEOUT` until that session has ended.  Raises CannotDebug if it has not, if
        debugpy is not installed, or if user code uses debugpy.
        """
        with self._open_lock:
            self._end_last_session()
            if problem := debugpy.missing():
                raise CannotDebug(problem)
            self._loop = loop
            listener = socket.socket(socket.AF_UNIX)
            with suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
            listener.listen(1)
            listener.settimeout(ACCEPT_TIMEOUT)
            self._thread = threading.Thread(
                target=self._serve, args=(listener, path), name="nbdist-debugger", daemon=True
            )
            self._thread.start()

    def _end_last_session(self) -> None:
        thread, connection = self._thread, self._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if thread is not None:
            thread.join(CLOSE_TIMEOUT)
            if thread.is_alive():
                raise CannotDebug("the last session of its debugger has not ended")

    def _serve(self, listener: socket.socket, path: str) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the agent has not connected in time
            return
        finally:
            listener.close()
            with suppress(OSError):
                os.unlink(path)
        self._connection = connection
        try:
            # Before the first request is answered: a task that begins after the last answer has to
            # find the session, or it would run without the breakpoints.
            self._session = session = debugpy.DebugSession()
            try:
                session.connect(connection)
                session.wait()
            finally:
                self._session = None
                session.end()
        finally:
            if self._loop is not None:
                # While a task runs, its `end_task` does the same.
                with suppress(RuntimeError):  # the loop is closed: the worker exits
                    self._loop.call_soon_threadsafe(debugpy.stop_tracing)
            self._connection = None
            connection.close()

    def begin_task(self) -> None:
        """Trace the main thread in the task that begins, if the debugger is on."""
        if (session := self._session) is not None:
            session.begin_task()
        elif self._thread is not None:
            debugpy.stop_tracing()

    def record_stop(self) -> None:
        """Stop at no breakpoint until the task has ended, as Stop has been pressed.

        Called by the handler of SIGINT, on the main thread.
        """
        if self._session is not None:
            self._session.pause_tracing()

    def record_abort(self) -> None:
        """Stop at no exception until the task has ended: aborted collectives will raise some."""
        if self._session is not None:
            self._session.ignore_exceptions()

    def end_task(self) -> None:
        """Drop what the task has left in the debugger, on the main thread."""
        if (session := self._session) is not None:
            session.end_task()
        elif self._thread is not None:
            debugpy.stop_tracing()

    def stop_at(self, frame: FrameType | None) -> bool:
        """Stop in a frame as at a breakpoint; return False if the debugger is off."""
        if (session := self._session) is None:
            return False
        session.stop_at(frame)
        return True


DEBUGGER = RankDebugger()
