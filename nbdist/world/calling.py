"""Functions called on all ranks of a world: what goes there with them, and what comes back."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from nbdist.errors import VariableNotSent, WorkerError
from nbdist.output.ansi import strip
from nbdist.output.bars import merged_line
from nbdist.output.events import Died, Failure, RankError
from nbdist.output.plain import PlainLines
from nbdist.values.definitions import SYSTEM_NAMES
from nbdist.values.payload import pack_frames
from nbdist.values.pickling import Pickled, pickle
from nbdist.values.unpicklable import PICKLING_ERRORS, blame, fails_in
from nbdist.wire.task import Call, Task
from nbdist.world.asking import ask, next_to_ask
from nbdist.world.moving_line import MovingLine
from nbdist.world.names import WORKERS_OWN
from nbdist.world.result import CellResult, raised
from nbdist.world.running import RunningTask
from nbdist.world.session import Session

SCRIPT_NAMES = frozenset({"__file__"})
"""Names of Python's own in `__main__` that functions of a script read."""

TRACEBACK_HEAD = "Traceback (most recent call last)"


def run_call(
    session: Session,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> CellResult[Any]:
    """Call the function on all ranks at once, and wait; raises what a cell raises."""
    call = _FunctionCall(title_of(function), function, args, kwargs)
    payload, segment = pack_frames(_Packing(call, session.namespace).pickled().frames)
    try:
        arguments = {"title": call.title, "packed": payload}
        running = session.submit(session.task(Call("call", arguments)))
        return outcome(session, running)
    finally:
        if segment is not None:
            segment.close()


def outcome(session: Session, running: RunningTask) -> CellResult[Any]:
    """Wait for a task; raises its error, with the traceback of the rank that failed first.

    What ranks say goes to stdout line by line, if the config's `show`: `[0-1] epoch 3`; what
    ended them the error says.  Raises KeyboardInterrupt after Stop.
    """
    lines, bars = PlainLines(running.task.ranks), MovingLine(sys.stdout)
    for news in session.follow(running, answers=True):
        with running.counting_stops():
            now = time.monotonic()
            for rank, output in news if session.config.show else ():
                if not isinstance(output, RankError):
                    _write(lines.receive(rank, output, now), bars)
            _write(lines.due(now), bars)
            if session.config.show and bars.is_due(now):
                bars.show(merged_line(running.transcript), now)
            if (asks := next_to_ask(running)) is not None:
                _write(lines.flush(), bars)
                bars.clear()
                ask(session, running, asks)
    _write(lines.finish(time.monotonic()), bars)
    bars.clear()
    try:
        session.check(running)
    except WorkerError as error:
        error.show(f"rank {error.rank}:", *rank_lines(running.transcript[error.rank].error))
        raise raised(error) from None
    result = running.result()
    session.let_go(running)
    return result


def run_attempts(session: Session, task: Task, most: int) -> CellResult[Any]:
    """Send a task, again at most `most` times where it fails; what it asks for is typed here.

    Raises its error, or KeyboardInterrupt after Stop.
    """
    for attempt in session.attempts(task, most):
        running = session.submit(attempt)
        for _ in session.follow(running, answers=True):
            with running.counting_stops():
                if (asks := next_to_ask(running)) is not None:
                    ask(session, running, asks)
    try:
        session.check(running)
    except WorkerError as error:
        raise raised(error) from None
    return running.result()


def _write(lines: Iterable[str], bars: MovingLine) -> None:
    if text := "".join(f"{line}\n" for line in lines):
        bars.clear()
        sys.stdout.write(text)
        sys.stdout.flush()


def rank_lines(error: RankError | None) -> list[str]:
    """Return a failed rank's traceback, without colours, or its last lines."""
    match error:
        case Failure() as failure:
            lines = strip("\n".join([*failure.traceback, *failure.account])).splitlines()
            # IPython begins with a rule, and with the exception's name, which comes again.
            heads = [i for i, line in enumerate(lines[:2]) if line.endswith(TRACEBACK_HEAD)]
            return lines[heads[0] + 1 :] if heads else lines
        case Died(last_lines=last_lines):
            return list(last_lines)
    return []


def title_of(function: Callable[..., Any]) -> str:
    """Write `train`, as people call it."""
    inner = getattr(function, "func", function)  # of a partial
    return getattr(inner, "__qualname__", type(inner).__name__).rpartition("<locals>.")[2]


@dataclass(frozen=True)
class _FunctionCall:
    """What is to be called; `title` is what people call the function."""

    title: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Packing:
    """Pickles a call with the names of `__main__` that its functions use, as far as they go."""

    def __init__(self, call: _FunctionCall, namespace: dict[str, Any]) -> None:
        self._call = call
        self._namespace = namespace

    def pickled(self) -> Pickled:
        """Return all of it in one pickle, so that what shares objects still does."""
        names: dict[str, Any] = {}
        pickled = self._pickle_call(names)
        needs = pickled.needs
        while new := {name for name in needs - names.keys() if self._is_ours(name)}:
            names.update({name: self._namespace[name] for name in sorted(new)})
            needs = frozenset().union(*(self._pickle(name, names[name]).needs for name in new))
        return self._pickle_call(names) if names else pickled

    def _is_ours(self, name: str) -> bool:
        """Say whether the caller has it and it is not one of those that every worker has."""
        is_system = SYSTEM_NAMES.fullmatch(name) and name not in SCRIPT_NAMES
        return name in self._namespace and not is_system and name not in WORKERS_OWN

    def _pickle_call(self, names: Mapping[str, Any]) -> Pickled:
        call = self._call
        try:
            return pickle((call.function, call.args, call.kwargs, names), self._namespace)
        except PICKLING_ERRORS as problem:
            for name, value in self._parts().items():
                self._pickle(name, value)
            self._refuse(call.title, (call.function, call.args, call.kwargs), problem)

    def _parts(self) -> dict[str, Any]:
        """Return the function and its arguments, under the names that people know them by."""
        call = self._call
        named = {f"argument {index}": value for index, value in enumerate(call.args, 1)}
        named.update(call.kwargs)
        with suppress(TypeError, ValueError):  # no signature, or it does not fit
            named = dict(inspect.signature(call.function).bind(*call.args, **call.kwargs).arguments)
        return {call.title: call.function, **named}

    def _pickle(self, name: str, value: Any) -> Pickled:
        try:
            return pickle(value, self._namespace, sketch=True)
        except PICKLING_ERRORS as problem:
            self._refuse(name, value, problem)

    def _refuse(self, name: str, value: Any, problem: Exception) -> NoReturn:
        path, kind, why, remedy = blame(name, value, fails_in(self._namespace), problem)
        remedy = remedy.replace("the cell", "the function")
        raise VariableNotSent(name, path, kind, why, remedy) from None
