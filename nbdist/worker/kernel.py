"""The worker's kernel: a real ipykernel that takes names along and orders its output."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ipykernel.displayhook import ZMQDisplayHook
from ipykernel.kernelapp import IPKernelApp
from IPython.core.autocall import IPyAutocall
from IPython.core.page import as_hook, display_page
from jupyter_client.session import Session
from traitlets import default

from nbdist.wire.outputs import NAME_PROBLEM, RECORD, SCRIPT_FAILED, Done
from nbdist.worker.bars import draw_bars_as_text
from nbdist.worker.cleaning import forget_errors
from nbdist.worker.compat.ipython import (
    LeavesChildren,
    number_cells,
    publish_without_port,
    without_debugger,
)
from nbdist.worker.dumping import keep_crashes
from nbdist.worker.environment import count_restarts
from nbdist.worker.namespace import NameProblem, Namespace
from nbdist.worker.records import Records
from nbdist.worker.scripts import ScriptProblem, Scripts
from nbdist.worker.streams import RankStream, flush_c_streams, write_mark
from nbdist.worker.syncing import sync
from nbdist.worker.tracebacks import (
    shorten_lost_connections,
    show_groups,
    tell_classes,
    telling_classes,
)

if TYPE_CHECKING:
    from nbdist.wire.calls import FunctionCall
    from nbdist.wire.messages import Cell
    from nbdist.wire.scripts import Script
    from nbdist.worker.group import Group
    from nbdist.worker.interrupts import Interrupts


without_debugger()

ORDERED = frozenset(
    {
        "execute_result",
        "display_data",
        "update_display_data",
        "clear_output",
        "error",
        "comm_open",
        "comm_msg",
        "comm_close",
        RECORD,
    }
)
"""Messages whose place among the text matters."""


class MarkingSession(Session):
    """Marks in stdout where each ordered message belongs, and numbers the message alike."""

    token = ""
    kinds: tuple[str, ...] = ()
    """The classes of the exception that an error message is of."""
    errors = 0
    """How many error messages have been sent."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sent = 0
        # The mark and its message must not be parted by another thread's.
        self._in_order = threading.RLock()

    def send(
        self,
        stream: Any,
        msg_or_type: Any,
        content: Any = None,
        parent: Any = None,
        ident: Any = None,
        buffers: Any = None,
        track: bool = False,  # noqa: FBT001, FBT002
        header: Any = None,
        metadata: Any = None,
    ) -> Any:
        """Send as any kernel does; called from every thread that publishes."""
        if os.getpid() != self.pid:
            # A forked child sends nothing, and would wait for a lock that another thread held.
            return super().send(
                stream, msg_or_type, content, parent, ident, buffers, track, header, metadata
            )
        is_message = not isinstance(msg_or_type, str)
        kind = msg_or_type["header"]["msg_type"] if is_message else msg_or_type
        is_ordered = kind in ORDERED
        with self._in_order:
            if is_ordered:
                extra = {"kinds": self.kinds} if kind == "error" else {}
                ours = {"nbdist": {"number": self._sent + 1, "time_ns": time.time_ns(), **extra}}
                metadata = {**(metadata or {}), **ours}
                if is_message:
                    msg_or_type["metadata"] = {**(msg_or_type.get("metadata") or {}), **ours}
            sent = super().send(
                stream, msg_or_type, content, parent, ident, buffers, track, header, metadata
            )
            if is_ordered:
                # Afterwards: a message that cannot be written as JSON has raised by now.
                self._sent += 1
                self.errors += kind == "error"
                write_mark(self.token, self._sent)
        return sent

    def place(self) -> int:
        """Mark the place of something that goes another way; its number."""
        with self._in_order:
            self._sent += 1
            write_mark(self.token, self._sent)
            return self._sent


class CellExit(IPyAutocall):
    """`exit` and `quit`: end the cell on this rank; the worker stays."""

    rewrite = False

    def __call__(self, code: object = None) -> None:
        raise SystemExit(code)

    def __repr__(self) -> str:
        return "exit() ends the cell on this rank; `%dist_shutdown` ends all workers."


