"""Tests of `nbdist.worker.compat.ipython`: abilities that a version lacks, jedi, the debugger.

The tests of the debugger cover each way into it, its stops and its output.
"""

from __future__ import annotations

import linecache
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ipykernel import kernelapp
from IPython.core.compilerop import CachingCompiler

from nbdist.errors import WorkerError
from nbdist.output.ansi import strip
from nbdist.worker.compat import ipython
from nbdist.world.world import World

pytestmark = pytest.mark.shared_world(2)

IPYTHON_7 = (
    "\x1b[0;32m/tmp/ipykernel_7/42.py\x1b[0m in \x1b[0;36mfail\x1b[0;34m(x)\x1b[0m\n"
    "\x1b[1;32m      1\x1b[0m \x1b[0;32mdef\x1b[0m fail(x):\n"
    "\x1b[0;32m----> 2\x1b[0;31m     1 / 0\x1b[0m\n"
)
"""A frame as IPython 7.34 shows it."""


def test_a_missing_ability_is_named_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence names the version and the loss; code that uses the ability works without it."""
    assert ipython.check() == ()
    monkeypatch.delattr(kernelapp, "IOPubThread")
    (port,) = ipython.check()
    assert port.startswith("ipykernel ")
    assert port.endswith(": each worker listens on a port of the loopback interface.")
    ipython.publish_without_port()
    assert not hasattr(kernelapp, "IOPubThread")


def test_a_shell_without_the_method_prints_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell without IPython's method to show tracebacks prints them on stderr."""
    shell: Any = SimpleNamespace()
    monkeypatch.setattr(ipython, "ZMQInteractiveShell", SimpleNamespace())
    lines = ["line 1", "ValueError: bad"]
    ipython.AnnouncesErrors.publish_error(shell, ValueError, ValueError("bad"), lines)
    assert capsys.readouterr().err == "line 1\nValueError: bad\n"


def test_ipython_7_shows_numbers_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """With IPython 7, too, the frame of a cell in a traceback begins with the cell's number."""
    script = IPYTHON_7.replace("/tmp/ipykernel_7/42.py", "~/train.py")
    module = IPYTHON_7.replace("fail\x1b[0;34m(x)", "<cell line: 0>\x1b[0;34m()")
    head = "-----"
    compiler = SimpleNamespace(cache=lambda source, number, raw_code: "/tmp/ipykernel_7/42.py")
    shower = SimpleNamespace(structured_traceback=lambda: [head, IPYTHON_7, module, script])
    shell: Any = SimpleNamespace(compile=compiler, InteractiveTB=shower)
    ipython.number_cells(shell)
    assert shell.compile.cache("1 / 0", 5, raw_code="1 / 0") == "/tmp/ipykernel_7/42.py"
    monkeypatch.setenv("HOME", "/root")
    first, cell, main, file = shell.InteractiveTB.structured_traceback()
    assert first == head
    assert cell.startswith("Cell \x1b[0;32mIn[5], line 2\x1b[0m, in \x1b[0;36mfail\x1b[0;34m(x)")
    assert main.startswith("Cell \x1b[0;32mIn[5], line 2\x1b[0m\n")
    assert file.startswith("File \x1b[0;32m~/train.py:2\x1b[0m, in \x1b[0;36mfail")
    assert cell.endswith("1 / 0\x1b[0m\n")
    shell = SimpleNamespace(
        compile=CachingCompiler(), InteractiveTB=SimpleNamespace(structured_traceback=None)
    )
    ipython.number_cells(shell)
    name = shell.compile.cache("x = 1\n", 7, raw_code="x = 1\n")
    assert shell.compile._filename_map[name] == 7
    linecache.cache.pop(name)


