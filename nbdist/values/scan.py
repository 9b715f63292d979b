"""Reads the states of objects, by which the notebook and ranks notice changes of shared objects.

The notebook scans the values that it sends, and all objects to which these values lead.  A rank
scans only objects that it has received.
"""

from __future__ import annotations

import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import logging
import os
import pathlib
import pickle
import re
import sys
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from nbdist.values import definitions
from nbdist.values.definitions import MadeBy, Variable
from nbdist.values.digests import digest_bytes, sample_of
from nbdist.values.links import Links, MemoryBlock
from nbdist.values.memory import (
    attributes_of_array,
    has_plain_memory,
    is_of_file,
    is_plain_array,
    is_scattered,
    root_of_array,
    span_of_array,
    span_of_tensor,
)
from nbdist.values.states import (
    ATOMIC,
    ATTRIBUTE,
    CLASS,
    FACTORY,
    HEAD_PART,
    MAX_PARTS,
    MAX_TEXT,
    ObjectState,
    Reducer,
    Token,
    attributes_of,
    bytes_of_code,
    digest_of_token,
    has_getstate,
    has_python_reduce,
    is_its_attributes,
    is_made_of_attributes,
    keys_in,
    listed,
    own_attributes,
    plain_attributes_of,
    reachable_keys,
    slots_of,
)
from nbdist.values.tensors import count_hooks, has_hooks, untyped_storage_of, version_of
from nbdist.values.unchanged import NO_PARTS, Parts, parts_of

_VALUES: tuple[type, ...] = (
    *(pathlib.PurePath, re.Pattern, datetime.date, datetime.time, datetime.timedelta),
    *(datetime.tzinfo, decimal.Decimal, fractions.Fraction, uuid.UUID, os.PathLike),
)
"""Types of objects of which only the value matters, and not the identity; they get no key."""

_VALUES_BY_NAME = (("numpy", "dtype"), ("numpy", "generic"))
_TEXTS_BY_NAME = tuple(("torch", name) for name in ("dtype", "device", "layout", "memory_format"))

_FRAMES_BY_NAME = (("pandas", "DataFrame"), ("pandas", "Series"))
"""Types of pandas that are compared and sent as a whole, not as views of shared memory.

pandas lets two frames share memory until one of them is changed.  Pickling loses the record of this
sharing, so a change of one frame on a rank would change the other frame too."""

_NAMED_TYPES = (
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType),
)


