"""Tests of `nbdist.system.processes`: nbdist's interpreters, their parents, facts from /proc.

No interpreter looks for modules in the notebook's folder; a child ends with its parent.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from nbdist.agent.inspect import MemoryGauge
from nbdist.system import processes
from nbdist.system.processes import (
    Child,
    OwnTime,
    identify,
    ignores_signal,
    is_exiting,
    is_stopped,
    may_run,
    safe_environ,
    safe_path,
    schedule,
    thread_state,
)
from tests.faults.stops import spinning
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.world

ROOT = str(Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("path", "safe"),
    [
        ("", ""),
        ("/lib:/other", "/lib:/other"),
        ("/lib::relative:.:/work", "/lib"),
        ("/work/..//work/", ""),
        (f"{ROOT}:/lib", f"{ROOT}:/lib"),
    ],
)
def test_the_notebooks_folder_leaves_pythonpath(path: str, safe: str) -> None:
    """PYTHONPATH loses empty and relative entries, and the notebook's folder in any spelling."""
    assert safe_path({"PYTHONPATH": path}, "/work") == safe
    environ = {"A": "1", "PYTHONPATH": path}
    assert safe_environ(environ, "/work") == {"A": "1", **({"PYTHONPATH": safe} if safe else {})}
    # The folder with nbdist stays even if the notebook is in it: workers could not start else.
    assert safe_path({"PYTHONPATH": ROOT}, ROOT) == ROOT


@pytest.mark.world
def test_a_child_has_its_session_and_log(tmp_path: Path) -> None:
    """A child has its own session, and shows when it has ended, its exit code and last lines."""
    program = "import sys; print('x' * 5000, flush=True); sys.stderr.write('last\\n'); sys.exit(3)"
    child = Child("a", [sys.executable, "-c", program], tmp_path / "log", None)
    assert os.getsid(child.pid) == child.pid  # out of reach of Stop
    assert select.select([child], [], [], 20)[0] == [child]
    assert (child.exit_code(), child.host) == (3, "a")
    assert child.last_lines() == ["x" * 4090, "last"]
    assert repr(child) == f"<Child {child.pid} exit code 3>"
    child._close_stdin()
    child.close()


def test_a_child_without_pidfd_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child without a pidfd is killed, and no descriptor stays open."""

    def fail(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    began, before = psutil.Process().children(), os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", fail)
        with pytest.raises(OSError, match="Too many open files"):
            Child("a", ["sleep", "600"], tmp_path / "log")
    assert psutil.Process().children() == began
    assert os.listdir("/proc/self/fd") == before


PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
input()
"""

ASKS = """
import os, signal, sys
from nbdist.system.processes import signal_on_parent_exit
print(signal_on_parent_exit(signal.SIGKILL, os.getppid() + int(sys.argv[1])), flush=True)
input()
"""


def child_of(parent: subprocess.Popen[str]) -> tuple[psutil.Process, str]:
    """Return the child of a parent, and the first line of the child."""
    pid, line = parent.stdout.readline().split(maxsplit=1)
    return psutil.Process(int(pid)), line.strip()


def start(*command: str) -> subprocess.Popen[str]:
    """Start a parent that starts a command."""
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_child_ends_with_its_parent() -> None:
    """The kernel kills a child whose parent ends; False says that the parent has ended before."""
    with start(sys.executable, "-c", ASKS, "0") as parent:
        child, said = child_of(parent)
        assert said == "True"
        parent.kill()
    child.wait(SOON)
    with start(sys.executable, "-c", ASKS, "1") as parent:  # another process is its parent
        assert child_of(parent)[1] == "False"


