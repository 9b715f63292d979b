"""Runs functions and scripts on ranks of a world, and prints their output line by line.

`World` uses this module in a script or notebook; the notebook's magics show panels instead.  If a
rank asks for input, this process's `input` asks the user, on the thread that follows the task.
"""

from __future__ import annotations

import functools
import getpass
import inspect
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from typing import Any, NoReturn

from nbdist.errors import NbdistError, UsageError, VariableNotSent, WorkerError
from nbdist.output.ansi import strip
from nbdist.output.bars import merged_line
from nbdist.output.events import Failure, RankError
from nbdist.output.text import PlainLines
from nbdist.system.folders import current_folder
from nbdist.values.definitions import SYSTEM_NAMES
from nbdist.values.memory import reduce_to_file
from nbdist.values.payload import Payload, pack_frames
from nbdist.values.pickling import Pickled, pickle
from nbdist.values.unpicklable import blame, fails_in
from nbdist.wire.work import OpCall, ProgramKind, Script, Task
from nbdist.world import dispatch, plain_calls, recovery
from nbdist.world.engine import Engine
from nbdist.world.moving_line import MovingLine
from nbdist.world.name_table import WORKERS_OWN
from nbdist.world.outgoing import Outgoing, SendQuestion
from nbdist.world.result import CellResult, raised
from nbdist.world.sent_objects import Parcel
from nbdist.world.task_run import TaskRun

log = logging.getLogger("nbdist.world")


def find_script(
    kind: ProgramKind, name: str, args: Iterable[Any] = (), *, local_rank: bool = False
) -> Script:
    """Return the `Script` that runs a file, module or executable.

    `local_rank` is as in `Script`.  Raises UsageError if there is no such program, or if it cannot
    run.  A module is found without importing it, since it may import torch.
    """
    find = {"file": _find_file, "module": _find_module, "executable": _find_executable}[kind]
    file, root = find(name)
    near = os.path.relpath(file, current_folder()) if file else ""
    near = "" if near.startswith(os.pardir) else near
    return Script(kind, name, tuple(map(str, args)), file, root, local_rank, near)


def _find_file(name: str) -> tuple[str, str]:
    file = os.path.normpath(os.path.join(current_folder(), os.path.expanduser(name)))
    if not os.path.exists(file):
        near = "" if os.path.isabs(name) else f" in {current_folder()}"
        raise UsageError(
            f"there is no script `{name}`{near}. `-m {name}` runs a module, "
            f"`--no-python {name}` an executable."
        )
    stem, suffix = os.path.splitext(name)
    if suffix == ".ipynb":
        raise UsageError(
            f"`{name}` is a notebook: `%run {name}` runs its cells in the notebook, "
            f"`!jupyter nbconvert --to script {name}` writes the script `{stem}.py`."
        )
    try:
        with open(file, "rb") as opened:
            compile(opened.read(), file, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"the script `{name}` cannot be read: {error.strerror}.") from None
    except (SyntaxError, ValueError) as error:
        where = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else error
        raise UsageError(f"`{name}` is no Python: {where}; nothing has run.") from None
    return file, os.path.dirname(file)


def _find_module(name: str) -> tuple[str, str]:
    """Return the file of a module, and the folder in which the program's code is.

    Both are "" if the module has no file, for example because it is built in.
    """
    if name.endswith(".py") or os.sep in name:
        module = name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise UsageError(
            f"`-m {name}`: give either a script or `-m module`. Leave out `-m` to run the "
            f"script, or name the module: `-m {module}`."
        )
    full, spec = name, _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        full = f"{name}.__main__"
        if (spec := _find_spec(full)) is None:
            raise UsageError(f"`-m {name}`: it is a package without a `__main__` module.")
    if spec is None:
        raise UsageError(
            f"`-m {name}`: there is no module of this name on the notebook's `sys.path`, "
            f"nor in {current_folder()}."
        )
    if not spec.has_location or not spec.origin:
        return "", ""
    root = os.path.dirname(spec.origin)
    if "site-packages" not in root:
        root = os.path.abspath(os.path.join(root, *[".."] * full.count(".")))
    return spec.origin, root


