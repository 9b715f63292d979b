"""Starts processes, reads their state from /proc, and ends processes; also the guard of an agent.

This file imports little, and nothing of nbdist, because the agent imports it before it starts the
fork server, and further imports would delay the start.  The file is also a script for the option
`--wrap`: `python -IS processes.py COMMAND` becomes COMMAND, which Linux kills when the agent exits.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

MODULE_OPTIONS = ("-P", "-m")
"""Options of Python before the name of a module to run.

With `-P` Python does not import a user's file in the working directory, such as `random.py`."""

_SOURCE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def agent_command(python: str | None, number: int = -1) -> list[str]:
    """Return the command that starts an agent, which then connects to a head.

    `python` is the interpreter that runs the agent; None or "" means this process's interpreter.
    `number` is the number of the agent's node, or -1 if the head has to choose a number.
    """
    node = [] if number < 0 else ["--node", str(number)]
    return [python or sys.executable, *MODULE_OPTIONS, "nbdist.agent", "--ticket", *node]


def safe_path(environ: Mapping[str, str], folder: str) -> str:
    """Return PYTHONPATH without the entries that can lead to the working directory `folder`.

    They are `folder` itself, "" and relative paths.  By such an entry, Python could import a user's
    file such as `random.py` in place of a library's.  The folder from which nbdist was imported is
    kept.
    """
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    unsafe = {os.path.realpath(folder)} - {_SOURCE_ROOT}
    return os.pathsep.join(
        each for each in entries if os.path.isabs(each) and os.path.realpath(each) not in unsafe
    )


