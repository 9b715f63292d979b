"""The worker's `__main__`: binds what comes with a task, finds what it has bound, packs results.

In each worker, on the main thread; the kernel and the ops use it. Ops are found here too.
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
from nbdist.values.linked import Arrived, CannotRebuild, NotThere
from nbdist.values.payload import (
    INLINE_LIMIT,
    OTHER,
    Identity,
    Packed,
    Payload,
    Segment,
    Steps,
    kind_of,
    open_payload,
    pack_frames,
    packing,
    size_of,
)
from nbdist.values.pickling import pickle, unpickle
from nbdist.values.unpicklable import blame, fails_in, type_name
from nbdist.wire.ops import Brought, Replaced
from nbdist.wire.work import Task
from nbdist.worker import ops
from nbdist.worker.counterparts import Counterparts, Keyed
from nbdist.worker.received import Homeward, KeptValues, SpreadValue

MOVED_EVERY = 0.25  # seconds between two messages on how much of a big value has been packed


@dataclass
class Taken:
    """Variables that have been received and not bound, with the objects in them that have a key.

    `arrived` is the message of the notebook that they came with, if they came from it.
    """

    values: dict[str, Any]
    keyed: Sequence[Keyed] = ()
    arrived: Arrived | None = None


@dataclass(frozen=True)
class Bound:
    """The names that were bound, the keys of their objects, and the values that were replaced."""

    names: frozenset[str]
    gained: tuple[int, ...]
    replaced: Mapping[str, Replaced]


class Problem(Exception):
    """Ends a task with a message for the user, where a traceback would tell no more."""

    kind = ""  # the name of its `Failure`


class VariableError(Problem):
    """A variable could not be bound, or its value not be sent to the notebook."""

    kind = NAME_PROBLEM


class Namespace:
    """Wraps the kernel's `user_ns`, which is also the `__main__` of the process."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self.ready: dict[str, Any] = {}
        self.counterparts = Counterparts(names)
        self.say_moved: Callable[[int, int], None] = lambda done, total: None
        self.warn: Callable[[str], None] = lambda text: None
        self.last_values = KeptValues()
        self._lent: dict[str, list[Segment]] = {}
        self._taken: dict[str, Taken] = {}
        self._identities: dict[str, Identity] = {}

    def start_with(self, names: Mapping[str, Any]) -> None:
        """Bind names that every worker has from its start, and keep them in `ready`."""
        self.ready.update(names)
        self._names.update(names)

    def change(self, name: str, value: object) -> None:
        """Give a name of `ready` another value; bind it unless a cell has bound it."""
        # Compare identity: a cell may have bound a tensor, whose comparison would raise.
        if self._names.get(name) is self.ready[name]:
            self._names[name] = value
        self.ready[name] = value

    def receive(self, task: Task, rank: int) -> list[str]:
        """Bind the variables that came with a task, and change the objects that it has changes of.

        All of it is done, or nothing if a variable cannot be rebuilt: then VariableError is raised.
        Return the variables that the notebook has deleted, and that were deleted here too. Names of
        `ready` that a cell has deleted are bound again.
        """
        for name in self.ready.keys() - self._names.keys():
            self._names[name] = self.ready[name]
        # The notebook has read what the last task lent to it.
        for task_id in list(self._lent):
            self.release_values(task_id)
        ended = self.counterparts.forget(task.forget.get(rank, ()))
        arrived = None
        if (payload := task.names.get(rank)) is not None:
            arrived = self.read(payload)
            self._commit(arrived)
        del ended
        if task.plain is not None:
            self._names.update(self.open(task.plain))
        deleted = self.counterparts.delete(task.deleted.get(rank, ()))
        if arrived is not None:
            self.counterparts.give(arrived.values)
        return deleted

    def receive_values(self, payload: Payload) -> dict[str, Any]:
        """Return the values of a call's message, without binding them; register their objects."""
        try:
            arrived = self.read(payload)
            self._commit(arrived)
        finally:
            self.counterparts.end_idle()
        return arrived.values

    def read(self, payload: Payload) -> Arrived:
        """Rebuild the values of a message; VariableError if one cannot be rebuilt."""
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

    def _commit(self, arrived: Arrived) -> None:
        try:
            self.counterparts.accept(arrived)
        except Exception as error:  # a user's `__setstate__` or attribute can raise anything
            raise VariableError(
                "a change of a variable could not be made in the worker: "
                f"{type(error).__name__}: {error}"
            ) from error

    def open(self, payload: Payload) -> Any:
        """Unpickle a value of the notebook; VariableError if it cannot be rebuilt."""
        try:
            return unpickle(open_payload(payload), self._names)
        except Exception as error:  # a user's class can raise anything while it is rebuilt
            raise VariableError(
                f"a variable that the cell uses could not be rebuilt in the worker: "
                f"{type(error).__name__}: {error}"
            ) from error

    def take(self, taken: Taken, task_id: str) -> None:
        """Keep received values for `pop_taken`, until the task is released or the next `take`."""
        self._taken = {task_id: taken}

    def pop_taken(self) -> Taken:
        """Return the values that `take` keeps, and drop them; VariableError if there are none."""
        if not self._taken:
            raise VariableError("there is nothing to bind: this rank has received no values")
        return self._taken.popitem()[1]

    def bind_taken(self) -> Bound:
        """Bind the values that `take` keeps; change variables of the same structure in place."""
        taken = self.pop_taken()
        if taken.arrived is not None:
            self._commit(taken.arrived)
        instead, replaced = self.counterparts.replace(taken.values, taken.keyed)
        gained = self.counterparts.register(taken.keyed, instead)
        if taken.arrived is not None:
            self.counterparts.move_keys(instead)
            self.counterparts.give({name: self._names[name] for name in taken.values})
        return Bound(frozenset(taken.values), gained, replaced)

    def release_values(self, task_id: str) -> None:
        """Release what this task has received, lent or kept; also called on the control thread."""
        self._taken.pop(task_id, None)
        self.last_values.release_values(task_id)
        for segment in self._lent.pop(task_id, ()):
            segment.close()

    def snapshot(self) -> dict[str, Identity]:
        """Return which object each name is bound to, for `changes_since`."""
        # Reuse the entries of the last snapshot: there are many names, and few are bound again.
        known, now = self._identities, self._of_users()
        self._identities = {
            name: known[name] if _is_still(known, name, value) else Identity(value)
            for name, value in now
        }
        return self._identities

    def changes_since(self, before: Mapping[str, Identity]) -> tuple[set[str], set[str]]:
        """Return names bound to another object than `before`, and names that were deleted."""
        now = self._of_users()
        bound = {name for name, value in now if not _is_still(before, name, value)}
        return bound, before.keys() - self._names.keys()

    def let_go(self, names: Iterable[str]) -> None:
        """Hold no longer what these variables had before the task that bound or deleted them.

        Small lists and dicts would else live on: the notebook would count them as there.
        """
        for name in names:
            self._identities.pop(name, None)
            self.counterparts.let_go(name)

    def _of_users(self) -> list[tuple[str, Any]]:
        """List names and values without those of IPython, as `_` and `_i3`, and of Python."""
        # A copy, as threads of cells may bind names meanwhile.
        return [each for each in dict(self._names).items() if not _is_of_system(each[0])]

    def imported(self, names: Iterable[str]) -> dict[str, str]:
        """Return by name where modules, functions and classes come from, for `import_again`.

        A path is such as `torch.nn:Linear`; "" if the object is not found there.
        """
        found = ((name, _whence(self._names.get(name))) for name in names)
        return {name: import_path for name, import_path in found if import_path is not None}

    def kinds(self, names: Iterable[str]) -> dict[str, int]:
        """Return by name the kind of those values that are modules, optimizers or tensors."""
        kinds = {name: kind_of(self._names.get(name)) for name in names}
        return {name: kind for name, kind in kinds.items() if kind != OTHER}

    def covered(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of `ready` to which a cell has bound a value that reads differently."""
        return frozenset(
            name
            for name in self.ready.keys() & names
            if (value := self._names.get(name)) is not (own := self.ready[name])
            # A number or device that reads the same counts as the same.
            and not (isinstance(value, int | str | type(own)) and str(value) == str(own))
        )

    def import_again(self, imports: Mapping[str, str]) -> frozenset[str]:
        """Bind names that `imported` listed in the worker before this one; return those bound.

        An import that fails is reported on stderr: the cell may not need it.
        """
        bound = set()
        for name, import_path in imports.items():
            if name in self._names or not import_path:
                continue
            module, _, path = import_path.partition(":")
            try:
                found = import_module(module)
                self._names[name] = attrgetter(path)(found) if path else found
            except Exception as error:  # noqa: BLE001 (a module can raise anything)
                said = f"{type(error).__name__}: {error}"
                sys.stderr.write(f"`{name}` could not be imported again ({import_path}): {said}\n")
                continue
            bound.add(name)
        return frozenset(bound)

    def fetch(self, expressions: Sequence[str], task_id: str) -> Payload:
        """Pack the values of names or expressions for the notebook; CUDA tensors come from the CPU.

        A big payload is memory of this process until `release_values`, or until its next task.
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
        """Pack what an op returned; VariableError says which part cannot be sent, and why."""
        if value is None:
            return None
        inner = tuple((each.ref.path, each.ref) for each in self._lent.get(task_id, ()))
        try:
            return self.lend(value, task_id, Homeward())._replace(within=inner)
        except Exception as error:  # a user's __reduce__ can raise anything
            path, kind, why = self.blame("result", value, error)
            what = f"what {title} returned"
            part = what if path == "result" else f"{what}: `{path}`"
            raise VariableError(f"{part} ({kind}) cannot be sent back: {why}.") from error

    def lend(self, value: Any, task_id: str, home: Homeward | None = None) -> Payload:
        """Pack a value; if it is too big for a message it stays in memory until `release_values`.

        `home` pickles values that have a meaning only among ranks.
        """
        payload, segment = self._packed(value, home)
        if segment is not None:
            self._lent.setdefault(task_id, []).append(segment)
        return payload

    def blame(self, name: str, value: Any, error: Exception) -> tuple[str, str, str]:
        """Return the path to the part of a value that cannot be sent, its type, and why."""
        if isinstance(error, SpreadValue):
            return name, type_name(value), str(error)
        return blame(name, value, fails_in(self._names), error)[:3]

    def keep(self, value: object, task_id: str) -> tuple[Payload | None, int | None]:
        """Pack the last value of a cell; return a small one, keep a big one and return its size.

        A value that cannot be packed is no error of the cell: `lend_kept` says why.
        """
        if value is None:
            return None, None
        try:
            payload, segment = self._packed(value, Homeward())
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
        """Pack the last value of a cell if it is small; nothing of a bigger one is copied.

        Return None and 0 if it is not packed.
        """
        if value is None:
            return None, None
        try:
            # A sketch copies nothing from a GPU.
            pickled = pickle(value, self._names, sketch=True, reduce=Homeward().reduce)
            if pickled.is_sketch or pickled.size >= INLINE_LIMIT:
                return None, 0
            payload, _ = pack_frames(pickled.frames)
        except Exception:  # noqa: BLE001 (a user's __reduce__ can raise anything)
            return None, 0
        return payload, None

    def lend_kept(self, of: str, task_id: str) -> Brought:
        """Lend the value that was kept for the task `of`, or say why there is none."""
        if isinstance(found := self.last_values.find(of), str):
            return Brought(problem=found)
        # The kept value stays too: Stop may come before the notebook has read this one.
        lent = Segment.of_another(found.ref)
        self._lent.setdefault(task_id, []).append(lent)
        return Brought(packed=Payload(segment=lent.ref))

    def _packed(self, value: object, home: Homeward | None) -> Packed:
        pickled = pickle(value, self._names, reduce=home.reduce if home else None)
        total, say_at = size_of(pickled.frames), time.monotonic() + MOVED_EVERY
        with closing(Steps(packing(pickled.frames))) as steps:
            for done in steps:
                if (now := time.monotonic()) > say_at:
                    say_at = now + MOVED_EVERY
                    self.say_moved(done, total)
        return steps.made


@lru_cache(maxsize=1 << 16)  # each cell asks this twice for every name
def _is_of_system(name: str) -> bool:
    return SYSTEM_NAMES.fullmatch(name) is not None


def _whence(value: Any) -> str | None:
    """Return `numpy` or `torch.nn:Linear`; "" if it is not found there, None if not imported."""
    if isinstance(value, ModuleType):
        return value.__name__ if sys.modules.get(value.__name__) is value else ""
    if not isinstance(value, type | FunctionType | BuiltinFunctionType):
        return None
    module, path = value.__module__ or "", value.__qualname__
    if module == "__main__":
        return None
    try:
        is_there = attrgetter(path)(sys.modules[module]) is value
    except (AttributeError, KeyError):
        return ""
    return f"{module}:{path}" if is_there else ""


def _is_still(known: Mapping[str, Identity], name: str, value: object) -> bool:
    return (identity := known.get(name)) is not None and identity.is_still(value)


# --- ops --------------------------------------------------------------------------------------


@dataclass
class Context:
    """What an op or a cell works with, and what it reports besides its value.

    `bound` are the names that it has bound, `gone` the names that it has deleted, `gained` the keys
    of objects of the notebook that it has got from another rank or a file. `title` is its name for
    the user. `at_end` is closed once the value has been packed.
    """

    shell: Any
    namespace: Namespace
    title: str = ""
    task_id: str = ""
    bound: set[str] = field(default_factory=set)
    gained: set[int] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    at_end: ExitStack = field(default_factory=ExitStack)

    @property
    def rank(self) -> int:
        """The worker's rank, whatever cells have bound to the name."""
        return int(self.namespace.ready["rank"])

    @property
    def names(self) -> dict[str, Any]:
        """The worker's `__main__`."""
        names: dict[str, Any] = self.shell.user_ns
        return names

    def lend(self, value: Any, home: Homeward | None = None) -> Payload:
        """Pack a value, to be read by the notebook before it releases the task."""
        return self.namespace.lend(value, self.task_id, home or Homeward())

    def noting(self) -> ExitStack:
        """Return a context that adds what user code binds and deletes to `bound` and `gone`."""
        before = self.namespace.snapshot()

        def note() -> None:
            bound, gone = self.namespace.changes_since(before)
            self.bound |= bound
            self.gone |= gone

        # An ExitStack, as `contextmanager` sets attributes of exceptions, whose class can refuse
        # that.
        noting = ExitStack()
        noting.callback(note)
        return noting


@cache
def import_ops() -> Mapping[str, ModuleType | Exception]:
    """Import and return all modules of ops by name, or the exception that a plugin's import raised.

    Called before user code runs, which may leave no descriptor to import with.
    """
    found: dict[str, ModuleType | Exception] = {}
    for name, point in plugins.entry_points(plugins.OPS).items():
        try:
            found[name] = point.load()
        except Exception as error:  # noqa: BLE001 (other people's modules)
            found[name] = error
    for each in pkgutil.iter_modules(ops.__path__):
        found[each.name] = import_module(f"{ops.__name__}.{each.name}")
    return found


def find_op(name: str) -> Callable[..., Any]:
    """Return an op's function: `write` of the module `snapshot` for the name "snapshot.write".

    A name without a dot is that of the module and of the function.
    """
    module, _, function = name.partition(".")
    found = import_ops().get(module)
    if not isinstance(found, ModuleType):
        why = f": {found}" if found else ""
        raise ImportError(f"nbdist has no `{module}` on this rank{why}")
    run: Callable[..., Any] = getattr(found, function or module)
    return run
