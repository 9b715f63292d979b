"""Tests of `nbdist.worker.ops.run`: scripts and modules as under python, executables, functions."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import psutil
import pytest
from IPython.core.events import EventManager, available_events

from nbdist.config import Patience
from nbdist.errors import WorkerDied, WorkerError
from nbdist.output.ansi import strip
from nbdist.values.linked import write
from nbdist.values.links import Links
from nbdist.values.payload import Payload, pack_frames
from nbdist.worker.namespace import Context, Namespace, VariableError
from nbdist.worker.ops.run import call, lent_names
from nbdist.world import dispatch
from nbdist.world.remote_call import find_script
from nbdist.world.result import CellResult
from nbdist.world.task_error import error_of
from nbdist.world.wait_texts import waiting_text
from nbdist.world.world import World
from tests.cells import Write, said

pytestmark = pytest.mark.shared_world(2)

N = 2


def test_script_runs_as_python_would_run_it(
    world: World, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script has its own arguments, name, file and folder; cells find the names that it binds."""
    write("lib/beside.py", "VALUE = 7")
    path = write(
        "lib/arguments.py",
        "'''Its docstring.'''\n"
        "import os, sys\nfrom beside import VALUE\n"
        "print(sys.argv, __name__, __file__, __doc__, __package__, __spec__)\n"
        "assert sys.path[0] == os.path.dirname(__file__)\n"
        "double = lambda: 2 * VALUE + rank\n"
        "sys.exit(0)",
    )
    world.execute("import os, sys")
    world.execute("before = sys.argv, list(sys.path), os.getcwd(), __doc__")
    result = world.run_script("lib/arguments.py", 1, 2, 3, "ab", "c d")
    argv = ["lib/arguments.py", "1", "2", "3", "ab", "c d"]
    assert said(result) == [f"{argv} __main__ {path} Its docstring. None None"] * N
    assert f"[0-1] {argv} __main__" in capsys.readouterr().out
    assert world.gather("double()") == [14, 15]
    after = "(sys.argv, list(sys.path), os.getcwd(), __doc__) == before, '__file__' in globals()"
    assert world.gather(after) == [(True, False)] * N


def test_module_runs_as_python_would_run_it(world: World, write: Write) -> None:
    """`-m` takes relative imports and packages with `__main__`; the folder is on `sys.path`."""
    write("pkg/__init__.py", "")
    write("pkg/other.py", "VALUE = 7")
    path = write("pkg/sub/mod.py", "from ..other import VALUE\nimport sys\nprint(sys.argv, VALUE)")
    write("pkg/__main__.py", "import sys\nfrom . import other\nprint(__package__, sys.path[0])")
    world.execute(f"import os; os.chdir({os.getcwd()!r})")
    for args in ((), ("a",)):  # the second time with an argument
        result = world.run_script("pkg.sub.mod", *args, module=True)
        assert said(result) == [f"{[str(path), *args]} 7"] * N
    assert said(world.run_script("pkg", module=True)) == [f"pkg {os.getcwd()}"] * N


def test_traceback_has_the_scripts_own_lines_only(world: World, write: Write) -> None:
    """Tracebacks have no calls of nbdist or IPython, and show the new lines of an edited script."""
    for text in ("def bad():\n    raise ValueError('one')\nbad()", "x = 1\nassert x == 2, 'two'"):
        path = write("fails.py", text)
        with pytest.raises(WorkerError, match=r"ranks 0-1 failed, of 2") as error:
            world.run_script("fails.py")
        assert isinstance(error.value, ValueError | AssertionError)
        shown = strip("\n".join(failures(world)[1].traceback))
        assert [word for word in ("nbdist/", "IPython", "runpy", "Cell In") if word in shown] == []
        assert f"File {path}:{3 if 'bad' in text else 2}" in shown
        assert text.splitlines()[1] in shown


def failures(world: World) -> list[Any]:
    """Return the failure of the last task on each rank."""
    assert world.engine.task_table.last is not None
    return [world.engine.task_table.last.transcript.errors[rank] for rank in range(N)]


