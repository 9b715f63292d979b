"""Receives, compares and packs the variables of a worker, the names of its `__main__`.

The kernel and the ops use this module in each worker, mostly on the main thread. `find_op` finds
the function of an op by its name.
"""

from __future__ import annotations

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

    `keyed` has the objects in the values that have a key. `arrived` is the notebook's message if
    the values are counterparts of the notebook's objects, else None.
    """

    values: dict[str, Any]
    keyed: Sequence[Keyed] = ()
    arrived: ReceivedMessage | None = None


@dataclass(frozen=True)
class Bound:
    """The result of `bind_received`: the bound `names`, and the old values that were `replaced`.

    `gained` are the keys of objects that came from another rank.
    """

    names: frozenset[str]
    gained: tuple[int, ...]
    replaced: Mapping[str, Replaced]


class Problem(Exception):
    """Ends a task with a message for the user instead of a traceback."""

    kind = ""  # the `name` of the `Failure` that reports the problem


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
        """Change a value in `ready`, and the variable too unless a cell has given it a value."""
        # Compare by `is`: if a cell has bound a tensor, `==` would not return a bool.
        if self._names.get(name) is self.ready[name]:
            self._names[name] = value
        self.ready[name] = value

    def receive(self, task: Task, rank: int) -> list[str]:
        """Bind the variables that came with a task, and make the notebook's changes of objects.

        Variables that the notebook has deleted are deleted; their names are returned. If a variable
        cannot be rebuilt, no variable is bound, and VariableError is raised. Names of `ready` that
        a cell has deleted are bound again in any case.
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
        """Return the arguments of a call, without binding variables.

        The objects in the arguments are registered by their keys, as variables' objects are.
        """
        try:
            arrived = self.read(payload)
            self._commit(arrived, lent=True)
        finally:
            self.counterparts.end_idle()
        return arrived.values

    def read(self, payload: Payload) -> ReceivedMessage:
        """Rebuild the values of a message without binding variables; raises VariableError."""
        try:
            return self.counterparts.read(open_payload(payload))
        except CannotRebuild as problem:
            error = problem.__cause__
            what = f"`{problem.name}`" if problem.name else "a variable that the cell uses"
            raise VariableError(
                f"{what} could not be rebuilt in the worker: {type(error).__name__}: {error}"
            ) from error
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
            raise VariableError(
                f"a variable that the cell uses could not be rebuilt in the worker: "
                f"{type(error).__name__}: {error}"
            ) from error

    def keep_received(self, received: Taken, task_id: str) -> None:
        """Keep received values for `bind_received` or `pop_received`.

        Values that were kept before are dropped.
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

        If the old value of a variable has the same structure, it is changed in place instead.
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

        The control thread calls this, too.
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
        """Return the names that were bound to another object since `before`, and deleted names."""
        items = self._user_items()
        bound = {name for name, value in items if not _is_still(before, name, value)}
        return bound, before.keys() - self._names.keys()

    def forget_old_values(self, names: Iterable[str]) -> None:
        """Forget the old values of variables that a task has bound or deleted.

        An `Identity` keeps a small list or dict alive. If the object has a key, the key would then
        be missing in `Done.dead`.
        """
        for name in names:
            self._identities.pop(name, None)
            self.counterparts.forget_sent_value(name)

    def _user_items(self) -> list[tuple[str, Any]]:
        """List the user's variables, without names of IPython and Python such as `_i3`."""
        # Iterate over a copy, because threads of cells may bind names meanwhile.
        return [each for each in dict(self._names).items() if not _is_system_name(each[0])]

    def import_paths(self, names: Iterable[str]) -> dict[str, str]:
        """Return by name the import paths of modules, functions and classes among `names`.

        A path such as `torch.nn:Linear` is "" if importing it would not give the object. Functions
        and classes that cells have defined are left out.
        """
        import_paths = ((name, _import_path(self._names.get(name))) for name in names)
        return {name: import_path for name, import_path in import_paths if import_path is not None}

    def kinds(self, names: Iterable[str]) -> dict[str, int]:
        """Return by name the kinds of values that are torch modules, optimizers or tensors."""
        kinds = {name: kind_of(self._names.get(name)) for name in names}
        return {name: kind for name, kind in kinds.items() if kind != OTHER}

    def covered_names(self, names: Iterable[str]) -> frozenset[str]:
        """Return which of `names` are in `ready`, and have another value now or were deleted."""
        return frozenset(
            name
            for name in self.ready.keys() & names
            if (value := self._names.get(name)) is not (ready := self.ready[name])
            # A number or device that is equal by its text counts as the same value.
            and not (isinstance(value, int | str | type(ready)) and str(value) == str(ready))
        )

    def import_names(self, imports: Mapping[str, str]) -> frozenset[str]:
        """Import the modules, functions and classes of another worker that this rank lacks.

        `imports` has the other worker's import paths by name. Return the names that were bound. If
        an import fails, only a line on stderr says so, because the cell may not need the name.
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
        """Pack the values of expressions for the notebook; CUDA tensors become CPU tensors.

        Raises VariableError if an expression raises an exception, or if a value cannot be packed. A
        big payload occupies memory of this machine until `release_values` or the next task.
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
        """Pack the value that an op has returned.

        If the value cannot be sent, VariableError says which part of it, and why.
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
        """Pickle a value for the notebook, and return the pickle's frames, which are bytes.

        Raises the exception that ended the pickling, if it fails.
        """
        return frames_of(value, self._names, ReturnReducer().reduce)

    def lend(self, value: Any, task_id: str, home: ReturnReducer | None = None) -> Payload:
        """Pack a value for the notebook.

        A value that is too big for a message is put into shared memory, a segment, which stays
        until `release_values`. `home` pickles objects that have a meaning only among ranks.
        """
        payload, segment = self._pack_value(value, home)
        if segment is not None:
            self._lent_segments.setdefault(task_id, []).append(segment)
        return payload

    def blame(self, name: str, value: Any, error: Exception) -> tuple[str, str, str]:
        """Return which part of a value cannot be sent: the path to the part, its type, and why."""
        if isinstance(error, SpreadValue):
            return name, type_name(value), str(error)
        return blame(name, value, fails_in(self._names), error)[:3]

    def pack_or_keep(self, value: object, task_id: str) -> tuple[Payload | None, int | None]:
        """Pack the last value of a cell; return the packed value and the size of a kept value.

        A small value is returned. A big value is kept in this process, for `lend_kept`, and only
        its size is returned. A value that cannot be packed is no error of the cell: the size is 0,
        and `lend_kept` returns the reason later.
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
        """Pack and return the last value of a cell if it is small.

        Return None and 0 if the value is bigger or cannot be packed. A bigger value is not copied.
        """
        if value is None:
            return None, None
        try:
            # A sketch has addresses instead of contents on a GPU, so nothing is copied from there.
            pickled = pickle(value, self._names, sketch=True, reduce=ReturnReducer().reduce)
            if pickled.is_sketch or pickled.size >= INLINE_LIMIT:
                return None, 0
            payload, _ = pack_frames(pickled.frames)
        except Exception:  # noqa: BLE001 (a user's __reduce__ can raise anything)
            return None, 0
        return payload, None

    def lend_kept(self, kept_task_id: str, task_id: str) -> Brought:
        """Lend the notebook the last value that was kept for the task `kept_task_id`.

        If the value is not available, return the reason.
        """
        if isinstance(kept := self.last_values.find(kept_task_id), str):
            return Brought(problem=kept)
        # Lend a second segment of the same memory. The first stays for a later call, as Stop may
        # come before the notebook has read the value.
        lent = Segment.of_another(kept.ref)
        self._lent_segments.setdefault(task_id, []).append(lent)
        return Brought(packed=Payload(segment=lent.ref))

    def _pack_value(self, value: object, home: ReturnReducer | None) -> PackedPayload:
        pickled = pickle(value, self._names, reduce=home.reduce if home else None)
        total, next_report = size_of(pickled.frames), time.monotonic() + MOVED_EVERY
        with closing(StepwiseValue(packing(pickled.frames))) as steps:
            for packed_bytes in steps:
                if (now := time.monotonic()) > next_report:
                    next_report = now + MOVED_EVERY
                    self.report_progress(packed_bytes, total)
        return steps.made


