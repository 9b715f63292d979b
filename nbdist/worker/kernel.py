"""The worker's kernel: a real ipykernel that takes names along and orders its output."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ipykernel.displayhook import ZMQDisplayHook
from ipykernel.kernelapp import IPKernelApp
from IPython.core.autocall import IPyAutocall
from IPython.core.page import as_hook, display_page
from jupyter_client.session import Session
from traitlets import default

from nbdist.wire.outputs import NAME_PROBLEM, RECORD, SCRIPT_FAILED
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
from nbdist.worker.namespace import CellOrders, NameProblem, Namespace
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
    from nbdist.wire.scripts import Script
    from nbdist.worker.group import Group


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
        "execute_reply",
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
        is_message = not isinstance(msg_or_type, str)
        kind = msg_or_type["header"]["msg_type"] if is_message else msg_or_type
        # A forked child sends nothing, so it must not mark anything either.
        is_ordered = kind in ORDERED and os.getpid() == self.pid
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

    async def do_execute(
        self,
        code: str,
        silent: bool,  # noqa: FBT001 (the signature is ipykernel's)
        store_history: bool = True,  # noqa: FBT001, FBT002
        user_expressions: Any = None,
        allow_stdin: bool = False,  # noqa: FBT001, FBT002
        *,
        cell_meta: Any = None,
        cell_id: Any = None,
    ) -> dict[str, Any]:
        """Bind the cell's names, run it, and add what nbdist wants to know to the reply."""
        orders = CellOrders.of(self.get_parent("shell"))
        started = time.perf_counter()
        ours: dict[str, Any] = {}
        self.records.begin_cell(orders.log_level)
        session: Any = self.session
        told = session.errors
        try:
            synced = self._prepare(orders)
            before = self.namespace.snapshot()
            reply: dict[str, Any]
            if orders.script is not None:
                reply = self._run_script(orders.script)
            else:
                stores = store_history and not self.namespace.has_call
                reply = await super().do_execute(
                    code, silent, stores, user_expressions, allow_stdin
                )
            bound = self.namespace.bound_since(before) | synced
            ours = self._brought(orders, bound, is_ok=reply["status"] == "ok")
        except NameProblem as problem:
            reply = self._report(NAME_PROBLEM, str(problem))
        except KeyboardInterrupt:  # between the lines of the cell; ipykernel would not reply
            reply = self._report("KeyboardInterrupt", "")
        except Exception as error:  # noqa: BLE001 (whatever it was, the notebook waits for the reply)
            reply = self._report(type(error).__name__, str(error))
        if reply["status"] == "error" and session.errors == told:
            self._report_unseen(reply)
        self._end_call(failed=reply["status"] != "ok")
        self.records.end_cell()
        ours["seconds"] = time.perf_counter() - started
        flush_c_streams()
        return {**reply, "nbdist": ours}

    def _prepare(self, orders: CellOrders) -> frozenset[str]:
        """Do what comes before the source; the names that were copied from another rank."""
        if self.group is not None:
            self.group.begin_cell(orders.cell_id)
        self.namespace.receive(orders.names)
        shell: Any = self.shell
        synced = sync(shell.user_ns, orders.sync) if orders.sync else frozenset()
        if orders.execution_count is not None:
            shell.execution_count = orders.execution_count
        count_restarts(*orders.restarts)
        keep_crashes()
        return synced

    def _brought(self, orders: CellOrders, names: frozenset[str], *, is_ok: bool) -> dict[str, Any]:
        """The names that the cell bound, and the values that it was asked to bring back."""
        bound = sorted(names)
        ours: dict[str, Any] = {"bound": bound, "imported": self.namespace.imported(bound)}
        if orders.fetch and is_ok:
            payload = self.namespace.fetch(orders.fetch, orders.cell_id)
            ours["frames"] = [frame.hex() for frame in payload.frames]
            if payload.segment:
                ours["segment"] = [payload.segment.path, payload.segment.sizes]
        return ours

    def _run_script(self, script: Script) -> dict[str, Any]:
        try:
            return self.scripts.run(script)
        except ScriptProblem as problem:
            return self._report(SCRIPT_FAILED, str(problem))

    def _end_call(self, *, failed: bool) -> None:
        """Keep nothing of a function call, if this was one."""
        if self.namespace.has_call:
            self.namespace.end_call()
            if failed:
                forget_errors(self.shell)
                gc.collect()  # what looked at the frames refers to them in cycles

    def send_record(self, record: dict[str, Any]) -> None:
        """Publish a record of logging; called from every thread that logs."""
        assert self.session is not None
        self.session.send(self.iopub_socket, RECORD, record, ident=self._subject(RECORD))

    def _report(self, name: str, message: str) -> dict[str, Any]:
        """Publish a failure outside the cell's code, as one line."""
        error = {"ename": name, "evalue": message, "traceback": [f"{name}: {message}"]}
        self.send_response(
            self.iopub_socket, "error", error, ident=self._subject("error"), channel="shell"
        )
        return {"status": "error", **error}

    def _report_unseen(self, reply: Mapping[str, Any]) -> None:
        """Publish the failure of a cell that was shown in another way than IPython's.

        `rich.traceback.install()` is one; the notebook is to know of it all the same.
        """
        shell, session = cast("Any", self.shell), cast("Any", self.session)
        ran = shell.last_execution_result
        error = ran and (ran.error_before_exec or ran.error_in_exec)
        with telling_classes(session, type(error) if error else Exception):
            self._report(reply["ename"], reply["evalue"])

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