class WorkerKernel(LeavesChildren):
    """Runs cells with the names that came along, and reports what they bound."""

    namespace: Namespace
    scripts: Scripts
    records: Records
    group: Group | None = None

    @default("ident")
    def _rank_as_ident(self) -> str:
        """The agent subscribes to topics by rank."""
        app: Any = self.parent
        return str(app.rank)

    async def run(self, cell: Cell, interrupts: Interrupts) -> Done:
        """Bind the cell's names, run it, and say what nbdist wants to know of it.

        Interrupts are for the cell: not for what comes after it.
        """
        started = time.perf_counter()
        done = Done("error", 0.0)
        self.records.begin_cell(cell.log_level)
        session: Any = self.session
        told = session.errors
        try:
            interrupts.begin()
            synced = self._prepare(cell)
            before = self.namespace.snapshot()
            error = await self._run(cell)
            sys.stdout.flush()
            if error is not None and session.errors == told:
                self._report_unseen(error)
            bound = self.namespace.bound_since(before) | synced
            done = self._brought(cell, bound, is_ok=error is None)
        except NameProblem as problem:
            self._report(NAME_PROBLEM, str(problem))
        except KeyboardInterrupt:  # between the lines of the cell
            self._report("KeyboardInterrupt", "")
        except Exception as error:  # noqa: BLE001 (whatever it was, the notebook waits for the end)
            self._report(type(error).__name__, str(error))
        interrupts.end()
        self._end_call(failed=done.status != "ok")
        self.records.end_cell()
        flush_c_streams()
        return replace(done, seconds=time.perf_counter() - started)

    async def _run(self, cell: Cell) -> BaseException | None:
        """Run what is to be run; the exception that ended it, after showing it."""
        if cell.script is not None:
            return self._run_script(cell.script)
        if self.namespace.call is not None:
            return self._make(self.namespace.call)
        if not cell.source:  # values are bound, or asked for
            return None
        reply = await self.do_execute(cell.source, silent=False, allow_stdin=False)
        if reply["status"] == "ok":
            return None
        shell: Any = self.shell
        ran = shell.last_execution_result
        error: BaseException | None = ran and (ran.error_before_exec or ran.error_in_exec)
        return error or RuntimeError(reply["evalue"])

    def _make(self, call: FunctionCall) -> BaseException | None:
        """Call the function: it is no cell, so nothing of IPython's but how errors are shown."""
        shell: Any = self.shell
        try:
            call()
        except SystemExit as end:
            shell.showtraceback(exception_only=True)
            return end
        except BaseException as error:  # noqa: BLE001 (also Stop: shown as a cell's would be)
            tb = error.__traceback__
            shell.showtraceback((type(error), error, tb and tb.tb_next), tb_offset=0)
            return error
        finally:
            shell.events.trigger("post_execute")  # matplotlib shows its figures
        return None

    def _prepare(self, cell: Cell) -> frozenset[str]:
        """Do what comes before the source; the names that were copied from another rank."""
        if self.group is not None:
            self.group.begin_cell(cell.id)
        self.namespace.receive(cell.names)
        shell: Any = self.shell
        synced = sync(shell.user_ns, cell.sync) if cell.sync else frozenset()
        if cell.execution_count is not None:
            shell.execution_count = cell.execution_count
        count_restarts(*cell.restarts)
        keep_crashes()
        return synced

    def _brought(self, cell: Cell, bound: frozenset[str], *, is_ok: bool) -> Done:
        """The names that the cell bound, and the values that it was asked to bring back."""
        imported = frozenset(self.namespace.imported(bound))
        fetches = bool(cell.fetch) and is_ok
        values = self.namespace.fetch(cell.fetch, cell.id) if fetches else None
        return Done("ok" if is_ok else "error", 0.0, bound, imported, values)

    def _run_script(self, script: Script) -> BaseException | None:
        try:
            return self.scripts.run(script)
        except ScriptProblem as problem:
            self._report(SCRIPT_FAILED, str(problem))
            return problem

    def _end_call(self, *, failed: bool) -> None:
        """Keep nothing of a function call, if this was one."""
        if self.namespace.call is not None:
            self.namespace.end_call()
            if failed:
                forget_errors(self.shell)
                gc.collect()  # what looked at the frames refers to them in cycles

    def send_record(self, record: dict[str, Any]) -> None:
        """Publish a record of logging; called from every thread that logs."""
        assert self.session is not None
        self.session.send(self.iopub_socket, RECORD, record, ident=self._subject(RECORD))

    def _report(self, name: str, message: str) -> None:
        """Publish a failure outside the cell's code, as one line."""
        error = {"ename": name, "evalue": message, "traceback": [f"{name}: {message}"]}
        self.send_response(
            self.iopub_socket, "error", error, ident=self._subject("error"), channel="shell"
        )

    def _report_unseen(self, error: BaseException) -> None:
        """Publish the failure of a cell that was shown in another way than IPython's.

        `rich.traceback.install()` is one; the notebook is to know of it all the same.
        """
        with telling_classes(cast("Any", self.session), type(error)):
            self._report(type(error).__name__, str(error))

    def _subject(self, kind: str) -> bytes:
        """What the agent subscribes to, as ipykernel names it."""
        return f"kernel.{self.ident}.{kind}".encode()


