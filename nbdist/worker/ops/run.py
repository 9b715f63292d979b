"""Ops that run user code other than cells: a script, an executable, a function, the debugger.

The kernel of each rank calls these ops. A script runs as `python` would run it, but its variables
are bound in the namespace of the cells.
"""

from __future__ import annotations

import asyncio
import dis
import importlib
import linecache
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from bdb import BdbQuit
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import decode_source
from types import CodeType, FrameType
from typing import Any

import psutil

from nbdist.output.events import SCRIPT_FAILED, ItemOutcome
from nbdist.values.child_definitions import script_names
from nbdist.values.payload import Payload, open_payload, pack_frames, pack_inline, size_of
from nbdist.values.pickling import Buffer, unpickle
from nbdist.wire.places import RankPosition
from nbdist.wire.work import MAX_ITEM_BYTES, InputReply, Script
from nbdist.words import error_line, size_text, word_exit
from nbdist.worker.compat.ipython import post_mortem
from nbdist.worker.namespace import Context, Problem
from nbdist.worker.ops.memory import last_errors
from nbdist.worker.shell import show
from nbdist.worker.tracebacks import contents_of, failure_of, message_of

WORKER_PREFIX = os.path.dirname(os.path.dirname(__file__)) + os.sep
PYTHON_PREFIXES = tuple({prefix + os.sep for prefix in (sys.prefix, sys.base_prefix)})
# Files of the calls that come before a script's own calls, and are left out of its traceback.
RUNNERS = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")
# Once the results have this many bytes, `map_items` sends them to the notebook, even if this rank
# still has items to work on.
ENOUGH_RESULTS = 4 << 20
# Seconds for an executable to exit after SIGINT; the agent gives the worker itself more time.
SCRIPT_STOP_GRACE = 1.0
_UNBOUND = object()  # stands for the value of a name that is not bound


class ScriptProblem(Problem):
    """A script or executable could not run, or its exit code is not 0."""

    kind = SCRIPT_FAILED


def script(context: Context, program: Script) -> None:
    """Run a script or executable to its end.

    Raises ScriptProblem if it cannot run or its exit code is not 0. An exception that ends a script
    is raised, too.
    """
    first = (f"--local-rank={os.environ.get('LOCAL_RANK', '0')}",) if program.local_rank else ()
    args = (*first, *program.args)
    program = _with_local_path(program)
    _running.append(program)
    try:
        if program.kind == "executable":
            _run_executable(program, args)
        else:
            with context.record_changes():
                _run_python(context.shell, program, args)
    finally:
        _running.clear()


def _with_local_path(program: Script) -> Script:
    """Return the program with the paths that its file and its folder have on this machine.

    Raises ScriptProblem if this machine does not have the program's file.
    """
    if not program.file or os.path.exists(program.file):
        return program
    if program.near and os.path.exists(program.near):
        file = os.path.abspath(program.near)
        root = file.removesuffix(program.file.removeprefix(program.root)) if program.root else ""
        return replace(program, file=file, root=root)
    raise ScriptProblem(
        f"{program.name} could not be run: {socket.gethostname()} has no {program.file}. "
        "`%dist_restart --sync-code` sends the notebook's folder to machines that do not have it."
    )


# --- the program that runs now, for other threads ----------------------------------------

_running: list[Script] = []  # empty, or with the program that runs


def spot(frames: Sequence[FrameType]) -> RankPosition | None:
    """Return the position of the script or executable that runs, or None if neither runs.

    `frames` is the stack of the main thread, the innermost frame first. The position is the
    innermost line in the script's own files (`_is_own`). For an executable, or if no frame is in
    such a file, the position has only the name of the program.
    """
    program = next(iter(_running), None)
    if program is None:
        return None
    for frame in frames:
        file = frame.f_code.co_filename
        if program.kind != "executable" and _is_own(file, program):
            line = frame.f_lineno or 0
            code = linecache.getline(file, line).strip()
            name = os.path.relpath(file, program.root) if program.root else program.name
            return RankPosition(line, file=name, code=code)
    return RankPosition(file=program.name)


def _is_own(file: str, program: Script) -> bool:
    """Return True for the script's file, and for files of the user below the script's folder.

    Files of Python, of installed packages and of nbdist are not the user's.
    """
    if file == program.file:
        return True
    below = file.removeprefix(program.root + os.sep)
    is_below = bool(program.root) and below != file
    return (
        is_below
        and "-packages" not in below
        and not file.startswith((WORKER_PREFIX, *PYTHON_PREFIXES))
    )


# --- Python ------------------------------------------------------------------------------


