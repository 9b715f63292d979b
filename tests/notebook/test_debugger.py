"""Tests of `nbdist.notebook.debugger` with real kernels, by the messages that JupyterLab sends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.notebook.debug_protocol import is_library
from nbdist.notebook.debug_ranks import DebuggedRanks
from nbdist.notebook.debug_session import FIRST_ID, Numbers, RankSession
from nbdist.notebook.debugger import GONE, _choice
from nbdist.wire.messages import FromDebugger, ToDebugger
from tests.notebook.debug_client import STEP, DebugClient
from tests.notebook.front_end import Notebook, lasting
from tests.waiting import SOON

pytest.importorskip("debugpy")

kernel = lasting("%load_ext nbdist", "%%distributed -n 2\nimport os, time")


@pytest.fixture(scope="module")
def adapter(kernel: Notebook) -> Iterator[None]:
    """Starts the process of ipykernel's own debugger, which lives as long as the kernel.

    So the kernel is shut down after this module's tests, and no other module uses it.
    """
    client = DebugClient(kernel)
    client.start()
    client.stop()
    yield
    kernel.manager.shutdown_kernel(now=True)


@pytest.fixture
def debug(kernel: Notebook, adapter: None) -> Iterator[DebugClient]:
    """A debugger that is switched on, and off again after the test."""
    client = DebugClient(kernel)
    client.start()
    yield client
    if not client._is_over:  # the test has failed
        kernel.manager.interrupt_kernel()
        client.finish()
    client.stop()


def go_on(debug: DebugClient, thread: int) -> str:
    """Let all ranks go on to the end of the cell, also ranks that stop later; return its output."""
    debug.request("continue", threadId=thread)
    return debug.finish(goes_on=True).seen


def test_ranks_step_together_over_a_collective(debug: DebugClient) -> None:
    """All ranks stop at a breakpoint, and a step moves them all, also through an all_reduce."""
    path = debug.set_breakpoints(STEP, 3)
    debug.begin(STEP)
    thread, frame = debug.stopped()
    assert thread >= FIRST_ID
    frames = [(each["name"], each["line"], each["source"]["path"]) for each in debug.stack(thread)]
    assert frames == [("rank 0 · train_step", 3, path), ("rank 0 · <module>", 7, path)]
    assert debug.variables(frame)["weight"]["value"] == "tensor([1.])"
    debug.evaluate(frame, "%dist_debug -r 1")
    for line in (3, 4):
        thread, frame = debug.all_stopped(1, 0)
        assert frame["line"] == line
        debug.request("next", threadId=thread)
    thread, frame = debug.all_stopped(0)
    assert frame["line"] == 5
    assert debug.evaluate(frame, "gradient.item()") == "3.0"
    debug.evaluate(frame, "gradient.mul_(10)")
    assert "weight 30.0" in go_on(debug, thread)


def test_a_page_that_asks_for_thread_1_gets_the_stopped_rank(debug: DebugClient) -> None:
    """JupyterLab before 4.4.5 asks for thread 1; such a request is about the rank that is shown."""
    debug.set_breakpoints(STEP, 3)
    debug.begin(STEP)
    debug.next_event("stopped")
    assert [each["name"] for each in debug.stack(1)] == ["rank 0 · train_step", "rank 0 · <module>"]
    debug.request("next", threadId=1)
    debug.next_event("stopped")
    assert debug.stack(1)[0]["line"] == 4
    assert "weight 3.0" in go_on(debug, 1)


def test_a_rank_that_stops_alone_is_waited_for(debug: DebugClient) -> None:
    """Other ranks wait for a rank at a breakpoint, and the cell's timeout is paused meanwhile."""
    cell = "%%distributed --timeout 2\nif rank == 1:\n    x = 1\ndist.barrier()\nprint('passed')"
    debug.set_breakpoints(cell, 3)
    debug.begin(cell)
    thread, frame = debug.stopped()
    assert frame["name"] == "rank 1 · <module>"
    debug.evaluate(frame, "time.sleep(3)")
    assert "passed" in go_on(debug, thread)


def test_stop_ends_a_cell_at_a_breakpoint(debug: DebugClient) -> None:
    """Stop ends the cell while ranks stand at a breakpoint; the next cell stops there again."""
    debug.set_breakpoints(STEP, 3)
    for _ in range(2):
        debug.begin(STEP)
        debug.stopped()
        debug.notebook.manager.interrupt_kernel()
        outcome = debug.finish()
        assert outcome.errors[0]["ename"] == "Interrupted"
        assert "pydevd" not in outcome.seen
        debug.next_event("continued")
    debug.begin(STEP)
    thread, _ = debug.stopped()
    assert "weight 3.0" in go_on(debug, thread)


