"""The main function of a worker: starts the kernel and the process group, then runs tasks.

The fork server calls `become_worker` in each process that it forks, and `nbdist.worker.__main__`
calls it in a process that was spawned.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Sequence
from multiprocessing import process

import torch
import torch.distributed as dist

from nbdist.output.events import Comm, Done, InputRequest, ItemOutcome, ItemsWanted
from nbdist.system.folders import nearest_folder
from nbdist.system.processes import WORKER_PID, safe_path
from nbdist.values.child_definitions import share_definitions_with_children
from nbdist.wire.frames import FrameCutter, framed, pack, unpack
from nbdist.wire.spec import LAST_LINE_SAYS, WorkerStart, difference, versions_here
from nbdist.wire.work import (
    CatchUp,
    Finished,
    InputReply,
    SigintSent,
    Task,
    TaskMessage,
    failure_in_words,
    mark,
)
from nbdist.worker.control import ControlThread
from nbdist.worker.debugging import DEBUGGER
from nbdist.worker.environment import Around, prepare_torch
from nbdist.worker.group.default import warn_of_own_groups
from nbdist.worker.group.group import Group
from nbdist.worker.kernel import WorkerKernel, make_app
from nbdist.worker.namespace import import_ops
from nbdist.worker.ops.memory import reserve_addresses
from nbdist.worker.probe import write_stacks_to
from nbdist.worker.process import (
    SOCKET_READ_SIZE,
    BadEnvironment,
    Interrupts,
    die_with_parent,
    duplicate_streams,
    flush_c_streams,
    flush_streams,
    is_ready,
    leave_world_in_children,
    limit_descriptors,
    threads_without_sigint,
    write_all,
)
from nbdist.worker.publishing import MarkingSession
from nbdist.worker.steps import STEPS
from nbdist.worker.tracebacks import gpu_start_error


def run_worker(start: WorkerStart, agent_pid: int) -> None:
    """Start the kernel, form the group, and run tasks until the kernel stops; never returns.

    The worker writes two marks to stdout, by which the agent follows the start: "up" once the
    kernel's sockets are bound, and "ready" once the group is formed and the loop reads tasks.
    """
    own_path = list(sys.path)
    duplicate_streams()
    prepare_torch(start)
    import_ops()
    with threads_without_sigint():
        app = make_app(start)
    # Remove Python's prompts: if `sys.ps1` exists, Lightning assumes an interactive session, and
    # then refuses to run several processes.
    for prompt in ("ps1", "ps2"):
        if hasattr(sys, prompt):
            delattr(sys, prompt)
    # After a cell has called `exit()`, IPython warns "To exit: use 'exit'". Hide this warning: a
    # cell cannot end a worker.
    warnings.filterwarnings("ignore", message="To exit: use")
    reserve_addresses()
    write_stacks_to(start.stack_file)
    share_definitions_with_children()
    STEPS.on_sigint = DEBUGGER.record_stop
    STEPS.watch()
    group = Group(start) if start.world.backend is not None else None
    if group is None:
        warn_of_own_groups()
    app.kernel.group = group
    leave_world_in_children(group.abandon_in_child if group is not None else None)
    tasks = Tasks(start.task_socket, app.kernel, app.session, ControlThread(app.kernel, start))
    app.kernel.ask, app.session.catch_up = tasks.ask, tasks.catch_up
    app.kernel.next_items = tasks.next_items
    if agent_pid:
        die_with_parent(agent_pid)
    write_all(mark(start.token, "up"))
    if group is not None:
        group.form()
    app.kernel.around = Around(start, own_path)
    # The loop writes the mark, so that the agent sees "ready" only once the loop runs and reads
    # tasks.
    asyncio.get_event_loop().call_soon(write_all, mark(start.token, "ready"))
    app.start()
    tasks.close()
    if group is not None:
        group.shut_down()
    elif dist.is_initialized():
        dist.destroy_process_group()
    # Run the exit handlers, but do not finalize the interpreter: that would take 0.15 s more.
    atexit._run_exitfuncs()
    flush_c_streams()
    os._exit(0)


# --- a new process, forked or spawned, becomes the worker of one rank -------------------------


def become_worker(start: WorkerStart, agent_pid: int = 0) -> None:
    """Make this process the worker of one rank, and exit when its kernel stops; never returns.

    `agent_pid` is the agent's process id if this process was forked, and 0 if it was spawned.
    """
    limit_descriptors()
    environ = {**start.world.environ, **start.environ}
    if agent_pid:
        # A forked process has the fork server's variables: replace them by the notebook's, with the
        # variables that torchrun sets, such as RANK.
        os.environ.clear()
        os.environ.update(environ)
    elif os.environ.get("PYTHONPATH", "") == safe_path(environ, start.world.cwd):
        # The agent started a spawned worker with these variables, so keep the changes that a
        # wrapper script around Python may have made since. Set only PYTHONPATH again, because the
        # agent has removed some of its entries (`safe_path`).
        os.environ.update({k: v for k, v in environ.items() if k == "PYTHONPATH"})
    os.environ[WORKER_PID] = str(os.getpid())
    folder = nearest_folder(start.world.cwd)
    os.chdir(folder)
    if folder != start.world.cwd:
        sys.stderr.write(f"the folder {start.world.cwd} was removed: this rank is in {folder}\n")
    # Functions of the notebook cannot be sent to another version of Python or torch.
    if start.world.versions and (mismatch := difference(versions_here(), start.world.versions)):
        has = f"{sys.executable} has {mismatch.what} {mismatch.there}, the notebook {mismatch.here}"
        exit_with(f"{has}: {mismatch.why}. `--python` names another one", LAST_LINE_SAYS)
    try:
        if agent_pid:
            # A forked process has the fork server's random state, multiprocessing key, temporary
            # folder and time zone. Ranks would share these, so set them again.
            torch.default_generator.seed()
            if (random := sys.modules.get("numpy.random")) is not None:
                random.seed()
            process.current_process().authkey = os.urandom(32)
            tempfile.tempdir = None
            time.tzset()
        run_worker(start, agent_pid)
    except BadEnvironment as error:
        exit_with(str(error))
    except Exception as error:  # noqa: BLE001 (whatever it was, it is printed and the process ends)
        advice = gpu_start_error(start.gpu or start.device, error)
        exit_with(advice or traceback.format_exc().rstrip(), LAST_LINE_SAYS if advice else 1)


def exit_with(reason: str, code: int = 1) -> None:
    """Print the reason on stderr and exit at once.

    The interpreter is not finalized: finalizing could wait for ever for open sockets.
    """
    try:
        sys.stderr.write(f"{reason}\n")
        sys.stderr.flush()
    finally:
        os._exit(code)


# --- tasks from the agent, done in turn on the main thread ----------------------------------------

# A thread that waits for a reply checks this often whether another thread has read the reply.
LOOK_EVERY_MS = 200
# How long `catch_up` waits at most. An agent that is paused (SIGSTOP) reads no output.
CATCH_UP_SECONDS = 60.0
INPUT_IN_CHILD = (
    "a process forked by the rank cannot read input: use `num_workers=0` for a `DataLoader`"
)


class Tasks:
    """The socket through which a worker gets tasks, and the replies to its own requests.

    Threads other than the main thread may call only `ask` and `catch_up`. The agent's first
    connection brings tasks, and the kernel stops when the agent closes this connection. Further
    connections bring the agent's requests to the control thread. ipykernel's shell channel is not
    used, because its thread and its signatures would take longer than a short cell.
    """

    def __init__(
        self, path: str, kernel: WorkerKernel, session: MarkingSession, control: ControlThread
    ) -> None:
        self._kernel = kernel
        self._session = session
        self._control = control
        self._pid = os.getpid()
        self._loop = asyncio.get_event_loop()
        self._pending: deque[Task | Comm] = deque()
        self._interrupts = Interrupts(self._loop, self._has_more, STEPS.handle_sigint)
        self._task_arrived = asyncio.Event()
        self._cutter = FrameCutter()
        self._read_lock = threading.Lock()
        # Two threads must not mix the bytes of their frames. The lock is reentrant, because a
        # user's signal handler may send while it interrupts a thread that holds the lock.
        self._send_lock = threading.RLock()
        self._replies: dict[int, InputReply | None] = {}
        self._agent: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._loop.add_reader(self._listener, self._accept)
        # Run all cells in a single asyncio task: context variables that a cell sets then stay set.
        self._serve_task = self._loop.create_task(self._serve())
        self._serve_task.add_done_callback(_exit_unless_cancelled)

    def close(self) -> None:
        """Close the sockets and read no more tasks; called before the worker exits."""
        self._serve_task.cancel()
        for each in (self._listener, self._agent):
            if each is not None:
                each.close()

    def ask(self, prompt: str, *, secret: bool, by_debugger: bool) -> InputReply:
        """Ask the user for a line of input, and wait for it; any thread may call this.

        The reply has the text of the line, None as the text for the end of input, or a problem that
        kept the notebook from asking.
        """
        if self._agent is None or os.getpid() != self._pid:
            return InputReply(0, problem=INPUT_IN_CHILD)
        flush_streams()
        number = self._session.mark_place()
        return self._wait_for_reply(InputRequest(number, prompt, secret, by_debugger))

    def next_items(self, outcomes: Sequence[ItemOutcome]) -> InputReply:
        """Send the results of some items of `World.map`; return the reply with the next items."""
        flush_streams()
        return self._wait_for_reply(ItemsWanted(self._session.mark_place(), tuple(outcomes)))

    def catch_up(self) -> None:
        """Wait until the agent has read all earlier output, but at most `CATCH_UP_SECONDS`.

        Any thread may call this.
        """
        if self._agent is not None:
            self._wait_for_reply(CatchUp(self._session.mark_place()), CATCH_UP_SECONDS)

    def _wait_for_reply(
        self, request: InputRequest | ItemsWanted | CatchUp, timeout: float = float("inf")
    ) -> InputReply:
        agent, number, deadline = self._agent, request.number, time.monotonic() + timeout
        assert agent is not None
        self._replies[number] = None
        try:
            self._send(request)
            while (reply := self._replies[number]) is None and time.monotonic() < deadline:
                if is_ready(agent, LOOK_EVERY_MS) and not self._read(agent):
                    break  # the agent has closed the connection: this process is about to exit
            return reply or InputReply(number)
        finally:
            del self._replies[number]

    def _has_more(self) -> bool:
        """Return True if a task is pending, or if the socket has unread data that may be a task."""
        return self._has_read_more() or is_ready(self._agent or self._listener, 0)

    def _has_read_more(self) -> bool:
        return any(isinstance(each, Task) for each in self._pending)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if self._agent is None:
            self._agent = connection
            self._loop.add_reader(connection, self._read_or_exit, connection)
        else:
            self._control.serve(connection)

    def _read(self, agent: socket.socket) -> bool:
        """Handle messages that have arrived; return False if the agent closed the connection."""
        with self._read_lock:
            try:
                data = agent.recv(SOCKET_READ_SIZE, socket.MSG_DONTWAIT)
            except BlockingIOError:  # another thread has read the data
                return True
            if not data:  # the agent closes the connection to end this process
                self._loop.call_soon_threadsafe(self._loop.remove_reader, agent)
                self._kernel.stop()
            for frame in self._cutter.feed(data):
                self._handle_message(unpack(frame))
        return bool(data)

    def _handle_message(self, message: Task | InputReply | SigintSent | Comm) -> None:
        match message:
            case SigintSent():
                self._interrupts.settle_sigint(is_for_task=self._has_read_more())
            case InputReply(number):
                if number in self._replies:
                    self._replies[number] = message
            case Comm():
                self._pending.append(message)
                # If a cell awaits something, the loop is free to handle the message meanwhile.
                self._loop.call_soon_threadsafe(self._handle_comms)
            case _:
                self._pending.append(message)
                if threading.current_thread() is threading.main_thread():
                    self._task_arrived.set()
                else:
                    self._loop.call_soon_threadsafe(self._task_arrived.set)

    def _handle_comms(self) -> None:
        """Handle the messages for widgets that arrived before the next pending task."""
        while self._pending and isinstance(comm := self._pending[0], Comm):
            self._pending.popleft()
            self._kernel.handle_comm(comm)

    def _read_or_exit(self, agent: socket.socket) -> None:
        try:
            self._read(agent)
        except MemoryError as error:
            # Too little memory was free to read a task. The task is lost, or its data stays in the
            # socket, and the loop would call this method for ever. So exit.
            exit_with(f"a task could not be read: {error!r}")

    async def _serve(self) -> None:
        while True:
            await self._task_arrived.wait()
            self._task_arrived.clear()
            while self._pending:
                task = self._pending.popleft()
                if isinstance(task, Comm):
                    self._kernel.handle_comm(task)
                    continue
                try:
                    outcome = await self._kernel.run(task, self._interrupts)
                except KeyboardInterrupt:  # a second SIGINT came while the first one was handled
                    self._interrupts.end()
                    STEPS.end_task()
                    DEBUGGER.end_task()
                    outcome = Done(
                        "error",
                        0.0,
                        failure=failure_in_words("KeyboardInterrupt", ""),
                        steps=STEPS.begun,
                        is_in_step=STEPS.is_inside,
                    )
                if os.getpid() != self._pid:
                    os._exit(0)  # a child that the cell forked: only the parent reports the end
                # `Finished` has the number of a mark that is written to stdout first. So the agent
                # reads all text of the task before it reports the end.
                self._send(Finished(self._session.mark_place(), task.id, outcome))

    def _send(self, message: TaskMessage) -> None:
        assert self._agent is not None
        frame = framed(pack(message))
        with self._send_lock:
            self._agent.sendall(frame)


def _exit_unless_cancelled(serve_task: asyncio.Task[None]) -> None:
    """Exit if `_serve` has failed: otherwise the notebook would wait for ever."""
    if not serve_task.cancelled():
        exit_with(f"the end of a cell could not be reported: {serve_task.exception()!r}")