class Scan:
    """Reads the states of objects; in the notebook, also of all objects to which they refer.

        scan = Scan(links, reducer, namespace)
        token = scan.token(value)
        scan.run()
        scan.states  # by key

    In the notebook, the scan gives keys to the objects.  On a rank (`adds=False`), the scan gives
    no keys, and reads only the objects that are passed to `read`.  There the token of an object
    without a key has only the object's type.

    Each object is read once.  `before` returns the state that an earlier scan has read for a key,
    or None.  An object whose parts are recognized as unchanged keeps this state.  With
    `trusts_samples`, big memory is not read as a whole if a sample of the memory has not changed.
    Raises PicklingError, and any error of a class's own `__reduce__` or `__getstate__`.
    """

    def __init__(
        self,
        links: Links,
        reducer: Reducer,
        namespace: dict[str, Any],
        *,
        adds: bool = True,
        before: Callable[[int], ObjectState | None] = lambda _: None,
        trusts_samples: bool = False,
    ) -> None:
        self.links = links
        self.states: dict[int, ObjectState] = {}
        self.needs: dict[int, frozenset[str]] = {}
        self.sizes: dict[int, int] = {}
        self.blocks: dict[int, MemoryBlock] = {}
        self.with_graph: set[int] = set()  # keys of tensors with a graph, which is not sent
        self.with_hooks: set[int] = set()  # keys of tensors with hooks, which are not sent
        self._reducer, self._namespace, self._adds, self._before = reducer, namespace, adds, before
        self._trusts_samples = trusts_samples
        self._seen: set[int] = set()
        self._waiting: list[Any] = []
        self._children: list[int] = []
        self._versions: dict[int, list[int]] = defaultdict(list)
        self._token_makers: dict[type, Callable[[Any], Token]] = {}
        self._readers: dict[str, Callable[[Any, Any], ObjectState]] = {}
        self._named: dict[int, tuple[Any, Token]] = {}
        # Ids of the containers that belong to the object that is being read, and need no key.
        self._inlined: set[int] = set()
        # By class, two items.  The first has the slots of the class, or None if the class has a
        # `__getstate__`.  The second has, for torch modules, names of tables that begin empty.
        self._kinds: dict[type, tuple[list[tuple[str, Any]] | None, frozenset[str]]] = {}
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        self._torch: Any = torch if hasattr(torch, "UntypedStorage") else None
        self._numpy: Any = numpy if hasattr(numpy, "ndarray") else None

    # --- from object to object ------------------------------------------------------------

    def token(self, value: Any) -> Token:
        """Return the data (`Token`) that represents a value in the states of other objects.

        In the notebook, the next `run` reads the objects to which the token refers.
        """
        kind = type(value)
        if kind in ATOMIC:
            if (kind is str or kind is bytes) and len(value) > MAX_TEXT:
                data = value.encode("utf-8", "surrogatepass") if kind is str else value
                return "#", kind.__name__, digest_bytes(data)
            return value
        entry = self.links.by_id.get(id(value))
        if entry is not None:
            return self._refer(entry)
        make_token = self._token_makers.get(kind)
        if make_token is None:
            make_token = self._token_makers[kind] = self._token_maker_for(kind, value)
        return make_token(value)

    def run(self) -> None:
        """Read the states of all objects that wait to be read.

        An object waits if it was passed to `read`.  In the notebook, an object also waits if a
        token or another object refers to it, and the memory of tensors and arrays is read, too.
        """
        waiting, states, readers = self._waiting, self.states, self._readers
        while waiting:
            entry = waiting.pop()
            key = entry.key
            if key in states or (value := entry()) is None:
                continue
            self._children = []
            read = readers.get(entry.tool)
            if read is None:
                read = readers[entry.tool] = getattr(self, f"_read_{entry.tool}")
            states[key] = read(value, entry)
        self._read_blocks()

    def read(self, entries: Iterable[Any]) -> None:
        """Read the states of the objects of these entries (`Links.entries`).

        In the notebook, also read the objects to which these objects refer.
        """
        self._waiting += entries
        self.run()

    def read_all(self, entries: Iterable[Any]) -> None:
        """Read the states of the entries' objects, but skip objects that cannot be read.

        An object that cannot be pickled any more is an error only when a cell uses the object.
        """
        entries = [*entries]
        try:
            self.read(entries)
        except Exception:  # noqa: BLE001 (a user's `__reduce__` can raise anything)
            for entry in entries:
                self._waiting.clear()
                with suppress(Exception):
                    self.read([entry])

    def reach(self, tokens: Iterable[Token]) -> set[int]:
        """Return the keys of the objects and memory blocks to which these tokens lead."""
        return reachable_keys(self.states, (key for token in tokens for key in keys_in(token)))

    def _refer(self, entry: Any) -> Token:
        key = entry.key
        self._children.append(key)
        if key not in self._seen:
            self._seen.add(key)
            if self._adds:
                self._waiting.append(entry)
        return ..., key

    def _track(self, tool: str) -> Callable[[Any], Token]:
        def track(value: Any) -> Token:
            if not self._adds:
                return "new", type(value).__qualname__
            return self._refer(self.links.add(value, tool))

        return track

    # --- which kind of object -------------------------------------------------------------

    def _token_maker_for(self, kind: type, value: Any) -> Callable[[Any], Token]:
        """Return the function that makes tokens for values of the type of `value`."""
        simple = _TOOLS.get(kind)
        if simple is not None:
            return self._track(simple)
        inline = {
            tuple: self._token_of_tuple,
            frozenset: lambda v: ("fs", *sorted(map(self.token, v), key=digest_of_token)),
            types.MethodType: lambda v: ("mm", self.token(v.__func__), self.token(v.__self__)),
            types.FunctionType: self._token_of_function,
            types.BuiltinFunctionType: self._token_of_builtin,
            types.ModuleType: lambda v: ("mod", definitions.require_importable(v)),
            types.CodeType: lambda v: ("code", bytes_of_code(v)),
            staticmethod: lambda v: ("sm", self.token(v.__func__)),
            classmethod: lambda v: ("cm", self.token(v.__func__)),
            property: lambda v: ("pr", *map(self.token, (v.fget, v.fset, v.fdel, v.__doc__))),
            weakref.ReferenceType: lambda v: ("w", self.token(v())),
            range: lambda v: ("v", repr(v)),
            slice: lambda v: ("sl", *map(self.token, (v.start, v.stop, v.step))),
            type(NotImplemented): lambda v: ("v", "NotImplemented"),
            types.MethodWrapperType: lambda v: ("mw", self.token(v.__self__), v.__name__),
            MadeBy: lambda v: ("mb", self.token(v.reduced)),
            Variable: lambda v: self.token(v.cell),
            types.GenericAlias: lambda v: ("ga", self.token(v.__origin__), self.token(v.__args__)),
        }.get(kind)
        if inline is not None:
            return inline
        if isinstance(value, type):
            return self._token_of_class
        for base, tool in _TOOLS.items():
            if base in _HAVE_SUBCLASSES and issubclass(kind, base):
                return self._track(tool)
        if issubclass(kind, enum.Enum):
            return lambda v: ("e", self.token(type(v)), repr(v.name), self.token(v.value))
        if isinstance(value, _NAMED_TYPES):
            return lambda v: ("n", repr(v))
        if isinstance(value, types.ModuleType):
            return lambda v: ("mod", definitions.require_importable(v))
        if isinstance(value, logging.Logger):
            return lambda v: ("log", v.name)
        if kind.__module__ == "typing" or kind is types.UnionType or _is_sentinel(kind):
            return lambda v: ("v", repr(v))
        if isinstance(value, self._types(_TEXTS_BY_NAME)):
            return lambda v: ("v", repr(v))
        if isinstance(value, (*_VALUES, *self._types(_VALUES_BY_NAME))):
            return lambda v: ("v", digest_bytes(pickle.dumps(v, 5)))
        if issubclass(kind, tuple) and (hasattr(kind, "_fields") or kind.__module__ == "torch"):
            return lambda v: ("nt", self.token(type(v)), *map(self.token, v))
        if self._torch is not None and isinstance(value, self._torch.Tensor):
            return self._token_of_tensor
        if self._torch is not None and isinstance(
            value, self._torch.UntypedStorage | self._torch.TypedStorage
        ):
            return self._token_of_storage
        if is_plain_array(value):
            return self._token_of_array
        if isinstance(value, self._types(_FRAMES_BY_NAME)):
            return self._track("frame")
        if kind not in self._reducer.table and is_made_of_attributes(kind):
            return self._token_of_instance
        if isinstance(self.reduced(value), str):
            return lambda v: ("n", type(v).__module__, str(self.reduced(v)))
        return self._track("opaque")

    @staticmethod
    def _types(names: Iterable[tuple[str, str]]) -> tuple[type, ...]:
        classes = (getattr(sys.modules.get(library), name, None) for library, name in names)
        return tuple(filter(None, classes))

    def _token_of_tuple(self, value: tuple[Any, ...]) -> Token:
        return "t", *map(self.token, value)

    def _token_of_builtin(self, value: Any) -> Token:
        if value.__self__ is None or isinstance(value.__self__, types.ModuleType):
            return "n", value.__module__ or "", value.__qualname__
        return "bm", self.token(value.__self__), value.__name__

    def _token_of_function(self, value: types.FunctionType) -> Token:
        if value.__code__ is definitions.DISPATCHER:
            return self._track("opaque")(value)
        return self._token_of_definition(value, "function")

    def _token_of_class(self, value: type) -> Token:
        return self._token_of_definition(value, "class")

    def _token_of_definition(self, value: Any, tool: str) -> Token:
        """Return the token of a class or function; this is its name if pickle sends only the name.

        `tool` is "class" or "function".
        """
        cached = self._named.get(id(value))
        if cached is not None:
            return cached[1]
        reduced = self._reducer.reduce(value)
        if reduced is NotImplemented or len(reduced) <= definitions.REFERENCE_LENGTH:
            token = "n", value.__module__ or "", value.__qualname__
            self._named[id(value)] = value, token
            return token
        return self._track(tool)(value)

    # --- the states of containers and instances -------------------------------------------

    def _state(self, parts: dict[Token, Token]) -> ObjectState:
        if len(parts) > MAX_PARTS:
            return self._unit(tuple(parts.items()))
        return ObjectState(parts, tuple(self._children))

    def _unit(self, token: Token) -> ObjectState:
        return ObjectState(None, tuple(self._children), digest_of_token(token))

    def _read_dict(self, value: Any, entry: Any) -> ObjectState:
        if type(value) in (dict, OrderedDict) and not value:
            return _EMPTY
        token = self.token
        # Copy the items, because another thread may change the dict meanwhile.  A method of the
        # user's class may return other items, so call the method of Python's class.
        items = OrderedDict.items if isinstance(value, OrderedDict) else dict.items
        pairs = [*items(value)]
        is_plain = type(value) in (dict, OrderedDict)
        flat = []
        if is_plain and len(pairs) <= MAX_PARTS:
            self.sizes[entry.key] = 64 * len(pairs)
            flat = [part for pair in pairs for part in pair]
            if (before := self._known_of(value, entry, flat)) is not None:
                return before
        parts = {token(k): token(v) for k, v in pairs}
        if flat:
            return self._sampled(self._state(parts), value, entry, flat, set())
        if isinstance(value, defaultdict):
            parts[FACTORY] = token(value.default_factory)
        if type(value) not in _TOOLS:
            parts |= {(ATTRIBUTE, name): token(part) for name, part in own_attributes(value)}
        self.sizes[entry.key] = 64 * len(parts)
        return self._state(parts)

    def _known_of(self, value: Any, entry: Any, parts: list[Any]) -> ObjectState | None:
        """Return the earlier state of `value` if `value` has the same parts as then, else None.

        After None, the caller must make the tokens of all parts, to read the state again.
        """
        before = self._before(entry.key)
        if before is None or type(before.sample) is not Parts:
            return None
        entries = before.sample.entries_if_same(value, parts, self.links.by_id)
        if entries is None:
            return None
        for each in entries:
            self._refer(each)
        return before

    def _sampled(
        self, state: ObjectState, value: Any, entry: Any, parts: list[Any], empty: set[int]
    ) -> ObjectState:
        """Return the earlier state of `value` if the new `state` equals it, else return `state`.

        An earlier state gets a sample, by which `_known_of` recognizes the parts in the next scan.
        A state that is read for the first time gets no sample, because most objects are read only
        once.  `parts` are the parts of `value`, and `empty` has the positions of empty tables in
        `parts`.
        """
        before = self._before(entry.key)
        if before is None or before != state:
            return state
        if before.sample is not NO_PARTS:
            before.sample = parts_of(value, parts, self.links.by_id, empty) or NO_PARTS
        return before

    def _read_list(self, value: Any, entry: Any) -> ObjectState:
        self.sizes[entry.key] = 16 * list.__len__(value)
        parts = [*list.__iter__(value)]
        if type(value) is not list:
            return self._unit((*self._attributes_in(value), *map(self.token, parts)))
        if (before := self._known_of(value, entry, parts)) is not None:
            return before
        state = self._unit((*map(self.token, parts),))
        return self._sampled(state, value, entry, parts, set())

    def _attributes_in(self, value: Any) -> list[Token]:
        return [(ATTRIBUTE, name, self.token(part)) for name, part in own_attributes(value)]

    def _read_deque(self, value: Any, entry: Any) -> ObjectState:
        attributes = () if type(value) is deque else self._attributes_in(value)
        return self._unit((*attributes, value.maxlen, *map(self.token, [*deque.__iter__(value)])))

    def _read_set(self, value: Any, entry: Any) -> ObjectState:
        self.sizes[entry.key] = 64 * set.__len__(value)
        attributes = () if type(value) is set else self._attributes_in(value)
        return self._unit(
            (*attributes, *sorted(map(self.token, [*set.__iter__(value)]), key=digest_of_token))
        )

    def _read_bytearray(self, value: Any, entry: Any) -> ObjectState:
        self.sizes[entry.key] = len(value)
        return ObjectState(None, (), digest_bytes(bytes(value)).encode())

    def _read_cell(self, value: Any, entry: Any) -> ObjectState:
        try:
            return self._unit((self.token(value.cell_contents),))
        except ValueError:  # the cell is empty
            return self._unit(())

    def _read_instance(self, value: Any, entry: Any) -> ObjectState:
        token, kind = self.token, type(value)
        if kind not in self._kinds:
            is_module = self._torch is not None and issubclass(kind, self._torch.nn.Module)
            slots = None if has_getstate(kind) else slots_of(kind)
            self._kinds[kind] = slots, names_of_empty_tables() if is_module else _NO_NAMES
        slots, tables = self._kinds[kind]
        named = attributes_of(value) if slots is None else plain_attributes_of(value, slots)
        flat = [*named, *named.values()]
        before = self._known_of(value, entry, flat)
        if before is not None and before.parts and before.parts.get(CLASS) == token(kind):
            return before
        self._children = []
        by_id = self.links.by_id
        empty_names = {
            name
            for name in tables.intersection(named)
            if not named[name] and id(named[name]) not in by_id
        }
        parts = {
            name: ("empty", type(part).__name__) if name in empty_names else token(part)
            for name, part in named.items()
        }
        parts[CLASS] = token(kind)
        empty = {at for at, name in enumerate(named, len(named)) if name in empty_names}
        return self._sampled(self._state(parts), value, entry, flat, empty)

    # --- definitions ----------------------------------------------------------------------

    def _read_function(self, value: types.FunctionType, entry: Any) -> ObjectState:
        namespace = value.__globals__
        if namespace is self._namespace:
            self.needs[entry.key] = definitions.global_names(value.__code__)
            where = "main"
        elif getattr(sys.modules.get(namespace.get("__name__", "")), "__dict__", None) is namespace:
            where = str(namespace.get("__name__"))
        else:
            return self._read_opaque(value, entry)
        token = self.token
        parts = {
            HEAD_PART: (where, *map(token, value.__closure__ or ())),
            "__code__": ("code", digest_bytes(bytes_of_code(value.__code__))),
        }
        for name, part in definitions.details_of(value).items():
            parts[name] = ("d", *_flat(token, part)) if type(part) is dict else token(part)
        for name, part in value.__dict__.items():
            parts[f".{name}"] = token(part)
        return self._state(parts)

    def _read_class(self, value: type, entry: Any) -> ObjectState:
        maker, args, state = self._reducer.reduce(value)[:3]
        _, second_args, second_state = self._reducer.reduce(value)[:3]
        parts = {HEAD_PART: (self.token(maker), self._pair(args, second_args))}
        second = definitions.class_attributes(second_state)
        for name, part in definitions.class_attributes(state).items():
            parts[name] = self._pair(part, second.get(name))
        return self._state(parts)

    def _read_frame(self, value: Any, entry: Any) -> ObjectState:
        usage = value.memory_usage(index=True)
        self.sizes[entry.key] = int(getattr(usage, "sum", lambda: usage)())
        state = {name: part for name, part in value.__getstate__().items() if name != "_mgr"}
        # Read each column: pandas may merge columns of one type in memory at any time, and this
        # would look like a change.
        if value.ndim == 1:
            arrays = [value.array]
        else:
            arrays = [value.iloc[:, number].array for number in range(value.shape[1])]
        content = self._reducer.content((state, value.axes, arrays))
        return self._unit((self.token(type(value)), content))

    # --- all other objects, by what they are pickled as -----------------------------------

    def reduced(self, value: Any) -> Any:
        reduced = self._reducer.reduce(value)
        if reduced is NotImplemented:
            make = self._reducer.table.get(type(value))
            reduced = value.__reduce_ex__(5) if make is None else make(value)
        return reduced

    def _read_opaque(self, value: Any, entry: Any) -> ObjectState:
        # Read `__dict__` before reducing: some objects make it only when it is read.
        attributes = getattr(value, "__dict__", None)
        first = listed(self.reduced(value))
        # Reduce the value twice.  Objects in both reductions belong to the value.  Other objects
        # are made for each reduction, so their identity means nothing.
        second = first if _is_plain(first) else listed(self.reduced(value))
        self._inlined = {id(attributes), *self._own_containers(value, first)}
        make, args, state, items, pairs, _ = first
        parts = {
            HEAD_PART: (self._pair(make, second[0]), self._pair(args, second[1])),
            "state": self._pair(state, second[2]),
            "items": self._pair(items, second[3]),
            "pairs": self._pair(pairs, second[4]),
        }
        return self._state(parts)

    def _own_containers(self, value: Any, reduced: tuple[Any, ...]) -> set[int]:
        """Return the ids of the lists, dicts and sets that belong to an object itself.

        They are in `reduced`, the result of `__reduce_ex__` for the object.  If Python code has
        made that result, return no ids, since the code may return containers of other objects.
        """
        ids = set[int]()
        kind = type(value)
        if kind not in copyreg.dispatch_table and not has_python_reduce(kind):  # pickled by C code
            for part in reduced[1:3]:
                inner = part if type(part) is tuple else (part,)
                ids |= {id(each) for each in inner if type(each) in (list, dict, set)}
        return ids

    def _pair(self, first: Any, second: Any) -> Token:
        """Return the token of a part of what `__reduce_ex__` returns for an object.

        `__reduce_ex__` was called twice: `first` is the part in the first result, and `second` the
        same part in the second result.  If they are two objects, each was made only for its result.
        Then, and for a container that belongs to the object itself (`_own_containers`), the token
        describes the contents of `first`, and `first` gets no key.
        """
        kind = type(first)
        if first is second and kind is not MadeBy and id(first) not in self._inlined:
            return self.token(first)
        if kind is not type(second):
            return "?", kind.__qualname__
        if kind in ATOMIC:
            return self.token(first)
        if kind in (tuple, list):
            if len(first) != len(second):
                return "?", len(first)
            return kind.__name__, *map(self._pair, first, second)
        if kind in (dict, OrderedDict, defaultdict):
            items = zip([*first.items()], [*second.items()], strict=False)
            return "d", *((self._pair(a, c), self._pair(b, d)) for (a, b), (c, d) in items)
        if kind in (set, frozenset):
            return "s", *sorted(map(self.token, first), key=digest_of_token)
        if kind is MadeBy:
            return "mb", self._pair(first.reduced, second.reduced)
        if kind is Variable:
            return self.token(first.cell)
        if kind is pickle.PickleBuffer:
            return "b", digest_bytes(first.raw())
        if isinstance(first, types.MethodType | types.BuiltinFunctionType | types.ModuleType):
            return self.token(first)
        return "f", kind.__qualname__, self._reducer.content(first)

    # --- tensors and arrays ---------------------------------------------------------------

    def _token_of_tensor(self, value: Any) -> Token:
        tool = "tensor" if has_plain_memory(self._torch, value) else "opaque"
        return self._track(tool)(value)

    def _token_of_storage(self, value: Any) -> Token:
        data = untyped_storage_of(value)
        start, size = data.data_ptr(), data.nbytes()
        if not size or not start:
            return "st", 0
        make_ref = partial(weakref.ref, data)
        block = self._block(start, start + size, (start, start + size), make_ref, data.device.type)
        if block is None:
            return "st", "new"
        self._use(block)
        return "st", (..., block.key), start - block.start, size

    def _token_of_instance(self, value: Any) -> Token:
        return self._track("instance" if is_its_attributes(value) else "opaque")(value)

    def _token_of_array(self, value: Any) -> Token:
        is_opaque = value.dtype.hasobject or is_of_file(value)
        return self._track("opaque" if is_opaque else "array")(value)

    def _read_tensor(self, value: Any, entry: Any) -> ObjectState:
        sample = _layout_of_tensor(value)
        before = self._before(entry.key) if sample else None
        if before is not None and before.sample == sample:
            block = self.links.blocks.get(before.children[0])
            if block is not None and block.owner() is not None:
                self._use(block, value)
                return before
        state = self._state_of_tensor(value, entry)
        if len(state.children) == 1:
            state.sample = sample
        return state

    def _state_of_tensor(self, value: Any, entry: Any) -> ObjectState:
        parts = {"data": self._data_of_tensor(value)}
        parts["requires_grad"] = value.requires_grad
        parts[CLASS] = type(value).__qualname__
        if value.is_leaf or value.retains_grad:
            parts["grad"] = self.token(value.grad)
        if self._adds:
            hooks = count_hooks(value)
            if hooks:
                parts["hooks"] = hooks
                self.with_hooks.add(entry.key)
            if value.grad_fn is not None:
                self.with_graph.add(entry.key)
        for name, part in value.__dict__.items():
            parts[f".{name}"] = self.token(part)
        return self._state(parts)

    def _data_of_tensor(self, value: Any) -> Token:
        size, stride = tuple(value.shape), value.stride()
        shape = str(value.dtype), size, stride
        if 0 in size:
            return "empty", *shape
        storage = value.untyped_storage()
        start, end = span_of_tensor(value)
        at = storage.data_ptr()
        root, device = (at, at + storage.nbytes()), storage.device.type
        make_ref = partial(weakref.ref, storage)
        if is_scattered(value, root, start, end) and (
            self.links.blocks.find_containing(start, end, root[0], device) is None
        ):
            what = start, end, *shape
            block = self.links.blocks.add_copied(what, make_ref, device) if self._adds else None
        else:
            block = self._block(start, end, root, make_ref, device)
        if block is None:
            return "new", *shape
        self._use(block, value)
        return (..., block.key), start - block.start, *shape

    def _read_array(self, value: Any, entry: Any) -> ObjectState:
        shape = (
            value.dtype.str,
            repr(value.dtype.fields and value.dtype),
            value.shape,
            value.strides,
        )
        attributes = attributes_of_array(value).items()
        parts = {f".{name}": self.token(part) for name, part in attributes}
        parts[CLASS] = self.token(type(value))
        if not value.size:
            return self._state({HEAD_PART: ("empty", *shape), **parts})
        start, end = span_of_array(value)
        at = value.__array_interface__["data"][0]
        root, make_ref = root_of_array(self._torch, value, (start, end))
        block = self._block(start, end, root, make_ref, "cpu")
        if block is None:
            return self._state({HEAD_PART: ("new", *shape), **parts})
        self._use(block)
        parts["writeable"] = bool(value.flags.writeable)
        return self._state({HEAD_PART: ((..., block.key), at - block.start, *shape), **parts})

    def _block(
        self, start: int, end: int, root: tuple[int, int], make_ref: Callable[[], Any], device: str
    ) -> MemoryBlock | None:
        blocks = self.links.blocks
        if not self._adds:
            return blocks.find_containing(start, end, root[0], device)
        return blocks.find_or_add(start, end, root, make_ref, device)

    def _use(self, block: MemoryBlock, tensor: Any = None) -> None:
        self._children.append(block.key)
        self.blocks[block.key] = block
        if tensor is not None and not _is_small(block):  # small blocks need no versions
            self._versions[block.key].append(version_of(tensor))

    def _read_blocks(self) -> None:
        """Read, in the notebook, the states of memory blocks; several big blocks in threads."""
        if not self._adds:  # on a rank, where `Counterparts` compares memory
            return
        states, sizes, big = self.states, self.sizes, []
        for key, block in self.blocks.items():
            if key in states:
                continue
            sizes[key] = block.size
            if block.size >= _SCAN_AT_ONCE:
                big.append(block)
            else:
                states[key] = self._read_block(block)
        for block, state in zip(big, _in_threads(self._read_block, big), strict=True):
            states[block.key] = state

    def _read_block(self, block: MemoryBlock) -> ObjectState:
        before = self._before(block.key)
        if _is_small(block):
            digest = digest_bytes(block.view()).encode()
            if before is not None and before.digest == digest:
                return before
            return ObjectState(None, (), digest)
        versions = repr(self._versions[block.key])
        if block.device != "cpu":
            return ObjectState(None, (), f"{block.start} {versions}".encode())
        if block.copied:
            return ObjectState(None, (), repr((block.copied, versions)).encode())
        view = block.view()
        sample = versions, sample_of(view)
        if self._trusts_samples and before is not None and before.sample == sample:
            return before
        if block.size > WHOLE_LIMIT:
            return ObjectState(None, (), repr(sample).encode(), sample)
        return ObjectState(None, (), digest_bytes(view).encode(), sample)


