"""Functions called on all ranks of a world: what goes there with them, and what comes back."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from nbdist.errors import UnshippableName, WorkerError
from nbdist.wire.calls import CALL, TAKE, FunctionCall
from nbdist.wire.definitions import SYSTEM_NAMES
from nbdist.wire.outputs import Died, Failure
from nbdist.wire.payload import pack_frames
from nbdist.wire.pickling import Pickled, pickle
from nbdist.wire.unshippable import PICKLING_ERRORS, blame, fails_in
from nbdist.world.lines import PlainLines
from nbdist.world.result import CellResult
from nbdist.world.sgr import strip

if TYPE_CHECKING:
    from nbdist.world.running import RunningCell
    from nbdist.world.world import World

WORKERS_OWN = frozenset({"rank", "world_size", "local_rank", "device"})
SCRIPT_NAMES = frozenset({"__file__"})
"""Names of Python's own in `__main__` that functions of a script read."""

TRACEBACK_HEAD = "Traceback (most recent call last)"


def run_call(
    world: World, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> CellResult[Any]:
    """Call the function on all ranks at once, and wait; raises what a cell raises."""
    call = FunctionCall(title_of(function), function, args, kwargs)
    payload, segment = pack_frames(_Packing(call, world.namespace).pickled().frames)
    try:
        running = world.submit(world.cell(call.source, names=payload, fetch=(TAKE,)))
        return outcome(running, shows=world.shows)
    finally:
        if segment is not None:
            segment.close()


def outcome(running: RunningCell, *, shows: bool) -> CellResult[Any]:
    """Wait for the cell; raises its error, with the traceback of the rank that failed first.

    What ranks say goes to stdout line by line, if `shows`; errors are told by the error.
    Stop interrupts the ranks, and waits for them.
    """
    show = _show if shows else _pass_over
    try:
        show(running)
    except KeyboardInterrupt:
        running.interrupt()
        show(running)
        raise
    result = running.result()
    error = running.error()
    if error is None:
        running.let_go()
        return result
    if isinstance(error, WorkerError):
        error.show(f"rank {error.rank}:", *rank_lines(running.transcript[error.rank].error))
    raise error


def _show(running: RunningCell) -> None:
    """Write what ranks say to stdout as it comes: `[0-1] epoch 3`."""
    lines = PlainLines(running.cell.ranks)
    try:
        for news in running:
            now = time.monotonic()
            for rank, output in news:
                if not isinstance(output, Failure | Died):
                    _write(lines.receive(rank, output, now))
            _write(lines.due(now))
    finally:
        _write(lines.finish(time.monotonic()))


def _pass_over(running: RunningCell) -> None:
    for _ in running:
        pass


def _write(lines: Iterable[str]) -> None:
    if text := "".join(f"{line}\n" for line in lines):
        sys.stdout.write(text)
        sys.stdout.flush()


def rank_lines(error: Failure | Died | None) -> list[str]:
    """What a failed rank has to say of it: its traceback, without colours; its last lines."""
    match error:
        case Failure(traceback=traceback):
            lines = strip("\n".join(traceback)).splitlines()
            # IPython begins with a rule, and with the exception's name, which comes again.
            heads = [i for i, line in enumerate(lines[:2]) if line.endswith(TRACEBACK_HEAD)]
            return lines[heads[0] + 1 :] if heads else lines
        case Died(last_lines=last_lines):
            return list(last_lines)
    return []


def title_of(function: Callable[..., Any]) -> str:
    """`train`, as people call it."""
    inner = getattr(function, "func", function)  # of a partial
    return getattr(inner, "__qualname__", type(inner).__name__).rpartition("<locals>.")[2]


class _Packing:
    """Pickles a call with the names of `__main__` that its functions use, as far as they go."""

    def __init__(self, call: FunctionCall, namespace: dict[str, Any]) -> None:
        self._call = call
        self._namespace = namespace

    def pickled(self) -> Pickled:
        """All of it in one pickle, so that what shares objects still does."""
        names: dict[str, Any] = {}
        first = pickled = self._pickle_call()
        needs = first.needs
        while new := {name for name in needs - names.keys() if self._is_ours(name)}:
            names.update({name: self._namespace[name] for name in sorted(new)})
            needs = frozenset().union(*(self._pickle(name, names[name]).needs for name in new))
        if names:
            self._call.names = names
            pickled = self._pickle_call()
        return pickled

    def _is_ours(self, name: str) -> bool:
        """Whether the caller has it and it is not one of those that every worker has."""
        is_system = SYSTEM_NAMES.fullmatch(name) and name not in SCRIPT_NAMES
        return name in self._namespace and not is_system and name not in WORKERS_OWN

    def _pickle_call(self) -> Pickled:
        try:
            return pickle({CALL: self._call}, self._namespace)
        except PICKLING_ERRORS as problem:
            for name, value in self._parts().items():
                self._pickle(name, value)
            self._refuse(self._call.title, self._call, problem)

    def _parts(self) -> dict[str, Any]:
        """The function and its arguments, under the names that people know them by."""
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
        raise UnshippableName(name, path, kind, why, remedy) from None