def _run_python(shell: Any, program: Script, args: Sequence[str]) -> None:
    """Run a Python script, and trigger IPython's events before and after it, as for a cell.

    An exception that ends the script is shown and raised; a BdbQuit is raised only. Raises
    ScriptProblem if the script exits with another code than 0.
    """
    # Otherwise `%dist_debug` would find the exception of an earlier cell.
    shell.last_execution_result = None
    shell.events.trigger("pre_execute")
    try:
        shell.kernel.own_modules.forget_edited(partial(_is_own, program=program))
        with _command_line(program, args), _as_in_a_new_process():
            _execute(*_load(program), shell.user_ns)
    except SystemExit as end:
        if end.code is not None and end.code != 0:
            how = f" with code {int(end.code)}" if isinstance(end.code, int) else f": {end.code}"
            raise ScriptProblem(f"{program.name} exited{how}") from None
    except BdbQuit:
        raise  # without a traceback: the notebook shows a line if the user has quit the debugger
    except BaseException as error:  # also KeyboardInterrupt, which is shown as in a cell
        _running.clear()  # the script itself has ended
        tb = error.__traceback__
        while tb is not None and tb.tb_frame.f_code.co_filename in RUNNERS:
            tb = tb.tb_next
        show(shell, (type(error), error, tb), tb_offset=0)
        raise
    finally:
        shell.events.trigger("post_execute")


def _load(program: Script) -> tuple[CodeType, str, dict[str, Any]]:
    """Return a script's code, its source, and special names such as `__file__` for its `__main__`.

    Raises the exceptions that `python` raises, such as SyntaxError.
    """
    importlib.invalidate_caches()  # files of modules may have been written since the last import
    if program.kind == "file":
        with open(program.file, "rb") as file:
            data = file.read()
        code = compile(data, program.file, "exec", dont_inherit=True)
        names: dict[str, Any] = {"__file__": program.file, "__package__": None, "__spec__": None}
        return code, decode_source(data), names
    _, spec, code = runpy._get_module_details(program.name)  # type: ignore[attr-defined]
    sys.argv[0] = spec.origin
    source = getattr(spec.loader, "get_source", lambda _: None)(spec.name) or ""
    # Compile the source again: Python may use an old .pyc file if the source was edited within a
    # second after the last compilation.
    if source:
        code = compile(source, spec.origin, "exec", dont_inherit=True)
    names = {"__file__": spec.origin, "__package__": spec.parent, "__spec__": spec}
    return code, source, names