def _find_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module, or None; the module's packages are not imported.

    The module is searched in the current folder and on `sys.path`.
    """
    first, *others = name.split(".")
    spec = PathFinder.find_spec(first, [current_folder()])
    if spec is None:
        with suppress(ValueError):  # an empty name, or `__main__`
            spec = find_spec(first)  # this also asks the finders of editable installations
    for part in others:
        # Search for `part` alone in the folders of its package.  A search by the full name would
        # fail in a namespace package, which looks for its parent among the imported modules.
        path = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(part, [*path] if path else [])
    return spec


def _find_executable(name: str) -> tuple[str, str]:
    if file := shutil.which(os.path.expanduser(name)):
        return os.path.abspath(file), ""
    if os.sep not in name:
        hint = f" `./{name}` runs the one in this folder." if os.path.isfile(name) else ""
        raise UsageError(f"`--no-python {name}`: there is no such executable on PATH.{hint}")
    if not os.path.isfile(os.path.expanduser(name)):
        raise UsageError(f"`--no-python {name}`: there is no such file.")
    raise UsageError(f"`--no-python {name}`: it is not executable. `!chmod +x {name}`")


def ask(engine: Engine, running: TaskRun, rank: int) -> None:
    """Ask the user for the input that a rank waits for, and send it to the rank.

    If this process cannot ask for input, `input` raises on all ranks of the task that wait for it.
    """
    request, prompt = running.prompts[rank], running.prompts.prompt(rank)
    while True:
        try:
            typed = getpass.getpass(prompt) if request.secret else input(prompt)
            answers = running.prompts.answers(rank, typed, engine.size)
        except UsageError as error:
            prompt = f"{error} {running.prompts.prompt(rank)}"
            continue
        except EOFError:
            engine.connection.reply(running, {rank: None})
        # Without an input box IPython raises NotImplementedError.  Without stdin Python raises one
        # of the other errors.
        except (NotImplementedError, OSError, RuntimeError, ValueError):
            engine.connection.refuse_prompts(running)
        else:
            engine.connection.reply(running, answers)
        return


SCRIPT_NAMES = frozenset({"__file__"})
"""Names that Python binds in `__main__`, and that are sent because functions may use them."""

TRACEBACK_HEAD = "Traceback (most recent call last)"


def pop_selection(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments `ranks` and `rank` of `World.run` from `kwargs`, and return them.

    Raises UsageError if the function can take an argument of the same name: then it is unclear
    whether the argument selects ranks or is meant for the function.
    """
    selection: dict[str, Any] = {
        name: kwargs.pop(name) for name in ("ranks", "rank") if name in kwargs
    }
    for name, value in selection.items():
        if _takes_argument(function, name):
            title = title_of(function)
            raise UsageError(
                f"`{name}={value!r}` selects ranks, but `{title}` can take a `{name}` too. "
                f"`run(functools.partial({title}, {name}=...))` passes it to the function, "
                f"`run(lambda: {title}(...), {name}={value!r})` selects ranks."
            )
    return selection


