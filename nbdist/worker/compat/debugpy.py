"""Uses private names of pydevd, the part of debugpy that runs in the process that is debugged.

`debugpy.listen` would open a TCP port and start another process.  Instead, `DebugSession` serves
the Debug Adapter Protocol on a connected socket.  debugpy is imported with the first session.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import Any

from nbdist.wire.places import CELL_FILE

# pydevd reads these variables when it is imported.  The first two make a step go from a statement
# of a cell to the next statement, although IPython runs each statement alone.  The second names
# the functions that call a statement: IPython's `run_code`, and `WorkerShell.run_code` around it.
# The third variable avoids a warning about standard modules whose source pydevd cannot debug.
IMPORT_ENVIRON: Mapping[str, str] = {
    "PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING": "1",
    "PYDEVD_IPYTHON_CONTEXT": "interactiveshell.py,run_code,run_code",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}

DISPOSE_TIMEOUT = 1.0  # seconds for each of the threads of pydevd to exit


def missing() -> str:
    """Return why debugpy cannot debug this process now; "" if it can."""
    if find_spec("debugpy") is None:
        return f"{sys.executable} has no debugpy"
    constants = sys.modules.get("_pydevd_bundle.pydevd_constants")
    if constants is not None and constants.get_global_debugger() is not None:
        return "code of this rank has started debugpy by itself"
    return ""


def _import_pydevd() -> Any:
    """Import and return debugpy's pydevd; leave `os.environ` and `sys.breakpointhook` unchanged."""
    before, hook = {name: os.environ.get(name) for name in IMPORT_ENVIRON}, sys.breakpointhook
    os.environ.update(IMPORT_ENVIRON)
    try:
        import_module("debugpy._vendored.force_pydevd")
        files: Any = import_module("pydevd_file_utils")
        if getattr(files.exists, "func", None) is not _exists:
            files.exists = partial(_exists, files.exists)
        return import_module("pydevd")
    finally:
        sys.breakpointhook = hook
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _exists(original: Callable[[str], bool], file: str) -> bool:
    """Return True if a file exists or is a cell's file; pydevd calls this in place of `original`.

    pydevd ignores a breakpoint in a file that does not exist, and a cell's file need not exist.
    """
    return CELL_FILE.search(file) is not None or original(file)


