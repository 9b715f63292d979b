"""The kernel of a rank: an ipykernel that runs the agent's tasks and reports their outcome.

`nbdist.worker.main` makes it and passes it each task, on the main thread.
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
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ipykernel.displayhook import ZMQDisplayHook
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from IPython.core.error import StdinNotImplementedError
from IPython.core.page import as_hook, display_page
from jupyter_client.session import Session
from traitlets import Type, default

from nbdist.output.events import MOVED, RECORD, TRACKED, WARNED, Comm, Done
from nbdist.values import definitions
from nbdist.values.class_ids import name_classes
from nbdist.values.pickling import without_cycles
from nbdist.wire.spec import WorkerStart
from nbdist.wire.work import Call, InputReply, Source, Task, Work, failure_in_words
from nbdist.worker import tracking
from nbdist.worker.compat.ipython import (
    import_without_debugpy,
    is_debugger,
    leave_debugger,
    number_cells,
    publish_without_port,
    reloads_modules,
    use_debugger,
)
from nbdist.worker.environment import Around, OwnModules, draw_bars_as_text, ready_names
from nbdist.worker.group.group import Group
from nbdist.worker.incomplete import find_incomplete
from nbdist.worker.namespace import Context, Namespace, find_op
from nbdist.worker.ops.memory import PEAKS, forget_errors
from nbdist.worker.probe import RUNS_CELLS, keep_crashes
from nbdist.worker.process import CELL_TIMES, Interrupts, flush_streams, install
from nbdist.worker.publishing import LargeOutputs, MarkingSession, Records
from nbdist.worker.shell import CellExit, WorkerShell, show_cell_lines
from nbdist.worker.steps import STEPS
from nbdist.worker.tracebacks import contents_of, failure_of, remedies, unfit_after

import_without_debugpy()

USERS_CODE = ("run.call", "run.script")  # ops that run user code, as cells do
LONGEST_PROMPT = 10_000


class WorkerKernel(IPythonKernel):
    """Runs tasks with the names that came with them, and reports which names they bound."""

    session: MarkingSession
    namespace: Namespace
    records: Records
    own_modules: OwnModules
    around: Around
    group: Group | None = None
    syncs_code = False
    ask: Callable[..., InputReply]  # (prompt, secret=..., by_debugger=...), by `Tasks`
    shell_class = Type(WorkerShell)

    @default("ident")
    def _rank_as_ident(self) -> str:
        app: Any = self.parent
        return str(app.rank)

    async def run(self, task: Task, interrupts: Interrupts) -> Done:
        """Bind the task's names, do its work, and return its outcome; SIGINT interrupts the work.

        An exception becomes the `failure` of the outcome. KeyboardInterrupt is raised only if
        another SIGINT comes before `interrupts` have ended.
        """
        started, began = time.perf_counter(), time.time_ns()
        done = Done("error", 0.0, received=False)
        error: BaseException | None = None
        value: Any = None
        context = Context(self.shell, self.namespace, task_id=task.id)
        self.records.begin_task(task.log_level)
        self.session.begin_task()
        tracking.begin_task()
        STEPS.begin_task(task.id)
        try:
            try:
                interrupts.begin()
                self._prepare(task, context)
                done = replace(done, received=True)
                error, value = await self._work(task.work, context)
                done = self._with_names(task, context, done)
                done = self._brought(task, context, error, value, done)
            except Exception as problem:  # noqa: BLE001 (whatever it was, the notebook waits for the end)
                done, error = replace(done, failure=failure_of(problem)), problem
            interrupts.end()
        except KeyboardInterrupt:  # between the lines of the cell, or after its outcome is known
            interrupts.end()
        if done.status == "error" and done.failure is None:
            failure = failure_in_words("KeyboardInterrupt", "")
            bound, gone = frozenset(context.bound), frozenset(context.gone)
            done = replace(done, failure=failure, bound=bound, gone=gone)
        STEPS.end_task(has_succeeded=done.status == "ok")
        if error is not None:
            done = replace(done, unfit=unfit_after(context.rank, error))
        leave_debugger()
        context.at_end.close()
        if isinstance(task.work, Call) and done.status != "ok":
            forget_errors(self.shell, error)
            error = None
            gc.collect()  # code that inspected the frames has left reference cycles to them
        # Release them before `take_dead`, which tells the notebook which objects have ended.
        error = value = None
        self.namespace.let_go(context.bound | context.gone)
        changed = self.own_modules.news(began, reloads=reloads_modules(self.shell))
        self.records.end_task()
        tracking.flush()
        flush_streams()
        counterparts = self.namespace.counterparts
        with without_cycles():  # a collection in here could end objects that go unreported
            dead, lost = counterparts.take_dead(), counterparts.take_lost()
            counterparts.begin_idle()
        return replace(
            done,
            changed=changed,
            dead=dead,
            lost=lost,
            steps=STEPS.begun,
            is_in_step=STEPS.is_inside,
            seconds=time.perf_counter() - started,
        )

    def _with_names(self, task: Task, context: Context, done: Done) -> Done:
        """Return the outcome with the names that the task has bound and deleted."""
        names = context.names
        name_classes({name: names[name] for name in context.bound & names.keys()}, task.id)
        return replace(
            done,
            bound=frozenset(context.bound),
            gone=frozenset(context.gone),
            gained=(*context.gained,),
            imported=self.namespace.imported(context.bound),
            kinds=self.namespace.kinds(context.bound),
            covered=self.namespace.covered(context.bound),
        )

    def _prepare(self, task: Task, context: Context) -> None:
        if self.group is not None:
            self.group.begin_task(task.id)
        self.around.follow(task.around)
        if self.syncs_code:
            self.own_modules.reload(time.time_ns())
        deleted = self.namespace.receive(task, context.rank)
        context.gone |= {*deleted}
        context.bound |= self.namespace.import_again(task.imports.get(context.rank, {}))
        if task.execution_count is not None:
            context.shell.execution_count = task.execution_count
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(task.attempt.number)
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(task.attempt.most)
        keep_crashes()

    async def _work(self, work: Work, context: Context) -> tuple[BaseException | None, Any]:
        """Do the work; return the exception that ended it, or None, and the value.

        The value of a cell is its last expression, that of an op is what its function returns.
        """
        if not (isinstance(work, Call) and "packed" in work.arguments):
            self.namespace.counterparts.end_idle()  # else `receive_values` calls it
        if isinstance(work, Source):
            return await self._run_source(work.text, context), context.shell.displayhook.take()
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

    async def _run_source(self, text: str, context: Context) -> BaseException | None:
        if not text:  # the task only binds or fetches values
            return None
        shell: Any = self.shell
        shell.last_execution_result = None
        shell.displayhook.take()  # drop the last value of a cell that Stop has ended
        PEAKS.begin()
        with context.noting(), CELL_TIMES:
            try:
                reply: Any = await self.do_execute(text, silent=False, allow_stdin=True)
            except KeyboardInterrupt:
                # ipykernel runs a cell with an `await` as an asyncio task, which would still begin.
                for task in asyncio.all_tasks():
                    if getattr(task.get_coro(), "__name__", "") == RUNS_CELLS:
                        task.cancel()
                raise
            if reply["status"] == "ok":
                self._wait_for_nccl(len(text.splitlines()))
                return None
        ran = shell.last_execution_result
        raised = (ran.error_before_exec, ran.error_in_exec) if ran is not None else ()
        # An exception raised while the last value was shown is in `session.shown` alone. Compare
        # with None: an exception can be falsy.
        shown = self.session.shown[0]
        found = (error for error in (*raised, shown) if error is not None)
        return next(found, RuntimeError(reply["evalue"]))

    def _wait_for_nccl(self, line: int) -> None:
        if self.group is not None and self.group.uses_nccl:
            self.group.wait_for_nccl(line)

    def _brought(
        self, task: Task, context: Context, error: BaseException | None, value: Any, done: Done
    ) -> Done:
        """Return the outcome with the task's packed values, or with the failure that ended it."""
        if error is not None:
            number = self.session.number_of(error)
            said = [] if number else remedies(context.shell, context.rank, error)
            contents = contents_of(error, context.names)
            failure = failure_of(error, said)
            return replace(
                done,
                failure=failure,
                error_number=number,
                values=contents,
                incomplete=find_incomplete(error, context.names),
            )
        values, kept = None, None
        if task.keeps:
            values, kept = self.namespace.keep(value, task.id)
        elif task.brings_small:
            values, kept = self.namespace.pack_small(value)
        elif task.fetch:
            values = self.namespace.fetch(task.fetch, task.id)
        elif not isinstance(task.work, Source):
            values = self.namespace.pack(value, task.id, context.title)
        return replace(done, status="ok", values=values, kept=kept)

    def stop(self) -> None:
        """Let the main thread's loop stop, so that the process exits; on any thread."""
        self.io_loop.add_callback(self.io_loop.stop)

    def handle_comm(self, comm: Comm) -> None:
        """Pass a page's message to its widget, as ipykernel does; SIGINT interrupts the widget."""
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
        signal.signal(signal.SIGINT, before)  # if a SIGINT came just before the line above
        flush_streams()

    def get_parent(self, *channel: Any) -> dict[str, Any]:
        """Return the parent message, or a header alone for a cell, which is no message in a worker.

        `ipywidgets.Output` reads the id in that header.
        """
        return super().get_parent(*channel) or {"header": {"msg_id": self.ident}}

    def raw_input(self, prompt: object = "") -> str:
        """Ask the notebook for a line.  It replaces `input`, also in scripts and functions."""
        return self._typed(str(prompt), secret=False)

    def getpass(self, prompt: object = "Password: ", *_: object, **__: object) -> str:
        """Ask the notebook for a line that is not shown.  It replaces `getpass.getpass`."""
        return self._typed(str(prompt), secret=True)

    def _typed(self, prompt: str, *, secret: bool) -> str:
        frame = inspect.currentframe()
        asker = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
        *before, prompt = prompt.splitlines() or [""]
        sys.stdout.write("".join(f"{line}\n" for line in before))  # the input box shows one line
        reply = self.ask(prompt[-LONGEST_PROMPT:], secret=secret, by_debugger=is_debugger(asker))
        if reply.problem:
            raise StdinNotImplementedError(reply.problem)
        if reply.text is None:
            raise EOFError
        return reply.text

    def publish(self, kind: str, content: dict[str, Any]) -> None:
        """Publish a message on iopub; any thread may call it, as each thread that logs does."""
        self.session.send(self.iopub_socket, kind, content)