STOP_BEFORE_SENDING = """import os, signal, sys, threading, time, traceback

def stop(thread=threading.get_ident()):
    while not {("debugger.py", "prepare"), ("_base.py", "result")} <= {*calls(thread)}:
        time.sleep(0.01)
    time.sleep(0.2)  # the debugger's own thread begins to wait
    os.kill(os.getpid(), signal.SIGINT)

def calls(thread):
    codes = (each.f_code for each, _ in traceback.walk_stack(sys._current_frames()[thread]))
    return [(os.path.basename(each.co_filename), each.co_name) for each in codes]

threading.Thread(target=stop, daemon=True).start()
get_ipython().run_cell_magic("distributed", "", "x = 1")"""


def test_stop_while_a_rank_attaches_keeps_its_breakpoints(debug: DebugClient) -> None:
    """After a Stop while a rank still attaches, that rank stops at breakpoints in later cells."""
    assert debug.run("%%distributed -o pids\nos.getpid()").errors == []
    (_, pid) = debug.notebook.value("[*pids]")
    cell = "%%distributed\nif rank == 1:\n    x = 1\nprint('passed')"
    debug.stop()
    os.kill(pid, signal.SIGSTOP)
    try:
        debug.start()
        debug.set_breakpoints(cell, 3)
        outcome = debug.run(STOP_BEFORE_SENDING)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [each["ename"] for each in outcome.errors] == ["Interrupted"]
    debug.begin(cell)
    thread, frame = debug.stopped()
    assert (frame["name"], frame["line"]) == ("rank 1 · <module>", 3)
    assert "passed" in go_on(debug, thread)


def test_a_rank_that_dies_at_a_breakpoint_is_told(fresh: Callable[..., Notebook]) -> None:
    """After a rank's death another stopped rank is shown, and the new rank has the breakpoints."""
    notebook = fresh("%load_ext nbdist", "%%distributed -n 2\nimport os")
    debug = DebugClient(notebook)
    debug.start()
    cell = "%%distributed\nx = rank\nprint('x', x)"
    debug.set_breakpoints(cell, 3)
    debug.begin(cell)
    thread, frame = debug.stopped()
    scope = debug.request("scopes", frameId=frame["id"])["scopes"][0]
    os.kill(int(debug.evaluate(frame, "os.getpid()")), signal.SIGKILL)
    dead, (thread, frame) = (thread, frame), debug.stopped()
    assert frame["name"] == "rank 1 · <module>"
    assert "WorkerDied: rank 0" in go_on(debug, thread)
    debug.begin(cell)
    thread, frame = debug.stopped()
    # A page may still ask for what it has shown of the dead rank.
    for command, arguments in [
        ("variables", {"variablesReference": scope["variablesReference"]}),
        ("scopes", {"frameId": dead[1]["id"]}),
        ("stackTrace", {"threadId": dead[0]}),
        ("next", {"threadId": dead[0]}),
    ]:
        reply = debug.ask(command, **arguments)
        assert (reply["success"], reply["message"]) == (False, GONE)
    debug.request("evaluate", expression="%dist_debug -r 0 --alone", frameId=frame["id"])
    thread, frame = debug.stopped()
    assert frame["name"] == "rank 0 · <module>"
    debug.request("evaluate", expression="%dist_debug -r 0", frameId=frame["id"])
    thread, frame = debug.stopped()
    assert "x 0" in go_on(debug, thread)
    debug.stop()
    notebook.manager.shutdown_kernel(now=True)


def test_a_rank_stops_in_a_cell_without_a_file(debug: DebugClient) -> None:
    """A rank stops at a breakpoint even if its machine lacks the cell's file."""
    cell = "%%distributed\nx = rank\nprint('x', x)"
    path = debug.request("dumpCell", code=cell)["sourcePath"]
    os.unlink(path)
    points = {"breakpoints": [{"line": 3}], "source": {"path": path}, "sourceModified": False}
    debug.request("setBreakpoints", **points)
    debug.begin(cell)
    thread, frame = debug.stopped()
    assert (frame["line"], frame["source"]["path"]) == (3, path)
    assert "x 0" in go_on(debug, thread)


