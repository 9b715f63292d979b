"""Ranks that close, redirect and overwrite descriptors of nbdist, and send malformed messages."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.output.events import Died
from nbdist.output.screen import Screen
from nbdist.world import dispatch
from nbdist.world.states import WorldState
from nbdist.world.task_error import error_of
from nbdist.world.task_run import TaskRun
from nbdist.world.world import World
from tests.cells import run
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def started(new_world: NewWorld) -> Iterator[World]:
    with new_world(2, show=False) as world:
        yield world


@pytest.fixture
def world(started: World) -> Iterator[World]:
    """The world with a variable on each rank; rank 1 is replaced afterwards."""
    started.execute("kept = 'kept'")
    pid = started.pids[1]
    yield started
    if started.state is WorldState.READY and started.pids[1] == pid:
        started.replace([1])


def ran(world: World, source: str) -> TaskRun:
    """Run a cell to its end, and return its run."""
    return run(world, source).running


AWAY = {
    "redirected": (1, "log = os.open('{log}', os.O_WRONLY | os.O_CREAT); os.dup2(log, {fd})"),
    "closed": (2, "os.close({fd})"),
    "closed and taken": (1, "os.close({fd}); taken = open('{log}', 'w')"),
    "non-blocking": (2, "os.set_blocking({fd}, False); print('x' * 2_000_000)"),
    "the other's": (1, "os.dup2({fd}, 3 - {fd})"),
}


@pytest.mark.parametrize("away", AWAY)
def test_a_cell_ends_if_its_output_goes_elsewhere(world: World, away: str, tmp_path: Path) -> None:
    """If a rank redirects or closes stdout or stderr, cells end, with displays and errors."""
    fd, text = AWAY[away]
    change = text.format(fd=fd, log=tmp_path / "fd.log")
    running = ran(world, f"import os\nif rank == 1:\n    {change}\nprint('first'); display(rank)")
    assert error_of(running) is None
    assert [shown.plain for shown in running.transcript[1].displays] == ["1"]
    failed = ran(world, "print('second'); display(rank); 1 / (1 - rank)")
    assert list(failed.transcript.errors) == [1]
    assert [shown.plain for shown in failed.transcript[1].displays] == ["1"]
    assert world.gather("kept") == ["kept", "kept"]
    world.execute("dist.barrier()")


def test_redirected_text_is_as_written(world: World, tmp_path: Path) -> None:
    """Redirected text has no mark of nbdist; a closed descriptor works again in the next cell."""
    log = tmp_path / "fd.log"
    ran(
        world,
        f"import os, sys\nif rank == 1:\n    log = os.open('{log}', os.O_WRONLY | os.O_CREAT)\n"
        "    os.dup2(log, 1)\n    print('out')\n    print('err', file=sys.stderr)\n"
        "    display(1)\n    os.dup2(log, 2)\n    print('err too', file=sys.stderr)",
    )
    assert log.read_text() == "out\nerr too\n"
    ran(world, "if rank == 1:\n    os.close(1); os.close(2); sys.stdout.close()")
    running = ran(world, "print('said'); print('too', file=sys.stderr); os.system('echo child')")
    for rank in range(2):
        pieces = running.transcript[rank].pieces
        screens = (piece for piece in pieces if isinstance(piece, Screen))
        lines = (line.text for screen in screens for line in screen.tail(1000))
        assert {*" ".join(lines).split()} == {"said", "too", "child"}


def test_garbage_on_stdout_harms_no_cell(world: World) -> None:
    """Bytes on stdout or stderr, even parts of nbdist's marks, harm no display and no cell."""
    marks = ("5", "9" * 5000, "stdin", "stderr")
    written = [*(f"b'\\x1b_' + token + b';{each}\\x1b\\\\'" for each in marks)]
    written += ["b'\\x1b_' + token + b';'", "bytes(range(256)) * 100"]
    for each in [*written, *written]:
        running = ran(
            world,
            "import os\nif rank == 1:\n    token = get_ipython().kernel.session.token.encode()\n"
            f"    for fd in (1, 1, 2): os.write(fd, {each})\ndisplay(rank)",
        )
        assert error_of(running) is None, each
        assert [shown.plain for shown in running.transcript[1].displays] == ["1"], each
    assert world.gather("kept") == ["kept", "kept"]