def _takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function accepts a keyword argument of this name, or has no signature."""
    while isinstance(function, functools.partial):
        if name in function.keywords:  # already set, so a caller does not mean this argument
            return False
        function = function.func
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function in C may have no signature
        return True
    return any(
        each.kind is each.VAR_KEYWORD
        or (each.name == name and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
        for each in parameters
    )


def run_call(
    engine: Engine,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ranks: tuple[int, ...],
) -> CellResult[Any]:
    """Call a function on all of these ranks at once; return its values (see `World.run`)."""

    def call(
        packed: Mapping[int, Payload],
        parcels: Mapping[int, Parcel],
        names: Mapping[str, Any],
        *,
        is_plain: bool,
    ) -> CellResult[Any]:
        arguments = {
            "title": title_of(function),
            "packed": packed,
            "outdated": outdated_names(engine, names),
            "is_plain": is_plain,
        }
        task = engine.task(OpCall("run.call", arguments), ranks=ranks)
        return outcome(engine, [dispatch.submit(engine, task, shipped=parcels)])

    is_ours = functools.partial(is_sent_name, engine.names.namespace)
    plain = plain_calls.pack(engine.names.namespace, function, args, kwargs, is_ours)
    if plain is not None and (none_sent := _parcels_of_plain(engine, function, ranks)) is not None:
        return call(dict.fromkeys(ranks, plain.payload), none_sent, plain.names, is_plain=True)
    names = names_of_call(engine.names.namespace, function, args, kwargs)
    values = {"call": (function, args, kwargs), "names": names}
    with sending(engine, values, ranks, are_lent=True) as (payloads, parcels):
        return call(payloads, parcels, names, is_plain=False)


def _parcels_of_plain(
    engine: Engine, function: Callable[..., Any], ranks: Iterable[int]
) -> dict[int, Parcel] | None:
    """Return the parcels for a plain call, which brings no objects to the ranks.

    Returns None if the call has to bring an object nevertheless: if the notebook has changed an
    object that a rank has, or if a rank has a counterpart of the function itself.
    """
    objects = engine.names.objects
    known_states = [objects.of(rank) for rank in ranks]
    key = objects.links.key_of(function)
    if any(key in states for states in known_states):
        return None
    objects.runs += 1  # compare again: a script may have changed any object
    outgoing = Outgoing(objects, engine.names.namespace, frozenset(ranks))
    if any(known_states):
        outgoing.compare()
        if any(outgoing.changed.values()):
            return None
        _log_kept(outgoing)
    return outgoing.parcels([])


def outdated_names(engine: Engine, names: Iterable[str]) -> dict[int, list[str]]:
    """Return, by rank, the names whose value on the rank is older than the notebook's.

    The notebook has bound such a name again since it sent the name to the rank.  During the call,
    the rank uses the notebook's present value, as in a cell.
    """
    outdated: dict[int, list[str]] = {}
    for name in names:
        for rank in engine.names.ranks_with_older(name):
            outdated.setdefault(rank, []).append(name)
    return outdated


@contextmanager
def sending(
    engine: Engine, values: Mapping[str, Any], ranks: Iterable[int], *, are_lent: bool = False
) -> Iterator[tuple[dict[int, Payload], dict[int, Parcel]]]:
    """Pack values for ranks, with references to objects that the ranks already have.

    Yields the payloads by rank, and by rank the parcel that records what the payload brings.  Wait
    for the task within the `with` block, since the end of the block closes the shared memory of the
    payloads.  Raises any exception of pickling, and the errors of `dispatch.run`.

    With `are_lent`, the values are arguments of a call, which the ranks should free at its end.
    """
    objects = engine.names.objects
    objects.runs += 1  # compare again: a script may have changed any object
    outgoing = Outgoing(objects, engine.names.namespace, frozenset(ranks))
    while True:
        for value in values.values():
            outgoing.scan_value(value)
        outgoing.compare()
        if to_inspect := outgoing.objects_to_inspect():
            on = tuple(sorted(rank for rank, changed in outgoing.changed.items() if changed))
            question = SendQuestion(on, to_inspect)
            task = engine.task(OpCall("values.inspect", question.arguments), ranks=on)
            outgoing.apply_replies(dispatch.run(engine, task).by_rank)
        if not outgoing.renew_replaced():
            break
    _log_kept(outgoing)
    payloads, sent = dict[int, Payload](), list[tuple[tuple[int, ...], Parcel]]()
    with ExitStack() as memory:
        for group in outgoing.groups({}):
            message, states = outgoing.message(values, group[0])
            payload, segment = pack_frames(message.frames)
            if segment is not None:
                memory.callback(segment.close)
            payloads |= dict.fromkeys(group, payload)
            sent.append((group, Parcel(states=states)))
        lent = {
            rank: parcel.states.keys() - objects.of(rank).keys()
            for group, parcel in (sent if are_lent else ())
            for rank in group
        }
        try:
            yield payloads, outgoing.parcels(sent)
        finally:
            objects.renew_partly_kept(lent)


def _log_kept(outgoing: Outgoing) -> None:
    for key in outgoing.kept():
        kind = type(outgoing.objects.links.find(key)).__qualname__
        log.warning("ranks have changed a %s since it was sent, and keep theirs", kind)


def run(engine: Engine, task: Task, max_restarts: int = 0) -> CellResult[Any]:
    """Run a task, and again after a failure, at most `max_restarts` times; return the last result.

    The task is not run again after Stop, or after some errors, such as a SyntaxError
    (`outcome_texts.restart_text`).  Shows output and raises errors as `outcome` does.
    """
    return outcome(engine, _attempts(engine, task, max_restarts))


def _attempts(engine: Engine, task: Task, max_restarts: int) -> Iterator[TaskRun]:
    for attempt in dispatch.attempts(task, max_restarts):
        running = dispatch.submit(engine, attempt)
        yield running
        if not running.ending.restart_text:
            return


def outcome(engine: Engine, attempts: Iterable[TaskRun]) -> CellResult[Any]:
    """Wait for each attempt of a task; return the result of the last attempt, or raise its error.

    With the option `show` of the world, output is printed line by line: `[0-1] epoch 3`.  The error
    shows the traceback of the rank that failed first.  Raises KeyboardInterrupt after Stop.
    """
    for running in attempts:
        for _ in following(engine, running):
            pass
    check(engine, running)
    result = running.result()
    engine.connection.release_values(running)
    return result


def check(engine: Engine, running: TaskRun) -> None:
    """Raise the error of a task that `following` has followed, if the task has failed.

    Raises KeyboardInterrupt after Stop.
    """
    try:
        dispatch.check(engine, running)
    except WorkerError as error:
        error.show(f"rank {error.rank}:", *_rank_lines(running.transcript[error.rank].error))
        raise raised(error) from None


def following(engine: Engine, running: TaskRun) -> Iterator[None]:
    """Follow a task as `recovery.follow` does, and yield after each step.

    With the option `show` of the world, print the output of ranks.  Ask the user for input if a
    rank waits for it.
    """
    lines, bars = PlainLines(running.task.ranks), MovingLine(sys.stdout)
    for outputs in recovery.follow(engine, running, answers=True):
        with running.stop.counting_presses():
            now = time.monotonic()
            for rank, output in outputs if engine.config.show else ():
                if not isinstance(output, RankError):
                    _write(lines.receive(rank, output, now), bars)
            _write(lines.due(now), bars)
            if engine.config.show and bars.is_due(now):
                bars.show(merged_line(running.transcript), now)
            if (rank_to_ask := running.prompts.next(now, running.unfinished)) is not None:
                _write(lines.flush(), bars)
                bars.clear()
                ask(engine, running, rank_to_ask)
        yield
    _write(lines.finish(time.monotonic()), bars)
    bars.clear()


def _write(lines: Iterable[str], bars: MovingLine) -> None:
    if text := "".join(f"{line}\n" for line in lines):
        bars.clear()
        sys.stdout.write(text)
        sys.stdout.flush()


def _rank_lines(error: RankError | None) -> Sequence[str]:
    """Return the lines of a rank's traceback, without colours, or the last lines of a dead rank."""
    if not isinstance(error, Failure):
        return error.last_lines if error else ()
    lines = strip("\n".join([*error.traceback, *error.account])).splitlines()
    # Drop IPython's first lines: a rule, and the exception's name, which the last line repeats.
    heads = [i for i, line in enumerate(lines[:2]) if line.endswith(TRACEBACK_HEAD)]
    return lines[heads[0] + 1 :] if heads else lines