def test_breakpoint_uses_the_debugger_while_it_is_on(debug: DebugClient) -> None:
    """`breakpoint()` stops in the front end's debugger; it opens no input box."""
    debug.begin("%%distributed\nx = 1\nif rank == 0:\n    breakpoint()\nprint('on')")
    thread, frame = debug.stopped()
    assert (frame["name"], frame["line"]) == ("rank 0 · <module>", 4)
    assert "on" in go_on(debug, thread)


def test_an_exception_stops_only_the_rank_that_raises(debug: DebugClient) -> None:
    """The notebook and the released ranks do not stop at the errors that follow from the exception.

    The rank stops at exceptions in the next cell too, although aborting collectives turns these
    stops off.
    """
    debug.request("setExceptionBreakpoints", filters=["userUnhandled"])
    for _ in range(2):
        debug.begin("%%distributed\nif rank == 1:\n    1 / 0\ndist.barrier()")
        thread, frame = debug.stopped()
        assert frame["name"].startswith("rank 1 · <module>")
        assert "ZeroDivisionError" in go_on(debug, thread)


def test_the_notebook_s_own_breakpoints_work_as_before(debug: DebugClient) -> None:
    """A breakpoint in a plain cell's function stops the notebook, and ranks that call it."""
    plain = "def double(value):\n    result = 2 * value\n    return result\ndouble(1)"
    debug.set_breakpoints(plain, 2)
    debug.begin(plain)
    thread, frame = debug.stopped()
    assert thread < FIRST_ID
    assert frame["name"] == "double"
    debug.request("continue", threadId=thread)
    assert debug.finish().errors == []
    debug.begin("%%distributed\nprint(double(21))")
    thread, frame = debug.stopped()
    assert frame["name"] == "rank 0 · double"
    assert "42" in go_on(debug, thread)


def test_nothing_is_left_of_a_debugger_that_is_off(kernel: Notebook, adapter: None) -> None:
    """With the debugger off, workers have no trace function, debugger thread or more open files."""
    check_cell = """%%distributed
import sys, threading
names = [each.name for each in threading._active.values()]  # pydevd hides its threads elsewhere
left = [name for name in names if "debug" in name or "pydev" in name]
files = len(os.listdir("/proc/self/fd"))
print("traced", sys.gettrace(), threading.gettrace(), left)"""
    cell = "%%distributed\ny = 1"
    counts = list[list[int]]()
    for _ in range(3):
        debug = DebugClient(kernel)
        debug.start()
        debug.set_breakpoints(cell, 2)
        debug.begin(cell)
        thread, _ = debug.stopped()
        go_on(debug, thread)
        debug.stop()
        assert "traced None None []" in debug.run(check_cell).seen
        assert debug.run("%%distributed -o counts\nfiles").errors == []
        counts.append(kernel.value("[*counts]"))
    assert counts[-1] == counts[0]


def test_threads_and_memory_of_a_rank_are_as_before_the_debugger(
    kernel: Notebook, adapter: None
) -> None:
    """With the debugger off, no thread of a worker is traced, and a session's objects are freed."""
    begin_cell = """%%distributed
import gc, queue, sys, threading
asked, answers = queue.Queue(), queue.Queue()
def work():
    while asked.get():
        answers.put(sys.gettrace())
threading.Thread(target=work, daemon=True).start()"""
    check_cell = """%%distributed
asked.put(True)
is_traced = answers.get(timeout=30) is not None
gc.collect()
sessions = sum(type(each).__name__ == "PyDB" for each in gc.get_objects())
print("thread traced", is_traced)"""
    counts = list[list[int]]()
    assert kernel.run(begin_cell).errors == []
    for _ in range(4):
        debug = DebugClient(kernel)
        debug.start()
        # A worker with sys.monitoring, from Python 3.12 on, has no trace functions.
        is_traced = sys.version_info < (3, 12)
        assert f"thread traced {is_traced}" in debug.run(check_cell).seen
        debug.stop()
        assert "thread traced False" in debug.run(check_cell).seen
        assert debug.run("%%distributed -o counts\nsessions").errors == []
        counts.append(kernel.value("[*counts]"))
    assert kernel.run("%%distributed\nasked.put(False)").errors == []
    # The traceback of an earlier test's exception may keep one session.
    assert max(counts[-1]) - max(counts[0]) <= 1


