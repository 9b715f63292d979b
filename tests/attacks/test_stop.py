"""Stop keeps all that can be kept, whatever the ranks do and however busy the machine is."""

from __future__ import annotations

import pytest

from nbdist.errors import WorkerDied
from nbdist.world import dispatch
from nbdist.world.task_error import error_of
from nbdist.world.task_run import TaskRun
from nbdist.world.world import World
from tests.cells import press_stop
from tests.faults.stops import FIRST, spinning, stop_in

pytestmark = pytest.mark.shared_world(3)


@pytest.fixture
def world(world: World) -> World:
    """A world whose ranks have a variable to lose."""
    world.execute("kept = rank")
    return world


def begin(world: World, source: str) -> TaskRun:
    """Run `source` on all ranks, until each rank has printed a line: Stop may come then."""
    running = world.submit(world.task(source))
    for _ in world.follow(running):
        if all(track.line_count > 1 for track in running.transcript):
            return running
    raise AssertionError(error_of(running))


def kept(world: World) -> list[int | None]:
    """Return the variable of each rank, or None."""
    return world.gather("globals().get('kept')")


def leave(world: World, running: TaskRun) -> None:
    """Wait until all ranks have left or were killed; the notebook has control all the time.

    C code that gets a tenth of a processor takes ten times as long.
    """
    while running.unfinished:
        dispatch.wait_for_stop(world.engine)


def test_stop_in_a_first_collective_loses_nothing(world: World) -> None:
    """Stop costs no variables on busy cores; `python -m tests.faults.stops` tries all cases."""
    world.restart()
    with spinning(4):
        *_, lost = stop_in(world, FIRST["all_reduce"])
    assert lost == ()


def test_stop_waits_for_code_that_cleans_up(world: World) -> None:
    """A `finally` that takes long may end, while the notebook has control again."""
    running = begin(
        world,
        "import time\ntry:\n    print('trains\\n')\n    while True: time.sleep(0.01)\n"
        "finally:\n    end = time.monotonic() + 6\n"
        "    while time.monotonic() < end: time.sleep(0.1)\n    saved = True",
    )
    press_stop(world, running)
    assert "cleaning up after Stop, line 7" in str(error_of(running))
    assert world.gather("(kept, saved)") == [(rank, True) for rank in range(world.size)]


def test_a_second_stop_kills_ranks_that_ignore_both(world: World) -> None:
    """A second Stop ends ranks that have caught the first; ranks that catch both are killed."""
    running = begin(
        world,
        "import time\nprint('runs\\n')\ncaught = 0\nwhile True:\n"
        "    try:\n        while True: time.sleep(0.01)\n"
        "    except KeyboardInterrupt:\n        caught += 1\n        if rank and caught > 1: raise",
    )
    press_stop(world, running)
    assert running.unfinished == (0, 1, 2)
    press_stop(world, running)
    leave(world, running)
    assert isinstance(error_of(running), WorkerDied)
    assert "ignored Stop" in str(error_of(running))
    assert kept(world) == [None, 1, 2]


IN_STORES = {
    "for clients": "TCPStore('127.0.0.1', port, world_size=2, is_master=True)",
    "for a key": "TCPStore(host_name='127.0.0.1', port=port, is_master=True).wait(['key'])",
    "for a value": "dist.PrefixStore('a', TCPStore('127.0.0.1', port, is_master=True)).get('key')",
}


@pytest.mark.parametrize("name", IN_STORES)
def test_stop_ends_waits_in_stores_of_user_code(world: World, name: str) -> None:
    """Stop ends a rank's wait in place, though the store's server is in the same process."""
    running = begin(
        world,
        "import socket, threading\nfrom torch.distributed import TCPStore\n"
        "with socket.create_server(('127.0.0.1', 0)) as free: port = free.getsockname()[1]\n"
        "threading.Timer(0.5, print, ['waits\\n']).start()\n"  # by then the rank is in C++
        f"if rank == 1: {IN_STORES[name]}\ndist.barrier()",
    )
    press_stop(world, running)
    assert not running.unfinished
    assert running.transcript.deaths == {}
    failure = running.transcript[1].failure
    assert failure is not None
    assert failure.name == "KeyboardInterrupt"
    assert "line 5" in failure.traceback[0]
    assert kept(world) == [0, 1, 2]


