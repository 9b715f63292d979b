"""The main function of a worker: starts the kernel and the process group, then runs tasks.

Called in each rank's process, by the fork server after a fork or by `nbdist.worker.__main__`.
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
from multiprocessing import process

import torch
import torch.distributed as dist

from nbdist.output.events import Comm, Done, InputRequest
from nbdist.system.folders import nearest_folder
from nbdist.system.processes import WORKER_PID, safe_path
from nbdist.values.child_definitions import share_definitions_with_children
from nbdist.wire.frames import FrameCutter, framed, pack, unpack
from nbdist.wire.spec import LAST_LINE_SAYS, WorkerStart, difference, versions_here
from nbdist.wire.work import (
    CatchUp,
    Finished,
    InputReply,
    Said,
    SigintSent,
    Task,
    failure_in_words,
    mark,
)
from nbdist.worker.control import ControlThread
from nbdist.worker.environment import Around, prepare_torch
from nbdist.worker.group.default import warn_of_own_groups
from nbdist.worker.group.group import Group
from nbdist.worker.kernel import WorkerKernel, make_app
from nbdist.worker.namespace import import_ops
from nbdist.worker.ops.memory import reserve_addresses
from nbdist.worker.probe import write_stacks_to
from nbdist.worker.process import (
    READ_SIZE,
    BadEnvironment,
    Interrupts,
    die_with_parent,
    flush_c_streams,
    flush_streams,
    is_ready,
    leave_world_in_children,
    set_limit,
    threads_without_sigint,
    write_all,
)
from nbdist.worker.publishing import MarkingSession
from nbdist.worker.steps import STEPS
from nbdist.worker.tracebacks import why_not_started


def run_worker(start: WorkerStart, agent_pid: int) -> None:
    """Start the kernel, form the group, and run tasks until the kernel shuts down; never returns.

    Two marks on stdout tell the agent how far the start is: "up" once the kernel's sockets are
    bound, "ready" once the group is formed and the loop reads tasks.
    """
    own_path = list(sys.path)
    prepare_torch(start)
    import_ops()
    with threads_without_sigint():
        app = make_app(start)
    # Lightning refuses to run several processes if Python has a prompt, as in an interactive
    # session.
    for prompt in ("ps1", "ps2"):
        if hasattr(sys, prompt):
            delattr(sys, prompt)
    # IPython warns how to leave the kernel after `exit()`; its advice is wrong for a worker.
    warnings.filterwarnings("ignore", message="To exit: use")
    reserve_addresses()
    write_stacks_to(start.stack_file)
    share_definitions_with_children()
    STEPS.watch()
    group = Group(start) if start.world.backend is not None else None
    if group is None:
        warn_of_own_groups()
    app.kernel.group = group
    leave_world_in_children(group.abandon_in_child if group is not None else None)
    tasks = Tasks(start.task_socket, app.kernel, app.session, ControlThread(app.kernel, start))
    app.kernel.ask, app.session.catch_up = tasks.ask, tasks.catch_up
    if agent_pid:
        die_with_parent(agent_pid)
    write_all(mark(start.token, "up"))
    if group is not None:
        group.form()
    app.kernel.around = Around(start, own_path)
    # By the loop: from now on it reads the agent's tasks and requests.
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


# --- makes a fresh process, forked or spawned, the worker of one rank -------------------------


def become_worker(start: WorkerStart, agent_pid: int = 0) -> None:
    """Make this process the worker of one rank, and exit when its kernel ends; never returns.

    `agent_pid` is 0 if the process was spawned and not forked: it has its environment already.
    """
    set_limit()
    wanted = {**start.world.environ, **start.environ}
    if agent_pid:
        # The notebook's environment, and torchrun's variables.
        os.environ.clear()
        os.environ.update(wanted)
    elif os.environ.get("PYTHONPATH", "") == safe_path(wanted, start.world.cwd):
        # A spawned worker was started with these variables, which a wrapper of Python may have
        # changed. Only PYTHONPATH is set again: entries that are unsafe at the start were left out
        # of it.
        os.environ.update({k: v for k, v in wanted.items() if k == "PYTHONPATH"})
    os.environ[WORKER_PID] = str(os.getpid())
    folder = nearest_folder(start.world.cwd)
    os.chdir(folder)
    if folder != start.world.cwd:
        sys.stderr.write(f"the folder {start.world.cwd} was removed: this rank is in {folder}\n")
    # Functions of the notebook cannot be sent to another version of Python or torch.
    if start.world.versions and (found := difference(versions_here(), start.world.versions)):
        has = f"{sys.executable} has {found.what} {found.there}, the notebook {found.here}"
        end(f"{has}: {found.why}. `--python` names another one", LAST_LINE_SAYS)
    try:
        if agent_pid:
            # State that all children of the fork server have in common must differ from rank to
            # rank.
            torch.default_generator.seed()
            if (random := sys.modules.get("numpy.random")) is not None:
                random.seed()
            process.current_process().authkey = os.urandom(32)
            tempfile.tempdir = None
            time.tzset()
        run_worker(start, agent_pid)
    except BadEnvironment as error:
        end(str(error))
    except Exception as error:  # noqa: BLE001 (whatever it was, it is printed and the process ends)
        why = why_not_started(start.gpu or start.device, error)
        end(why or traceback.format_exc().rstrip(), LAST_LINE_SAYS if why else 1)


def end(why: str, code: int = 1) -> None:
    """Print the reason on stderr and exit at once.

    The interpreter is not finalized: that could wait for ever for open sockets.
    """
    try:
        sys.stderr.write(f"{why}\n")
        sys.stderr.flush()
    finally:
        os._exit(code)


# --- tasks from the agent, done in turn on the main thread ----------------------------------------

LOOK_EVERY_MS = 200  # for a thread that waits to see whether another has read its reply
CATCH_UP_SECONDS = 60.0  # for the agent to read all output; a paused agent takes longer
IN_CHILD = "a process forked by the rank cannot read input: use `num_workers=0` for a `DataLoader`"


class Tasks:
    """The worker's end of the socket for tasks, and for replies to `InputRequest` and `CatchUp`.

    Everything but `ask` and `catch_up` runs on the main thread's loop. ipykernel's shell channel,
    with a thread and signatures of its own, would take longer than a short cell. The agent's
    first connection is for tasks, and the kernel stops when it is closed; a second connection, for
    requests, goes to the control thread.
    """

    def __init__(
        self, path: str, kernel: WorkerKernel, session: MarkingSession, control: ControlThread
    ) -> None:
        self._kernel = kernel
        self._session = session
        self._control = control
        self._pid = os.getpid()
        self._loop = asyncio.get_event_loop()
        self._waiting: deque[Task | Comm] = deque()
        self._interrupts = Interrupts(self._loop, self._has_more, STEPS.handle_sigint)
        self._arrived = asyncio.Event()
        self._cutter = FrameCutter()
        self._reading = threading.Lock()
        # No other thread may write into a frame. A signal handler of the user's may send too, on
        # the thread that is sending.
        self._sending = threading.RLock()
        self._replies: dict[int, InputReply | None] = {}
        self._agent: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._loop.add_reader(self._listener, self._accept)
        # One asyncio task runs all cells, so that context variables that a cell sets stay set.
        self._serving = self._loop.create_task(self._serve())
        self._serving.add_done_callback(_end_unless_closed)

    def close(self) -> None:
        """Close the sockets and read no more tasks; called when the worker ends."""
        self._serving.cancel()
        for end in (self._listener, self._agent):
            if end is not None:
                end.close()

    def ask(self, prompt: str, *, secret: bool, by_debugger: bool) -> InputReply:
        """Ask the notebook for a line; return its text, or a problem.  Any thread may call this."""
        if self._agent is None or os.getpid() != self._pid:
            return InputReply(0, problem=IN_CHILD)
        flush_streams()
        number = self._session.place()
        return self._reply_to(InputRequest(number, prompt, secret, by_debugger))

    def catch_up(self) -> None:
        """Wait until the agent has read all output, or `CATCH_UP_SECONDS`; on any thread."""
        if self._agent is not None:
            self._reply_to(CatchUp(self._session.place()), CATCH_UP_SECONDS)

    def _reply_to(self, said: InputRequest | CatchUp, timeout: float = float("inf")) -> InputReply:
        agent, number, deadline = self._agent, said.number, time.monotonic() + timeout
        assert agent is not None
        self._replies[number] = None
        try:
            self._send(said)
            while (reply := self._replies[number]) is None and time.monotonic() < deadline:
                if is_ready(agent, LOOK_EVERY_MS) and not self._read(agent):
                    break  # the agent has closed the connection: this process is about to end
            return reply or InputReply(number)
        finally:
            del self._replies[number]

    def _has_more(self) -> bool:
        """Return True if a task has arrived that has not begun, whether it was read or not."""
        return self._has_read_more() or is_ready(self._agent or self._listener, 0)

    def _has_read_more(self) -> bool:
        return any(isinstance(each, Task) for each in self._waiting)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if self._agent is None:
            self._agent = connection
            self._loop.add_reader(connection, self._read_more, connection)
        else:
            self._control.serve(connection)

    def _read(self, agent: socket.socket) -> bool:
        """Read and handle what has arrived; return False if the agent has closed the connection."""
        with self._reading:
            try:
                data = agent.recv(READ_SIZE, socket.MSG_DONTWAIT)
            except BlockingIOError:  # another thread has read it
                return True
            if not data:  # the agent closes the connection to end this process
                self._loop.call_soon_threadsafe(self._loop.remove_reader, agent)
                self._kernel.stop()
            for frame in self._cutter.feed(data):
                self._take(unpack(frame))
        return bool(data)

    def _take(self, item: Task | InputReply | SigintSent | Comm) -> None:
        match item:
            case SigintSent():
                self._interrupts.take_sent(is_for_task=self._has_read_more())
            case InputReply(number):
                if number in self._replies:
                    self._replies[number] = item
            case Comm():
                self._waiting.append(item)
                # Also while a task awaits something.
                self._loop.call_soon_threadsafe(self._handle_comms)
            case _:
                self._waiting.append(item)
                if threading.current_thread() is threading.main_thread():
                    self._arrived.set()
                else:
                    self._loop.call_soon_threadsafe(self._arrived.set)

    def _handle_comms(self) -> None:
        """Handle the messages of pages that came before the next task."""
        while self._waiting and isinstance(comm := self._waiting[0], Comm):
            self._waiting.popleft()
            self._kernel.handle_comm(comm)

    def _read_more(self, agent: socket.socket) -> None:
        try:
            self._read(agent)
        except MemoryError as error:
            # The data stays in the socket, so the loop would call this method again and again.
            end(f"a task could not be read: {error!r}")

    async def _serve(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                task = self._waiting.popleft()
                if isinstance(task, Comm):
                    self._kernel.handle_comm(task)
                    continue
                try:
                    done = await self._kernel.run(task, self._interrupts)
                except KeyboardInterrupt:  # Stop came again and again while the task ended
                    self._interrupts.end()
                    STEPS.end_task()
                    done = Done(
                        "error",
                        0.0,
                        failure=failure_in_words("KeyboardInterrupt", ""),
                        steps=STEPS.begun,
                        is_in_step=STEPS.is_inside,
                    )
                if os.getpid() != self._pid:
                    os._exit(0)  # a child that the cell forked: only the parent reports the end
                # `place` writes a mark before `Finished` is sent: the agent reads text up to that
                # mark first.
                self._send(Finished(self._session.place(), task.id, done))

    def _send(self, said: Said) -> None:
        assert self._agent is not None
        frame = framed(pack(said))
        with self._sending:
            self._agent.sendall(frame)


def _end_unless_closed(serving: asyncio.Task[None]) -> None:
    """Exit if no further task could be reported as finished: the notebook would wait for ever."""
    if not serving.cancelled():
        end(f"the end of a cell could not be reported: {serving.exception()!r}")
