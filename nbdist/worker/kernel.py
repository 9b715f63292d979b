"""The kernel of a rank: an ipykernel that runs the agent's tasks and returns their outcomes.

`nbdist.worker.main` makes one kernel in each worker, and calls it on the main thread for each task.
"""

from __future__ import annotations

import asyncio
import builtins
import gc
import getpass
import inspect
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from ipykernel.displayhook import ZMQDisplayHook
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from IPython.core.error import StdinNotImplementedError
from IPython.core.page import as_hook, display_page
from jupyter_client.session import Session
from traitlets import Type, default

from nbdist.output.events import (
    MOVED_TYPE,
    RECORD_TYPE,
    TRACKED_TYPE,
    WARNED_TYPE,
    Comm,
    Done,
    ItemOutcome,
)
from nbdist.values import definitions
from nbdist.values.class_ids import name_classes
from nbdist.wire.spec import WorkerStart
from nbdist.wire.work import CellCode, InputReply, OpCall, Task, Work, failure_in_words
from nbdist.worker import tracking
from nbdist.worker.compat.ipython import (
    CellCompiler,
    import_without_debugpy,
    is_debugger,
    leave_debugger,
    number_cells,
    publish_without_port,
    reloads_modules,
    use_debugger,
)
from nbdist.worker.debugging import DEBUGGER
from nbdist.worker.environment import Around, OwnModules, draw_bars_as_text, ready_names
from nbdist.worker.group.group import Group
from nbdist.worker.incomplete import find_incomplete
from nbdist.worker.namespace import Context, Namespace, find_op
from nbdist.worker.ops.memory import PEAKS, forget_errors
from nbdist.worker.probe import RUNS_CELLS, restore_crash_file
from nbdist.worker.process import CELL_TIMES, Interrupts, flush_streams, install_streams
from nbdist.worker.publishing import LargeOutputs, MarkingSession, Records
from nbdist.worker.shell import CellExit, WorkerShell, show_cell_lines
from nbdist.worker.steps import STEPS
from nbdist.worker.tracebacks import contents_of, failure_of, remedies, unfit_reason

import_without_debugpy()

USERS_CODE = ("run.call", "run.map_items", "run.script")  # ops that run user code, as cells do
LONGEST_PROMPT = 10_000