def test_stop_keeps_stores_in_which_no_rank_waits(world: World) -> None:
    """A store serves on after Stop in Python code, and in C code that does not use the store."""
    world.execute(
        "from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True)\nstore.set('key', 'value')"
    )
    for waits in ("import time; time.sleep(600)", WAITED_FOR["C code that works"]):
        running = begin(world, f"print('runs\\n')\n{waits}")
        press_stop(world, running)
        leave(world, running)
        assert running.transcript.deaths == {}
    assert world.gather("store.get('key')") == [b"value"] * 3


def test_stop_kills_only_a_rank_that_holds_the_gil(world: World) -> None:
    """A rank in C code that holds the GIL is killed; ranks that wait for it are released."""
    running = begin(world, "print('runs\\n')\nif rank == 1: sum(range(10 ** 12))\ndist.barrier()")
    press_stop(world, running)
    if running.unfinished:  # on busy cores the rank needs a second Stop
        press_stop(world, running)
    leave(world, running)
    assert isinstance(error_of(running), WorkerDied)
    assert running.transcript.killed_by_stop == (1,)
    assert kept(world) == [0, None, 2]


WAITED_FOR = {
    # A KeyboardInterrupt in a finalizer is printed and lost; the rank is interrupted once more.
    "a stop that Python drops": (
        "import time\nclass Slow:\n    def __del__(self):\n"
        "        print('ends\\n', flush=True); time.sleep(2)\n"
        "slow = Slow(); del slow\ntime.sleep(600)"
    ),
    # Ranks notice this themselves, also if Python drops a second one while it prints the first.
    "stops that Python drops, slowly": (
        "import sys, time\nclass Slow:\n    def __del__(self):\n"
        "        print('ends\\n', flush=True); time.sleep(2)\n"
        "class Writer:\n    def flush(self): pass\n    def write(self, text):\n"
        "        until = time.thread_time() + 0.1\n"
        "        while time.thread_time() < until: pass\n"
        "sys.stderr, before = Writer(), sys.stderr\n"
        "try:\n    for _ in range(2): slow = Slow(); del slow\n    time.sleep(600)\n"
        "finally: sys.stderr = before"
    ),
    # A rank that has missed Stop gets another SIGINT once it sleeps, also if it has worked before.
    "a stop that nobody notices, and work": (
        "import sys, time\nclass Slow:\n    def __del__(self):\n"
        "        print('ends\\n', flush=True); time.sleep(2)\n"
        "sys.unraisablehook, before = (lambda _: None), sys.unraisablehook\n"
        "slow = Slow(); del slow\nuntil = time.thread_time() + 0.2\n"
        "while time.thread_time() < until: pass\n"
        "try: time.sleep(600)\nfinally: sys.unraisablehook = before"
    ),
    "C code that works": (
        "import hashlib\nprint('runs\\n')\n"
        "while rank == 1: hashlib.pbkdf2_hmac('sha256', b'', b'', 8_000_000)"
    ),
}


@pytest.mark.parametrize("name", WAITED_FOR)
def test_stop_waits_for_ranks_that_leave_late(world: World, name: str) -> None:
    """Ranks that leave in the end are waited for, however long, and no rank loses anything."""
    running = begin(world, WAITED_FOR[name])
    press_stop(world, running)
    leave(world, running)
    assert running.transcript.deaths == {}
    assert kept(world) == [0, 1, 2]


def test_ranks_that_do_not_leave_can_be_replaced(world: World) -> None:
    """Ranks that do not leave can be replaced without another Stop; other ranks keep variables."""
    running = begin(
        world,
        "import time\nprint('runs\\n')\nwhile True:\n    try:\n        time.sleep(0.01)\n"
        "    except KeyboardInterrupt:\n        if rank != 2: raise",
    )
    press_stop(world, running)
    assert running.unfinished == (2,)
    world.replace([2])
    assert kept(world) == [0, 1, None]


def test_imports_come_back(world: World) -> None:
    """A new worker imports again what cells had imported, and a line says which import failed."""
    world.execute(
        "import fractions as f, json\nfrom os.path import join\n"
        "import sys, types\nsys.modules['gone'] = gone = types.ModuleType('gone')"
    )
    world.replace([1])
    wanted = "f.Fraction(1, 2), json.__name__, join('a', 'b')"
    found = world.execute("", fetch=(wanted,))
    assert found.rank(0) == found.rank(1)
    (said,) = (line.text for line in found.transcript[1].tail(5))
    assert said.startswith("`gone` could not be imported again (gone): ModuleNotFoundError")