GARBAGE = {
    "a frame that is no pickle": "os.write(fd, (7).to_bytes(8, 'big') + b'garbage')",
    "a pickle that runs code": (
        "code = b\"cposix\\nsystem\\n(S'kill $PPID'\\ntR.\"; "
        "os.write(fd, len(code).to_bytes(8, 'big') + code)"
    ),
    "a huge frame": "os.write(fd, b'\\x7f' * 8 + bytes(100_000))",
    "half a frame": "os.write(fd, (1000).to_bytes(8, 'big') + b'half'); os.close(fd)",
    "the end": "os.close(fd)",
    "another file": "os.dup2(null, fd)",
}
"""Statements, each of which spoils a descriptor `fd` of a worker."""

FOR_EACH = """
import os, select
if rank == 1:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3, 300):
        try:
            os.set_blocking(fd, False)
            {}
        except OSError: pass
"""


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_on_descriptors_costs_one_rank_at_most(world: World, garbage: str) -> None:
    """Garbage on a worker's descriptors costs at most its rank; the other rank loses nothing."""
    running = ran(world, FOR_EACH.format(GARBAGE[garbage]))
    assert isinstance(running.transcript.errors.get(1), Died | None)
    for _ in range(2):
        again = ran(world, "kept = globals().get('kept', 'lost')\ndist.barrier()")
        if error_of(again) is None:
            break
    assert error_of(again) is None
    assert world.gather("kept")[0] == "kept"
    assert world.state is WorldState.READY


DUMPS = {
    "a number": "b'Fatal Python error: x\\nStack (most recent call first):\\n'"
    " + b'  File \"x\", line ' + b'9' * 5000 + b' in y\\n'",
    "much": "b'x' * 50_000_000",
}


@pytest.mark.parametrize("dump", DUMPS)
def test_garbage_in_a_stack_file_harms_nobody(world: World, dump: str) -> None:
    """A rank that crashes with garbage in its stack file is dead; stacks can still be read."""
    running = ran(
        world,
        "import os\nif rank == 1:\n    for fd in os.listdir('/proc/self/fd'):\n"
        "        try: path = os.readlink(f'/proc/self/fd/{fd}')\n"
        "        except OSError: continue\n"
        f"        if path.endswith('.stack'): os.write(int(fd), {DUMPS[dump]})\n"
        "    os.abort()",
    )
    assert isinstance(running.transcript.errors[1], Died)
    assert [stack.rank for stack in world.stacks()] == [0, 1]
    assert world.gather("'kept' in globals()") == [True, False]


GREETINGS = (b"\x01", b"\x00", b"\x01\x00", b"\xff", b"\xff" + bytes(8) + b"\x7f\x01", b"GET / ")


@pytest.mark.parametrize("greeting", GREETINGS)
def test_a_foreign_client_gets_no_message_of_the_notebook(started: World, greeting: bytes) -> None:
    """A process of the user that connects and stays gets none of the notebook's messages."""
    path = started.engine.connection.link.socket.address.removeprefix("ipc://")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(greeting)
        for _ in range(10):  # libzmq may accept late, and would deal messages out in turn
            assert started.gather("rank") == [0, 1]


PREPARE = """
kernel = get_ipython().kernel
session, iopub = kernel.session, kernel.iopub_socket

def deep(levels):
    return [deep(levels - 1)] if levels else 1

def send(kind, content, metadata=None):
    session.send(iopub, kind, content, ident=kind.encode(), metadata=metadata)
"""

