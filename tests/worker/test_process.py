"""Tests of `nbdist.worker.process`: a worker's parent, descriptors, signals, children, streams."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from nbdist.agent.worker_output import Merger
from nbdist.output.events import Text
from nbdist.worker import process
from nbdist.worker.process import DESCRIPTOR_RESERVE, CellTimes, Interrupts
from tests.waiting import SOON

pytestmark = pytest.mark.world


def run(code: str) -> list[str]:
    """Run code in a process of its own; return the words that this process prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


LIMITS = """
import resource
from nbdist.worker.process import allow_more_descriptors, limit_descriptors
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
limit_descriptors()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
with allow_more_descriptors():
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "kept"), [(4, 3), (2, 2)])
def test_some_descriptors_are_kept_for_the_agents_requests(soft: int, kept: int) -> None:
    """Cells leave a reserve of descriptors, which requests of the agent can use."""
    hard, asks = 4 * DESCRIPTOR_RESERVE, (kept + 1) * DESCRIPTOR_RESERVE
    found = run(LIMITS.format(soft=soft * DESCRIPTOR_RESERVE, hard=hard))
    assert [*map(int, found)] == [
        kept * DESCRIPTOR_RESERVE,
        hard,
        asks,
        hard,
        kept * DESCRIPTOR_RESERVE,
        hard,
    ]


async def test_an_interrupt_is_for_the_task_that_runs() -> None:
    """SIGINT without a task has no effect; a SIGINT that overtakes its task ends only this task."""
    before, arrived = signal.getsignal(signal.SIGINT), list[int]()
    interrupts = Interrupts(asyncio.get_running_loop(), lambda: bool(arrived))
    try:
        interrupts.begin()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        interrupts.end()
        signal.raise_signal(signal.SIGINT)
        assert repr(interrupts) == "<Interrupts one kept>"
        for _ in range(3):  # turns of the loop, in which a task would be read
            await asyncio.sleep(0)
        assert repr(interrupts) == "<Interrupts none>"
        interrupts.begin()
        interrupts.end()
        signal.raise_signal(signal.SIGINT)
        arrived.append(1)
        for _ in range(3):
            await asyncio.sleep(0)
        with pytest.raises(KeyboardInterrupt):
            interrupts.begin()
        interrupts.end()
        interrupts.begin()
        interrupts.end()
    finally:
        signal.signal(signal.SIGINT, before)


FORKS = """
import os, signal, sys
from nbdist.worker.process import leave_world_in_children
leave_world_in_children(None)
signal.signal(signal.SIGINT, signal.SIG_IGN)

if (pid := os.fork()) == 0:
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_forked_child_has_pythons_handler_of_sigint() -> None:
    """A forked child gets Python's own handler of SIGINT, even if the rank ignores SIGINT."""
    assert run(FORKS) == ["True"]


