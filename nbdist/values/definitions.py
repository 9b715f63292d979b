"""Helps to pickle functions and classes of `__main__`, and rebuilds them in the receiver.

The texts of the cells that define them are sent too, so that `inspect`, tracebacks and IPython find
the source.  The picklers of `nbdist.values.pickling` and `nbdist.values.linked` use this file.
"""

from __future__ import annotations

import dis
import enum
import functools
import importlib
import linecache
import os
import pickle
import re
import sys
import types
import weakref
from collections.abc import Callable, Container, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple

import cloudpickle.cloudpickle as by_value

SYSTEM_NAMES = re.compile(r"_+|_i+|_i?\d+|_[dio]h|_exit_code|__\w+__|In|Out|exit|quit|get_ipython")
"""Matches the names that Python and IPython, and not the user, bind in `__main__`."""

PYTHON = sys.version_info[:2]
"""This Python's version, as (3, 12); a function's code can run only in the version that made it."""

_JUMPS = frozenset(dis.hasjrel + dis.hasjabs)

_SPECIAL_SLOTS = {"__dict__", "__weakref__"}

_receiver: ContextVar[dict[str, Any] | None] = ContextVar("nbdist_receiver", default=None)

# Classes that `make_class` has made.  `fill_class` changes no other classes.
_received: weakref.WeakSet[type] = weakref.WeakSet()

_names_of_code: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = (
    weakref.WeakKeyDictionary()
)

# --- the sender's side ------------------------------------------------------------------


REFERENCE_LENGTH = 2
"""The length of the tuple to which cloudpickle reduces a built-in class such as `type(None)`.

A longer tuple means that cloudpickle sends the class itself, with its attributes.
"""

DETAILS = (
    *("__qualname__", "__kwdefaults__", "__defaults__", "__module__", "__doc__"),
    "__type_params__",  # from Python 3.12 on
)
"""Special attributes of a function that the receiver sets after it has made the function."""

_OF_ANNOTATIONS = {"__annotate__", "__annotate_func__", "__annotations_cache__"}
"""Attributes in which a class of Python 3.14 has annotations, or a function to evaluate them."""


def details_of(function: types.FunctionType) -> dict[str, Any]:
    """Return a function's defaults, annotations and other special attributes, by their names.

    They may refer to the function itself, so the receiver sets them after it has made the function.
    """
    details = {name: getattr(function, name) for name in DETAILS if hasattr(function, name)}
    return {**details, "__annotations__": annotations_of(function)}


def annotations_of(value: types.FunctionType | type) -> Any:
    """Return the annotations of a function or a class.

    Python 3.14 evaluates annotations when they are read.  If that raises an error, for example
    because a name is not bound yet, return all annotations as texts.
    """
    try:
        return value.__annotations__
    except Exception:  # noqa: BLE001 (an annotation is the user's code)
        annotationlib = importlib.import_module("annotationlib")
        return annotationlib.get_annotations(value, format=annotationlib.Format.STRING)


def set_annotations(kind: type, attributes: dict[str, Any]) -> None:
    """Put a class's evaluated annotations into `attributes`, unless there are none.

    In Python 3.14 a class has a function that evaluates its annotations when they are read.
    cloudpickle leaves this function out, so the receiver's class would have no annotations.
    """
    for name in _OF_ANNOTATIONS:
        attributes.pop(name, None)
    if not _OF_ANNOTATIONS.isdisjoint(vars(kind)):
        attributes["__annotations__"] = annotations_of(kind)
    if not attributes.get("__annotations__", True):
        del attributes["__annotations__"]


def class_attributes(state: Any) -> dict[str, Any]:
    """Return the attributes of a class from the `state` with which cloudpickle sends the class."""
    attributes: dict[str, Any] = state[0]
    return attributes


