"""What can be said of names while the main thread is at work: read, without running users' code.

No property and none of their special methods (`__getattr__`, `__repr__`) is called, which
could wait for what the main thread holds, begin a collective, or see an object half made.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
)
from typing import Any

import torch
from IPython.utils.tokenutil import token_at_cursor

from nbdist.wire.questions import Candidate, Complete, Completions, Description, Inspect, Question

BEFORE_CURSOR = re.compile(r"(?<![\w.)\]}'\"])((?:[^\W\d]\w*\.)*)(\w*)$")
"""A dotted name that ends at the cursor, in its last part perhaps."""

KEY = re.compile(r"(?<![\w.)\]])((?:[^\W\d]\w*\.)*[^\W\d]\w*)\[\s*[\"']([^\"'\]]*)$")
"""The beginning of a key, such as `batch["im`."""

MOST = 2000
LONGEST_VALUE = 200
LONGEST_DOC = 20_000

WRITTEN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Types, not their subclasses, whose values are written as they are."""

UNKNOWN = type("_Unknown", (), {})()
"""Stands for what could only be had by running code."""


def answer(names: Mapping[str, Any], question: Question) -> Completions | Description:
    """Answer from what is there."""
    try:
        match question:
            case Complete(code, cursor):
                return complete(names, code[:cursor])
            case Inspect(code, cursor):
                return describe(names, token_at_cursor(code, cursor))
    except RuntimeError:  # the main thread has changed a dict while it was read
        if isinstance(question, Inspect):
            return Description({})
    return Completions((), question.cursor, question.cursor)


def complete(names: Mapping[str, Any], text: str) -> Completions:
    """Say what can stand at the end of the text: names, attributes, keys."""
    end = len(text)
    if key := KEY.search(text):
        value = find(names, key[1])
        keys = [*dict.keys(value)] if type(value) is dict else []
        words = [each for each in keys if type(each) is str and each.startswith(key[2])]
        return Completions(tuple(map(Candidate, words[:MOST])), end - len(key[2]), end)
    place = BEFORE_CURSOR.search(text)
    if place is None:
        return Completions((), end, end)
    path, begun = place[1].rstrip("."), place[2]
    if not path and not begun:
        return Completions((), end, end)
    value = find(names, path) if path else UNKNOWN
    found = attributes(value) if path else {*names, *vars(builtins), *keyword.kwlist}
    words = sorted(w for w in {*found} if w.startswith(begun) and (begun or w[:1] != "_"))
    candidates = [Candidate(w, _kind(names, path, value, w)) for w in words[:MOST]]
    candidates.sort(key=own_first(names, text))
    return Completions(tuple(candidates), end - len(begun), end)


def own_first(names: Mapping[str, Any], text: str) -> Callable[[Candidate], bool]:
    """Make a key that sorts first what an object itself holds, of all its attributes.

    That is what its maker has put there: the layers of a model, before 60 methods of torch.
    """
    place = BEFORE_CURSOR.search(text)
    value = find(names, place[1].rstrip(".")) if place is not None and place[1] else UNKNOWN
    own = {*_own(value)} if value is not UNKNOWN and type(value) is not ModuleType else set()
    if issubclass(type(value), torch.nn.Module):
        own = {name for part in _parts(value) for name in part} | (own - {*_own(_EMPTY)})
    return lambda candidate: candidate.text not in own


_EMPTY = torch.nn.Module()
"""What every module holds."""


def describe(names: Mapping[str, Any], path: str) -> Description:
    """Describe what a dotted name stands for; nothing where there is no such name."""
    value = find(names, path)
    if value is UNKNOWN:
        return Description({})
    parts = {
        "Signature": _signature(path, value),
        "Type": type(value).__name__,
        "Value": _value(value),
        "File": _file(value),
        "Docstring": _doc(value),
    }
    lines = [f"{name + ':':<11}{text}" for name, text in parts.items() if text]
    return Description({"text/plain": "\n".join(lines)})


# --- finding -------------------------------------------------------------------------------------