PUBLISHED = (
    "send('update_display_data', {'data': {}, 'transient': None})",
    "send('display_data', {})",
    "send('display_data', {'data': [1], 'metadata': 3})",
    "send('display_data', {'data': {'text/plain': 5, 'text/html': 6, 'image/png': 7}})",
    "send('display_data', {'data': {}, 'transient': {'display_id': [1, 2]}})",
    "send('display_data', None)",
    "send('execute_result', {'data': None})",
    "session.send(iopub, 'error', {})",
    "session.send(iopub, 'nbdist_record', {'x': 1})",
    "send('comm_open', {}); send('comm_msg', None)",
    "send('clear_output', {'wait': 'never'})",
    "send('display_data', {'data': {'application/json': deep(500)}})",
    "iopub.send_multipart([b'nbdist', b'garbage'])\n"
    "iopub.send_multipart([b'nbdist', b'<IDS|MSG>', b'', b'{', b'', b'', b''])\n"
    "iopub.send_multipart([b'nbdist'])\n"
    "iopub.send_multipart([b'nbdist', b'\\xff' * 1000, b'<IDS|MSG>'])",
    # An unsigned message, and signed messages with malformed numbers.
    "iopub.send_multipart([b'nbdist', b'<IDS|MSG>', b'x', *[b'{}'] * 4])",
    "Base = type(session).__mro__[1]\n"
    "for ours in ({'number': 'x'}, {'number': -5}, {'number': 10**30}, {'number': [1]}, 7):\n"
    "    Base.send(session, iopub, 'display_data', {'data': {}}, ident=b'nbdist',\n"
    "              metadata={'nbdist': ours})",
)


def test_malformed_messages_harm_no_cell(started: World) -> None:
    """Malformed messages of a rank end no cell and no process, and hide no other output."""
    started.execute("kept = rank")
    pids = dict(started.pids)
    for published in PUBLISHED:
        body = "\n".join(f"    {line}" for line in (PREPARE + published).splitlines())
        running = ran(started, f"if rank == 1:\n{body}\ndisplay('shown')")
        assert error_of(running) is None, published
        assert "'shown'" in [shown.plain for shown in running.transcript[1].displays], published
    assert started.gather("kept") == [0, 1]
    assert started.pids == pids


ANSWERS = (
    "b''",
    "b'garbage'",
    "pickle.dumps(answer)",
    "pickle.dumps(ControlReplyTo(number, RankPosition(line='x')))",
    "pickle.dumps(ControlReplyTo(number, Traced(RankPosition(), [1])))",
    "b'\\x80\\x02cnbdist.wire.places\\nRankPosition\\n)\\x81.'",
    'b"cos\\nkill\\n(I%d\\nI9\\ntR." % os.getppid()',
)


def test_malformed_control_answers_harm_no_cell(started: World) -> None:
    """If a control thread answers garbage, both ranks are still listed, and the cell goes on."""
    started.execute(
        "import gc, os, pickle\nfrom nbdist.wire.control import ControlReplyTo, Traced\n"
        "from nbdist.wire.frames import framed\nfrom nbdist.wire.places import RankPosition\n"
        "from nbdist.worker.control import ControlThread\n"
        "(thread,) = (each for each in gc.get_objects() if type(each) is ControlThread)"
    )
    for answer in ANSWERS:
        started.execute(
            "def odd(connection, number, answer):\n"
            f"    connection.sendall(framed({answer}))\n"
            "if rank == 1: thread._send = odd"
        )
        running = started.submit(started.task("import time; time.sleep(0.1)"))
        rows, stacks = started.status(), started.stacks()
        assert [row.rank for row in rows] == [stack.rank for stack in stacks] == [0, 1], answer
        dispatch.wait(started.engine, running)
        assert error_of(running) is None, answer
    started.execute("if rank == 1: del thread._send")
    assert started.state is WorldState.READY