def title_of(function: Callable[..., Any]) -> str:
    """Return a function's name as users know it, such as `train`."""
    inner = getattr(function, "func", function)  # functools.partial has `func`
    return getattr(inner, "__qualname__", type(inner).__name__).rpartition("<locals>.")[2]


def names_of_call(
    namespace: dict[str, Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Return the variables of `__main__` that a call uses, directly or through other variables.

    Raises VariableNotSent if the call or a variable cannot be pickled.
    """

    def sketch(name: str, value: Any) -> Pickled:
        try:
            return pickle(value, namespace, sketch=True, reduce=reduce_to_file)
        except Exception as problem:  # noqa: BLE001 (a user's __reduce__ can raise anything)
            refuse(name, value, problem)

    def refuse(name: str, value: Any, problem: Exception) -> NoReturn:
        if isinstance(problem, NbdistError):  # such as NotEnoughMemory
            raise problem
        path, kind, why, remedy = blame(name, value, fails_in(namespace), problem)
        remedy = remedy.replace("the cell", "the function")
        raise VariableNotSent(name, path, kind, why, remedy) from None

    def whole(names: Mapping[str, Any]) -> Pickled:
        try:
            return pickle((function, args, kwargs, names), namespace, reduce=reduce_to_file)
        except Exception as problem:  # noqa: BLE001 (a user's __reduce__ can raise anything)
            # Find the argument that cannot be sent, under the name that the user knows.
            parts = {f"argument {index}": value for index, value in enumerate(args, 1)} | kwargs
            with suppress(TypeError, ValueError):  # no signature, or the arguments do not fit
                parts = inspect.signature(function).bind(*args, **kwargs).arguments
            for name, value in {title_of(function): function, **parts}.items():
                sketch(name, value)
            refuse(title_of(function), (function, args, kwargs), problem)

    names: dict[str, Any] = {}
    pickled = whole(names)
    needs = pickled.needs
    while new := {*filter(functools.partial(is_sent_name, namespace), needs - names.keys())}:
        names.update({name: namespace[name] for name in sorted(new)})
        needs = frozenset().union(*(sketch(name, names[name]).needs for name in new))
    if names:
        whole(names)
    return names


def is_sent_name(namespace: Mapping[str, Any], name: str) -> bool:
    """Return True if the notebook's value of a name is sent with a function that uses the name."""
    is_system = SYSTEM_NAMES.fullmatch(name) and name not in SCRIPT_NAMES
    return name in namespace and not is_system and name not in WORKERS_OWN