WRITES = """
import os, signal, sys, types
from pathlib import Path
from nbdist.worker.compat.ipython import prepare_jedi
limit = sys.getrecursionlimit()
prepare_jedi(completer := types.SimpleNamespace())
assert (sys.getrecursionlimit(), completer.use_jedi) == (limit, True)
import parso, parso.cache as cache
class Item:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
if len(sys.argv) == 1:
    cache._save_to_file_system("grammar", "module.py", cache._NodeCacheItem("whole", [], 1.0))
    torn = cache._NodeCacheItem("x" * 1_000_000, [Item()], 2.0)
    cache._save_to_file_system("grammar", "module.py", torn)
grammar, file = parso.load_grammar(), parso.file_io.FileIO(sys.argv[1])
place = Path(os.environ["XDG_CACHE_HOME"], "jedi")  # as jedi has its own
known = cache.load_module(grammar._hashed, file, cache_path=place)
grammar.parse(file_io=file, cache=True, cache_path=place)
print("new" if known is None else known.get_code())
"""


@pytest.mark.world
def test_cache_files_of_jedi_are_whole(tmp_path: Path) -> None:
    """A cache file can be read again, and is whole even if a rank was killed while writing."""
    pytest.importorskip("jedi")

    def run(cache: Path, *parsed: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WRITES, *parsed]
        env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    (parsed := tmp_path / "mine.py").write_text("x = 1")
    for said in ("new\n", "x = 1\n"):
        ended = run(tmp_path, str(parsed))
        assert (ended.returncode, ended.stdout) == (0, said), ended.stderr
    files = [pickle.loads(file.read_bytes()) for file in tmp_path.glob("jedi/*/*")]
    assert "x = 1" in {each.node.get_code() for each in files}
    assert run(tmp_path / "killed").returncode == -signal.SIGKILL
    (file,) = tmp_path.glob("killed/parso/*/*.pkl")
    assert pickle.loads(file.read_bytes()).node == "whole"


# --- the debugger --------------------------------------------------------------------------

Debug = Callable[..., str]

FROM_CALL = ("n",) if sys.version_info >= (3, 13) else ()
"""Leads to the line after `breakpoint()`: Python 3.13 and later stop at the call itself first."""