def test_waits_of_the_cells_thread_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of a cell's thread are counted and timed, and the next cell begins with no waits.

    Of many waits only the newest are kept, but all are counted.
    """
    times, since = CellTimes(), time.time_ns()
    times.record_wait(since)
    with times:
        times.record_wait(since)
        other = threading.Thread(target=times.record_wait, args=(since,))
        other.start()
        other.join(5)
    times.record_wait(since)
    assert (times.count, len(times.waits)) == (1, 1)
    assert times.waited_ns == times.waits[0][1] - since > 0
    assert since <= times.began_ns <= times.ended_ns
    with pytest.raises(KeyboardInterrupt), times:
        raise KeyboardInterrupt
    assert (times.count, times.waited_ns) == (0, 0)
    assert times.ended_ns >= times.began_ns
    monkeypatch.setattr(process, "MAX_WAITS", 2)
    times = CellTimes()
    with times:
        for _ in range(3):
            times.record_wait(times.began_ns)
    assert (times.count, len(times.waits)) == (3, 2)


TOKEN = "0123456789abcdef"

PROLOGUE = f"""
import os, sys, threading
from nbdist.worker.process import rank_stream, flush_c_streams, write_mark
sys.stdout, sys.stderr = (rank_stream(name, {TOKEN!r}) for name in ("stdout", "stderr"))
"""


def wrote(source: str) -> list[Text]:
    """Run code with a worker's streams in a process that must succeed; return all its output."""
    merger: Merger[Text] = Merger(TOKEN)
    found: list[Text] = []
    command = [sys.executable, "-c", PROLOGUE + source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        while data := os.read(child.stdout.fileno(), 1 << 20):
            merger.receive_stdout(data, time.monotonic())
            for item in merger.pop_ready(time.monotonic()):
                if found and found[-1].stream == item.stream:
                    found[-1] = Text(item.stream, found[-1].text + item.text)
                else:
                    found.append(item)
        said = child.stderr.read()
        assert child.wait(SOON) == 0, said.decode()
    return found


WRITE_AT_ONCE = f"""
def say(letter, where):
    for _ in range(5): where.write(letter * 200_000 + '\\n')
def mark():
    for _ in range(200): write_mark({TOKEN!r}, 'stdout')
pairs = [('€', sys.stdout), ('e', sys.stderr), ('o', sys.stdout)]
threads = [threading.Thread(target=say, args=pair) for pair in pairs]
threads.append(threading.Thread(target=mark))
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_threads_do_not_tear_one_anothers_writes() -> None:
    """Writes of several threads, longer than a pipe, and marks come one after the other."""
    said = wrote(WRITE_AT_ONCE)
    for stream, letters in (("stdout", "€o"), ("stderr", "e")):
        lines = "".join(item.text for item in said if item.stream == stream).splitlines()
        assert sorted(lines) == sorted(letter * 200_000 for letter in letters for _ in range(5))


FORK_WHILE_WRITING = """
import warnings
warnings.simplefilter('ignore')  # Python 3.12 and later warn of a fork beside other threads
def chatter():
    while not stop.is_set(): sys.stdout.write('x' * 5000 + '\\n')
stop = threading.Event()
thread = threading.Thread(target=chatter)
thread.start()
for number in range(8):
    if (pid := os.fork()) == 0:
        said = threading.Thread(target=sys.stdout.write, args=(f'child {number}\\n',))
        said.start()
        said.join()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
thread.join()
"""


def test_a_child_forked_during_a_write_can_print() -> None:
    """A forked child and its threads can print, even if another thread was writing at the fork."""
    (said,) = wrote(FORK_WHILE_WRITING)
    # A parent's long write may be in two pieces with a child's line between: no lock is shared.
    for number in range(8):
        assert f"child {number}\n" in said.text


def test_output_of_c_code_keeps_its_place() -> None:
    """Output of C code comes before Python's later output, although libc buffers it in a pipe."""
    (said,) = wrote(
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "libc.setvbuf(ctypes.c_void_p.in_dll(libc, 'stdout'), None, 0, 4096)  # 0: a full buffer\n"
        "for number in range(3):\n"
        "    libc.puts(b'C'); print('P'); libc.printf(b'c '); print('p', end=' ')\n"
        "    os.write(1, b'o\\n')"
    )
    assert said.text == "C\nP\nc p o\n" * 3


def test_streams_have_what_libraries_expect() -> None:
    """A stream takes any text and bytes, and has a name, as libraries expect.

    A descriptor that a cell has closed is open again after `flush_streams`.
    """
    (said,) = wrote(
        "from nbdist.worker import process\n"
        "print('a\\udc80b')\nsys.stdout.buffer.write(b'\\xc3')\nos.write(1, b'\\xa9 ')\n"
        "s = sys.stderr\n"
        "sys.stdout.write(f'{s.name} {s.encoding} {s.writable()} {s.isatty()} {s.fileno()} ')\n"
        "sys.stdout.write(f'{s.closed} ')\n"
        "s.flush()\ns.writelines([])\n"
        "try:\n    s.write(b'bytes')\nexcept TypeError: pass\nelse: raise SystemExit(1)\n"
        f"process.duplicate_streams()\nprocess.install_streams({TOKEN!r})\n"
        "os.close(1)\nprocess.flush_streams()\n"
        "os.write(1, b'again')"
    )
    assert said.text == "a\\udc80b\né <stderr> utf-8 True False 2 False again"