class WorkerKernel(IPythonKernel):
    """The kernel of a worker, whose `run` runs a task and returns its outcome, a `Done`."""

    session: MarkingSession
    namespace: Namespace
    records: Records
    own_modules: OwnModules
    around: Around
    group: Group | None = None
    syncs_code = False
    ask: Callable[..., InputReply]  # `Tasks.ask`: (prompt, secret=..., by_debugger=...)
    next_items: Callable[[Sequence[ItemOutcome]], InputReply]  # `Tasks.next_items`
    shell_class = Type(WorkerShell)
    compiler_class = Type(CellCompiler)

    @default("ident")
    def _rank_as_ident(self) -> str:
        app: Any = self.parent
        return str(app.rank)

    async def run(self, task: Task, interrupts: Interrupts) -> Done:
        """Bind a task's variables, run the task, and return its outcome.

        SIGINT interrupts the task. An exception of the task becomes the `failure` of the outcome.
        This method itself raises KeyboardInterrupt if a second SIGINT comes while the first one is
        handled.
        """
        started, began = time.perf_counter(), time.time_ns()
        # Collect the fields of the outcome in a dict, and make a single `Done` from it at the end.
        # Making a new `Done` for each change would take time.
        done: dict[str, Any] = {"status": "error", "received": False}
        error: BaseException | None = None
        value: Any = None
        context = Context(self.shell, self.namespace, task_id=task.id)
        self.records.begin_task(task.log_level)
        self.session.begin_task()
        tracking.begin_task()
        STEPS.begin_task(task.id)
        begun = self.group.count_beyond(task.ranks) if self.group else {}
        DEBUGGER.begin_task()
        try:
            try:
                interrupts.begin()
                self._prepare(task, context)
                done["received"] = True
                error, value = await self._perform(task.work, context)
                done |= self._names_of(task, context)
                done |= self._result_of(task, context, error, value)
            except Exception as problem:  # noqa: BLE001 (the notebook waits for an outcome in any case)
                done["failure"], error = failure_of(problem), problem
            interrupts.end()
        except KeyboardInterrupt:  # Stop outside of the cell's code, such as in `_prepare`
            interrupts.end()
        is_ok = done["status"] == "ok"
        if not is_ok and done.get("failure") is None:
            done["failure"] = failure_in_words("KeyboardInterrupt", "")
            done["bound"], done["gone"] = frozenset(context.bound), frozenset(context.deleted)
        STEPS.end_task(has_succeeded=is_ok)
        if self.group and is_ok:
            done["outside"] = self.group.reached_beyond(task.ranks, begun)
        if error is not None:
            done["unfit"] = unfit_reason(context.rank, error)
        leave_debugger()
        DEBUGGER.end_task()
        context.cleanup.close()
        if isinstance(task.work, OpCall) and not is_ok:
            forget_errors(self.shell, error)
            error = None
            gc.collect()  # reference cycles may keep the frames of the error, and their variables
        # Release the task's objects before `pop_ended_keys` lists the objects that were freed.
        error = value = None
        self.namespace.forget_old_values(context.bound | context.deleted)
        done["changed"] = self.own_modules.pop_edited_files(
            began, reloads=reloads_modules(self.shell)
        )
        self.records.end_task()
        tracking.flush()
        flush_streams()
        counterparts = self.namespace.counterparts
        done["dead"], done["lost"] = counterparts.pop_ended_keys(), counterparts.pop_lost_keys()
        done["steps"], done["is_in_step"] = STEPS.begun, STEPS.is_inside
        return Done(**done, seconds=time.perf_counter() - started)

    def _names_of(self, task: Task, context: Context) -> dict[str, Any]:
        """Return the fields of the outcome about names that the task has bound and deleted."""
        names = context.names
        name_classes({name: names[name] for name in context.bound & names.keys()}, task.id)
        return {
            "bound": frozenset(context.bound),
            "gone": frozenset(context.deleted),
            "gained": (*context.gained,),
            "imported": self.namespace.import_paths(context.bound),
            "kinds": self.namespace.kinds(context.bound),
            "covered": self.namespace.covered_names(context.bound),
        }

    def _prepare(self, task: Task, context: Context) -> None:
        if self.group is not None:
            self.group.begin_task(task.id)
        self.around.follow(task.around)
        if self.syncs_code:
            self.own_modules.reload(time.time_ns())
        deleted = self.namespace.receive(task, context.rank)
        context.deleted |= {*deleted}
        context.bound |= self.namespace.import_names(task.imports.get(context.rank, {}))
        if task.execution_count is not None:
            context.shell.execution_count = task.execution_count
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(task.attempt.number)
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(task.attempt.most)
        restore_crash_file()

    async def _perform(self, work: Work, context: Context) -> tuple[BaseException | None, Any]:
        """Run a cell, a script or an op; return (exception, value).

        The exception is None if none was raised. The value of a cell is that of its last statement
        if this is an expression, and otherwise None. Raises KeyboardInterrupt if Stop interrupts
        IPython before or after the cell's own code.
        """
        # Packed arguments may refer to objects that `end_idle` drops. So do not call `end_idle`
        # here for an op with packed arguments. If the op calls a function, `receive_values` or
        # `receive_plain` calls `end_idle`.
        if not (isinstance(work, OpCall) and "packed" in work.arguments):
            self.namespace.counterparts.end_idle()
        if isinstance(work, CellCode):
            return await self._run_source(work, context), context.shell.displayhook.pop_value()
        is_users = work.op in USERS_CODE
        if is_users:
            PEAKS.begin()
        try:
            with CELL_TIMES if is_users else nullcontext():
                value = find_op(work.op)(context, **work.arguments)
                if is_users:
                    self._wait_for_nccl(1)
                return None, value
        except BaseException as error:  # noqa: BLE001 (also Stop)
            return error, None

    async def _run_source(self, cell: CellCode, context: Context) -> BaseException | None:
        text = cell.text
        if not text:  # the task only binds or fetches values
            return None
        shell: Any = self.shell
        shell.last_execution_result = None
        shell.compile.cell = cell
        shell.displayhook.pop_value()  # drop the last value of a cell that Stop has interrupted
        PEAKS.begin()
        with context.record_changes(), CELL_TIMES:
            try:
                reply: Any = await self.do_execute(text, silent=False, allow_stdin=True)
            except KeyboardInterrupt:
                # ipykernel runs a cell with an `await` as an asyncio task. Cancel this task, which
                # would otherwise go on after Stop.
                for task in asyncio.all_tasks():
                    if getattr(task.get_coro(), "__name__", "") == RUNS_CELLS:
                        task.cancel()
                raise
            if reply["status"] == "ok":
                self._wait_for_nccl(len(text.splitlines()))
                return None
        result = shell.last_execution_result
        raised = (result.error_before_exec, result.error_in_exec) if result is not None else ()
        # If showing the last value has raised an exception, only `session.shown_error` has it.
        # Compare with None, because an exception can be falsy.
        shown = self.session.shown_error[0]
        errors = (error for error in (*raised, shown) if error is not None)
        return next(errors, RuntimeError(reply["evalue"]))

    def _wait_for_nccl(self, line: int) -> None:
        if self.group is not None and self.group.uses_nccl:
            self.group.wait_for_nccl(line)

    def _result_of(
        self, task: Task, context: Context, error: BaseException | None, value: Any
    ) -> dict[str, Any]:
        """Return the fields of the outcome about the result of the task.

        These are the packed values, or the failure if the task has raised `error`.
        """
        if error is not None:
            error_number = self.session.pop_error_number(error)
            advice = [] if error_number else remedies(context.shell, context.rank, error)
            contents = contents_of(error, context.names)
            failure = failure_of(error, advice)
            return {
                "failure": failure,
                "error_number": error_number,
                "values": contents,
                "incomplete": find_incomplete(error, context.names),
            }
        values, kept_size = None, None
        if task.keeps:
            values, kept_size = self.namespace.pack_or_keep(value, task.id)
        elif task.brings_small:
            values, kept_size = self.namespace.pack_small(value)
        elif task.fetch:
            values = self.namespace.fetch(task.fetch, task.id)
        elif not isinstance(task.work, CellCode):
            values = self.namespace.pack(value, task.id, context.title)
        return {"status": "ok", "values": values, "kept": kept_size}

    def stop(self) -> None:
        """Stop the main thread's loop, so that the process exits; any thread may call this."""
        self.io_loop.add_callback(self.io_loop.stop)

    def handle_comm(self, comm: Comm) -> None:
        """Pass a message from the notebook's page in the browser to a widget of this rank.

        SIGINT interrupts the code that the widget runs.
        """
        content = {"comm_id": comm.id, "data": comm.data}
        message = self.session.msg(comm.kind, content, metadata={**comm.metadata})
        message["buffers"] = [memoryview(each) for each in comm.buffers]
        before = signal.getsignal(signal.SIGINT)
        with suppress(KeyboardInterrupt, SystemExit):
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self.shell_handlers[comm.kind](None, None, message)
            finally:
                signal.signal(signal.SIGINT, before)
        # Do this again, because a SIGINT may have come before the line in `finally` was run.
        signal.signal(signal.SIGINT, before)
        flush_streams()

    def get_parent(self, *channel: Any) -> dict[str, Any]:
        """Return the Jupyter message that is being handled, or a header with this rank's number.

        A worker gets its cells from the agent and not as Jupyter messages, so mostly there is no
        message. `ipywidgets.Output` reads the `msg_id` in the header, here the rank's number.
        """
        return super().get_parent(*channel) or {"header": {"msg_id": self.ident}}

    def raw_input(self, prompt: object = "") -> str:
        """Ask the user for a line of input; replaces `input`, also in scripts and functions."""
        return self._ask_for_line(str(prompt), secret=False)

    def getpass(self, prompt: object = "Password: ", *_: object, **__: object) -> str:
        """Ask the user for a line that is not shown; replaces `getpass.getpass`."""
        return self._ask_for_line(str(prompt), secret=True)

    def _ask_for_line(self, prompt: str, *, secret: bool) -> str:
        frame = inspect.currentframe()
        asker = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
        *before, prompt = prompt.splitlines() or [""]
        # The input box shows a single line: print all lines before the last one.
        sys.stdout.write("".join(f"{line}\n" for line in before))
        reply = self.ask(prompt[-LONGEST_PROMPT:], secret=secret, by_debugger=is_debugger(asker))
        if reply.problem:
            raise StdinNotImplementedError(reply.problem)
        if reply.text is None:
            raise EOFError
        return reply.text

    def publish(self, kind: str, content: dict[str, Any]) -> None:
        """Publish a message on iopub; any thread may call this."""
        self.session.send(self.iopub_socket, kind, content)