def memory_key(value: Any, links: Links) -> int | None:
    """Return the key of the memory block of which a tensor or array is a view.

    Return None if the memory has no key, if `value` is no tensor or array, or if it has no
    elements.  Also return None for a tensor with an autograd graph, because the graph would be
    lost.
    """
    try:
        return _memory_key(value, links)
    except RuntimeError:  # for example, a tensor of `torch.func.grad` is invalid afterwards
        return None


def _memory_key(value: Any, links: Links) -> int | None:
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "UntypedStorage") and issubclass(type(value), torch.Tensor):
        if not has_plain_memory(torch, value) or not value.numel() or value.grad_fn is not None:
            return None
        storage, span = value.untyped_storage(), span_of_tensor(value)
        root, device = storage.data_ptr(), storage.device.type
    elif is_plain_array(value) and value.size:
        span, device = span_of_array(value), "cpu"
        (root, _), _ = root_of_array(torch, value, span)
    else:
        return None
    block = links.blocks.find_containing(*span, root, device)
    return None if block is None else block.key


QUICK_BYTES = 4 << 20
WHOLE_LIMIT = 4 << 30
"""How a memory block of the CPU is compared depends on its number of bytes.

Up to QUICK_BYTES, the state of the block has a digest of all bytes.  The state of a bigger block
also has a sample, a digest of some pages, which is computed faster.  Above WHOLE_LIMIT it has only
the sample, because reading all bytes would take too long."""