def _execute(code: CodeType, source: str, names: dict[str, Any], namespace: dict[str, Any]) -> None:
    """Execute a script's code in the namespace of the cells.

    `names` are bound only while the script runs. Tracebacks show the lines of `source`, even if the
    file is edited later.
    """
    file, lines = code.co_filename, source.splitlines(keepends=True)
    names |= {"__name__": "__main__", "__doc__": None}
    before = {name: namespace.get(name, _UNBOUND) for name in names}
    namespace.update(names)
    # The entry has no modification time, so linecache never reads the file again.
    linecache.cache[file] = (len(source), None, lines, file)
    stored = (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_NAME")
    script_names.update(stored)
    try:
        exec(code, namespace)
    finally:
        script_names.clear()
        for name, value in before.items():
            if value is _UNBOUND:
                namespace.pop(name, None)
            else:
                namespace[name] = value


# --- what python sets up for a script ----------------------------------------------------


@contextmanager
def _command_line(program: Script, args: Sequence[str]) -> Iterator[None]:
    """Within this context, `sys.argv` and the first entry of `sys.path` are as under `python`."""
    argv = sys.argv
    folder = os.path.dirname(program.file) if program.kind == "file" else os.getcwd()
    sys.argv = [program.name, *args]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = argv
        if folder in sys.path:
            sys.path.remove(folder)


@contextmanager
def _as_in_a_new_process() -> Iterator[None]:
    """Within this context, a script can call `asyncio.run` and `multiprocessing.set_start_method`.

    `asyncio.run` would raise while the worker's own loop runs. The start method can be set only
    once in a process, so it is reset afterwards, for the next script.
    """
    before = multiprocessing.get_start_method(allow_none=True)
    worker_loop, script_loop = asyncio.get_running_loop(), asyncio.new_event_loop()
    # Leave the worker's current task of asyncio. From Python 3.14 on, a thread has one current task
    # for all its event loops, so the script could not begin a task in its own loop.
    if (task := asyncio.current_task()) is not None:
        asyncio._leave_task(worker_loop, task)
    asyncio._set_running_loop(None)
    asyncio.set_event_loop(script_loop)
    try:
        yield
    finally:
        script_loop.close()
        asyncio.set_event_loop(worker_loop)
        asyncio._set_running_loop(worker_loop)
        if task is not None:
            asyncio._enter_task(worker_loop, task)
        multiprocessing.set_start_method(before, force=True)


# --- executables -------------------------------------------------------------------------


def _run_executable(program: Script, args: Sequence[str]) -> None:
    """Run an executable and wait for its exit.

    After Stop, the executable has `SCRIPT_STOP_GRACE` seconds to exit. Then it is killed, with its
    child processes. Children stay if they have a process group of Linux of their own.
    """
    before, argv = _group_pids(), [program.name, *args]
    try:
        child = subprocess.Popen(argv, executable=program.file, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ScriptProblem(f"{program.name} could not be run: {error.strerror}") from None
    try:
        code = child.wait()
    except BaseException as error:  # noqa: BLE001 (also Stop: no process may be left)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(timeout=SCRIPT_STOP_GRACE)
        for pid in _group_pids() - before:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()
        raise error.with_traceback(None) from None  # users need not see nbdist's frames
    if code != 0:
        raise ScriptProblem(f"{program.name} {word_exit(code)}")


def _group_pids() -> set[int]:
    """Return the pids of all processes in this worker's process group of Linux."""
    group, pids = os.getpgrp(), set()
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group:
                pids.add(pid)
    return pids


# --- functions of the notebook, and the debugger -----------------------------------------

# Names to which every worker binds modules. If the notebook has bound these names to other modules,
# functions of the notebook use the notebook's modules.
READY_MODULES = ("torch", "dist")
# Variables of the notebook that `lent_names` has left bound after a call, with their values.
# Functions that the call has defined may use them.
_left: dict[str, Any] = {}


def call(
    context: Context,
    title: str,
    packed: Mapping[int, Payload],
    outdated: Mapping[int, Sequence[str]],
    *,
    is_plain: bool = False,
) -> Any:
    """Call a function of the notebook on this rank, and return its result.

    `packed` has, for each rank, the function, its arguments, and the variables of the notebook's
    `__main__` that the function uses. `outdated` has, for each rank, the names of variables whose
    values on the rank are older than the notebook's: during the call they have the notebook's
    values. `title` names the function in messages. `is_plain` says that the notebook has packed the
    call by `nbdist.world.plain_calls`.
    """
    function, args, kwargs = _receive_call(context, title, packed, outdated, is_plain=is_plain)
    with _as_in_a_cell(context):
        return function(*args, **kwargs)


def map_items(
    context: Context,
    title: str,
    packed: Mapping[int, Payload],
    outdated: Mapping[int, Sequence[str]],
    *,
    returns_errors: bool,
    is_elsewhere: bool,
) -> None:
    """Call a function of the notebook with one item of `World.map` after another.

    The rank requests items until the notebook has none left. Each request brings the results of
    earlier items to the notebook.

    With `returns_errors`, an exception of the function is the result of its item; otherwise the
    first exception ends the task. `is_elsewhere` says that the notebook may be on another machine:
    then results are sent in messages, and not in shared memory. `title` names the function in
    messages. `packed` has, for each rank, the function and the notebook's variables that it uses.
    `outdated` has, for each rank, the names whose values there are older than the notebook's.
    """
    function, _, _ = _receive_call(context, title, packed, outdated)
    ask: Callable[[Sequence[ItemOutcome]], InputReply] = context.shell.kernel.next_items
    items: deque[tuple[int, Payload]] = deque()
    outcomes: list[ItemOutcome] = []
    with _as_in_a_cell(context), ExitStack() as segments:
        while (reply := ask(outcomes)).text is not None:
            segments.close()  # the notebook has read the results in these segments
            items.extend(reply.items)
            outcomes, size = [], 0
            while items and size < ENOUGH_RESULTS:
                index, payload = items.popleft()
                try:
                    value = function(unpickle(open_payload(payload), context.names))
                    frames = _frames_of_result(context, index, value)
                    value = None
                    size += size_of(frames)
                    result = _pack_result(index, frames, segments, is_elsewhere=is_elsewhere)
                    outcomes.append(ItemOutcome(index, result))
                except Exception as error:
                    is_own = isinstance(error, Problem)
                    contents = None if is_own else contents_of(error, context.names)
                    outcomes.append(ItemOutcome(index, contents, failure_of(error)))
                    if not returns_errors:
                        ask(outcomes)
                        raise
    if reply.problem:
        raise Problem(reply.problem)


def _frames_of_result(context: Context, index: int, value: Any) -> list[Buffer]:
    try:
        return context.namespace.frames_of(value)
    except Exception as error:  # a user's __reduce__ can raise anything
        path, kind, why = context.namespace.blame("result", value, error)
        part = "the result" if path == "result" else f"`{path}`"
        raise ItemProblem(
            f"{part} of item {index:,} ({kind}) cannot be sent to the notebook: {why}"
        ) from error


def _pack_result(
    index: int, frames: Sequence[Buffer], segments: ExitStack, *, is_elsewhere: bool
) -> Payload:
    """Pack the result of the item `index` of `World.map` for a message to the notebook.

    A big result is put into a segment, which is closed when `segments` is closed. If the notebook
    may be on another machine (`is_elsewhere`), the whole result is in the message, and a result
    that is too big raises ItemProblem.
    """
    if not is_elsewhere:
        payload, segment = pack_frames(frames)
        if segment is not None:
            segments.callback(segment.close)
        return payload
    if (size := size_of(frames)) > MAX_ITEM_BYTES:
        raise ItemProblem(
            f"the result of item {index:,} has {size_text(size)}, and World.map brings at most "
            f"{size_text(MAX_ITEM_BYTES)} an item from another machine: write it to a file, or "
            "keep it on the rank"
        )
    return pack_inline(frames)


class ItemProblem(Problem):
    """The result of an item of `World.map` cannot be sent to the notebook."""

    kind = "ItemProblem"


def _receive_call(
    context: Context,
    title: str,
    packed: Mapping[int, Payload],
    outdated: Mapping[int, Sequence[str]],
    *,
    is_plain: bool = False,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Unpack a function of the notebook and its arguments, for the rank that runs this op.

    Return the function, its positional arguments and its keyword arguments. The notebook's
    variables that the function uses are bound by `lent_names` until the op ends. The parameters are
    those of `call`.
    """
    context.title = title
    receive = context.namespace.receive_plain if is_plain else context.namespace.receive_values
    arrived = receive(packed[context.rank])
    replaced = {*READY_MODULES, *outdated.get(context.rank, ())}
    context.cleanup.enter_context(lent_names(context, arrived["names"], replaced))
    function, args, kwargs = arrived["call"]
    return function, args, kwargs


@contextmanager
def _as_in_a_cell(context: Context) -> Iterator[None]:
    """Within this context, user code is treated like the code of a cell.

    The names that the code binds and deletes are recorded in `context`. An exception that leaves
    the context is shown, except for BdbQuit, and raised again.
    """
    shell = context.shell
    with context.record_changes():
        try:
            yield
        except SystemExit:
            show(shell, exception_only=True)
            raise
        except BdbQuit:
            raise  # without a traceback: the notebook shows a line if the user has quit
        except BaseException as error:  # also KeyboardInterrupt, which is shown as in a cell
            tb = error.__traceback__
            while tb and tb.tb_next and tb.tb_frame.f_code.co_filename == __file__:
                tb = tb.tb_next  # leave out the calls in this file, above the user's function
            show(shell, (type(error), error, tb), tb_offset=0)
            raise
        finally:
            shell.events.trigger("post_execute")  # matplotlib shows its figures in this event


@contextmanager
def lent_names(
    context: Context, names: Mapping[str, Any], replaced: Iterable[str] = READY_MODULES
) -> Iterator[None]:
    """Within this context, bind variables of the notebook's `__main__` in the worker, for a call.

    If the worker itself has bound a variable of the same name, the call uses the worker's value,
    except for the names in `replaced`.

    At the end of the context, the notebook's variables are removed, and the names in `replaced` get
    the worker's values again. Names that the call itself has bound, by `global`, keep their new
    values. These may be functions that use the notebook's variables. So if the call has bound any
    name, the notebook's variables that the worker did not have stay bound, until a later call
    brings others.
    """
    namespace, bound = context.names, {*context.bound}
    covered = {n: namespace[n] for n in replaced if n in names and n in namespace}
    lent = {
        name: value
        for name, value in names.items()
        if name in covered
        or name not in namespace
        # The name has its value from an earlier call, and not from the worker.
        or namespace[name] is _left.get(name, _UNBOUND)
    }
    namespace.update(lent)
    yield
    for name, value in lent.items():
        if namespace.get(name, _UNBOUND) is not value:
            continue  # the call has bound or deleted the name
        if name in covered:
            namespace[name] = covered[name]
        elif context.bound > bound:
            _left[name] = value
        else:
            del namespace[name]


def debug(context: Context) -> bool:
    """Debug the last exception of this rank until the user quits or presses Stop.

    Return False if there is no exception.
    """
    error = next(last_errors(context.shell), None)
    if error is None or error.__traceback__ is None:
        return False
    sys.stdout.write(f"{error_line(type(error).__name__, message_of(error))}\n")
    with suppress(KeyboardInterrupt):
        post_mortem(error)
    return True