class WorkerApp(IPKernelApp):
    """ipykernel's application with the kernel, streams and session of a worker."""

    name = "nbdist-worker"
    kernel_class = WorkerKernel
    rank, token = 0, ""

    def parse_command_line(self, argv: Any = None) -> None:
        """Do nothing: a worker has no arguments, and making ipykernel's parser takes long."""

    @default("session")
    def _marking_session(self) -> Session:
        session = MarkingSession(parent=self, username="nbdist")
        session.token = self.token
        return session

    def init_iopub(self, context: Any) -> None:
        """Make the iopub socket, on which zmq may queue any number of output messages.

        By default zmq drops all messages beyond 1,000.
        """
        context.sndhwm = 0
        publish_without_port()
        super().init_iopub(context)

    def init_io(self) -> None:
        """Make `print` write to the pipe that the agent reads; ipykernel itself would use iopub."""
        install_streams(self.token)
        self.displayhook = ZMQDisplayHook(self.session, self.iopub_socket)
        sys.displayhook = self.displayhook
        self.patch_io()

    def init_poller(self) -> None:
        """Do nothing; ipykernel's method would start a thread that watches the parent process.

        A worker needs no such thread: Linux kills the worker when its agent exits
        (`die_with_parent`).
        """

    def init_code(self) -> None:
        """Do nothing; ipykernel's method would run IPython's start-up files.

        The notebook runs the start-up files, and sends variables that they bind and cells use.
        """