_SCAN_AT_ONCE = 1 << 20  # bytes; several blocks of this size or more are read in threads

_TOOLS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "dict",
    defaultdict: "dict",
    list: "list",
    set: "set",
    deque: "deque",
    bytearray: "bytearray",
    types.CellType: "cell",
}


@functools.cache
def names_of_empty_tables() -> frozenset[str]:
    """Return the names of the tables for hooks, buffers and the like that a new torch module has.

    A scan gives an empty table no key.  This saves time, since each module of a model has a dozen
    tables, and most stay empty.
    """
    from torch import nn

    made = vars(nn.Module()).items()
    return frozenset(name for name, part in made if isinstance(part, dict | set) and not part)


def _is_small(block: MemoryBlock) -> bool:
    """Return True if a memory block is small and on the CPU: then each scan reads all its bytes."""
    return block.size <= QUICK_BYTES and block.device == "cpu" and not block.copied


def _is_sentinel(kind: type) -> bool:
    """Return True for the private types of `dataclasses`, such as the type of `MISSING`."""
    return kind.__module__ == "dataclasses" and kind.__name__.startswith("_")


_EMPTY = ObjectState({})
_NO_NAMES = frozenset[str]()


_HAVE_SUBCLASSES = (dict, list, set, deque)


def _layout_of_tensor(value: Any) -> Any:
    """Return a tensor's address and layout; None if it has a graph, grad, attributes or hooks."""
    if value.grad_fn is not None or value.grad is not None or value.__dict__ or has_hooks(value):
        return None
    where = value.data_ptr(), value.untyped_storage().nbytes(), value.device
    return *where, value.dtype, value.shape, value.stride(), value.requires_grad, type(value)


def _flat(token: Callable[[Any], Token], value: dict[Any, Any]) -> Iterable[Token]:
    return ((token(k), token(v)) for k, v in value.items())


def _is_plain(reduced: Any) -> bool:
    """Return True if a reduction has only plain values, functions, classes and tuples of these."""
    if type(reduced) is tuple:
        return all(map(_is_plain, reduced))
    return type(reduced) in ATOMIC or isinstance(reduced, types.FunctionType | type)


def _in_threads(
    read: Callable[[MemoryBlock], ObjectState], blocks: list[MemoryBlock]
) -> list[ObjectState]:
    if len(blocks) < 2:
        return [*map(read, blocks)]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "nbdist-digest") as pool:
        return [*pool.map(read, blocks)]