def safe_environ(environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return a copy of `environ` whose PYTHONPATH lacks the entries that can lead to `folder`.

    `safe_path` says which entries these are.  If no entry is left, the copy has no PYTHONPATH.
    """
    others = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    path = safe_path(environ, folder)
    return {**others, "PYTHONPATH": path} if path else others


# --- parents and children (prctl(2)) -----------------------------------------------------------


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def signal_on_parent_exit(number: signal.Signals, parent: int) -> bool:
    """Let Linux send this process the signal `number` when its parent exits.

    `parent` is the pid that the parent had.  Returns False if the parent has exited already, so
    that no signal will come.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def adopt_orphans(*, adopts: bool = True) -> None:
    """Make this process the new parent of descendants whose parents exit, so that it can kill them.

    With `adopts=False` this process stops adopting such orphans.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, int(adopts))


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children, also of zombies (exited and not yet reaped)."""
    return [process for process, stat in _processes() if stat[1:2] == [str(pid)]]


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Yield each process's pid, and its state, parent, process group and so on (`_stat`)."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        yield int(pid), _stat(pid)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


# --- the state of a process (proc(5)) -----------------------------------------------------------


PF_EXITING = 0x4
"""A bit in a thread's flags (include/linux/sched.h): the thread is exiting, or has exited."""


def thread_state(pid: int, tid: int | str = "") -> str:
    """Return the state of a thread, by default of the main thread, as a letter (see proc(5)).

    `R` is running or ready to run, `S` sleeping, `T` stopped, and `X` has exited.
    """
    return _stat(f"{pid}/task/{tid or pid}")[0]


def is_exiting(pid: int) -> bool:
    """Return True if the process has exited or is exiting, which can take long."""
    stat = _stat(pid)
    return len(stat) <= 6 or bool(int(stat[6]) & PF_EXITING)


def identify(pid: int) -> str:
    """Return a text that identifies a process: machine, pid and start time.

    A later process with the same pid has another start time.  Returns "" if there is no process
    with this pid.
    """
    stat = _stat(pid)
    return f"{os.uname().nodename} {pid} {stat[19]}" if len(stat) > 19 else ""


def is_of_this_machine(identity: str) -> bool:
    """Return True if a process, given by its text from `identify`, is or was on this machine."""
    return identity.split()[:1] == [os.uname().nodename]


def may_run(identity: str) -> bool:
    """Return True if a process runs or may run; `identity` is its text from `identify`.

    A process on another machine may run, since this machine cannot tell.
    """
    match identity.split():
        case [host, pid, _] if pid.isdecimal():
            return host != os.uname().nodename or identify(int(pid)) == identity
    return False


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds that a process has used; 0 if there is no such process."""
    stat = _stat(pid)
    return sum(map(int, stat[11:13])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; ["X"] if there is no such process.

    For a thread, `pid` is the text `PID/task/TID`.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2].split()
    except OSError:
        return ["X"]


def is_stopped(pid: int) -> bool:
    """Return True if a signal such as SIGSTOP, or a debugger, has stopped the main thread."""
    return thread_state(pid) in "Tt"


def ignores_signal(pid: int, number: int) -> bool:
    """Return True if the process ignores the signal; False if no such process exists."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            mask_line = next((line for line in status if line.startswith("SigIgn:")), "SigIgn: 0")
        return bool(int(mask_line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        return False


class Schedule(NamedTuple):
    """How long a thread has run and has waited for a processor since it was started."""

    ran: float = 0.0  # seconds in which the thread has run
    waited: float = 0.0  # seconds in which the thread was ready to run and did not run
    wakes: int = 0  # how often the thread has begun to run


def schedule(pid: int, tid: int | str) -> Schedule:
    """Return how long a thread has run and has waited, from /proc/PID/task/TID/schedstat.

    Returns zeros if the thread has exited, or if the kernel has no such file, as in gVisor.
    """
    try:
        with open(f"/proc/{pid}/task/{tid}/schedstat", encoding="ascii") as file:
            ran, waited, wakes = map(int, file.read().split())
    except (OSError, ValueError):
        return Schedule()
    return Schedule(ran / 1e9, waited / 1e9, wakes)


class OwnTime:
    """A stopwatch that does not count seconds in which process `pid` waits for a processor.

    It starts when the object is made.  The agent measures timeouts of workers by it, so that a
    worker on a busy machine gets more time.  The longest wait of any thread counts as the process's
    wait, because that thread may have held the GIL.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.since = time.monotonic()
        self._before = _schedules(pid)
        self._largest = 0.0

    def seconds(self) -> float:
        """Return the seconds counted so far; the number never falls.

        If a thread is waiting for a processor now, Linux does not say since when.  Until the thread
        runs again, all seconds in which it has not run count as waiting.  If Linux does not count
        waits at all, return all seconds since the object was made.
        """
        seconds = time.monotonic() - self.since - max(self.waits(), default=0.0)
        self._largest = max(self._largest, seconds)
        return self._largest

    def waits(self) -> list[float]:
        """Return for how many seconds each thread may have waited for a processor.

        Only time since this object was made counts.  Threads that have never run are left out.
        """
        passed, now = time.monotonic() - self.since, _schedules(self._pid)
        return [self._wait(tid, each, passed) for tid, each in now.items() if each.wakes]

    def _wait(self, tid: str, now: Schedule, passed: float) -> float:
        before = self._before.get(tid, Schedule())
        # Linux adds a wait to `waited` only when the wait is over.  A thread in state "R" may still
        # wait, so count all seconds in which it has not run.  The thread that runs this code is in
        # state "R" too, but does not wait.
        is_over = thread_state(self._pid, tid) != "R" or int(tid) == threading.get_native_id()
        return now.waited - before.waited if is_over else passed - (now.ran - before.ran)


def _schedules(pid: int) -> dict[str, Schedule]:
    """Return the schedules of a process's threads, by thread id; {} if the process has exited."""
    with suppress(OSError):  # the process has exited
        return {tid: schedule(pid, tid) for tid in os.listdir(f"/proc/{pid}/task")}
    return {}


def trim_memory() -> None:
    """Make glibc return the memory to Linux that this process has released; no-op without glibc."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# --- the guard above an agent -----------------------------------------------------------------

# The process of an agent, or of a head, forks before most of its imports.  The child becomes the
# agent or head, and the parent becomes the guard, which waits for the child to exit.  Then the
# guard kills all processes that the child has left, even if the child was killed: as a child
# subreaper, the guard has become the parent of these processes.  If the guard is killed, Linux
# sends the agent a SIGTERM, and the agent ends its workers and exits.  The guard kills an agent
# that does not exit after its notebook has exited, unless the last byte that the agent has sent is
# `STAYS_BYTE`.  "Agent" below also means a head.


EXIT_TIMEOUT, EXIT_POLL_INTERVAL = 5.0, 0.005
"""Seconds for killed processes to exit, and seconds between checks whether they have exited."""

AGENT_GRACE = 20.0
"""Seconds for an agent to exit after its notebook: on busy cores the agent's imports take long."""

STAYS_BYTE, LEAVES_BYTE, LONGEST_TOLD = b"s", b"l", 1 << 16
"""What an agent sends to its guard: `STAYS_BYTE` if the agent keeps running after its notebook has
exited, `LEAVES_BYTE` if it exits, too.

`LONGEST_TOLD` is how many bytes the pipe to the guard can hold."""


class Guard:
    """The agent's end of the pipe to its guard."""

    def __init__(self, pipe: int) -> None:
        self.pid = os.getppid()
        self._pipe = pipe

    def send(self, word: bytes) -> None:
        """Send the guard `STAYS_BYTE`, `LEAVES_BYTE`, or bytes for `after_kill`.

        The guard calls `after_kill` if this process is killed (`fork_below_guard`).
        """
        with suppress(BrokenPipeError):  # the guard has exited
            os.write(self._pipe, word)


def fork_below_guard(
    runtime: Path,
    notebook: int | None,
    grace: float = 0.0,
    after_kill: Callable[[bytes], None] = lambda last_word: None,
) -> Guard:
    """Fork this process: the child becomes the agent, and this process becomes the agent's guard.

    Returns only in the child.  `notebook` is the notebook's pid, or None for an agent of a head.

    When the agent has exited, processes that it leaves behind have `grace` seconds to exit, because
    their stdin has closed, and `grace` seconds more after a SIGTERM.  Then the guard kills them and
    removes the folder `runtime`.  If a signal has killed the agent, the guard then calls
    `after_kill` with the bytes that the agent has sent (`Guard.send`).

    If the agent has not exited `AGENT_GRACE` + 2 * `grace` seconds after its notebook, the guard
    kills the agent, unless the last byte from the agent is `STAYS_BYTE`.  Raises OSError if no
    further process can be started.
    """
    guard = os.getpid()
    adopt_orphans()
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    agent = os.fork()
    if agent:
        os.close(write_end)
        _watch(agent, runtime, notebook, read_end, grace, after_kill)
    os.close(read_end)
    if not signal_on_parent_exit(signal.SIGTERM, guard):
        sys.exit(1)
    return Guard(write_end)


TRACKERS = (b"resource_tracker import main", b"torch_shm_manager")
"""Parts of the command lines of trackers: processes that clean /dev/shm after other processes.

Trackers are the resource trackers of multiprocessing and of joblib's loky, and the manager of
torch's shared tensors."""

TRACKED_PREFIXES = ("sem.mp-", "psm_", "sem.loky-", "joblib_memmapping_folder_", "torch_")
"""The beginnings of the names of files in /dev/shm that trackers remove."""

TRACKER_GRACE = 3.0
"""Seconds for trackers to notice that processes were killed, and to clean up after them."""

MAX_KILL_ROUNDS = 20  # rounds of killing, because processes may start others before they die


def kill_group(pid: int) -> None:
    """Kill the processes of the Linux process group that `pid` leads, such as a worker's.

    Trackers (`TRACKERS`) are spared if /dev/shm has files that they may have to remove.  They
    remove the files when all other processes of the group have exited, and then exit.
    """
    if not _has_tracked():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        return
    killed = set[int]()
    for _ in range(MAX_KILL_ROUNDS):
        members = [each for each, stat in _processes() if stat[2:3] == [str(pid)]]
        new = [each for each in members if each not in killed and not _is_tracker(each)]
        for each in new:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        if not new:
            break
        killed.update(new)


WORKER_PID = "NBDIST_WORKER_PID"
"""An environment variable with a worker's pid; programs that the worker starts inherit it."""


def kill_adopted(worker: int) -> None:
    """Kill the programs that an exited worker has left running, and their descendants.

    `worker` is the worker's pid.  This process has become the parent of such programs, and
    recognizes them by `WORKER_PID` in their environment.  A program without this variable keeps
    running, unless it descends from one that has it.  Trackers (`TRACKERS`) also keep running.
    """
    mark, killed = f"{WORKER_PID}={worker}".encode(), set[int]()
    for _ in range(MAX_KILL_ROUNDS):
        adopted = children_of(os.getpid())
        waiting = [each for each in adopted if each not in killed and _has_variable(each, mark)]
        if not waiting:
            break
        while waiting:
            pid = waiting.pop()
            waiting += children_of(pid)
            killed.add(pid)
            if not _is_tracker(pid):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _has_variable(pid: int, variable: bytes) -> bool:
    """Return True if a program was started with `variable`, NAME=VALUE, in its environment."""
    with suppress(OSError):
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _has_tracked() -> bool:
    with suppress(OSError):
        return any(name.startswith(TRACKED_PREFIXES) for name in os.listdir("/dev/shm"))
    return False


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(each in command for each in TRACKERS)
    return False


def kill_descendants() -> None:
    """Kill and reap all descendants of this process, which must have called `adopt_orphans`.

    Trackers are spared for `TRACKER_GRACE` seconds, so that they can remove files.  Gives up after
    `EXIT_TIMEOUT` seconds.
    """
    spared_until = time.monotonic() + TRACKER_GRACE

    def kill_children() -> bool:
        if not (have_exited := _reap_children()):
            is_over = time.monotonic() > spared_until
            _signal_children(signal.SIGKILL, lambda child: is_over or not _is_tracker(child))
        return have_exited

    poll_until(kill_children)


def poll_until(condition: Callable[[], bool], timeout: float = EXIT_TIMEOUT) -> None:
    """Call `condition` repeatedly until the result is True, for at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(EXIT_POLL_INTERVAL)


def _reap_children() -> bool:
    """Reap the children that have exited; return True if no child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _signal_children(number: int, is_selected: Callable[[int], bool] = lambda _: True) -> None:
    for child in filter(is_selected, children_of(os.getpid())):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, number)


def _watch(
    agent: int,
    runtime: Path,
    notebook: int | None,
    pipe: int,
    grace: float,
    after_kill: Callable[[bytes], None],
) -> NoReturn:
    """Run the guard: wait for the agent's exit, then kill the processes that outlive the agent.

    `pipe` is the guard's end of the pipe from the agent; `fork_below_guard` explains the other
    parameters.  Never returns: the guard exits with the agent's exit code, or by the signal that
    has killed the agent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(agent, signal.SIGTERM))
    status, last_word = _wait_for(agent, notebook, pipe, AGENT_GRACE + 2 * grace)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if grace:
        poll_until(_reap_children, grace)
        _signal_children(signal.SIGTERM)
        poll_until(_reap_children, grace)
    kill_descendants()
    shutil.rmtree(runtime, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        after_kill(last_word)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # only the agent may write a core file
        with suppress(OSError):  # raised for SIGKILL, whose action cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _wait_for(agent: int, notebook: int | None, pipe: int, grace: float) -> tuple[int, bytes]:
    """Wait until the agent exits; return its wait status, and the bytes that it has sent.

    Bytes that come after the notebook has exited, or after stdin was closed, are not read.
    Kill an agent that has not exited `grace` seconds after its notebook, unless the last byte that
    it sent is `STAYS_BYTE`.
    """
    agent_exit, poller = os.pidfd_open(agent), select.poll()
    poller.register(agent_exit, select.POLLIN)
    poller.register(sys.stdin, 0)  # POLLHUP: the other end of stdin was closed
    try:
        if notebook is not None:
            poller.register(os.pidfd_open(notebook), select.POLLIN)
        poller.poll()
    except ProcessLookupError:
        pass  # the notebook has exited already
    words = b""
    with suppress(BlockingIOError):  # raised if the agent has sent nothing
        words = os.read(pipe, LONGEST_TOLD)
    if words[-1:] != STAYS_BYTE and not select.select([agent_exit], [], [], grace)[0]:
        os.kill(agent, signal.SIGKILL)
    return os.waitpid(agent, 0)[1], words


# --- a child process with a log ---------------------------------------------------------------


LAST_BYTES, LEFT_BEHIND = 4096, "nbdist left behind: "
"""How many bytes at a log's end are read, and the beginning of a log's line about leftovers."""


def last_lines_of(log: BinaryIO) -> list[str]:
    """Return the lines in the last `LAST_BYTES` of a log file; the first may lack its beginning."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_BYTES))
    return log.read().decode(errors="replace").splitlines()


def without_debugger() -> AbstractContextManager[None]:
    """Return a context in which this process can start processes that no debugger follows.

    While a debugger such as JupyterLab's is on, debugpy changes the command line of each Python
    program that this process starts.  The program then waits until the debugger's front end
    attaches to it, which JupyterLab never does.
    """
    pydevd = sys.modules.get("_pydev_bundle.pydev_monkey")  # None if nothing is debugged here
    return getattr(pydevd, "skip_subprocess_arg_patch", nullcontext)()


class Child:
    """A process of this machine that runs a command, in its own session and with a log file.

    `host` is the name of the machine on which the command does its work, for messages to the user.
    For `ssh` this is another machine.
    """

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        log: Path,
        environ: Mapping[str, str] | None = None,
        stdout: int | None = None,
        folder: str | None = None,
    ) -> None:
        """Start the command; raises OSError if that fails.

        By default the command runs in this process's folder, and writes its stdout to the log.
        """
        self.host = host
        self.command = shlex.join(command)
        self._log = log.open("w+b")
        try:
            # A new session, because Stop sends SIGINT to all processes in the notebook's process
            # group.
            with without_debugger():
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=self._log if stdout is None else stdout,
                    stderr=self._log,
                    env=environ,
                    cwd=folder,
                    start_new_session=True,
                )
        except OSError:
            self._log.close()
            raise
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # the caller gets no object by which it could stop the command
            kill_group(self.pid)
            self._close_stdin()
            self._exits_within(EXIT_TIMEOUT)
            self._log.close()
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pid} exit code {self.exit_code()}>"

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process has exited."""
        return self._pidfd

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    def last_lines(self) -> list[str]:
        """Return the last lines of the log; the first of them may lack its beginning."""
        return last_lines_of(self._log)

    def close(self) -> None:
        """Close all descriptors, without waiting for the process to exit.

        Most commands exit when their stdin closes.
        """
        self._close_stdin()
        if self._process.poll() is None:
            # The child may outlive this object.  subprocess warns of that unless a code is set.
            self._process.returncode = 0
        os.close(self._pidfd)
        self._log.close()

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has exited before it read all of stdin
            self._process.stdin.close()

    def _exits_within(self, timeout: float) -> bool:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True


def find_leftovers(lines: Sequence[str]) -> str:
    """Return what a process could not end, as its log says; "" if the log does not say so.

    `lines` are lines of the log.  The result is the text after `LEFT_BEHIND` in the last line that
    begins with it.
    """
    return next(
        (line.removeprefix(LEFT_BEHIND) for line in [*lines][::-1] if line.startswith(LEFT_BEHIND)),
        "",
    )


# --- the script -------------------------------------------------------------------------------


def main() -> None:
    """Replace this process by the command that wraps a worker.

    Before that, let Linux kill this process when the agent exits, and ignore SIGINT; both settings
    stay in effect for the command.
    """
    signal_on_parent_exit(signal.SIGKILL, os.getppid())
    # Stop sends SIGINT to the worker's process group, in which the wrapper is too.  SIGINT would
    # end the wrapper, so the wrapper ignores SIGINT; the worker's kernel has a handler of its own
    # during a cell.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