def test_a_running_cell_is_not_traced_once_the_debugger_is_off(
    debug: DebugClient, tmp_path: Path
) -> None:
    """A cell that is still running when the debugger is switched off is not traced any more."""
    gate = tmp_path / "go-on"
    cell = f"""%%distributed
import sys
print("began", sys.gettrace() is not None)
while not os.path.exists({str(gate)!r}):
    time.sleep(0.05)
print("ended", sys.gettrace() is not None)"""
    debug.begin(cell)
    deadline = time.monotonic() + SOON
    while f"began {sys.version_info < (3, 12)}" not in debug.outcome.seen:
        debug._receive(deadline, "the cell has not begun, or its trace function is not as expected")
    debug.stop()
    gate.touch()
    assert "ended False" in debug.finish().seen
    debug.start()  # the fixture switches the debugger off again


def test_ranks_that_lack_a_module_are_told_once(debug: DebugClient) -> None:
    """A line names the ranks whose machine lacks a file with a breakpoint, and the file, once."""
    path = "/nowhere/model.py"
    points = {"breakpoints": [{"line": 3}], "source": {"path": path}, "sourceModified": False}
    line = f"ranks 0-1 cannot stop at breakpoints in {path}: the file is missing there"
    debug.request("setBreakpoints", **points)
    assert line in debug.run("%%distributed\nx = 1").seen
    assert path not in debug.run("%%distributed\nx = 1").seen


def test_unloading_gives_the_debugger_back(fresh: Callable[..., Notebook]) -> None:
    """After `%unload_ext` ipykernel's debugger is as if nbdist had not been loaded."""
    notebook = fresh()
    kernel = "get_ipython().kernel"
    state = f"({kernel}.debugger.event_callback.__qualname__, 'do_debug_request' in vars({kernel}))"
    before = notebook.value(state)
    rules = notebook.value(f"len({kernel}.debugger.kernel_modules)")
    notebook.run("%load_ext nbdist")
    assert notebook.value(state) != before
    notebook.run("%unload_ext nbdist")
    assert notebook.value(state) == before
    assert notebook.value(f"len({kernel}.debugger.kernel_modules)") == rules


# --- parts of the debugger that need no kernel ------------------------------------------------


def session(rank: int) -> RankSession:
    link: Any = None
    return RankSession(link, rank, 100 + rank, rank, f"rank {rank}")


def test_numbers_are_unique_over_ranks() -> None:
    """Equal frame ids of two ranks become different numbers, which lead back to rank and id."""
    numbers, first, second = Numbers(), session(0), session(1)
    body = {"stackFrames": [{"id": 3, "name": "f", "source": {"sourceReference": 0}}]}
    frames = [numbers.to_outer(each, body)["stackFrames"][0] for each in (first, second)]
    assert [each["name"] for each in frames] == ["rank 0 · f", "rank 1 · f"]
    assert frames[0]["id"] != frames[1]["id"]
    assert numbers.to_inner({"frameId": frames[1]["id"]}) == (second, {"frameId": 3})
    assert numbers.to_inner({"frameId": 3}) == (None, {"frameId": 3})
    assert not numbers.has_stale({"frameId": frames[1]["id"], "threadId": 1})
    numbers.forget(second)
    assert numbers.to_inner({"frameId": frames[1]["id"]})[0] is None
    assert numbers.has_stale({"inner": {"frameId": frames[1]["id"]}})
    assert numbers.to_inner({"frameId": frames[0]["id"]})[0] is first