class WorkerApp(IPKernelApp):
    """ipykernel's application with our kernel, streams and session."""

    name = "nbdist-worker"
    kernel_class = WorkerKernel
    rank = 0
    token = ""

    def parse_command_line(self, argv: Any = None) -> None:
        """There is none; to build a parser for it takes a tenth of a kernel's start."""

    @default("session")
    def _marking_session(self) -> Session:
        session = MarkingSession(parent=self, username="nbdist")
        session.token = self.token
        return session

    def init_iopub(self, context: Any) -> None:
        """Never drop output: zmq would from the thousandth waiting message on."""
        context.sndhwm = 0
        publish_without_port()
        super().init_iopub(context)

    def init_io(self) -> None:
        """Write text to the agent's pipes instead of to iopub."""
        sys.stdout = RankStream("stdout", self.token)
        sys.stderr = RankStream("stderr", self.token)
        self.displayhook = ZMQDisplayHook(self.session, self.iopub_socket)
        sys.displayhook = self.displayhook
        self.patch_io()

    def init_poller(self) -> None:
        """Do not poll for a lost parent: the kernel's PDEATHSIG is there at once."""

    def init_code(self) -> None:
        """Run no start-up files: they are the notebook's, and what they bind is shipped."""


def wake_on_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Have every signal wake the loop.

    ipykernel's handler for SIGINT during a top-level `await` only queues a callback, which
    a loop that sleeps in the selector does not notice.
    """
    wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    loop.add_reader(wake, os.read, wake, 4096)


def make_app(connection_file: str, rank: int, token: str) -> WorkerApp:
    """The worker's kernel, bound to its sockets and ready to start."""
    # A forked process may hold its parent's idea of a running loop.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    wake_on_signals(loop)
    WorkerApp.rank, WorkerApp.token = rank, token
    app = WorkerApp.instance(connection_file=connection_file, log_level=50)
    app.config.HistoryManager.enabled = False
    path = list(sys.path)
    app.initialize([])
    # ipykernel adds the current folder, as it does in a notebook; IPython 7 its own, too.
    sys.path[:] = [entry for entry in sys.path if not entry or entry in path]
    shell: Any = app.shell
    shell.user_ns["exit"] = shell.user_ns["quit"] = CellExit(shell)
    # What `x?` and `%psource` show is output like any other: nobody here has a pager.
    shell.set_hook("show_in_pager", as_hook(display_page), 0)
    # Many a library asks this whether widgets and the like are shown; ours are not relayed.
    shell.config.pop("IPKernelApp", None)
    number_cells(shell)
    shorten_lost_connections(shell)
    show_groups(shell)
    tell_classes(shell, app.session)
    app.kernel.namespace = Namespace(shell.user_ns)
    app.kernel.scripts = Scripts(shell)
    app.kernel.records = Records(app.kernel.send_record, app.log.name)
    app.kernel.records.watch()
    draw_bars_as_text()
    return app
