"""Tests of `nbdist.worker.process` in a process of its own, as a worker is one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nbdist.agent.worker_output import Merger
from nbdist.output.events import Text
from tests.waiting import SOON

pytestmark = pytest.mark.world

TOKEN = "0123456789abcdef"

PROLOGUE = f"""
import os, sys, threading
from nbdist.worker.process import RankStream, flush_c_streams, write_mark
sys.stdout, sys.stderr = (RankStream(name, {TOKEN!r}) for name in ("stdout", "stderr"))
"""


@contextmanager
def process(source: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs source with a worker's streams; it has to end well."""
    command = [sys.executable, "-c", PROLOGUE + source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        yield child
        assert child.stderr is not None
        said = child.stderr.read()
        assert child.wait(SOON) == 0, said.decode()


def run(source: str, pause: float = 0.0) -> list[Text]:
    """All that came by its stdout, text of one stream put together."""
    merger: Merger[Text] = Merger(TOKEN)
    found: list[Text] = []
    with process(source) as child:
        assert child.stdout is not None
        while data := os.read(child.stdout.fileno(), 4096 if pause else 1 << 20):
            merger.receive_stdout(data, time.monotonic())
            for item in merger.take(time.monotonic()):
                if found and found[-1].stream == item.stream:
                    found[-1] = Text(item.stream, found[-1].text + item.text)
                else:
                    found.append(item)
            time.sleep(pause)
    return found


def test_both_streams_in_one_order() -> None:
    """stdout, stderr, descriptors and children come in the order of writing."""
    said = run(
        "import subprocess\nfor i in range(2):\n    print('out', i)\n"
        "    print('err', i, file=sys.stderr)\n    os.write(1, b'fd\\n')\n"
        "    subprocess.run(['echo', 'child'])\n"
    )
    assert said == [
        Text("stdout", "out 0\n"),
        Text("stderr", "err 0\n"),
        Text("stdout", "fd\nchild\nout 1\n"),
        Text("stderr", "err 1\n"),
        Text("stdout", "fd\nchild\n"),
    ]


def test_nothing_is_lost_to_a_slow_reader() -> None:
    """A write that is larger than the pipe waits, and arrives whole."""
    (said,) = run("print('é' * 200_000, end='')", pause=0.001)
    assert said == Text("stdout", "é" * 200_000)


def test_threads_do_not_tear_one_anothers_writes() -> None:
    """Long writes of several threads, and marks, come one after the other."""
    said = run(
        "def say(letter, where):\n"
        "    for _ in range(5): where.write(letter * 200_000 + '\\n')\n"
        "def mark():\n"
        "    for _ in range(200): write_mark(" + repr(TOKEN) + ", 'stdout')\n"
        "pairs = [('€', sys.stdout), ('e', sys.stderr), ('o', sys.stdout)]\n"
        "threads = [threading.Thread(target=say, args=pair) for pair in pairs]\n"
        "threads.append(threading.Thread(target=mark))\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n",
    )
    for stream, letters in (("stdout", "€o"), ("stderr", "e")):
        lines = "".join(item.text for item in said if item.stream == stream).splitlines()
        assert sorted(lines) == sorted(letter * 200_000 for letter in letters for _ in range(5))


def test_fork_while_another_thread_writes() -> None:
    """A forked child and its threads can print, whatever the other threads were at."""
    (said,) = run(
        "def chatter():\n    while not stop.is_set(): sys.stdout.write('x' * 5000 + '\\n')\n"
        "stop = threading.Event()\nthread = threading.Thread(target=chatter)\nthread.start()\n"
        "for number in range(20):\n"
        "    if (pid := os.fork()) == 0:\n"
        "        said = threading.Thread(target=sys.stdout.write, args=(f'child {number}\\n',))\n"
        "        said.start()\n        said.join()\n        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "stop.set()\nthread.join()\n"
    )
    # A parent's long write may be in two pieces with a child's line between: no lock is shared.
    for number in range(20):
        assert f"child {number}\n" in said.text


def test_a_descriptor_that_a_cell_has_closed() -> None:
    """It is there again for the next one, and no file gets its number."""
    said = run(
        "from nbdist.worker import process\n"
        f"process.install({TOKEN!r})\nos.close(1)\nprocess.flush_streams()\n"
        "os.write(1, b'again')"
    )
    assert said == [Text("stdout", "again")]


def test_any_text_can_be_written() -> None:
    """Lone surrogates become escapes; bytes go through `buffer` as they are."""
    (said,) = run("print('a\\udc80b')\nsys.stdout.buffer.write(b'\\xc3')\nos.write(1, b'\\xa9')")
    assert said.text == "a\\udc80b\né"


def test_behaves_as_a_text_stream() -> None:
    """Libraries find what they look for: a name, an encoding, a descriptor, no terminal."""
    (said,) = run(
        "s = sys.stderr\n"
        "sys.stdout.write(f'{s.name} {s.encoding} {s.writable()} {s.isatty()} {s.fileno()} ')\n"
        "sys.stdout.write(f'{len(\"abc\")} {s.closed}')\n"
        "s.flush()\ns.writelines([])\n"
        "try:\n    s.write(b'bytes')\nexcept TypeError: pass\nelse: raise SystemExit(1)\n"
    )
    assert said.text == "<stderr> utf-8 True False 2 3 False"
