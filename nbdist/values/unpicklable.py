"""Explains why a value could not be pickled: which part is to blame, and what to do instead.

The notebook and workers call `blame` after pickling has failed.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import io
import itertools
import multiprocessing.process
import pickle
import socket
import subprocess
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from nbdist.errors import NbdistError
from nbdist.values import definitions, pickling

SEARCH_TIMEOUT = 1.0
MAX_SEARCH_DEPTH = 12
WIDEST = 1000

PICKLING_ERRORS = (Exception,)
"""The errors that pickling can raise: any, since a user's `__reduce__` can raise anything."""

_WITHOUT_NAME = (pickle.PicklingError, TypeError, AttributeError)
"""Errors that pickling itself raises: messages show their texts without the name of the class."""

_LOCKS = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event),
    *(threading.Semaphore, threading.Barrier, threading.local),
)

# The second class is the base of all C data and functions of ctypes; it has no public name.
_CTYPES = (ctypes.CDLL, ctypes.c_int.__mro__[-2])
_COMPILED = ("torch.jit.", "torch._C.", "torch.ScriptFunction", "triton.")
_C_FUNCTIONS = ("CFunctionType", "builtin_function_or_method", "cython_function_or_method")
_OF_THE_NOTEBOOK = ("IPython", "ipykernel", "ipywidgets", "traitlets", "comm", "nbdist")


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_compiled(value: Any) -> bool:
    kind = type(value)
    is_known = f"{kind.__module__}.{kind.__qualname__}".startswith(_COMPILED)
    return is_known or kind.__name__ in _C_FUNCTIONS or isinstance(value, _CTYPES)


_Kind = tuple[Callable[[Any], bool], str, str, str]

# fmt: off
_KINDS: tuple[_Kind, ...] = (
    (_is(types.GeneratorType, types.AsyncGeneratorType), "generator",
     "how far a generator has come cannot be copied",
     "call the function that makes it inside the cell, or send `list(...)` of it"),
    (_is(types.CoroutineType, asyncio.Future), "coroutine",
     "an awaitable belongs to one event loop",
     "call the async function inside the cell, and await it there"),
    (_is(*_LOCKS), "thread lock",
     "a lock works within one process",
     "make it inside the cell, or drop it in `__getstate__` of the class that holds it"),
    (_is(socket.socket), "socket",
     "a connection belongs to the process that opened it",
     "connect inside the cell"),
    (_is(io.IOBase), "open file",
     "the position of an open file belongs to the process that opened it",
     "keep its path, and open it inside the cell"),
    (_is(types.ModuleType), "module",
     "the workers could not import it by its name",
     "write it to a .py file that the workers can import"),
    (_is(subprocess.Popen, multiprocessing.process.BaseProcess, threading.Thread),
     "process or thread",
     "only the process that started it can use it",
     "start it inside the cell"),
    (_is(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType), "weak reference",
     "it points at an object of this process",
     "send the object itself, or make the reference inside the cell"),
    (_is(types.FrameType, types.TracebackType), "frame",
     "a stack belongs to the thread that runs on it",
     "send what you need from it: its text, or the values"),
    (lambda value: type(value).__module__.partition(".")[0] in _OF_THE_NOTEBOOK,
     "part of this notebook",
     "it belongs to this notebook's kernel",
     "use it in a cell of the notebook, outside `%%distributed`"),
    (_is_compiled, "compiled function or C data",
     "machine code and C pointers have a meaning in one process only",
     "load or compile it inside the cell"),
)
# fmt: on
"""Kinds of objects that cannot be sent: a test, the kind's name, the reason, and the remedy."""


def fails_in(namespace: dict[str, Any]) -> Callable[[Any], bool]:
    """Return a function that returns True for a value that cannot be pickled.

    `namespace` is the `__main__` of this process.
    """

    def fails(value: Any) -> bool:
        try:
            pickling.pickle(value, namespace, sketch=True)
        except NbdistError:  # the machine lacks memory, and the value is not to blame
            return False
        except Exception:  # noqa: BLE001 (a user's __reduce__ can raise anything)
            return True
        return False

    return fails