class DebugSession:
    """A session of debugpy in this process, whose client is connected to a socket.

    Python code runs slower while a session exists.  A process has at most one session at a time.
    """

    def __init__(self) -> None:
        """Trace the user's threads in this process; call `connect` next to serve the client.

        The calling thread is not traced: it belongs to the debugger, as pydevd's own threads do.
        """
        thread: Any = threading.current_thread()
        thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True
        pydevd = self._pydevd = _import_pydevd()
        constants = import_module("_pydevd_bundle.pydevd_constants")
        defaults = import_module("_pydevd_bundle.pydevd_defaults")
        comm = import_module("_pydevd_bundle.pydevd_comm")
        defaults.PydevdCustomization.DEFAULT_PROTOCOL = constants.HTTP_JSON_PROTOCOL
        self._uses_monitoring: bool = constants.PYDEVD_USE_SYS_MONITORING  # Python 3.12 and later
        if self._uses_monitoring:
            monitoring = import_module("_pydevd_sys_monitoring.pydevd_sys_monitoring")
            self._pause_tracing = monitoring.stop_monitoring
        else:
            self._pause_tracing = partial(import_module("pydevd_tracing").SetTrace, None)
        # pydevd reads these settings.  With "multiprocess" it would also debug forked processes.
        pydevd.SetupHolder.setup = {
            "client": "127.0.0.1",
            "server": False,
            "port": 0,
            "multiprocess": False,
            "skip-notify-stdin": True,
            constants.ARGUMENT_PPID: 0,
        }
        self._debugger = debugger = pydevd.PyDB()
        # Trace the threads before the first request is read, as `pydevd.settrace` does.
        debugger.writer = comm.WriterThread(
            constants.NULL, debugger, terminate_on_socket_close=False
        )
        debugger.ready_to_run = True
        pydevd.settrace(
            suspend=False,
            trace_only_current_thread=False,
            patch_multiprocessing=False,
            notify_stdin=False,
        )
        _sessions[:] = [self]

    def connect(self, connection: socket.socket) -> None:
        """Read and answer the client's requests on a connection, in threads of pydevd."""
        self._debugger.initialize_network(connection, terminate_on_socket_close=False)

    def wait(self) -> None:
        """Wait until the client has closed the connection."""
        self._debugger.reader.join()

    def end(self) -> None:
        """Remove all breakpoints, stop tracing all threads, and end pydevd's threads.

        A thread that stands at a breakpoint goes on.
        """
        _sessions.clear()
        import_module("_pydevd_bundle.pydevd_api").PyDevdAPI().request_disconnect(
            self._debugger, resume_threads=True
        )
        self._pydevd.stoptrace()
        atexit.unregister(self._pydevd.stoptrace)  # each session has registered it once more
        for each in self._debugger.created_pydb_daemon_threads.copy():
            each.join(DISPOSE_TIMEOUT)
        if not self._uses_monitoring:
            self._stop_tracing_threads()
        _forget_tracers()

    def _stop_tracing_threads(self) -> None:
        """Have each thread of this process remove its trace function when it next calls a function.

        pydevd stops tracing only the calling thread; the code of other threads would stay slow.
        """
        # Remove pydevd's trace functions from all frames. When a frame went on to its next line,
        # such a function would begin to trace the thread again.
        for frame in (each for top in sys._current_frames().values() for each in _frames(top)):
            if frame.f_trace is self._debugger.trace_dispatch or _is_of_pydevd(frame.f_trace):
                frame.f_trace = None
        tracing = import_module("pydevd_tracing")
        tracing.set_trace_to_threads(_stop_tracing_here, create_dummy_thread=False)

    def begin_task(self) -> None:
        """Trace the calling thread again, in case Stop at a breakpoint has ended its tracing."""
        self._debugger.enable_tracing()

    def pause_tracing(self) -> None:
        """Keep the calling thread from stopping in the debugger until `begin_task` is called.

        Signal handlers may call this. It takes no lock, because a signal can come while pydevd
        holds one.
        """
        self._pause_tracing()

    def ignore_exceptions(self) -> None:
        """Keep all threads from stopping at exceptions.

        This holds until the client sets its exception breakpoints again.
        """
        self._debugger.break_on_uncaught_exceptions = {}
        self._debugger.break_on_caught_exceptions = {}
        self._debugger.break_on_user_uncaught_exceptions = {}

    def end_task(self) -> None:
        """Let the calling thread run freely again, if the user has stepped to the task's end."""
        constants = import_module("_pydevd_bundle.pydevd_constants")
        lifecycle = import_module("_pydevd_bundle.pydevd_thread_lifecycle")
        lifecycle.resume_threads(constants.get_current_thread_id(threading.current_thread()))

    def stop_at(self, frame: FrameType | None) -> None:
        """Suspend the calling thread at the current line of `frame` until the user resumes it.

        If Stop ends the wait, the thread is not traced until `begin_task`.
        """
        thread = threading.current_thread()
        command = import_module("_pydevd_bundle.pydevd_comm_constants").CMD_SET_BREAK
        self._pause_tracing()  # or debugpy would stop in its own functions, which are called here
        self._debugger.set_suspend(thread, command)
        self._debugger.do_wait_suspend(thread, frame, "line", None)
        self._debugger.enable_tracing()

    def forget_in_child(self) -> None:
        """Switch debugging off in a forked process.

        A thread that stopped there at a breakpoint would wait for ever: pydevd's threads, which
        resume other threads, exist only in the parent.
        """
        self._debugger.pydb_disposed = True
        self._pause_tracing()
        threading.settrace(None)


_sessions: list[DebugSession] = []
"""The session that exists now; the list is empty if there is none."""


def _after_fork_in_child() -> None:
    for each in _sessions:
        each.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, and the frames that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_pydevd(trace: object) -> bool:
    return type(trace).__module__.startswith("_pydevd")


def _stop_tracing_here(frame: FrameType, event: str, arg: object) -> None:
    """Stop the tracing of the calling thread; this is a trace function that removes itself."""
    import_module("pydevd_tracing").SetTrace(None)


def _forget_tracers() -> None:
    """Drop the trace functions that pydevd keeps for each thread.

    These functions refer to the debugger of the session that ends. pydevd would keep them until
    their thread ends, so the process would grow with each session.
    """
    kept = import_module("_pydevd_bundle.pydevd_additional_thread_info").PyDBAdditionalThreadInfo
    for thread in threading.enumerate():
        if isinstance(info := getattr(thread, "additional_info", None), kept):
            # A trace function may be running now, but it is not freed before it returns: pydevd's
            # `SafeCallWrapper` also refers to it.
            info.top_level_thread_tracer_no_back_frames = []
            info.top_level_thread_tracer_unhandled = info.thread_tracer = None


def is_frame_of_debugger(frame: FrameType) -> bool:
    """Return True for a call of pydevd, such as the wait at a breakpoint."""
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    # From Python 3.12 on, Python enters pydevd by a wrapper that Cython has made.
    is_made_by_cython = file == "<stringsource>" and "pydevd" in function
    return file.startswith("_pydevd") or "/debugpy/_vendored/" in file or is_made_by_cython


def stop_tracing() -> None:
    """Remove the trace function that an ended session has left in the calling thread."""
    if _is_of_pydevd(sys.gettrace()):
        sys.settrace(None)