def test_edited_modules_are_imported_anew(world: World, write: Write) -> None:
    """If a module beside the script was edited, all such modules are imported anew, else none."""
    write("inner.py", "VALUE = 1\n")
    write("outer.py", "import json\nfrom inner import VALUE\nmarks = []\n")
    write("uses.py", "import outer\nouter.marks.append(0)\nprint(outer.VALUE, len(outer.marks))\n")
    assert said(world.run_script("uses.py")) == ["1 1"] * N
    assert said(world.run_script("uses.py")) == ["1 2"] * N
    later = time.time() + 5
    os.utime(write("inner.py", "VALUE = 22\n"), (later, later))
    assert said(world.run_script("uses.py")) == ["22 1"] * N


def test_an_exit_code_is_success_or_an_error(world: World, write: Write) -> None:
    """`sys.exit` with 0, None or False is success; another code or a text is named in the error."""
    write("leaves.py", "import sys\nsys.exit(eval(sys.argv[1]))")
    for good in ("0", "None", "False"):
        world.run_script("leaves.py", good)
    for bad, words in (("3", "leaves.py exited with code 3"), ("'no data'", "exited: no data")):
        with pytest.raises(WorkerError, match=words):
            world.run_script("leaves.py", bad)


def test_scripts_can_use_data_loaders_and_asyncio(world: World, write: Write) -> None:
    """Classes of a script reach its forked and spawned processes, and `asyncio.run` works."""
    write(
        "loads.py",
        "import asyncio\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Squares(Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return i * i\n"
        "async def main():\n"
        "    await asyncio.sleep(0)\n"
        "    return [x.item() for x in DataLoader(Squares(), num_workers=2)]\n"
        "if __name__ == '__main__':\n"
        "    print(asyncio.get_event_loop().run_until_complete(main()))\n"
        "    print(asyncio.run(main()))\n",
    )
    assert said(world.run_script("loads.py")) == ["[0, 1, 4, 9]\n[0, 1, 4, 9]"] * N
    world.execute("import asyncio; await asyncio.sleep(0)")
    # Classes of a script also reach processes that it spawns.
    write(
        "spawns.py",
        "import multiprocessing as mp, threading\n"
        "lock = threading.Lock()  # each process makes its own\n"
        "class Told: pass\n"
        "class Tells:\n"
        "    def __call__(self, q):\n"
        "        with lock: q.put(Told())\n"
        "if __name__ == '__main__':\n"
        "    mp.set_start_method('spawn')\n"
        "    q = mp.Queue()\n"
        "    child = mp.Process(target=Tells(), args=(q,)); child.start()\n"
        "    print(isinstance(q.get(timeout=40), Told)); child.join()\n",
    )
    script = find_script("file", "spawns.py")
    for _ in range(2):  # a process can set the method only once
        assert said(dispatch.run(world.engine, world.task(script, ranks=[0]))) == ["True"]


def test_waits_name_the_scripts_line(world: World, write: Write) -> None:
    """Waits, stacks, Stop and a rank's death are reported with the script's own lines."""
    sleeps = "def step():\n    if dist.get_rank() == 0:\n        time.sleep(600)\n"
    write("lib/waits.py", f"import time\n{sleeps}    dist.barrier()\nstep()\n")
    script = find_script("file", "lib/waits.py")
    running = world.submit(world.task(script), Patience(hang_timeout=0.3))
    for _ in world.follow(running):
        if waiting_text(running):
            break
    assert waiting_text(running) == (
        "rank 0 is in waits.py line 4: time.sleep(600) · rank 1 waits in barrier, waits.py line 5"
    )
    assert [(row.place.file, row.code) for row in world.status() if row.place] == [
        ("waits.py", "time.sleep(600)"),
        ("waits.py", "dist.barrier()"),
    ]
    for stack in world.stacks():
        assert [frame.line for frame in stack.frames][:2] == [6, 4 + stack.rank]
    world.interrupt()
    dispatch.wait(world.engine, running)
    assert "was waiting in barrier (waits.py line 5) and was released" in str(error_of(running))
    world.execute("dist.barrier()")
    write("dies.py", "import ctypes\nif rank == 1:\n    ctypes.string_at(0)\ndist.barrier()\n")
    with pytest.raises(WorkerDied, match="was killed by SIGSEGV"):
        world.run_script("dies.py")
    freed, died = failures(world)
    assert "(dies.py line 4)" in freed.message
    assert any("dies.py, line 3" in line for line in died.last_lines)