def blame(
    name: str, value: Any, fails: Callable[[Any], bool], problem: BaseException
) -> tuple[str, str, str, str]:
    """Return the part of a value that cannot be pickled, as (path, type, reason, remedy).

    The path begins with `name`.  `problem` is the error that pickling the value has raised, and
    `fails(part)` returns True if a part cannot be pickled, too.  After about a second the search
    ends with the innermost such part that it has found so far.
    """
    path, culprit = _find_culprit(name, value, fails)
    if kind := _kind_of(culprit):
        return path, *kind
    why = f"it cannot be pickled ({_text_of(problem)})"
    remedy = "make it inside the cell, or give its class a `__reduce__` that says how to make it"
    return path, type_name(culprit), why, remedy


def _text_of(problem: BaseException) -> str:
    """Return the first line of an error's text, mostly after the name of the error's class.

    Return only the name if there is no text.
    """
    name, text = type(problem).__name__, ""
    with suppress(Exception):  # a user's __str__ can raise anything
        text = str(problem).partition("\n")[0].rstrip(".")
    if not text:
        return name
    return text if isinstance(problem, _WITHOUT_NAME) else f"{name}: {text}"


def type_name(value: Any) -> str:
    """Return the name of a value's type, with its module if this is not builtins or `__main__`."""
    kind = type(value)
    plain = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def _kind_of(value: Any) -> tuple[str, str, str] | None:
    """Return name, reason and remedy for a kind of object that cannot be sent; None for others."""
    if name := definitions.process_bound_name(type(value)):
        return name, f"it {definitions.KNOWS_ITS_PROCESS}", "make it inside the cell"
    return next((kind[1:] for kind in _KINDS if kind[0](value)), None)


def _find_culprit(name: str, value: Any, fails: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the path and the innermost part of a value that cannot be pickled.

    `name` is the value's own path.  `fails` returns True for a part that cannot be pickled.  The
    search ends at a part of a known kind (`_KINDS`), such as a socket, after `SEARCH_TIMEOUT`, or
    at the depth `MAX_SEARCH_DEPTH`.  Then the innermost part that was found so far is returned.
    """
    path, deadline, seen_ids = name, time.monotonic() + SEARCH_TIMEOUT, {id(value)}
    for _ in range(MAX_SEARCH_DEPTH):
        if _kind_of(value):
            break  # the object itself explains the problem better than one of its parts
        for more, part in itertools.islice(_parts_until_error(value), WIDEST):
            if time.monotonic() > deadline:
                return path, value
            if id(part) not in seen_ids and not isinstance(part, _HARMLESS) and fails(part):
                path, value = path + more, part
                seen_ids.add(id(part))
                break
        else:
            return path, value
    return path, value


def _parts_until_error(value: Any) -> Iterator[tuple[str, Any]]:
    with suppress(Exception):  # a user's mapping can raise anything when it is listed
        yield from parts(value)


_HARMLESS = (str, bytes, int, float, complex, bool, type(None))


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (text, part) for the parts of a value; the text, such as `.func`, leads to the part."""
    match value:
        case types.FunctionType():
            yield from _parts_of_function(value)
        case types.MethodType():
            yield "", value.__self__
            yield "", value.__func__
        case functools.partial():
            yield ".func", value.func
            yield from _items(".args", enumerate(value.args))
            yield from _items(".keywords", value.keywords.items())
        case Mapping():
            yield from _items("", value.items())
        case list() | tuple() | set() | frozenset() | deque():
            yield from _items("", enumerate(value))
        case property():
            yield ".fget", value.fget
        case classmethod() | staticmethod():
            yield "", value.__func__
    yield from _attributes(value)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has no value
            yield f".<closure>.{name}", cell.cell_contents
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    named = zip(reversed(arguments), reversed(defaults), strict=False)
    for name, default in (*named, *(function.__kwdefaults__ or {}).items()):
        yield f".<default>.{name}", default


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        attributes = dict(vars(value))
    except TypeError:
        attributes = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                attributes.setdefault(name, getattr(value, name))
    for name, part in attributes.items():
        if not (isinstance(value, type) and name in ("__dict__", "__weakref__")):
            yield f".{name}", part


def _items(step: str, items: Any) -> Iterator[tuple[str, Any]]:
    for key, part in items:
        shown = repr(key) if isinstance(key, str | int | float | tuple) else type_name(key)
        yield f"{step}[{shown if len(shown) <= 40 else shown[:37] + '...'}]", part
