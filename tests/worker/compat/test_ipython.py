"""What the seam to IPython and ipykernel does where a version lacks something."""

from __future__ import annotations

import linecache
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ipykernel import kernelapp
from ipykernel.kernelbase import Kernel
from IPython.core.compilerop import CachingCompiler

from nbdist.worker.compat import ipython

IPYTHON_7 = (
    "\x1b[0;32m/tmp/ipykernel_7/42.py\x1b[0m in \x1b[0;36mfail\x1b[0;34m(x)\x1b[0m\n"
    "\x1b[1;32m      1\x1b[0m \x1b[0;32mdef\x1b[0m fail(x):\n"
    "\x1b[0;32m----> 2\x1b[0;31m     1 / 0\x1b[0m\n"
)
"""A frame as IPython 7.34 shows it."""


def test_what_is_missing_is_told_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence with the version and what is lost; what needs it goes on. Here is all."""
    assert ipython.check() == ()
    monkeypatch.delattr(kernelapp, "IOPubThread")
    monkeypatch.delattr(Kernel, ipython.END_CHILDREN)
    children, port = ipython.check()
    assert children.startswith("ipykernel ")
    assert children.endswith(": workers whose cells left processes behind may end late.")
    assert port.endswith(": each worker listens on a port of the loopback interface.")
    ipython.publish_without_port()
    assert not hasattr(kernelapp, "IOPubThread")


def test_a_shell_that_shows_tracebacks_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are text on stderr."""
    shell: Any = SimpleNamespace()
    monkeypatch.setattr(ipython, "ZMQInteractiveShell", SimpleNamespace())
    lines = ["line 1", "ValueError: bad"]
    ipython.AnnouncesErrors.publish_error(shell, ValueError, ValueError("bad"), lines)
    assert capsys.readouterr().err == "line 1\nValueError: bad\n"


def test_ipython_7_shows_numbers_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame begins as in later versions, which keep the number of a cell themselves."""
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


pytestmark = pytest.mark.world

WRITES = """
import os, signal, sys
from pathlib import Path
from nbdist.worker.compat.ipython import import_jedi
limit = sys.getrecursionlimit()
import_jedi()
assert sys.getrecursionlimit() == limit
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


def test_what_it_writes_is_read_again(tmp_path: Path) -> None:
    """The file is whole, also after a rank was killed while it wrote another one."""
    pytest.importorskip("jedi")

    def run(cache: Path, *parsed: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WRITES, *parsed]
        env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    (parsed := tmp_path / "mine.py").write_text("x = 1")
    for said in ("new\n", "x = 1\n"):
        ended = run(tmp_path, str(parsed))
        assert (ended.returncode, ended.stdout) == (0, said), ended.stderr
    (file,) = tmp_path.glob("jedi/*/*")
    assert pickle.loads(file.read_bytes()).node.get_code() == "x = 1"
    assert run(tmp_path / "killed").returncode == -signal.SIGKILL
    (file,) = tmp_path.glob("killed/parso/*/*.pkl")
    assert pickle.loads(file.read_bytes()).node == "whole"
