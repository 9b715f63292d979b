"""Runs scripts in the namespace of the cells, as `python` would run them, and executables.

On the main thread, in the place of a cell.
"""

from __future__ import annotations

import asyncio
import importlib
import linecache
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import decode_source
from types import CodeType, FrameType, TracebackType
from typing import Any

from nbdist.errors import word_exit
from nbdist.wire.places import Place
from nbdist.wire.task import Script
from nbdist.worker.ops.executable import run_executable
from nbdist.worker.ops.modules import OwnModules
from nbdist.worker.tracebacks import show

OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
PYTHONS = tuple({prefix + os.sep for prefix in (sys.prefix, sys.base_prefix)})
RUNNERS = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")
"""Files whose calls come before a script's own."""

_UNBOUND = object()


class ScriptProblem(Exception):
    """It ended otherwise than well, without an exception; the message is for the user."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What to execute, and what python binds in `__main__` before."""

    code: CodeType
    source: str
    names: dict[str, Any]


class Scripts:
    """Runs one at a time, and says where it is; `running` is the one that runs now."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.running: Script | None = None
        self._modules = OwnModules()

    def __repr__(self) -> str:
        return f"<Scripts running {self.running.name if self.running else 'none'}>"

    def run(self, script: Script) -> BaseException | None:
        """Run it to its end; the exception that ended it, after showing it.

        Raises ScriptProblem; an executable that is interrupted raises KeyboardInterrupt.
        """
        self.running = script
        first = (f"--local-rank={os.environ.get('LOCAL_RANK', '0')}",) if script.local_rank else ()
        args = (*first, *script.args)
        try:
            if script.kind == "executable":
                _run_executable(script, args)
                return None
            return self._run_python(script, args)
        finally:
            self.running = None

    def spot(self, frames: Sequence[FrameType]) -> Place | None:
        """The innermost line of the script that runs, or of what lies beside it."""
        script = self.running
        if script is None:
            return None
        for frame in frames:
            file = frame.f_code.co_filename
            if script.kind != "executable" and _is_own(file, script):
                line = frame.f_lineno or 0
                code = linecache.getline(file, line).strip()
                name = os.path.relpath(file, script.root) if script.root else script.name
                return Place(line, file=name, code=code)
        return Place(file=script.name)

    def _run_python(self, script: Script, args: Sequence[str]) -> BaseException | None:
        """The exception that ended it, after showing it; None if all went well."""
        events = self._shell.events
        events.trigger("pre_execute")
        self._modules.begin()
        try:
            with _command_line(script, args), _start_method(), _without_loop():
                _execute(_load(script), self._shell.user_ns)
        except SystemExit as end:
            if problem := _problem_of(script, end.code):
                raise ScriptProblem(problem) from None
        except BaseException as error:  # noqa: BLE001 (also Stop: shown as a cell's would be)
            self.running = None  # what follows only tells of it
            tb = _own_part(error.__traceback__)
            show(self._shell, (type(error), error, tb), tb_offset=0)
            return error
        finally:
            self._modules.end(lambda file: _is_own(file, script))
            events.trigger("post_execute")
        return None


def _run_executable(script: Script, args: Sequence[str]) -> None:
    try:
        code = run_executable(script.file, [script.name, *args])
    except OSError as error:
        raise ScriptProblem(f"{script.name} could not be run: {error.strerror}") from None
    if code != 0:
        raise ScriptProblem(f"{script.name} {word_exit(code)}")


def _problem_of(script: Script, code: object) -> str:
    """What a script says that leaves by `sys.exit(code)`; "" if all went well."""
    if code is None or code == 0:
        return ""
    said = f"{script.name} exited"
    return f"{said} with code {int(code)}" if isinstance(code, int) else f"{said}: {code}"


def _load(script: Script) -> _Loaded:
    """Read and compile it; raises what python would, SyntaxError or ImportError."""
    importlib.invalidate_caches()  # modules may have been written since the last look
    if script.kind == "file":
        with open(script.file, "rb") as file:
            data = file.read()
        code = compile(data, script.file, "exec", dont_inherit=True)
        names: dict[str, Any] = {"__file__": script.file, "__package__": None, "__spec__": None}
        return _Loaded(code, decode_source(data), names)
    _, spec, code = runpy._get_module_details(script.name)  # type: ignore[attr-defined]
    sys.argv[0] = spec.origin
    source = getattr(spec.loader, "get_source", lambda _: None)(spec.name) or ""
    if source:  # a compiled file can be older by less than a second
        code = compile(source, spec.origin, "exec", dont_inherit=True)
    names = {"__file__": spec.origin, "__package__": spec.parent, "__spec__": spec}
    return _Loaded(code, source, names)


def _execute(loaded: _Loaded, namespace: dict[str, Any]) -> None:
    """Execute it as `__main__`; tracebacks show what ran, also of a file edited meanwhile."""
    file, lines = loaded.code.co_filename, loaded.source.splitlines(keepends=True)
    names = {**loaded.names, "__name__": "__main__", "__doc__": None}
    before = {name: namespace.get(name, _UNBOUND) for name in names}
    namespace.update(names)
    # Without a time of modification it is not compared with the file.
    linecache.cache[file] = (len(loaded.source), None, lines, file)
    try:
        exec(loaded.code, namespace)
    finally:
        for name, value in before.items():
            if value is _UNBOUND:
                namespace.pop(name, None)
            else:
                namespace[name] = value


@contextmanager
def _command_line(script: Script, args: Sequence[str]) -> Iterator[None]:
    """`sys.argv` and the first entry of `sys.path` as python has them; the rest stays."""
    argv = sys.argv
    folder = os.path.dirname(script.file) if script.kind == "file" else os.getcwd()
    sys.argv = [script.name, *args]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = argv
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _start_method() -> Iterator[None]:
    """A script may set multiprocessing's, which only one per process can, once."""
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


@contextmanager
def _without_loop() -> Iterator[None]:
    """A main thread without a running event loop, so that `asyncio.run` works there."""
    ours, its = asyncio.get_running_loop(), asyncio.new_event_loop()
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(its)
    try:
        yield
    finally:
        its.close()
        asyncio.set_event_loop(ours)
        asyncio._set_running_loop(ours)


def _own_part(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first line on."""
    while tb is not None and tb.tb_frame.f_code.co_filename in RUNNERS:
        tb = tb.tb_next
    return tb


def _is_own(file: str, script: Script) -> bool:
    """Whether it is the script's file, or lies in its folder, and is no installed package's."""
    if file == script.file:
        return True
    below = file.removeprefix(script.root + os.sep)
    is_below = bool(script.root) and below != file
    return is_below and "-packages" not in below and not file.startswith((OURS, *PYTHONS))
