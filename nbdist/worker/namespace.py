"""Receives, compares and packs the variables of a worker, the names of its `__main__`.

The kernel and the ops use this module in each worker, mostly on the main thread. `find_op` finds
the function of an op by its name.
"""

from __future__ import annotations

import pickle as plain_pickle
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from nbdist import plugins
from nbdist.output.events import NAME_PROBLEM
from nbdist.values.definitions import SYSTEM_NAMES
from nbdist.values.linked import CannotRebuild, NotThere, ReceivedMessage
from nbdist.values.payload import (
    INLINE_LIMIT,
    OTHER,
    Identity,
    PackedPayload,
    Payload,
    Segment,
    StepwiseValue,
    is_light,
    kind_of,
    open_payload,
    pack_frames,
    packing,
    size_of,
)
from nbdist.values.pickling import Buffer, frames_of, pickle, unpickle
from nbdist.values.unpicklable import blame, fails_in, type_name
from nbdist.wire.ops import Brought, Replaced
from nbdist.wire.work import Task
from nbdist.worker import ops
from nbdist.worker.counterparts import Counterparts, Keyed
from nbdist.worker.returned import KeptValues, ReturnReducer, SpreadValue

MOVED_EVERY = 0.25  # seconds between two messages on how much of a big value has been packed


@dataclass
class Taken:
    """Variables that this rank has received and not bound yet.

    `values` has the values by name, or for a snapshot the contents of its file. If the notebook has
    pushed the values, `arrived` is the message that brought them; otherwise it is None. If they
    came from another rank, `keyed` lists the objects in them that have a key.
    """

    values: dict[str, Any]
    keyed: Sequence[Keyed] = ()
    arrived: ReceivedMessage | None = None


@dataclass(frozen=True)
class Bound:
    """The result of `bind_received`: the names of the variables that were bound.

    `replaced` has, by name, facts on old values that could not be changed in place. `gained` has
    the keys of objects that came from another rank.
    """

    names: frozenset[str]
    gained: tuple[int, ...]
    replaced: Mapping[str, Replaced]


class Problem(Exception):
    """Ends a task with a message for the user instead of a traceback."""

    kind = ""  # the `name` of the `Failure` by which the notebook learns of the problem


class VariableError(Problem):
    """A variable could not be bound or copied, or a value could not be sent to the notebook."""

    kind = NAME_PROBLEM