class MadeBy:
    """An object that is pickled in place of a value; the receiver calls `make(*args)` for it."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self.reduced = make, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class Variable:
    """Is pickled in place of a `cell`, the object in which Python keeps a captured variable.

    In one pickle, closures with the same cell get the same `Variable`, so they share a cell in the
    receiver, too.
    """

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def contents(self) -> tuple[Any, ...]:
        """Return (value,), or () if the variable has no value."""
        with suppress(ValueError):  # the cell is empty
            return (self.cell.cell_contents,)
        return ()

    def __reduce__(self) -> tuple[Any, ...]:
        # The receiver first makes the variable without its value, because the value may lead to the
        # functions that capture the variable; `fill_function` sets the value.
        return types.CellType, ()


class Import(MadeBy):
    """Is pickled in place of a module, which the receiver imports together with `submodules`."""

    def __init__(self, module: types.ModuleType, submodules: frozenset[str]) -> None:
        super().__init__(with_submodules, module, *sorted(submodules))


def require_importable(module: types.ModuleType) -> str:
    """Return a module's name; raises PicklingError if the module cannot be imported by its name."""
    name = module.__name__
    if sys.modules.get(name) is not module:
        raise pickle.PicklingError(f"module {name!r} cannot be imported by its name")
    # A module without a spec was made by code, so the receiver can hardly import it.  But a
    # submodule is accepted: the receiver may get it by importing the package.
    if module.__spec__ is None and name != "__main__" and "." not in name:
        raise pickle.PicklingError(f"module {name!r} does not come from a file")
    return name


def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the global names that a function's code may read or delete.

    They include names of built-ins, and names in functions and classes inside of the function.
    """
    if (cached := _names_of_code.get(code)) is not None:
        return cached
    used, stored = set(), {"__name__"}
    bytecode = dis.Bytecode(code)
    # A name counts as stored only if the instruction that stores it comes before the first jump and
    # the first `try` or `with`, and so runs in any case.
    straight = min((each.start for each in bytecode.exception_entries), default=sys.maxsize)  # type: ignore[attr-defined]  # in no stub
    for instruction in bytecode:
        name = instruction.argval
        if instruction.opcode in _JUMPS:
            straight = min(straight, instruction.offset)
        match instruction.opname:
            case "LOAD_GLOBAL" | "DELETE_GLOBAL" | "LOAD_FROM_DICT_OR_GLOBALS":
                used.add(name)
            case "STORE_NAME" if instruction.offset < straight:
                stored.add(name)
            case "DELETE_NAME":
                stored.discard(name)
            # The body of a class looks among its own names first, so only a name that the body has
            # not stored may be global.
            case "LOAD_NAME" if name not in stored:
                used.add(name)
    inner = (global_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    _names_of_code[code] = names = frozenset(used).union(*inner)
    return names


def imported_submodules(
    function: types.FunctionType, names: frozenset[str]
) -> list[types.ModuleType]:
    """Return the submodules that a function may use as attributes of packages.

    `names` are the global names that the function uses.  The receiver must import the submodules
    too, because importing a package may not import its submodules.
    """
    used = (function.__globals__.get(name) for name in sorted(names))
    modules = (each for each in used if isinstance(each, types.ModuleType))
    paths = [each.__name__ for each in modules if hasattr(each, "__path__")]
    submodules = []
    for path in paths:  # the loop adds paths, because a submodule can be a package, too
        for name in function.__code__.co_names:
            if (module := sys.modules.get(f"{path}.{name}")) is not None:
                submodules.append(module)
                paths.append(f"{path}.{name}")
    return submodules


def pop_slots(kind: type, state: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the names of the slots that a class itself defines; None if it has no `__slots__`.

    Return None also for a `NamedTuple`, because Python gives its class empty slots in any case.
    `state` has the attributes of the class that will be pickled.  This function removes from
    `state` the descriptors that Python has made for the slots.  Descriptors cannot be pickled, and
    the receiver's Python makes them again.
    """
    if "__slots__" not in kind.__dict__ or NamedTuple in kind.__dict__.get("__orig_bases__", ()):
        return None
    body = kind.__dict__.items()
    slots = [(name, value) for name, value in body if isinstance(value, types.MemberDescriptorType)]
    members = [name for name, value in slots if value.__objclass__ is kind]
    for name in members:  # cloudpickle removes slots too, but not `__x`, which Python mangles
        state.pop(name, None)
    made = {name for name, value in body if isinstance(value, types.GetSetDescriptorType)}
    return (*members, *sorted(made & _SPECIAL_SLOTS))


