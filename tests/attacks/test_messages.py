"""What ranks publish and answer that is no proper message of Jupyter's, or of ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbdist.world.states import State
from nbdist.world.world import World
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world

PREPARE = """
kernel = get_ipython().kernel
session, iopub = kernel.session, kernel.iopub_socket

def send(kind, content, metadata=None):
    session.send(iopub, kind, content, ident=kind.encode(), metadata=metadata)
"""

PUBLISHED = {
    "an update without an id": "send('update_display_data', {'data': {}, 'metadata': {}})",
    "an update of None": "send('update_display_data', {'data': {}, 'transient': None})",
    "a display without data": "send('display_data', {})",
    "a display of a list": "send('display_data', {'data': [1], 'metadata': 3})",
    "a display of numbers": (
        "send('display_data', {'data': {'text/plain': 5, 'text/html': 6, 'image/png': 7}})"
    ),
    "an odd id": "send('display_data', {'data': {}, 'transient': {'display_id': [1, 2]}})",
    "no content": "send('display_data', None)",
    "an odd result": "send('execute_result', {'data': None})",
    "an odd error": "session.send(iopub, 'error', {})",
    "an odd record": ("session.send(iopub, 'nbdist_record', {'x': 1})"),
    "comms": "send('comm_open', {}); send('comm_msg', None)",
    "no clear": "send('clear_output', {'wait': 'never'})",
    "garbage": (
        "iopub.send_multipart([b'nbdist', b'garbage'])\n"
        "iopub.send_multipart([b'nbdist', b'<IDS|MSG>', b'', b'{', b'', b'', b''])\n"
        "iopub.send_multipart([b'nbdist'])\n"
        "iopub.send_multipart([b'nbdist', b'\\xff' * 1000, b'<IDS|MSG>'])"
    ),
    "unsigned": "iopub.send_multipart([b'nbdist', b'<IDS|MSG>', b'x', *[b'{}'] * 4])",
    "numbers of one's own": (
        "Base = type(session).__mro__[1]\n"
        "for ours in ({'number': 'x'}, {'number': -5}, {'number': 10**30}, {'number': [1]}, 7):\n"
        "    Base.send(session, iopub, 'display_data', {'data': {}}, ident=b'nbdist',\n"
        "              metadata={'nbdist': ours})"
    ),
}


@pytest.fixture(scope="module")
def started(new_world: NewWorld) -> Iterator[World]:
    with new_world(2, show=False) as world:
        yield world


@pytest.fixture
def world(started: World) -> World:
    started.execute("kept = rank")
    return started


@pytest.mark.parametrize("published", PUBLISHED)
def test_odd_messages(world: World, published: str) -> None:
    """The cell ends as it would have without, no process ends, and what else is shown is there."""
    body = "\n".join(f"    {line}" for line in (PREPARE + PUBLISHED[published]).splitlines())
    pids = dict(world.pids)
    running = world.submit(world.task(f"if rank == 1:\n{body}\ndisplay('shown')"))
    world.session.wait(running)
    assert running.error() is None
    assert "'shown'" in [shown.plain for shown in running.transcript[1].displays]
    assert world.gather("kept") == [0, 1]
    assert world.pids == pids


ANSWERS = (
    *("{'error': 5}", "{}", "{'line': 'x', 'odd': 1}", "[]", "None"),
    "{}, buffers=[b'']",
    "{}, buffers=[b'garbage']",
    "{}, buffers=[pickle.dumps(Place(line='x'))]",
    "{}, buffers=[b'\\x80\\x02cnbdist.wire.places\\nPlace\\n)\\x81.']",
    "{}, buffers=[pickle.dumps(Place)]",
    "{}, buffers=[pickle.dumps(Traced(Place(), [1]))]",
    '{}, buffers=[b"cos\\nkill\\n(I%d\\nI9\\ntR." % os.getppid()]',
)


@pytest.mark.parametrize("answer", ANSWERS)
def test_odd_answers_of_the_control_thread(world: World, answer: str) -> None:
    """Whoever asks where ranks are learns of the others; the cell goes on."""
    world.execute(
        PREPARE + "import os, pickle\nfrom nbdist.wire.control import Traced\n"
        "from nbdist.wire.places import Place\nbefore = kernel.control_handlers['nbdist_request']\n"
        "def odd(stream, ident, request):\n"
        f"    session.send(stream, 'nbdist_reply', content={answer}, parent=request, ident=ident)\n"
        "    stream.send_multipart([ident, b'garbage'])\n"
        "if rank == 1: kernel.control_handlers['nbdist_request'] = odd"
    )
    running = world.submit(world.task("import time; time.sleep(0.5)"))
    rows, stacks = world.status(), world.stacks()
    assert [row.rank for row in rows] == [stack.rank for stack in stacks] == [0, 1]
    world.session.wait(running)
    assert running.error() is None
    world.execute("kernel.control_handlers['nbdist_request'] = before")
    assert world.state is State.READY
