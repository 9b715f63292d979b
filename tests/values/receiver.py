"""A notebook and a worker for tests: two real namespaces called `__main__`, in two processes.

This file is the worker if it runs as a script; tests load the two classes with `runpy`.
"""

from __future__ import annotations

import ast
import linecache
import os
import pickle
import subprocess
import sys
import traceback
import types
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

REPLY_TIMEOUT = 60.0


class Notebook(types.ModuleType):
    """A module that is `__main__` in this process; `run` runs a cell in the module."""

    def __init__(self) -> None:
        super().__init__("__main__")
        self.names = vars(self)
        self._cells = 0

    def run(self, source: str) -> Any:
        """Run a cell and keep its source, as IPython does; return the value of its last line."""
        self._cells += 1
        filename = f"/tmp/ipykernel_1/{self._cells}.py"
        lines = source.splitlines(keepends=True)
        linecache.cache[filename] = (len(source), None, lines, filename)
        return _run(source, self.names, filename)


class Worker:
    """Another process, which binds frames to names, runs source, and returns the results."""

    def __init__(self) -> None:
        path = str(Path(__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error"},
        )

    def _ask(self, *request: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        worked, reply = pickle.load(self._process.stdout)
        assert worked, reply
        return reply

    def bind(self, frames: Sequence[Any]) -> None:
        """Bind the names of a pickled mapping in the worker's `__main__`."""
        self._ask("bind", [bytes(memoryview(frame)) for frame in frames])

    bind_payload = partialmethod(_ask, "bind_payload")
    """Bind the names of a `Payload`, whose segment the worker opens."""

    receive = partialmethod(_ask, "receive")
    """Take a message of `nbdist.values.linked` as a worker does: change objects, bind variables."""

    inspect = partialmethod(_ask, "inspect")
    """Return which parts of objects the worker has changed, and the values of its variables."""

    forget = partialmethod(_ask, "forget")
    """Note that objects with these keys have ended in the notebook."""

    delete = partialmethod(_ask, "delete")
    """Delete variables that the notebook has deleted; return those that were deleted."""

    pop_ended_keys = partialmethod(_ask, "pop_ended_keys")
    """Return the keys of objects that have ended in the worker."""

    run = partialmethod(_ask, "run")
    """Run source in the worker; return the value of its last line if that is an expression."""

    fetch = partialmethod(_ask, "fetch")
    """Return the frames of a value that the worker pickles."""

    clear = partialmethod(_ask, "clear", None)
    """Unbind all names, for the next test."""

    def end(self) -> None:
        """End the process."""
        self._process.communicate(timeout=REPLY_TIMEOUT)


def _run(source: str, names: dict[str, Any], filename: str) -> Any:
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, filename, "exec", dont_inherit=True), names)
        return None
    before = ast.Module(tree.body[:-1], [])
    exec(compile(before, filename, "exec", dont_inherit=True), names)
    value = compile(ast.Expression(last.value), filename, "eval", dont_inherit=True)
    return eval(value, names)


_counterparts: list[Any] = []


def _answer(kind: str, *what: Any) -> Any:
    if kind in ("bind", "bind_payload", "run", "fetch", "clear"):
        return _answer_of_names(kind, *what)
    from nbdist.values.payload import open_payload
    from nbdist.worker.counterparts import Counterparts

    if not _counterparts:
        _counterparts.append(Counterparts(sys.modules["__main__"].__dict__))
    counterparts = _counterparts[0]
    if kind == "receive":
        arrived = counterparts.read(open_payload(*what))
        counterparts.accept(arrived)
        return counterparts.bind_sent(arrived.values)
    return getattr(counterparts, kind)(*what)


def _answer_of_names(kind: str, what: Any) -> Any:
    from nbdist.values.payload import open_payload
    from nbdist.values.pickling import pickle as nbdist_pickle
    from nbdist.values.pickling import unpickle

    names = sys.modules["__main__"].__dict__
    match kind:
        case "bind":
            names.update(unpickle(what))
        case "bind_payload":
            names.update(unpickle(open_payload(what)))
        case "clear":
            for name in [name for name in names if not name.startswith("__")]:
                del names[name]
            _counterparts.clear()
        case "run":
            return _run(what, names, "<worker>")
        case "fetch":
            pickled = nbdist_pickle(eval(what, names), names)
            return [bytes(memoryview(frame)) for frame in pickled.frames]
    return None


def _serve() -> None:
    channel, sys.stdout = sys.stdout.buffer, sys.stderr
    # The worker's `__main__` has none of the names of this script.
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = pickle.dumps((True, _answer(*request)))
        except Exception:  # noqa: BLE001 (a test's code may raise anything)
            reply = pickle.dumps((False, traceback.format_exc()))
        channel.write(reply)
        channel.flush()


if __name__ == "__main__":
    _serve()