def find(names: Mapping[str, Any], path: str) -> Any:
    """Find what a dotted name stands for; UNKNOWN where that takes users' code, or is nothing."""
    first, *rest = path.split(".")
    value = names[first] if first in names else vars(builtins).get(first, UNKNOWN)
    for name in rest:
        value = _attribute(value, name)
    return value


def attributes(value: Any) -> Iterator[str]:
    """List the attributes of a value, with what its classes have."""
    if value is UNKNOWN:
        return
    yield from _own(value)
    kind = value if issubclass(type(value), type) else type(value)
    for each in type.__getattribute__(kind, "__mro__"):
        yield from [*vars(each)]
    if issubclass(type(value), torch.nn.Module):
        for part in _parts(value):
            yield from part


def _attribute(value: Any, name: str) -> Any:
    if value is UNKNOWN:
        return UNKNOWN
    if issubclass(type(value), torch.nn.Module):
        for part in _parts(value):
            if name in part:
                return part[name]
    try:
        found = inspect.getattr_static(value, name)
    except AttributeError:
        return UNKNOWN
    if isinstance(found, GetSetDescriptorType | MemberDescriptorType):
        try:
            return found.__get__(value, type(value))  # C code
        except Exception:  # noqa: BLE001 (an empty slot, or an object that is half made)
            return UNKNOWN
    if isinstance(found, staticmethod | classmethod):
        return found.__func__
    is_plain = isinstance(found, FunctionType | BuiltinFunctionType | MethodDescriptorType | type)
    return found if is_plain or not hasattr(type(found), "__get__") else UNKNOWN


def _own(value: Any) -> list[str]:
    """List what an object itself holds."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return [each for each in [*held] if type(each) is str]


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """Give what torch finds as attributes of a module, by its own code; none of one half made.

    Where a module has no parts yet, it would look for them with the class's `__getattr__`.
    """
    module = torch.nn.Module
    if "training" in _own(value):  # the first thing that it has
        yield dict(module.named_children(value))
        yield dict(module.named_parameters(value, recurse=False))
        yield dict(module.named_buffers(value, recurse=False))


# --- in words ------------------------------------------------------------------------------------


def _kind(names: Mapping[str, Any], path: str, value: Any, name: str) -> str:
    """Say what jedi would call it: `function`, `class`, `module`, `keyword`, `instance`."""
    if not path and name not in names:
        return "keyword" if keyword.iskeyword(name) else "function"
    found = _attribute(value, name) if path else names.get(name, UNKNOWN)
    if found is UNKNOWN:
        return ""
    for kind, types in (("function", _FUNCTIONS), ("class", (type,)), ("module", (ModuleType,))):
        if issubclass(type(found), types):
            return kind
    return "instance"


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType)


def _signature(path: str, value: Any) -> str:
    kind = type(value)
    if kind not in (*_FUNCTIONS, type):
        return ""
    try:
        return f"{path.rpartition('.')[2]}{inspect.signature(value)}"
    except (TypeError, ValueError):  # C code has none
        return ""


def _value(value: Any) -> str:
    kind = type(value)
    if kind in WRITTEN:
        return repr(value)[:LONGEST_VALUE]
    if kind in (torch.Tensor, torch.nn.Parameter):
        return f"shape {tuple(value.shape)}, {value.dtype}, {value.device}"
    if kind in (list, tuple, dict, set, frozenset):
        return f"{len(value)} entries"
    return ""


def _file(value: Any) -> str:
    return value.__code__.co_filename if type(value) is FunctionType else ""


def _doc(value: Any) -> str:
    if type(value) in (FunctionType, BuiltinFunctionType, MethodDescriptorType, type, ModuleType):
        text = value.__doc__
    else:
        text = next(_docs(type(value)), "")
    return inspect.cleandoc(text)[:LONGEST_DOC] if type(text) is str else ""


def _docs(kind: type) -> Iterator[Any]:
    return (vars(each).get("__doc__") for each in kind.__mro__ if "__doc__" in vars(each))
