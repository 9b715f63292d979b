"""Tests of `nbdist.worker.compat.jedi`: what ranks leave in the user's cache is whole."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.world

KILLED = """
import os, signal, sys
from nbdist.worker.compat.jedi import import_jedi
limit = sys.getrecursionlimit()
import_jedi()
assert sys.getrecursionlimit() == limit
import jedi, parso.cache
cache = parso.cache
class Item:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)
kept = cache._NodeCacheItem("whole", [], 1.0)
cache._save_to_file_system("grammar", "module.py", kept)
if sys.argv[1] == "killed":
    torn = cache._NodeCacheItem("x" * 1_000_000, [Item()], 2.0)
    cache._save_to_file_system("grammar", "module.py", torn)
print(jedi.Interpreter("here", [{"here_only": 1}]).complete()[0].name)
"""


def run(how: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Complete a name in a process of its own, which is killed while it writes, or is not."""
    command = [sys.executable, "-c", KILLED, how]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def written(cache: Path) -> list[Path]:
    """Find the files of parso's own names."""
    return [*cache.glob("jedi/*/*.pkl"), *cache.glob("parso/*/*.pkl")]


def test_a_rank_killed_while_it_writes(tmp_path: Path) -> None:
    """The file under that name is the one from before, and can be read."""
    pytest.importorskip("jedi")
    assert run("killed", tmp_path).returncode == -signal.SIGKILL
    (file,) = written(tmp_path)
    assert pickle.loads(file.read_bytes()).node == "whole"


def test_what_it_writes_is_read_again(tmp_path: Path) -> None:
    """All files are whole, none is over, and the next process completes with them."""
    pytest.importorskip("jedi")
    for _ in range(2):
        ended = run("lives", tmp_path)
        assert (ended.returncode, ended.stdout) == (0, "here_only\n"), ended.stderr
    files = written(tmp_path)
    assert len(files) > 1
    assert [*tmp_path.glob("*/*/tmp*")] == []
    for file in files:
        pickle.loads(file.read_bytes())