def make_app(start: WorkerStart) -> WorkerApp:
    """Make the worker's kernel, and return its application, whose `start` runs the kernel.

    The kernel's sockets are bound when this returns.
    """
    # A forked process may have inherited an event loop of its parent.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    # Let every signal wake the loop. During a top-level `await`, ipykernel's handler of SIGINT only
    # queues a callback: a loop that sleeps in its selector would not run the callback.
    wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    loop.add_reader(wake, os.read, wake, 4096)
    WorkerApp.rank, WorkerApp.token = start.rank, start.token
    definitions.is_rank = True
    app = WorkerApp.instance(connection_file=start.connection_file, log_level=50)
    app.config.HistoryManager.enabled = False
    app.initialize([])
    shell: Any = app.shell
    # Print the texts of `x?` and `%psource` like any other output: no front end shows the pager of
    # a worker.
    shell.set_hook("show_in_pager", as_hook(display_page), 0)
    # By this key transformers and older versions of tqdm recognize a notebook, in which they draw
    # bars as HTML that changes or as widgets. But a rank's bars must be text, which the notebook
    # compares. Libraries that recognize a notebook by the name of the shell's class still do so.
    shell.config.pop("IPKernelApp", None)
    number_cells(shell)
    shell.shorten_tracebacks()
    host = "" if start.world.node is None else socket.gethostname()
    app.session.large_outputs = LargeOutputs(start.log_folder, host)
    kernel: WorkerKernel = app.kernel
    kernel.namespace = Namespace(shell.user_ns)
    kernel.namespace.report_progress = lambda done, total: kernel.publish(
        MOVED_TYPE, {"done": done, "total": total}
    )
    kernel.namespace.warn = lambda text: kernel.publish(WARNED_TYPE, {"text": text})
    exits = dict.fromkeys(("exit", "quit"), CellExit(shell))
    kernel.namespace.add_ready({**ready_names(start), **exits})
    shell.user_ns_hidden.update(exits)
    shell.ready = kernel.namespace.ready
    kernel.records = Records(partial(kernel.publish, RECORD_TYPE), app.log.name)
    kernel.records.watch()
    tracking.connect(partial(kernel.publish, TRACKED_TYPE))
    kernel.own_modules, kernel.syncs_code = OwnModules(), start.world.config.sync_code
    sys.meta_path.insert(0, kernel.own_modules)
    # Let users call `%autoreload 2` without `%load_ext autoreload` before.
    shell.magics_manager.register_lazy("autoreload", "IPython.extensions.autoreload")
    # ipykernel replaces `input` and `getpass` only while it runs a cell. Scripts and functions that
    # an op runs need the replacements too.
    builtins.input, getpass.getpass = kernel.raw_input, kernel.getpass
    use_debugger(DEBUGGER.stop_at)
    draw_bars_as_text()
    show_cell_lines()
    return app