class WorkerApp(IPKernelApp):
    """ipykernel's application with the kernel, streams and session of a worker."""

    name = "nbdist-worker"
    kernel_class = WorkerKernel
    rank, token = 0, ""

    def parse_command_line(self, argv: Any = None) -> None:
        """Parse no arguments: building the parser would take a tenth of the kernel's start."""

    @default("session")
    def _marking_session(self) -> Session:
        session = MarkingSession(parent=self, username="nbdist")
        session.token = self.token
        return session

    def init_iopub(self, context: Any) -> None:
        """Let zmq queue any number of messages: by default it drops output when 1,000 wait."""
        context.sndhwm = 0
        publish_without_port()
        super().init_iopub(context)

    def init_io(self) -> None:
        """Write text to the agent's pipe instead of iopub."""
        install(self.token)
        self.displayhook = ZMQDisplayHook(self.session, self.iopub_socket)
        sys.displayhook = self.displayhook
        self.patch_io()

    def init_poller(self) -> None:
        """Do not poll for the parent's end: Linux kills the worker then, see `die_with_parent`."""

    def init_code(self) -> None:
        """Run no start-up files: the notebook runs them, and sends the names that they bind."""


def make_app(start: WorkerStart) -> WorkerApp:
    """Return the application of the worker's kernel, with bound sockets and ready to start."""
    # A forked process may have inherited its parent's running loop.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    # Every signal must wake the loop. ipykernel's handler for SIGINT during a top-level `await`
    # only queues a callback, which a loop that sleeps in the selector does not notice.
    wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    loop.add_reader(wake, os.read, wake, 4096)
    WorkerApp.rank, WorkerApp.token = start.rank, start.token
    definitions.is_rank = True
    app = WorkerApp.instance(connection_file=start.connection_file, log_level=50)
    app.config.HistoryManager.enabled = False
    app.initialize([])
    shell: Any = app.shell
    # Print what `x?` and `%psource` show like any other output: a worker has no pager.
    shell.set_hook("show_in_pager", as_hook(display_page), 0)
    # tqdm and transformers look for this key to decide whether bars can be widgets or changing
    # HTML. A rank's bars must be text, which the notebook compares. Other libraries look at the
    # shell's class.
    shell.config.pop("IPKernelApp", None)
    number_cells(shell)
    shell.shorten_tracebacks()
    host = "" if start.world.node is None else socket.gethostname()
    app.session.large = LargeOutputs(start.log_folder, host)
    kernel: WorkerKernel = app.kernel
    kernel.namespace = Namespace(shell.user_ns)
    kernel.namespace.say_moved = lambda done, total: kernel.publish(
        MOVED, {"done": done, "total": total}
    )
    kernel.namespace.warn = lambda text: kernel.publish(WARNED, {"text": text})
    leave = dict.fromkeys(("exit", "quit"), CellExit(shell))
    kernel.namespace.start_with({**ready_names(start), **leave})
    shell.user_ns_hidden.update(leave)
    shell.ready = kernel.namespace.ready
    kernel.records = Records(partial(kernel.publish, RECORD), app.log.name)
    kernel.records.watch()
    tracking.connect(partial(kernel.publish, TRACKED))
    kernel.own_modules, kernel.syncs_code = OwnModules(), start.world.config.sync_code
    sys.meta_path.insert(0, kernel.own_modules)
    # Makes `%autoreload 2` work without `%load_ext autoreload`.
    shell.magics_manager.register_lazy("autoreload", "IPython.extensions.autoreload")
    # ipykernel sets them only while it runs a cell; scripts and functions need them too.
    builtins.input, getpass.getpass = kernel.raw_input, kernel.getpass
    use_debugger()
    draw_bars_as_text()
    show_cell_lines()
    return app