class SlowLink:
    """A link to ranks' debuggers, which awaits `during(command)` before it answers a request."""

    is_up = True

    def __init__(self, during: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self.on_debugger: Callable[[FromDebugger | None], None] | None = None
        self.received = list[tuple[str, Any]]()
        self._during = during
        self._answers = set[asyncio.Task[None]]()

    def send(self, message: object) -> None:
        if isinstance(message, ToDebugger):
            self._answers.add(asyncio.get_running_loop().create_task(self._answer(message)))

    async def _answer(self, message: ToDebugger) -> None:
        request = json.loads(message.text)
        self.received.append((request["command"], request["arguments"].get("breakpoints")))
        await self._during(request["command"])
        response = {"type": "response", "request_seq": request["seq"], "success": True}
        assert self.on_debugger is not None
        self.on_debugger(FromDebugger(message.rank, message.session, json.dumps(response)))


@pytest.mark.parametrize("moment", ["attach", "setBreakpoints", "configurationDone"])
def test_a_breakpoint_that_is_set_while_a_rank_attaches_reaches_it(moment: str) -> None:
    """A breakpoint set during any request of `attach` reaches the rank before `attach` returns."""
    before, after = [{"line": 1}], [{"line": 2}]

    async def attach() -> list[tuple[str, Any]]:
        async def set_breakpoint(command: str) -> None:
            if command == moment and "2" not in ranks.breakpoints:
                await ranks.set_breakpoints({"source": {"path": "2"}, "breakpoints": after})

        link: Any = SlowLink(set_breakpoint)
        ranks = DebuggedRanks(lambda: [(link, "rank", {0: 100})], print, just_my_code=False)
        await ranks.set_breakpoints({"source": {"path": "1"}, "breakpoints": before})
        assert await ranks.attach(link, [0]) == []
        received: list[tuple[str, Any]] = link.received
        return received

    received = asyncio.run(attach())
    points = [points for command, points in received if command == "setBreakpoints"]
    assert points == [before, after]


def test_a_rank_that_makes_a_step_is_not_stopped() -> None:
    """A rank counts as stopped again only after its step, even if its events arrive late."""

    async def choose_during_a_step() -> tuple[list[str], list[str]]:
        async def do_nothing(command: str) -> None:
            pass

        link: Any = SlowLink(do_nothing)
        events = list[str]()
        publish = lambda event: events.append(event["event"])  # noqa: E731
        ranks = DebuggedRanks(lambda: [(link, "rank", {0: 1, 1: 2})], publish, just_my_code=False)
        assert await ranks.attach(link, [0, 1]) == []

        async def send(rank: int, event: str) -> None:
            body = {"threadId": 1, "reason": "breakpoint"}
            content = {"type": "event", "event": event, "body": body}
            (number,) = (each.number for each in ranks.by_number.values() if each.rank == rank)
            link.on_debugger(FromDebugger(rank, number, json.dumps(content)))
            await asyncio.sleep(0)

        for rank in (0, 1):
            await send(rank, "stopped")
        (shown, _) = ranks.shown.entry or pytest.fail("no rank is shown")
        await ranks.move(shown, "next", {"threadId": 1})
        for event in ("continued", "stopped"):
            await send(0, event)
        texts = [ranks.shown.choose(link, 1, is_alone=False)]
        for event in ("continued", "stopped"):
            await send(1, event)
        texts.append(ranks.shown.choose(link, 1, is_alone=False))
        return texts, events

    texts, events = asyncio.run(choose_during_a_step())
    assert texts == [
        "rank 1 is shown once it stops; stopped: rank 0",
        "the debugger shows rank 1; all stopped ranks step together",
    ]
    assert events == ["stopped", "continued", "stopped", "stopped"]


def test_a_thread_that_goes_on_leaves_another_thread_on_the_page() -> None:
    """Of two stopped threads of a rank the page shows one, until that thread goes on."""

    async def shown_events() -> list[list[str]]:
        async def do_nothing(command: str) -> None:
            pass

        link: Any = SlowLink(do_nothing)
        events = list[str]()
        publish = lambda event: events.append(event["event"])  # noqa: E731
        ranks = DebuggedRanks(lambda: [(link, "rank", {0: 100})], publish, just_my_code=False)
        assert await ranks.attach(link, [0]) == []
        (number,) = ranks.by_number
        after = list[list[str]]()
        for event, thread in [("stopped", 1), ("stopped", 2), ("continued", 2), ("continued", 1)]:
            content = {"type": "event", "event": event, "body": {"threadId": thread}}
            link.on_debugger(FromDebugger(0, number, json.dumps(content)))
            await asyncio.sleep(0)
            after.append([*events])
        return after

    events_after = asyncio.run(shown_events())
    assert events_after == [["stopped"], ["stopped"], ["stopped"], ["stopped", "continued"]]


@pytest.mark.parametrize(
    ("expression", "choice"),
    [
        ("%dist_debug -r 2", (2, False)),
        (" %dist_debug --alone -r 3", (3, True)),
        ("%dist_debug -r 3 --alone", (3, True)),
        ("%dist_debug", None),
        ("rank", None),
    ],
)
def test_a_rank_is_chosen_by_an_expression(
    expression: str, choice: tuple[int, bool] | None
) -> None:
    """`%dist_debug -r 2` in the page's field for expressions chooses a rank."""
    assert _choice({"expression": expression}) == choice


def test_a_step_that_leaves_the_cell_is_recognised() -> None:
    """All frames of the stack are in packages once a step has left the cell."""
    helper = {"name": "helper", "source": {"path": "/usr/lib/python3.11/contextlib.py"}}
    begin = {"name": "<module>", "source": {"path": "/x/nbdist/agent/fork_server.py"}}
    cell = {"name": "<module>", "source": {"path": "/tmp/ipykernel_1/2.py"}}
    assert all(map(is_library, (helper, begin)))
    assert not is_library(cell)