def test_record_writes_torchs_error_file(world: World, write: Write) -> None:
    """A `main` with torch's `@record` that fails writes torch's file, without calls of nbdist."""
    folder = write(
        "records.py",
        "import sys\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    if 'fail' in sys.argv: raise RuntimeError(f'rank {rank} is out')\n"
        "    return 5\n"
        "assert main() == 5\n",
    ).parent
    variable = "os.environ['TORCHELASTIC_ERROR_FILE']"
    world.execute(f"import os; {variable} = f'{folder}/error{{rank}}.json'")
    world.run_script("records.py")
    with pytest.raises(WorkerError, match=r"RuntimeError: rank . is out"):
        world.run_script("records.py", "fail")
    for rank in range(N):
        message = json.loads((folder / f"error{rank}.json").read_text())["message"]
        assert message["message"] == f"RuntimeError: rank {rank} is out"
        assert "nbdist" not in message["extraInfo"]["py_callstack"]
    world.execute(f"del {variable}")


# --- executables --------------------------------------------------------------------------


def execute(world: World, name: str, *args: str, local_rank: bool = False) -> CellResult:
    """Run an executable on all ranks; `local_rank` is as in `Script`."""
    script = find_script("executable", name, args, local_rank=local_rank)
    return dispatch.run(world.engine, world.task(script))


def test_each_rank_runs_the_executable(world: World, write: Write) -> None:
    """Each rank runs the executable with its own environment; an exit code or signal is named."""
    lines = [text.split() for text in said(execute(world, "sh", "-c", "echo $$ $RANK; echo e >&2"))]
    assert [line[1:] for line in lines] == [["0", "e"], ["1", "e"]]
    assert len({line[0] for line in lines} | {str(pid) for pid in world.pids.values()}) == 2 * N
    write("x.sh", "#!/bin/sh\necho $0 $* $LOCAL_RANK\n", 0o755)
    result = execute(world, "./x.sh", "a b", local_rank=True)
    assert [text.split("x.sh ")[1] for text in said(result)] == [
        f"--local-rank={rank} a b {rank}" for rank in range(N)
    ]
    for text, words in (
        ("#!/bin/sh\nexit 3", "./x.sh exited with code 3"),
        ("#!/bin/sh\nkill -TERM $$", "./x.sh was killed by SIGTERM"),
        ("echo 1", "./x.sh could not be run: Exec format error"),
    ):
        write("x.sh", text, 0o755)
        with pytest.raises(WorkerError, match=words):
            execute(world, "./x.sh")


def test_stop_ends_executables(world: World, write: Write) -> None:
    """Stop ends executables that ignore SIGINT, and the processes started by them; workers stay."""
    deaf = "trap '' INT\nsleep 6161 &\necho started\nwhile true; do sleep 0.1; done"
    write("deaf.sh", f"#!/bin/sh\n{deaf}\n", 0o755)
    before = dict(world.pids)
    running = world.submit(world.task(find_script("executable", "./deaf.sh")))
    for _ in world.follow(running):
        if said(running) == ["started"] * N:
            break
    world.interrupt()
    dispatch.wait(world.engine, running)
    assert {error.name for error in failures(world)} == {"KeyboardInterrupt"}
    assert world.pids == before
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]]
    assert [line for line in left if "6161" in line or "./deaf.sh" in line] == []


# --- functions of the notebook -----------------------------------------------------------