def test_a_wrapper_ends_with_its_parent_and_ignores_stop() -> None:
    """A wrapped command ends with its parent and ignores Stop: both settings survive exec."""
    code = "import sys; print('there', flush=True); sys.stdin.read()"
    wrapper = (sys.executable, "-IS", processes.__file__, sys.executable, "-c", code)
    with start(*wrapper) as parent:
        child, said = child_of(parent)
        assert said == "there"
        status = Path(f"/proc/{child.pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        assert ignored >> (signal.SIGINT - 1) & 1
        parent.kill()
    child.wait(SOON)


SPINS = "while True: sum(range(100_000))"
BIG = 200 << 20


@contextmanager
def python(code: str) -> Iterator[int]:
    """A process that has run the code and waits."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; print('ready', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


def test_proc_shows_the_state_of_a_process() -> None:
    """/proc shows which signals a process ignores, and whether it sleeps, is stopped or exits."""
    code = "import signal; signal.signal(signal.SIGUSR1, print)"
    with python(f"{code}; signal.signal(signal.SIGUSR2, signal.SIG_IGN)") as pid:
        assert not ignores_signal(pid, signal.SIGUSR1)
        assert ignores_signal(pid, signal.SIGUSR2)
        wait_until(lambda: thread_state(pid) == "S")
        assert not is_stopped(pid)
        assert not is_exiting(pid)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(pid))
    assert not ignores_signal(pid, signal.SIGUSR2)
    assert (thread_state(pid), is_exiting(pid)) == ("X", True)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.kill()
        assert process.stdout.read() == b""
        assert is_exiting(process.pid)  # a zombie, which nobody has waited for


def test_a_process_is_known_by_pid_and_start() -> None:
    """A process is known by pid and start time; a process of another machine may be running."""
    with python("pass") as pid:
        identity = identify(pid)
        host, number, start = identity.split()
        assert may_run(identity)
        assert not may_run(f"{host} {number} {int(start) - 1}")
    assert (identify(pid), may_run(identity), may_run("")) == ("", False, False)
    assert may_run(f"{host}-2 {number} {start}")


def test_time_without_a_processor_is_not_its_own() -> None:
    """Time in which a process waits for a busy processor is not counted as its own."""
    cores = len(os.sched_getaffinity(0))
    with spinning(3 * cores):
        started = time.monotonic()
        process = subprocess.Popen([sys.executable, "-c", SPINS])
        try:
            own = OwnTime(process.pid)
            ran = waited = 0.0
            while (ran < 0.2 or waited < 0.4) and time.monotonic() < started + SOON:
                time.sleep(0.05)
                ran = schedule(process.pid, process.pid).ran
                waited = time.monotonic() - started - ran
            seconds, passed = own.seconds(), time.monotonic() - started
        finally:
            process.kill()
            process.wait()
    sys.stdout.write(f"{ran:.2f} s run, {seconds:.2f} s its own of {passed:.2f} s\n")
    assert ran / 2 < seconds < ran + waited / 2


NAPS = "import time\nwhile True: time.sleep(0.001)"


def test_time_of_its_own_never_falls() -> None:
    """The own time of a process that sleeps and wakes all the time never falls."""
    with spinning(len(os.sched_getaffinity(0))):
        process = subprocess.Popen([sys.executable, "-c", NAPS])
        try:
            own, seen = OwnTime(process.pid), []
            while time.monotonic() - own.since < 1.0:
                seen.append(own.seconds())
        finally:
            process.kill()
            process.wait()
    assert seen == sorted(seen)


def test_memory_of_processes_is_counted() -> None:
    """A gauge counts bytes in use; without time it returns private bytes or the last count."""

    async def read(pid: int) -> None:
        gauge = MemoryGauge()
        at_once = await gauge.read([pid], -1.0)
        found = await gauge.read([os.getpid(), pid, 2**22 + 1], 10.0)
        assert at_once[pid] > BIG
        assert found[pid] > at_once[pid]  # with a share of the pages of libraries
        assert found[os.getpid()] > 1 << 20
        assert found[2**22 + 1] == 0
        assert await gauge.read([pid], -1.0) == {pid: found[pid]}

    with python(f"x = b'x' * {BIG}") as pid:
        asyncio.run(read(pid))