class Namespace:
    """The variables of this rank: wraps the kernel's `user_ns`, the names of `__main__`.

    `ready` has the variables that every worker has from its start, such as `rank` and `device`.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self.ready: dict[str, Any] = {}
        self.counterparts = Counterparts(names)
        self.report_progress: Callable[[int, int], None] = lambda done, total: None
        self.warn: Callable[[str], None] = lambda text: None
        self.last_values = KeptValues()
        self._lent_segments: dict[str, list[Segment]] = {}
        self._received: dict[str, Taken] = {}
        self._identities: dict[str, Identity] = {}

    def add_ready(self, names: Mapping[str, Any]) -> None:
        """Bind variables that every worker has from its start, and add them to `ready`."""
        self.ready.update(names)
        self._names.update(names)

    def change_ready(self, name: str, value: object) -> None:
        """Change a value in `ready`, such as `rank`, and the variable of the same name.

        If a cell has bound the variable to another value, the variable keeps that value.
        """
        # Compare by `is`: if a cell has bound a tensor, `==` would not return a bool.
        if self._names.get(name) is self.ready[name]:
            self._names[name] = value
        self.ready[name] = value

    def receive(self, task: Task, rank: int) -> list[str]:
        """Bind the variables that came with a task, and apply the notebook's changes of objects.

        Also delete variables that the notebook has deleted and this rank has not changed; return
        their names. Names of `ready` that a cell has deleted are bound again. Raises VariableError
        if a variable cannot be rebuilt; then no variable of the task is bound.
        """
        for name in self.ready.keys() - self._names.keys():
            self._names[name] = self.ready[name]
        # The notebook sends a further task only after it has read all values that were lent to it.
        for task_id in list(self._lent_segments):
            self.release_values(task_id)
        self.counterparts.forget(task.forget.get(rank, ()))
        arrived = None
        if (payload := task.names.get(rank)) is not None:
            arrived = self.read(payload)
            self._commit(arrived)
        if task.plain is not None:
            self._names.update(self.open(task.plain))
        deleted = self.counterparts.delete(task.deleted.get(rank, ()))
        if arrived is not None:
            self.counterparts.bind_sent(arrived.values)
        return deleted

    def receive_values(self, payload: Payload) -> dict[str, Any]:
        """Unpack the function and the arguments of a call; bind no variables.

        The result has the function with its arguments under "call", and under "names" the variables
        that came with them. Objects in the arguments that have a key are registered, so that later
        messages of the notebook can refer to them.
        """
        try:
            arrived = self.read(payload)
            self._commit(arrived, lent=True)
        finally:
            self.counterparts.end_idle()
        return arrived.values

    def receive_plain(self, payload: Payload) -> dict[str, Any]:
        """Unpack the arguments of a plain call: a call with only plain values, such as 3 or "sgd".

        `nbdist.world.plain_calls` packs such calls. No argument gets a key. The result has the same
        form as that of `receive_values`: under "call" the function with its arguments, and under
        "names" the variables that came with them.
        """
        self.counterparts.end_idle()
        parts = []
        for what, frame in zip(("call", "call", "names"), payload.frames, strict=False):
            try:
                parts.append(unpickle([frame], self._names))
            except Exception as error:  # such as an ImportError of a module that this rank lacks
                raise _not_rebuilt(f"`{what}`", error) from error
        function, (args, kwargs), *names = parts
        return {"call": (function, args, kwargs), "names": names[0] if names else {}}

    def read(self, payload: Payload) -> ReceivedMessage:
        """Rebuild the values that the notebook has sent, without binding any variable.

        Raises VariableError if a value cannot be rebuilt.
        """
        try:
            return self.counterparts.read(open_payload(payload))
        except CannotRebuild as problem:
            what = f"`{problem.name}`" if problem.name else "a variable that the cell uses"
            error = problem.__cause__
            raise _not_rebuilt(what, error) from error
        except NotThere:
            raise VariableError(
                "this rank has dropped an object that the cell uses; run the cell again"
            ) from None

    def _commit(self, arrived: ReceivedMessage, *, lent: bool = False) -> None:
        accept = self.counterparts.accept_lent if lent else self.counterparts.accept
        try:
            accept(arrived)
        except Exception as error:  # a user's `__setstate__` or attribute can raise anything
            raise VariableError(
                "a change of a variable could not be made in the worker: "
                f"{type(error).__name__}: {error}"
            ) from error

    def open(self, payload: Payload) -> Any:
        """Unpickle the value of a payload; raise VariableError if the value cannot be rebuilt."""
        try:
            return unpickle(open_payload(payload), self._names)
        except Exception as error:  # a user's class can raise anything while it is rebuilt
            raise _not_rebuilt("a variable that the cell uses", error) from error

    def keep_received(self, received: Taken, task_id: str) -> None:
        """Keep the values that a task has received, for `bind_received` or `pop_received`.

        Values that an earlier task has received are dropped. If the new values are not wanted any
        more, `release_values` drops them.
        """
        self._received = {task_id: received}

    def pop_received(self) -> Taken:
        """Return the values that `keep_received` has kept, and forget them.

        Raises VariableError if there are none.
        """
        if not self._received:
            raise VariableError("there is nothing to bind: this rank has received no values")
        return self._received.popitem()[1]

    def bind_received(self) -> Bound:
        """Bind the variables that `keep_received` has kept.

        If a variable's old value has the same structure as its new one, the variable keeps the old
        object, which gets the contents of the new one.
        """
        received = self.pop_received()
        if received.arrived is not None:
            self._commit(received.arrived)
        instead, replaced = self.counterparts.replace(received.values, received.keyed)
        gained = self.counterparts.register(received.keyed, instead)
        if received.arrived is not None:
            self.counterparts.move_keys(instead)
            self.counterparts.bind_sent({name: self._names[name] for name in received.values})
        return Bound(frozenset(received.values), gained, replaced)

    def release_values(self, task_id: str) -> None:
        """Release the memory of the values that a task has received, kept, or lent to the notebook.

        The main thread and the control thread call this.
        """
        self._received.pop(task_id, None)
        self.last_values.release_values(task_id)
        for segment in self._lent_segments.pop(task_id, ()):
            segment.close()

    def snapshot(self) -> dict[str, Identity]:
        """Return an `Identity` of each variable's object, for `changes_since`."""
        # Reuse the identities of the last snapshot: few of many variables get another object.
        identities, items = self._identities, self._user_items()
        self._identities = {
            name: identities[name] if _is_still(identities, name, value) else Identity(value)
            for name, value in items
        }
        return self._identities

    def changes_since(self, before: Mapping[str, Identity]) -> tuple[set[str], set[str]]:
        """Return two sets: the names that were bound anew since `before`, and those deleted.

        `before` is the result of `snapshot`.
        """
        items = self._user_items()
        bound = {name for name, value in items if not _is_still(before, name, value)}
        return bound, before.keys() - self._names.keys()

    def forget_old_values(self, names: Iterable[str]) -> None:
        """Forget the old values of variables that a task has bound or deleted.

        The records of old values keep small lists and dicts alive. If the records stayed, the rank
        could not report to the notebook, in `Done.dead`, that such an object is gone.
        """
        for name in names:
            self._identities.pop(name, None)
            self.counterparts.forget_sent_value(name)

    def _user_items(self) -> list[tuple[str, Any]]:
        """List the user's variables, without names of IPython and Python such as `_i3`."""
        # Iterate over a copy, because threads of cells may bind names meanwhile.
        return [each for each in dict(self._names).items() if not _is_system_name(each[0])]

    def import_paths(self, names: Iterable[str]) -> dict[str, str]:
        """Return by name the import paths of variables that are modules, functions or classes.

        An import path is a text such as `numpy` or `torch.nn:Linear`, or "" if importing it would
        not give the same object. Functions and classes that cells have defined are left out.
        """
        import_paths = ((name, _import_path(self._names.get(name))) for name in names)
        return {name: import_path for name, import_path in import_paths if import_path is not None}

    def kinds(self, names: Iterable[str]) -> dict[str, int]:
        """Return by name the kinds of variables that are torch modules, optimizers or tensors.

        A kind is a number that `kind_of` returns.
        """
        kinds = {name: kind_of(self._names.get(name)) for name in names}
        return {name: kind for name, kind in kinds.items() if kind != OTHER}

    def covered_names(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of `names` that are in `ready` but now have another value or are deleted."""
        return frozenset(
            name
            for name in self.ready.keys() & names
            if (value := self._names.get(name)) is not (ready := self.ready[name])
            # A number or device that is equal by its text counts as the same value.
            and not (isinstance(value, int | str | type(ready)) and str(value) == str(ready))
        )

    def import_names(self, imports: Mapping[str, str]) -> frozenset[str]:
        """Import modules, functions and classes that another worker has; return the bound names.

        `imports` has import paths by name. Names that this rank has already are skipped. If an
        import fails, a line on stderr says so, and no error is raised: the cell may not need the
        name.
        """
        bound = set()
        for name, import_path in imports.items():
            if name in self._names or not import_path:
                continue
            module, _, path = import_path.partition(":")
            try:
                imported = import_module(module)
                self._names[name] = attrgetter(path)(imported) if path else imported
            except Exception as error:  # noqa: BLE001 (a module can raise anything)
                message = f"{type(error).__name__}: {error}"
                sys.stderr.write(
                    f"`{name}` could not be imported again ({import_path}): {message}\n"
                )
                continue
            bound.add(name)
        return frozenset(bound)

    def fetch(self, expressions: Sequence[str], task_id: str) -> Payload:
        """Pack the values of expressions for the notebook, by expression.

        CUDA tensors become CPU tensors. Raises VariableError if an expression raises an exception,
        or if a value cannot be packed. A big payload occupies memory of this machine until
        `release_values` or the next task.
        """
        values = {}
        for expression in expressions:
            try:
                values[expression] = eval(expression, self._names)
            except Exception as error:  # the expression is the user's
                raise VariableError(f"{type(error).__name__}: {error}") from error
        try:
            return self.lend(values, task_id)
        except Exception as error:  # a user's __reduce__ can raise anything
            raise VariableError(
                f"`{', '.join(expressions)}` cannot be sent to the notebook: "
                f"{type(error).__name__}: {error}"
            ) from error

    def pack(self, value: Any, task_id: str, title: str) -> Payload | None:
        """Pack the value that an op has returned, for the notebook; return None for the value None.

        `title` names the op in messages. Raises VariableError if the value cannot be sent; its
        message says which part of the value cannot be sent, and why.
        """
        if value is None:
            return None
        inner = tuple((each.ref.path, each.ref) for each in self._lent_segments.get(task_id, ()))
        try:
            return self.lend(value, task_id, ReturnReducer())._replace(within=inner)
        except Exception as error:  # a user's __reduce__ can raise anything
            path, kind, why = self.blame("result", value, error)
            what = f"what {title} returned"
            part = what if path == "result" else f"{what}: `{path}`"
            raise VariableError(f"{part} ({kind}) cannot be sent back: {why}.") from error

    def frames_of(self, value: Any) -> list[Buffer]:
        """Pickle a value for the notebook, and return the pickle as a list of pieces of bytes.

        Raises any exception of pickling.
        """
        return frames_of(value, self._names, ReturnReducer().reduce)

    def lend(self, value: Any, task_id: str, reducer: ReturnReducer | None = None) -> Payload:
        """Pack a value for the notebook.

        A value that is too big for a message is put into shared memory, which stays until
        `release_values` is called for the task. `reducer` tells pickle what to send for objects
        that have a meaning only among ranks, such as a DTensor.
        """
        payload, segment = self._pack_value(value, reducer)
        if segment is not None:
            self._lent_segments.setdefault(task_id, []).append(segment)
        return payload

    def blame(self, name: str, value: Any, error: Exception) -> tuple[str, str, str]:
        """Return the part of a value that cannot be sent: its path, its type, and the reason.

        `name` is the beginning of the path, and `error` the exception that pickling has raised.
        """
        if isinstance(error, SpreadValue):
            return name, type_name(value), str(error)
        return blame(name, value, fails_in(self._names), error)[:3]

    def pack_or_keep(self, value: object, task_id: str) -> tuple[Payload | None, int | None]:
        """Pack the last value of a cell if it is small, or keep it in this process if it is big.

        Return (packed value, None) for a small value. Return (None, its size in bytes) for a big
        one, which `lend_kept` lends to the notebook later. Return (None, 0) for a value that cannot
        be packed; then `lend_kept` returns the reason. Return (None, None) for the value None.
        """
        if value is None:
            return None, None
        try:
            payload, segment = self._pack_value(value, ReturnReducer())
        except Exception as error:  # noqa: BLE001 (a user's __reduce__ can raise anything)
            path, kind, why = self.blame("it", value, error)
            part = kind if path == "it" else f"{kind} in `{path}`"
            self.last_values.keep(task_id, f"cannot be sent to the notebook ({part}): {why}")
            return None, 0
        if segment is None:
            return payload, None
        self.last_values.keep(task_id, segment)
        return None, sum(segment.ref.sizes)

    def pack_small(self, value: object) -> tuple[Payload | None, int | None]:
        """Pack the last value of a cell if it is small; keep nothing.

        Return (packed value, None) for a small value, (None, 0) for a value that is big or cannot
        be packed, and (None, None) for the value None. Big tensors are not copied.
        """
        if value is None:
            return None, None
        try:
            # A sketch of a value has the addresses of memory on a GPU, and not its contents. So
            # nothing is copied from the GPU.
            pickled = pickle(value, self._names, sketch=True, reduce=ReturnReducer().reduce)
            if pickled.is_sketch or pickled.size >= INLINE_LIMIT:
                return None, 0
            payload, _ = pack_frames(pickled.frames)
        except Exception:  # noqa: BLE001 (a user's __reduce__ can raise anything)
            return None, 0
        return payload, None

    def lend_kept(self, kept_task_id: str, task_id: str) -> Brought:
        """Lend the notebook the last value of the cell that ran as the task `kept_task_id`.

        `task_id` is the task that requests the value. If the value is not available, the result has
        the reason as its `problem`.
        """
        if isinstance(kept := self.last_values.find(kept_task_id), str):
            return Brought(problem=kept)
        # Lend a second segment of the same memory. The first stays for a later call, as Stop may
        # come before the notebook has read the value.
        lent = Segment.of_another(kept.ref)
        self._lent_segments.setdefault(task_id, []).append(lent)
        return Brought(packed=Payload(segment=lent.ref))

    def _pack_value(self, value: object, reducer: ReturnReducer | None) -> PackedPayload:
        if is_light(value):  # saves time: Python's own pickle can pack all parts of the value
            return pack_frames([plain_pickle.dumps((value,), plain_pickle.HIGHEST_PROTOCOL)])
        pickled = pickle(value, self._names, reduce=reducer.reduce if reducer else None)
        total, next_report = size_of(pickled.frames), time.monotonic() + MOVED_EVERY
        with closing(StepwiseValue(packing(pickled.frames))) as steps:
            for packed_bytes in steps:
                if (now := time.monotonic()) > next_report:
                    next_report = now + MOVED_EVERY
                    self.report_progress(packed_bytes, total)
        return steps.made


def _not_rebuilt(what: str, error: BaseException | None) -> VariableError:
    return VariableError(
        f"{what} could not be rebuilt in the worker: {type(error).__name__}: {error}"
    )


@lru_cache(maxsize=1 << 16)  # because it is called twice in each cell for every name
def _is_system_name(name: str) -> bool:
    return SYSTEM_NAMES.fullmatch(name) is not None


def _import_path(value: Any) -> str | None:
    """Return the import path of a module, function or class: `numpy` or `torch.nn:Linear`.

    Return "" if importing this path would not give the same object. Return None for any other
    value, and for functions and classes of `__main__`, which cells have defined.
    """
    if isinstance(value, ModuleType):
        return value.__name__ if sys.modules.get(value.__name__) is value else ""
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return None
    module, path = value.__module__ or "", value.__qualname__
    if module == "__main__":
        return None
    try:
        is_importable = attrgetter(path)(sys.modules[module]) is value
    except (AttributeError, KeyError):
        return ""
    return f"{module}:{path}" if is_importable else ""


def _is_still(identities: Mapping[str, Identity], name: str, value: object) -> bool:
    return (identity := identities.get(name)) is not None and identity.is_still(value)


# --- ops --------------------------------------------------------------------------------------


@dataclass
class Context:
    """The first argument of each op: the rank's shell and variables, and fields that the op fills.

    An op adds to `bound` the names that it binds, to `deleted` the names that it deletes, and to
    `gained` the keys of objects that it gets from another rank or a file. It may set `title`, its
    name in messages to the user. The kernel closes `cleanup` once the op's value is packed. The
    kernel also makes a context for each cell.
    """

    shell: Any
    namespace: Namespace
    title: str = ""
    task_id: str = ""
    bound: set[str] = field(default_factory=set)
    gained: set[int] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    cleanup: ExitStack = field(default_factory=ExitStack)

    @property
    def rank(self) -> int:
        """The worker's rank, whatever cells have bound to the name `rank`."""
        return int(self.namespace.ready["rank"])

    @property
    def names(self) -> dict[str, Any]:
        """The worker's variables, the names of its `__main__`."""
        names: dict[str, Any] = self.shell.user_ns
        return names

    def lend(self, value: Any, reducer: ReturnReducer | None = None) -> Payload:
        """Pack a value of this task for the notebook, by `Namespace.lend`."""
        return self.namespace.lend(value, self.task_id, reducer or ReturnReducer())

    def record_changes(self) -> ExitStack:
        """Return a context manager in which user code is run.

        When the code has ended, the names that it has bound are added to `bound`, and the names
        that it has deleted to `deleted`.
        """
        before = self.namespace.snapshot()

        def record_difference() -> None:
            bound, deleted = self.namespace.changes_since(before)
            self.bound |= bound
            self.deleted |= deleted

        # Do not use `contextmanager`, which sets attributes of the exceptions that pass through a
        # context: the class of a user's exception can refuse that.
        stack = ExitStack()
        stack.callback(record_difference)
        return stack


@cache
def import_ops() -> Mapping[str, ModuleType | Exception]:
    """Import all modules of ops, nbdist's own and those of plugins, and return them by name.

    In place of a plugin that cannot be imported, the result has the exception. This is called
    before user code runs, since user code may use up the descriptors that an import needs.
    """
    modules: dict[str, ModuleType | Exception] = {}
    for name, point in plugins.entry_points(plugins.OPS_GROUP).items():
        try:
            modules[name] = point.load()
        except Exception as error:  # noqa: BLE001 (other people's modules)
            modules[name] = error
    for each in pkgutil.iter_modules(ops.__path__):
        modules[each.name] = import_module(f"{ops.__name__}.{each.name}")
    return modules


def find_op(name: str) -> Callable[..., Any]:
    """Return the function of an op: for "snapshot.write", `write` of the module `snapshot`.

    A name without a dot names both the module and its function. Raises ImportError if this rank has
    no such module.
    """
    module_name, _, function_name = name.partition(".")
    op_module = import_ops().get(module_name)
    if not isinstance(op_module, ModuleType):
        why = f": {op_module}" if op_module else ""
        raise ImportError(f"nbdist has no `{module_name}` on this rank{why}")
    function: Callable[..., Any] = getattr(op_module, function_name or module_name)
    return function
