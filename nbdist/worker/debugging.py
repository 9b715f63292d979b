"""Debugs a worker by debugpy, only while the notebook's debugger is switched on.

The agent asks the control thread to `open` the debugger on a Unix socket, and then connects to the
socket.  The socket is in the world's private folder, so that no port is opened and no other user
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
CLOSE_TIMEOUT = 6.0  # seconds for the last session to end; it may wait ACCEPT_TIMEOUT for the agent


class CannotDebug(Exception):
    """Raised if this worker cannot be debugged; the text says why."""


class RankDebugger:
    """The debugger of this process; `DEBUGGER` is the only object of this class."""

    def __init__(self) -> None:
        self._open_lock = threading.Lock()  # two requests of the agent may call `open` at once
        self._session: debugpy.DebugSession | None = None
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<RankDebugger {'on' if self._session else 'off'}>"

    def open(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        """Listen at the socket `path` for one connection, which a new session then serves.

        `loop` is the main thread's event loop.  This method first closes the connection of the last
        session, and waits up to `CLOSE_TIMEOUT` seconds for that session to end.  It raises
        CannotDebug if the last session does not end in time, if debugpy is not installed, or if
        user code uses debugpy.
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
            # Set `_session` before the first request is answered.  The notebook sends a task once
            # its requests are answered, and the task must find the session and its breakpoints.
            self._session = session = debugpy.DebugSession()
            try:
                session.connect(connection)
                session.wait()
            finally:
                self._session = None
                session.end()
        finally:
            if self._loop is not None:
                # The loop stops tracing on the main thread when it runs next.  If a task keeps the
                # main thread busy, `end_task` stops tracing at the end of the task.
                with suppress(RuntimeError):  # the loop is closed: the worker exits
                    self._loop.call_soon_threadsafe(debugpy.stop_tracing)
            self._connection = None
            connection.close()

    def begin_task(self) -> None:
        """Trace the main thread, on which a task begins; if the debugger is off, stop tracing."""
        if (session := self._session) is not None:
            session.begin_task()
        elif self._thread is not None:
            debugpy.stop_tracing()

    def record_stop(self) -> None:
        """Ignore breakpoints until this rank's task has ended, because the user has pressed Stop.

        The handler of SIGINT calls this method, on the main thread.
        """
        if self._session is not None:
            self._session.pause_tracing()

    def record_abort(self) -> None:
        """Do not stop this rank at exceptions until the notebook sets exception breakpoints again.

        This method is called when collectives are aborted, which raises exceptions in the rank.
        """
        if self._session is not None:
            self._session.ignore_exceptions()

    def end_task(self) -> None:
        """Let the main thread run freely again after a task; called on the main thread."""
        if (session := self._session) is not None:
            session.end_task()
        elif self._thread is not None:
            debugpy.stop_tracing()

    def stop_at(self, frame: FrameType | None) -> bool:
        """Stop in a frame as at a breakpoint, and return True once the user lets the rank go on.

        Returns False at once if the debugger is off.
        """
        if (session := self._session) is None:
            return False
        session.stop_at(frame)
        return True


DEBUGGER = RankDebugger()