@pytest.fixture
def debug(world: World, enter: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Debug:
    """A function that runs a cell, types lines into the debugger, and returns the output."""

    def run(source: str, *lines: str, ranks: list[int] | None = None) -> str:
        enter(*lines)
        capsys.readouterr()
        world.execute(source, ranks=ranks)
        return strip(capsys.readouterr().out)

    return run


@pytest.fixture
def debug_one(debug: Debug) -> Debug:
    """A function like `debug` for rank 1 alone, whose output has no number before each line."""
    return lambda *lines: debug(*lines, ranks=[1]).replace("[1] ", "")


def test_stepping_goes_from_statement_to_statement(debug: Debug) -> None:
    """Stepping goes to the next statement of the cell, also after `await`, and not into IPython."""
    source = "if rank == 1: breakpoint()\nx = 1\nx += 1\nx"
    said = debug(source, *FROM_CALL, "n", "n", "n")
    stops = [line.split("---> ")[1] for line in said.splitlines() if "---> " in line]
    assert stops[len(FROM_CALL) :] == ["2 x = 1", "3 x += 1", "4 x"]
    assert "Cell In[" in said
    assert said.endswith("ipdb> [1] 2\n")
    assert debug("print('through')") == "[0-1] through\n"
    source = "import asyncio\nbreakpoint()\nawait asyncio.sleep(0.01)\nx = 5\nx + 1"
    said = debug(source, *FROM_CALL, "n", "n", "n", "-r all c")
    stops = [line.split("---> ")[1] for line in said.splitlines() if "[0] ----> " in line]
    assert stops[len(FROM_CALL) :] == ["4 x = 5", "5 x + 1"]
    assert "[0] 6" in said
    assert "StopIteration" not in said
    # torch's own breakpoint stops a single rank, and the others wait for that rank.
    said = debug("dist.breakpoint(1)\nprint('after')", "up", "c")
    assert "[rank 1] ipdb> " in said
    assert "--> 1 dist.breakpoint(1)" in said
    assert said.endswith("[0-1] after\n")


def test_debug_begins_at_the_users_innermost_call(debug: Debug) -> None:
    """`%debug` on the ranks begins at the user's innermost call."""
    debug("def f(a):\n    return 1 / a\ntry:\n    f(0)\nexcept ZeroDivisionError:\n"
          "    get_ipython().showtraceback()")  # fmt: skip
    said = debug("%debug", "p a", "q", "p a", "q")
    assert "[0-1] ----> 2     return 1 / a" in said.splitlines()
    assert "[rank 0] ipdb> [0] 0" in said.splitlines()
    assert "[1] 0" in said


def test_each_way_into_the_debugger_works(debug_one: Debug, world: World) -> None:
    """Each way into the debugger stops at the next line, and variables set there stay."""
    for begin in (
        "breakpoint()",
        "import pdb; pdb.set_trace()",
        "from IPython.core.debugger import set_trace; set_trace()",
        "get_ipython().debugger_cls().set_trace()",  # as ipdb does
        "import sys, types; sys.modules['debugpy'] = types; breakpoint(header='here')",
    ):
        source = f"def f(a):\n    {begin}\n    return a\nresult = f(5)"
        said = debug_one(source, *FROM_CALL, "p a + 1", "!a = 7", "c")
        assert "----> 3     return a" in said
        assert "[rank 1] ipdb> 6\n" in said
        assert world.gather("result", ranks=[1]) == [7]


def test_pythonbreakpoint_turns_breakpoints_off(debug_one: Debug) -> None:
    """PYTHONBREAKPOINT=0 turns `breakpoint()` off."""
    off = "import os; os.environ['PYTHONBREAKPOINT'] = '0'\n"
    on = "\ndel os.environ['PYTHONBREAKPOINT']\nprint('ran')"
    assert debug_one(f"{off}breakpoint(){on}") == "ran\n"


def test_quitting_the_debugger_ends_the_cell(
    debug_one: Debug, world: World, enter: Callable[..., None], write: Callable[..., Path]
) -> None:
    """`q` ends the cell and says so in a line; the next cell runs, and no script is restarted."""
    with pytest.raises(WorkerError, match="BdbQuit: `q` left the debugger") as found:
        debug_one("kept = 1\nbreakpoint()\nkept = 2", "q")
    assert "bdb.py" not in "".join(map(str, found.value.__notes__))
    assert debug_one("print(kept)") == "1\n"
    script = write("asks.py", "breakpoint()\nx = 1")
    enter("q", "c", "c")
    with pytest.raises(WorkerError, match="BdbQuit"):
        world.run_script(str(script), ranks=[1], max_restarts=3)
    assert world.engine.task_table.last is not None
    assert world.engine.task_table.last.task.attempt.number == 0
    world.run_script(str(script), max_restarts=3)
    assert world.gather("x") == [1, 1]


def test_the_debugger_keeps_no_objects_of_a_call(debug_one: Debug, world: World) -> None:
    """A tensor of a call in which the debugger has stopped ends with the call."""
    source = "import weakref\ndef f():\n    t = torch.ones(9)\n    breakpoint()\n"
    debug_one(f"{source}    return weakref.ref(t)\nleft = f()", *FROM_CALL, "n", "n", "n")
    debug_one("import gc; gc.collect(); import sys")
    assert world.gather("left() is None, sys.gettrace()", ranks=[1]) == [(True, None)]


def test_functions_of_the_caller_can_be_debugged(
    world: World, enter: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a function of the notebook the debugger lists no calls of nbdist."""
    enter("w", "!b = 9", "c")

    def function(a: int) -> int:
        import torch.distributed as dist

        b = a
        if dist.get_rank() == 0:
            breakpoint()
        return b

    assert [*world.run(function, 3)] == [9, 3]
    said = strip(capsys.readouterr().out)
    assert said.count("function()") == 2
    assert "nbdist/worker" not in said