_OF_MEMBERS = {"_value_", "_name_", "__objclass__", "_sort_order_"}


def member_attributes(kind: type[enum.Enum]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, attributes) for each member of an Enum on which the user has set attributes."""
    members = (
        (name, {key: value for key, value in vars(member).items() if key not in _OF_MEMBERS})
        for name, member in kind.__members__.items()
    )
    return [(name, attributes) for name, attributes in members if attributes]


DISPATCHER = {
    each.co_name: each
    for each in functools.singledispatch.__code__.co_consts
    if isinstance(each, types.CodeType)
}.get("wrapper")
"""The code object that all functions made by `functools.singledispatch` share."""


def parts_of_dispatcher(function: Any) -> tuple[Any, dict[type, Any], dict[str, Any]]:
    """Return the parts of a `singledispatch` function from which the receiver makes it again.

    They are its default implementation, all implementations by type, and attributes of the user.
    """
    standard = vars(functools.singledispatch(len))
    attributes = {name: value for name, value in vars(function).items() if name not in standard}
    return function.registry[object], dict(function.registry), attributes


def is_importable(value: Any) -> bool:
    """Return True if importing an object by its module and qualified name gives this very object.

    False for objects of `__main__`, which no other process can import.
    """
    candidate: Any = sys.modules.get(value.__module__)
    if value.__module__ == "__main__":
        return False
    for part in value.__qualname__.split("."):
        candidate = getattr(candidate, part, None)
    return candidate is value


def other_name(kind: type) -> str | None:
    """Return the name of a class in its module, if that is not the class's `__qualname__`.

    For example, `Point = namedtuple('P', 'x y')` is found under the name Point.  Return None if
    the `__qualname__` leads to the class, if the class was made in `__main__` or in a function, or
    if its module has no name for the class.
    """
    module = sys.modules.get(kind.__module__)
    # A class made in a function may have a name in its module only in this process, since the
    # function may not have run in other processes.
    if module is None or kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        return None
    if is_importable(kind):
        return None
    return next((name for name, value in [*vars(module).items()] if value is kind), None)


# --- objects that know which process they are in ---------------------------------------------

is_rank = False  # True in workers, which may pickle objects that a notebook may not

_OF_ONE_PROCESS = frozenset(
    {
        "accelerate.accelerator.Accelerator",
        "accelerate.data_loader.DataLoaderStateMixin",  # a loader that was prepared
        "accelerate.state.AcceleratorState",
        "accelerate.state.PartialState",
        "lightning.fabric.fabric.Fabric",
        "lightning.pytorch.trainer.trainer.Trainer",
        "lightning_fabric.fabric.Fabric",
        "pyspark.context.SparkContext",
        "pyspark.core.context.SparkContext",
        "pyspark.sql.connect.session.SparkSession",
        "pyspark.sql.session.SparkSession",
        "pytorch_lightning.trainer.trainer.Trainer",
        "wandb.sdk.wandb_run.Run",
    }
)
"""The names of classes whose objects belong to one process, and which a notebook may not pickle.