@lru_cache(maxsize=1 << 16)  # because it is called twice in each cell for every name
def _is_system_name(name: str) -> bool:
    return SYSTEM_NAMES.fullmatch(name) is not None


def _import_path(value: Any) -> str | None:
    """Return an import path such as `numpy` or `torch.nn:Linear`; "" if it would not give `value`.

    Return None if the value is no module, function or class, and for functions and classes of
    `__main__`, which cells have defined.
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
    """The argument of each op: the rank's shell and variables, and what the op reports.

    An op adds the names that it binds to `bound`, and the names that it deletes to `deleted`. It
    adds the keys of objects that it gets from another rank or a file to `gained`. It may set
    `title`, its name for the user. The kernel closes `cleanup` once the op's value was packed. The
    kernel uses a context for each cell, too.
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

    def lend(self, value: Any, home: ReturnReducer | None = None) -> Payload:
        """Pack a value for the notebook; it stays until the notebook releases the task's values."""
        return self.namespace.lend(value, self.task_id, home or ReturnReducer())

    def record_changes(self) -> ExitStack:
        """Return a context for user code, which records in this object what the code changes.

        At the end of the context, names that the code has bound or deleted are added to `bound` and
        `deleted`.
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
    """Import all modules of ops, and return them by name.

    For a plugin that cannot be imported, return the exception. Called before user code runs, since
    user code may use up the descriptors that an import needs.
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

    A name without a dot names both the module and its function.
    """
    module_name, _, function_name = name.partition(".")
    op_module = import_ops().get(module_name)
    if not isinstance(op_module, ModuleType):
        why = f": {op_module}" if op_module else ""
        raise ImportError(f"nbdist has no `{module_name}` on this rank{why}")
    function: Callable[..., Any] = getattr(op_module, function_name or module_name)
    return function