class Shell:
    """A stand-in for IPython's shell, which records the tracebacks that a call shows."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {"torch": "their torch", "mine": "theirs"}
        self.events = EventManager(self, available_events)
        self.shown: list[Any] = []
        self.ends = 0
        self.events.register("post_execute", self.end)

    def end(self) -> None:
        self.ends += 1

    def showtraceback(self, exc_tuple: Any = None, **options: Any) -> None:
        self.shown.append((exc_tuple, options))


@pytest.fixture
def context() -> Context:
    shell = Shell()
    namespace = Namespace(shell.user_ns)
    namespace.ready["rank"] = 0
    return Context(shell, namespace)


def packed(source: str, *args: Any, **names: Any) -> dict[int, Payload]:
    """Pack the function `f` of this source, its arguments, and names of the caller that it uses."""
    main: dict[str, Any] = {"__name__": "__main__"}
    exec(source, main)
    values = {"call": (main["f"], args, {}), "names": names}
    payload, segment = pack_frames(write(values, [], Links(), {}, (), main).frames)
    assert segment is None
    return {0: payload}


def test_names_of_the_caller_are_bound_for_the_call(context: Context) -> None:
    """A call sees the caller's names, except for names that the worker has bound itself.

    Of modules such as `torch` a call sees the caller's; afterwards the worker has its own again.
    """
    names = context.names
    lent = {"torch": "our torch", "dist": "our dist", "mine": "ours", "k": 1}
    with lent_names(context, lent):
        assert names == {**lent, "mine": "theirs"}
    assert names == {"torch": "their torch", "mine": "theirs"}


def test_names_that_a_call_has_changed_stay_so(context: Context) -> None:
    """Names that a call has bound or deleted stay as the call leaves them.

    If a call binds names by `global`, the caller's other names stay bound until the next call.
    """
    names = context.names
    names.clear()
    with lent_names(context, {"bound": 1, "deleted": 2, "torch": 3}):
        names.update(bound=5, torch=6)
        del names["deleted"]
    assert names == {"bound": 5, "torch": 6}
    with lent_names(context, {"deleted": 2, "torch": 3}):
        names.update(torch=7)
        del names["deleted"]
    assert names == {"bound": 5, "torch": 7}
    names.clear()
    with lent_names(context, {"helper": "first", "other": "first"}):
        context.bound.add("x")
    assert names == {"helper": "first", "other": "first"}
    names["other"] = "a cell's"
    with lent_names(context, {"helper": "second", "other": "second"}):
        assert names == {"helper": "second", "other": "a cell's"}
    assert names == {"other": "a cell's"}


def test_a_call_runs_in_the_workers_main(context: Context) -> None:
    """A call sees the worker's `__main__` and lent names; its `global` names are recorded."""
    names, shell = context.names, context.shell
    source = "def f(x): return x + k, mine"
    assert call(context, "f", packed(source, 1, k=2, mine="ours"), {}) == (3, "theirs")
    assert (context.title, context.bound, shell.ends, shell.shown) == ("f", set(), 1, [])
    assert "k" in names
    context.cleanup.close()
    assert names == {"torch": "their torch", "mine": "theirs"}
    source = "def f():\n    global made\n    made = lambda: k"
    call(context, "f", packed(source, k=2), {})
    context.cleanup.close()
    assert context.bound == {"made"}
    assert names["made"]() == names["k"] == 2


def test_a_call_that_raises_is_shown_from_its_function(context: Context) -> None:
    """The traceback begins in the called function; names bound before the error are recorded."""
    source = "def f():\n    global k\n    try: 1 / k\n    finally: k = 5"
    with pytest.raises(ZeroDivisionError) as raised:
        call(context, "f", packed(source, k=0, other=1), {})
    context.cleanup.close()
    (((kind, value, tb), options),) = context.shell.shown
    assert (kind, value, options) == (ZeroDivisionError, raised.value, {"tb_offset": 0})
    assert tb.tb_frame.f_code.co_name == "f"
    assert (context.bound, context.shell.ends) == ({"k"}, 1)
    assert context.names["k"] == 5


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt])
def test_a_stopped_call_is_shown_and_raised(context: Context, stop: type[BaseException]) -> None:
    """A call that SystemExit or KeyboardInterrupt ends is shown, and the exception is raised.

    A call that cannot be unpickled raises VariableError, and no variable changes.
    """
    before = {**context.names}
    with pytest.raises(VariableError):
        call(context, "f", {0: Payload((b"garbage",))}, {})
    assert (context.names, context.title, context.shell.ends) == (before, "f", 0)
    with pytest.raises(stop):
        call(context, "f", packed(f"def f(): raise {stop.__name__}(3)", other=1), {})
    ((_, options),) = context.shell.shown
    assert ("exception_only" in options) == (stop is SystemExit)
    context.cleanup.close()
    assert "other" not in context.names