For example, an object of Accelerate knows the rank of its process and the number of processes.  On
a rank, a copy of the notebook's object would say that it is in process 0 of 1.
"""


def process_bound_name(kind: type) -> str | None:
    """Return the name of a class if its objects belong to one process (`_OF_ONE_PROCESS`).

    Return None for other classes, and on a rank for all classes.
    """
    names = (f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)
    if is_rank or _OF_ONE_PROCESS.isdisjoint(names):
        return None
    return kind.__qualname__


def refuse_process_bound(kind: type) -> None:
    """Raise PicklingError in a notebook if a class's objects belong to one process.

    On a rank, such objects may be pickled.
    """
    if name := process_bound_name(kind):
        raise pickle.PicklingError(f"{name} {KNOWS_ITS_PROCESS}")


KNOWS_ITS_PROCESS = (
    "knows the number of processes and its own rank, which are others on the workers"
)

# --- the receiver's side ----------------------------------------------------------------


@contextmanager
def receiving(namespace: dict[str, Any] | None) -> Iterator[None]:
    """Within this context, functions of a sender's `__main__` are unpickled with these globals.

    If `namespace` is None, their globals are the `__main__` of this process.
    """
    token = _receiver.set(namespace)
    try:
        yield
    finally:
        _receiver.reset(token)


def receiving_namespace() -> dict[str, Any]:
    """Return the globals for functions that are being unpickled, as set by `receiving`."""
    namespace = _receiver.get()
    return sys.modules["__main__"].__dict__ if namespace is None else namespace


MAIN = MadeBy(receiving_namespace)
"""Is pickled in place of the globals of a function of `__main__`.

The receiver calls `receiving_namespace` to get the globals.
"""


def with_submodules(module: types.ModuleType, *submodules: str) -> types.ModuleType:
    """Import submodules by full names such as `xml.dom`, and return the module itself.

    The receiver calls this for an `Import`.
    """
    for submodule in submodules:
        importlib.import_module(submodule)
    return module


def make_code(python: tuple[int, int], filename: str, *parts: Any) -> types.CodeType:
    """Make a function's code object; raises UnpicklingError for code of another Python version.

    Code of another version could crash this process.
    """
    if python != PYTHON:
        sender, receiver = (".".join(map(str, each)) for each in (python, PYTHON))
        raise pickle.UnpicklingError(f"a function of Python {sender} cannot be used in {receiver}")
    return types.CodeType(*parts).replace(co_filename=filename)


def fill_function(function: types.FunctionType, state: Any) -> None:
    """Set the special attributes (`DETAILS`) and own attributes of a function that was just made.

    Also set the variables that it captures, except variables whose values were not sent.
    """
    values, (attributes, details, _) = state
    for cell, contents in zip(function.__closure__ or (), values, strict=True):
        if contents:
            (cell.cell_contents,) = contents
    for name, value in details.items():
        setattr(function, name, value)
    function.__dict__.update(attributes)


def fill_dispatcher(dispatcher: Any, state: Any) -> None:
    """Give a new `singledispatch` function the sender's implementations and attributes."""
    registry, attributes = state
    for kind, function in registry.items():
        dispatcher.register(kind, function)
    vars(dispatcher).update(attributes)


def dead_reference() -> weakref.ref[Any]:
    """Return a weak reference whose object is gone, for a reference that was dead when pickled."""
    return weakref.ref(set())


def make_class(maker: Callable[..., type], args: tuple[Any, ...], qualname: str) -> type:
    """Return the class that a pickle describes; make it if this process does not have it yet.

    cloudpickle makes a class by `maker(*args)`; `args` has the id by which the class is known.
    `qualname` is the `__qualname__` of a new class; `fill_class` later sets its attributes.
    """
    # Look for a known class first: cloudpickle does so only after making the new class, and by then
    # the bases' `__init_subclass__` may have registered the new class, which is not used.
    *_, tracker_id, _ = args
    existing: type | None = by_value._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if existing is not None:
        return existing
    try:
        with _without_hooks(args, _received):
            made = maker(*args)
    except Exception:  # noqa: BLE001 (a hook may need arguments that were not sent)
        with _without_hooks(args):
            made = maker(*args)
    made.__qualname__ = qualname
    _received.add(made)
    return made


_HOOKS = ("__init_subclass__", "__prepare__", "__new__", "__init__")


