"""Processes of our own: how interpreters are started, what the kernel says of them, their ends.

Little is imported here, and nothing of nbdist: the agent has this before it starts the fork server.
It is also a script, with no package around it: `python -IS processes.py COMMAND ...` becomes the
command that wraps a worker (`--wrap`), which then dies with its agent.
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
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

MODULE = ("-P", "-m")
"""Options before a module to run: a `random.py` in the working directory is the user's."""

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def agent_command(python: str | None, number: int = -1) -> list[str]:
    """Return the command that runs an agent; `number` is the node's, where one is known."""
    node = [] if number < 0 else ["--node", str(number)]
    return [python or sys.executable, *MODULE, "nbdist.agent", "--ticket", *node]


def safe_path(environ: Mapping[str, str], folder: str) -> str:
    """Take from PYTHONPATH what leads to this working directory: it, "", and relative entries.

    An entry that nbdist itself was imported from stays.
    """
    entries = environ.get("PYTHONPATH", "").split(os.pathsep)
    unsafe = {os.path.realpath(folder)} - {_ROOT}
    return os.pathsep.join(
        each for each in entries if os.path.isabs(each) and os.path.realpath(each) not in unsafe
    )


def safe_environ(environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Make the environment of an interpreter that will have this working directory."""
    rest = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    path = safe_path(environ, folder)
    return {**rest, "PYTHONPATH": path} if path else rest


# --- parents and children (prctl(2)) -----------------------------------------------------------


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def signal_on_parents_end(number: signal.Signals, parent: int) -> bool:
    """Let the kernel send this process the signal when its parent ends; False if it has."""
    _prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def adopt_orphans(*, adopts: bool = True) -> None:
    """Become the parent of descendants whose parents end, so that this process can end them."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(adopts))


def children_of(pid: int) -> list[int]:
    """List the processes whose parent it is."""
    return [process for process, stat in _processes() if stat[1:2] == [str(pid)]]


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Yield all processes, each with what `_stat` reads: its state, parent, group and so on."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        yield int(pid), _stat(pid)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


# --- what the kernel says of a process (proc(5)) ------------------------------------------------


PF_EXITING = 0x4
"""In a thread's flags (include/linux/sched.h): it is being ended, and runs no more code."""


def thread_state(pid: int, tid: int | str = "") -> str:
    """Return `R`: a thread is to run, `S`: sleeps, `T`: is stopped (proc(5)); `X`: has ended.

    Of the main thread, where none is named.
    """
    return _stat(f"{pid}/task/{tid or pid}")[0]


def is_exiting(pid: int) -> bool:
    """Return True if the kernel is taking the process down, or has, which can take long."""
    stat = _stat(pid)
    return len(stat) <= 6 or bool(int(stat[6]) & PF_EXITING)


def identify(pid: int) -> str:
    """Return the machine, the number and the start time of a process; "" if it has ended."""
    stat = _stat(pid)
    return f"{os.uname().nodename} {pid} {stat[19]}" if len(stat) > 19 else ""


def may_run(identity: str) -> bool:
    """Return True if a process that `identify` has identified runs, or is on another machine."""
    match identity.split():
        case [host, pid, _]:
            return host != os.uname().nodename or identify(int(pid)) == identity
    return False


def cpu_seconds(pid: int) -> float:
    """Read what all threads of a process have run so far; 0 of one that has ended."""
    stat = _stat(pid)
    return sum(map(int, stat[11:13])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int | str) -> list[str]:
    """Read `stat` from the thread's state on; that it has ended, if it has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2].split()
    except OSError:
        return ["X"]


def is_stopped(pid: int) -> bool:
    """Return True if a signal such as SIGSTOP, or a debugger, has stopped the process."""
    return thread_state(pid) in "Tt"


def ignores(pid: int, number: int) -> bool:
    """Return True if the signal does nothing to the process; one that has ended ignores none."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
            found = next((line for line in status if line.startswith("SigIgn:")), "SigIgn: 0")
        return bool(int(found.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        return False


class Schedule(NamedTuple):
    """Seconds that a thread has run, and has been ready to and has not; how often it has begun."""

    ran: float = 0.0
    waited: float = 0.0
    wakes: int = 0


def schedule(pid: int, tid: int | str) -> Schedule:
    """Read what the kernel has counted (sched-stats.rst); zeros where it does not, as gVisor's."""
    try:
        with open(f"/proc/{pid}/task/{tid}/schedstat", encoding="ascii") as file:
            ran, waited, wakes = map(int, file.read().split())
    except (OSError, ValueError):
        return Schedule()
    return Schedule(ran / 1e9, waited / 1e9, wakes)


class OwnTime:
    """Counts the seconds of a process from now on, without those it has waited for a processor.

    The wait of the thread that waited longest: threads wait for one another, too, for the GIL.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.since = time.monotonic()
        self._before = _schedules(pid)
        self._most = 0.0

    def seconds(self) -> float:
        """Count them; all that pass, where the kernel does not count how long threads wait.

        The number never falls.  A thread that is about to run may have slept until now, or may have
        waited for a processor all the time: the latter is assumed until it is known.
        """
        seconds = time.monotonic() - self.since - max(self.waits(), default=0.0)
        self._most = max(self._most, seconds)
        return self._most

    def waits(self) -> list[float]:
        """Return how many seconds each thread has waited for a processor."""
        passed, now = time.monotonic() - self.since, _schedules(self._pid)
        return [self._wait(tid, each, passed) for tid, each in now.items() if each.wakes]

    def _wait(self, tid: str, now: Schedule, passed: float) -> float:
        before = self._before.get(tid, Schedule())
        # A wait is counted once it is over, as that of the thread which asks is.
        is_over = thread_state(self._pid, tid) != "R" or int(tid) == threading.get_native_id()
        return now.waited - before.waited if is_over else passed - (now.ran - before.ran)


def _schedules(pid: int) -> dict[str, Schedule]:
    """Read that of each thread."""
    with suppress(OSError):  # it has ended
        return {tid: schedule(pid, tid) for tid in os.listdir(f"/proc/{pid}/task")}
    return {}


def trim_memory() -> None:
    """Return what the C library keeps of freed memory to the machine, where it is glibc."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# --- the guard above an agent -----------------------------------------------------------------

# The process that a launcher starts forks the agent, or a head, before anything else is imported,
# and waits for its end: this is the guard, which stays when the agent is killed, and then ends all
# that is left.  As a child subreaper it becomes the parent of what the agent leaves behind, workers
# and what they started included; of a guard that is killed the agent gets a SIGTERM, and ends in
# order.  An agent that hangs after its notebook's end is killed, unless it has said that it stays.


END_TIMEOUT, END_STEP = 5.0, 0.005
"""Seconds for killed processes to be gone, and between two looks."""

AGENT_GRACE = 15.0
"""Seconds for an agent to end when its notebook has: it may still import, beside others."""

STAYS, LEAVES, LONGEST_TOLD = b"s", b"l", 1 << 16
"""Whether an agent outlives its notebook, as it tells its guard; bytes that a pipe holds."""


class Guard:
    """The guard as the agent has it."""

    def __init__(self, end: int) -> None:
        self.pid = os.getppid()
        self._end = end

    def tell(self, word: bytes) -> None:
        """Tell it `STAYS` or `LEAVES`, or what `after_kill` gets if this process is killed."""
        with suppress(BrokenPipeError):  # the guard is being killed
            os.write(self._end, word)


def go_below_guard(
    runtime: Path,
    notebook: int | None,
    grace: float = 0.0,
    after_kill: Callable[[bytes], None] = lambda last_word: None,
) -> Guard:
    """Fork: the parent becomes the guard and never returns, the child is to be the agent.

    What that leaves behind has `grace` seconds to end by itself, as its stdin has, and as many
    after a SIGTERM; for these the agent itself may wait.  The guard of an agent that is killed
    calls `after_kill` with its last word.
    Raises OSError where there can be no further process.
    """
    guard = os.getpid()
    adopt_orphans()
    told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    agent = os.fork()
    if agent:
        os.close(tell)
        _watch(agent, runtime, notebook, told, grace, after_kill)
    os.close(told)
    if not signal_on_parents_end(signal.SIGTERM, guard):
        sys.exit(1)
    return Guard(tell)


TRACKERS = (b"resource_tracker import main", b"torch_shm_manager")
"""In command lines of processes that remove what others have left in /dev/shm: the resource
trackers of multiprocessing and of joblib's loky, and torch's, which shares tensors by files."""

TRACKED = ("sem.mp-", "psm_", "sem.loky-", "joblib_memmapping_folder_", "torch_")
"""What the names of semaphores, memory and folders there begin with."""

TRACKER_GRACE = 3.0
"""Seconds for trackers to remove what killed processes left there, once they have seen it."""

MOST_LOOKS = 20  # for members of a group that started more meanwhile


def end_group(pid: int) -> None:
    """Kill the process group that a worker leads: itself and what it started.

    A resource tracker is spared: it ends by itself then, and first removes what they left.
    """
    if not _has_tracked():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        return
    killed = set[int]()
    for _ in range(MOST_LOOKS):
        members = [each for each, stat in _processes() if stat[2:3] == [str(pid)]]
        new = [each for each in members if each not in killed and not _is_tracker(each)]
        for each in new:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        if not new:
            break
        killed.update(new)


WORKER_PID = "NBDIST_WORKER_PID"
"""Set by a worker in its environment, which the programs that it starts get."""


def end_adopted(worker: int) -> None:
    """Kill what a dead worker has started in sessions of its own, and the children of that.

    This process has adopted these programs.  A program that was started with another environment
    cannot be recognised, and runs on until this process ends.
    """
    mark, killed = f"{WORKER_PID}={worker}".encode(), set[int]()
    for _ in range(MOST_LOOKS):
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
    """Return True if a program was started with this in its environment."""
    with suppress(OSError):
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _has_tracked() -> bool:
    with suppress(OSError):
        return any(name.startswith(TRACKED) for name in os.listdir("/dev/shm"))
    return False


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(each in command for each in TRACKERS)
    return False


def end_descendants() -> None:
    """Kill and reap all that descends from this process, which adopts orphans."""
    spared_until = time.monotonic() + TRACKER_GRACE

    def end_children() -> bool:
        if not (have_ended := _reap_children()):
            is_over = time.monotonic() > spared_until
            _signal_children(signal.SIGKILL, lambda child: is_over or not _is_tracker(child))
        return have_ended

    await_end(end_children)


def await_end(have_ended: Callable[[], bool], timeout: float = END_TIMEOUT) -> None:
    """Look until processes have ended, at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not have_ended() and time.monotonic() < deadline:
        time.sleep(END_STEP)


def _reap_children() -> bool:
    """Reap those that have ended; return True if none is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _signal_children(number: int, which: Callable[[int], bool] = lambda _: True) -> None:
    for child in filter(which, children_of(os.getpid())):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, number)


def _watch(
    agent: int,
    runtime: Path,
    notebook: int | None,
    told: int,
    grace: float,
    after_kill: Callable[[bytes], None],
) -> NoReturn:
    """Wait for the agent, end what it has left, and end as it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(agent, signal.SIGTERM))
    status, last_word = _wait_for(agent, notebook, told, AGENT_GRACE + 2 * grace)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if grace:
        await_end(_reap_children, grace)
        _signal_children(signal.SIGTERM)
        await_end(_reap_children, grace)
    end_descendants()
    shutil.rmtree(runtime, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        after_kill(last_word)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the agent has left one, if any
        with suppress(OSError):  # it is so already for SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _wait_for(agent: int, notebook: int | None, told: int, grace: float) -> tuple[int, bytes]:
    """Return the agent's status and what it told; kill one that hangs after its notebook's end."""
    ended, ends = os.pidfd_open(agent), select.poll()
    ends.register(ended, select.POLLIN)
    ends.register(sys.stdin, 0)  # a pipe's hang-up
    try:
        if notebook is not None:
            ends.register(os.pidfd_open(notebook), select.POLLIN)
        ends.poll()
    except ProcessLookupError:
        pass  # it has ended already
    said = b""
    with suppress(BlockingIOError):  # it has told nothing
        said = os.read(told, LONGEST_TOLD)
    if said[-1:] != STAYS and not select.select([ended], [], [], grace)[0]:
        os.kill(agent, signal.SIGKILL)
    return os.waitpid(agent, 0)[1], said


# --- a process that connects to this one ------------------------------------------------------


LAST_BYTES, LEFT = 4096, "nbdist left behind: "
"""Of a log; begins a line of it that says what its process could not end."""


def last_lines_of(log: BinaryIO) -> list[str]:
    """Return the end of a log that is open."""
    log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_BYTES))
    return log.read().decode(errors="replace").splitlines()


class Child:
    """A command that runs here, in a session of its own; `host` is where its work is done."""

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        log: Path,
        environ: Mapping[str, str] | None = None,
        stdout: int | None = None,
        folder: str | None = None,
    ) -> None:
        """Start it, by default in this process's folder; raises OSError if that fails.

        By default its stdout goes to the log too.
        """
        self.host = host
        self.command = shlex.join(command)
        self._log = log.open("w+b")
        try:
            # A session of its own: Stop signals the notebook's whole process group.
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
        self._pidfd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.pid} exit code {self.exit_code()}>"

    def fileno(self) -> int:
        """Return a descriptor that turns readable when it has ended."""
        return self._pidfd

    def exit_code(self) -> int | None:
        """Return how it ended; None while it runs."""
        return self._process.poll()

    def last_lines(self) -> list[str]:
        """Return the end of what it wrote to its log."""
        return last_lines_of(self._log)

    def close(self) -> None:
        """Let go of all descriptors; of stdin too, after which most of them end."""
        self._end_stdin()
        if self._process.poll() is None:
            # It outlives this process, and is not to be taken for forgotten.
            self._process.returncode = 0
        os.close(self._pidfd)
        self._log.close()

    def _end_stdin(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has not read all of it
            self._process.stdin.close()

    def _ends_in(self, timeout: float) -> bool:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True


def left_behind(lines: Sequence[str]) -> str:
    """Return what a log says last that could not be ended, "" for nothing."""
    return next((line.removeprefix(LEFT) for line in [*lines][::-1] if line.startswith(LEFT)), "")


# --- the script -------------------------------------------------------------------------------


def main() -> None:
    """Become the command that wraps a worker, and let it die with the agent: that survives exec."""
    signal_on_parents_end(signal.SIGKILL, os.getppid())
    # Stop is not meant for the wrapper, which is in the worker's process group; a kernel has a
    # handler of its own while it runs a cell.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