@contextmanager
def _without_hooks(args: tuple[Any, ...], only: Container[type] | None = None) -> Iterator[None]:
    """Within this context, a class can be made without calling some hooks of its bases.

    `args` are the arguments from which the class is made.  A hook is `__init_subclass__` of a base,
    or a method of the metaclass.  The hooks of the classes in `only` are skipped.  If `only` is
    None, the hooks of all classes of `__main__` are skipped.

    These hooks have run in the sender, and their effects are sent with the classes.  If they ran
    again, a registry would have the class twice, or a global name of the hook would be missing.
    Hooks of libraries are called, since a library must know the class in this process too.
    """
    metaclass, bases = args[0], args[2]
    if isinstance(metaclass, tuple):  # the arguments of an Enum begin with its bases
        metaclass, bases = type(args[0][-1]), args[0]
    holders = {kind: _HOOKS[:1] for base in types.resolve_bases(bases) for kind in base.__mro__}
    holders |= dict.fromkeys(metaclass.__mro__, _HOOKS[1:])
    hooks = [
        (kind, name, vars(kind)[name])
        for kind, names in holders.items()
        for name in names
        if name in vars(kind) and (kind.__module__ == "__main__" if only is None else kind in only)
    ]
    for kind, name, _ in hooks:
        type.__delattr__(kind, name)
    try:
        yield
    finally:
        for kind, name, method in hooks:
            type.__setattr__(kind, name, method)


def fill_class(kind: type, state: Any) -> None:
    """Set the sender's attributes on a class that `make_class` has made, now or earlier.

    A class that this process has defined itself is not changed.
    """
    if kind in _received:
        attributes, slots, *of_members = state
        by_value._class_setstate(kind, (attributes, slots))
        for name, values in of_members:
            kind.__members__[name].__dict__.update(values)  # type: ignore[attr-defined]  # an Enum


# --- the source of cells ----------------------------------------------------------------------


class CellSource(NamedTuple):
    """The text of a cell as it ran, and its execution count."""

    text: str
    number: int | None


def cell_source(filename: str) -> CellSource | None:
    """Return the cell that was compiled under this file name; None if there is no such cell."""
    match linecache.cache.get(filename):
        # A cell's entry has no modification time, since it was not read from a file.  IPython 7
        # adds entries with a time, but their files mostly do not exist.
        case (_, time, list(lines), _) if time is None or not os.path.exists(filename):
            source = "".join(lines)
            return CellSource(source, _number_of(filename, source))
    return None


def keep_cell_sources(sources: dict[str, CellSource]) -> None:
    """Make the texts of another process's cells known to tracebacks and `inspect` in this process.

    `sources` has the cells by file name.
    """
    numbers = cell_numbers()
    for filename, cell in sources.items():
        lines = cell.text.splitlines(keepends=True)
        linecache.cache[filename] = (len(cell.text), None, lines, filename)
        if cell.number is not None:
            numbers[filename] = cell.number


def function_name(name: str) -> str:
    """Return a function's name for tracebacks: `<module>` for IPython's `<cell line: NUMBER>`."""
    return "<module>" if name.startswith("<cell line: ") else name


def cell_numbers() -> MutableMapping[str, int]:
    """Return IPython's table of execution counts by file name; an empty dict without a table.

    IPython 8 and later have the table in any process; for IPython 7, workers make it
    (worker/compat/ipython.py).  The table is private: IPython's public functions take only file
    names that IPython has made in this process, and file names here come from other processes.
    """
    numbers: MutableMapping[str, int]
    numbers = getattr(getattr(_shell(), "compile", None), "_filename_map", {})
    return numbers


def _number_of(filename: str, source: str) -> int | None:
    numbers = cell_numbers()
    if filename in numbers:
        return numbers[filename]
    # With IPython 7 a notebook has only the texts of cells: find the last cell with this text.
    history = getattr(getattr(_shell(), "history_manager", None), "input_hist_parsed", [])
    same = (number for number in reversed(range(len(history))) if history[number] == source)
    return next(same, None)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None
