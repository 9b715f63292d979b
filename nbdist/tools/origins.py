"""How a script gets a name of the notebook: by an import, as code, or out of a file beside it.

Looked for in what the notebook's own cells say, so that the script says it as its author did;
files are written as any program would, so that nothing of nbdist is needed to read them.  This
process has torch where a value has tensors; it is never imported here.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import math
import pathlib
import pickle
import sys
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nbdist.notebook.shipping.free_names import names_bound, names_used
from nbdist.tools.script_text import WIDTH, Imported, imported_by
from nbdist.values.definitions import cell_source
from nbdist.values.identity import is_atomic
from nbdist.values.pickling import pickle as look_at
from nbdist.values.unpicklable import PICKLING_ERRORS
from nbdist.words import one_line

MOST_CHARACTERS = 1_000
"""Of a list or dict that is written into the script; a longer one goes into a file."""

_DEEP = 20
_SIZED = (list, tuple, set, dict, str, bytes)


@dataclass(frozen=True, slots=True)
class Written:
    """A name as code; `needs` are global names that this uses, `first` those before it is run."""

    text: str
    needs: frozenset[str] = frozenset()
    first: frozenset[str] = frozenset()


Origin = list[Imported] | Written | None
"""None: a value that nothing here writes down."""


class Origins:
    """Answers for the names of one notebook, by its namespace and the sources of its cells."""

    def __init__(self, namespace: Mapping[str, Any], cells: Iterable[str]) -> None:
        self._namespace = namespace
        self._cells = [tree for cell in cells if (tree := _parsed(cell)) is not None]
        self._sources = [cell for cell in cells if _parsed(cell) is not None]

    def __repr__(self) -> str:
        return f"<Origins in {len(self._cells)} cells>"

    def of(self, name: str, value: Any) -> Origin:
        """Find how the script can get the notebook's value of a name without a file."""
        if isinstance(value, types.ModuleType):
            return self._import(name, value) or _module(name, value)
        if found := self._import(name, value):
            return found
        if (text := literal(value)) is not None:
            return self._as_typed(name, value) or _written(f"{name} = {text}")
        whole = inspect.unwrap(value) if callable(value) else value
        if isinstance(whole, functools.partial | types.MethodType):
            return self.statement(name)
        if isinstance(whole, types.FunctionType | type) and whole.__module__ == "__main__":
            return self._definition(name, whole) or self.statement(name)
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
            return _attribute(name, value)
        return None

    def statement(self, name: str) -> Origin:
        """Find the last line of the notebook's cells that binds the name: to be run again."""
        for tree, source in zip(reversed(self._cells), reversed(self._sources), strict=True):
            for node in reversed(tree.body):
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.ClassDef):
                    text = _text(source, node)
                    if name in names_bound(text):
                        return _written(text)
        return None

    def _as_typed(self, name: str, value: Any) -> Origin:
        """Find the line that has bound a plain value, if that says the same still."""
        line = self.statement(name)
        match ast.parse(line.text).body if isinstance(line, Written) else []:
            case [ast.Assign([ast.Name()], typed)]:
                try:
                    same = ast.literal_eval(typed)
                except (SyntaxError, TypeError, ValueError):
                    return None
                return line if repr(same) == repr(value) else None
        return None

    @functools.cached_property
    def _imports(self) -> Mapping[str, list[Imported]]:
        found = defaultdict(list)
        for tree in reversed(self._cells):
            for node in ast.walk(tree):
                for each in (imported_by(node) or ()) if isinstance(node, ast.stmt) else ():
                    found[each.name.partition(".")[0]].append(each)
        return found

    def _import(self, name: str, value: Any) -> list[Imported]:
        """Find the statement that has imported it; several for `import a.b` and `import a.c`."""
        same = [each for each in self._imports.get(name, ()) if _gives(each, value)]
        dotted = [each for each in same if each.name != name]
        return [*same[:1]] if same[:1] != dotted[:1] else [*dict.fromkeys(dotted)]

    def _definition(self, name: str, whole: types.FunctionType | type) -> Origin:
        """Find the statement of a cell that has defined it, under this name."""
        code = whole.__code__ if isinstance(whole, types.FunctionType) else _code_of_class(whole)
        cell = cell_source(code.co_filename) if code is not None else None
        sources = [cell.text] if cell is not None else [*reversed(self._sources)]
        for source in sources:
            tree = _parsed(source)
            for node in tree.body if tree else ():
                text = _text(source, node)
                if name in names_bound(text) and _covers(node, whole, code):
                    return _written(text)
        return self._alias(name, whole)

    def _alias(self, name: str, value: Any) -> Origin:
        known = getattr(value, "__name__", name)
        if known != name and self._namespace.get(known) is value:
            return _written(f"{name} = {known}")
        return None


def literal(value: Any) -> str | None:
    """Write a small value of Python's own types as code; None for what is no such, or is long."""
    try:
        text = _literal(value, _DEEP)
    except ValueError:
        return None
    if len(text) > WIDTH - 20 and isinstance(value, list | tuple | dict | set):
        return _in_lines(text)
    return text


def quoted(text: str) -> str:
    """Write a string as most people do, in double quotes."""
    shown = repr(text)
    return f'"{shown[1:-1]}"' if shown[0] == "'" and '"' not in text else shown


def _in_lines(text: str) -> str:
    """Write a long list or dict over several lines: what is in it, one below the other."""
    parts = ast.parse(text, mode="eval").body
    match parts:
        case ast.Dict(keys, values):
            inner = [
                f"{_part(text, k)}: {_part(text, v)}" for k, v in zip(keys, values, strict=True)
            ]
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            inner = [_part(text, item) for item in items]
        case _:
            return text
    if all(isinstance(each, ast.Constant) for each in getattr(parts, "elts", [parts])):
        inner = (
            textwrap.wrap(", ".join(inner), WIDTH - 8, break_long_words=False)
            if not any('"' in each for each in inner)
            else inner
        )
    body = ",\n    ".join(each.rstrip(",") for each in inner)
    return f"{text[0]}\n    {body},\n{text[-1]}"


def _part(text: str, node: ast.expr | None) -> str:
    return "" if node is None else ast.get_source_segment(text, node) or ""


def _literal(value: Any, deep: int) -> str:
    if not deep or (type(value) in _SIZED and len(value) > MOST_CHARACTERS):
        raise ValueError("too deep, or too long")
    text = _as_literal(value, functools.partial(_literal, deep=deep - 1))
    if len(text) > MOST_CHARACTERS:
        raise ValueError("too long")
    return text


def _as_literal(value: Any, inner: Callable[[Any], str]) -> str:
    if isinstance(value, pathlib.PurePath):
        return f"Path({quoted(str(value))})"
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, str) and is_atomic(value):
        return quoted(value)
    if is_atomic(value):
        return repr(value)
    match type(value).__name__, type(value).__module__:
        case "list", "builtins":
            return f"[{', '.join(map(inner, value))}]"
        case "tuple", "builtins":
            return f"({', '.join(map(inner, value))}{',' * (len(value) == 1)})"
        case "set", "builtins" if value:
            return f"{{{', '.join(sorted(map(inner, value)))}}}"
        case "dict", "builtins":
            return f"{{{', '.join(f'{inner(k)}: {inner(v)}' for k, v in value.items())}}}"
        case "range", "builtins":
            return repr(value)
        case "dtype", "torch":
            return str(value)
        case "device", "torch":
            return f'torch.device("{value}")'
    raise ValueError("no literal")


def _written(text: str) -> Written:
    return Written(text, names_used(text), names_used(_without_bodies(text)))


def _without_bodies(text: str) -> str:
    """Give code without what its functions will do when they are called."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [ast.Pass()]
        elif isinstance(node, ast.Lambda):
            node.body = ast.Constant(None)
    return ast.unparse(tree)


def _module(name: str, module: types.ModuleType) -> Origin:
    if sys.modules.get(module.__name__) is not module or module.__name__ == "__main__":
        return None
    return [Imported(name, module.__name__)]


def _attribute(name: str, value: Any) -> Origin:
    found = Imported(name, value.__module__ or "", value.__qualname__)
    return [found] if "." not in found.attribute and _gives(found, value) else None


def _gives(imported: Imported, value: Any) -> bool:
    module = sys.modules.get(imported.module)
    if imported.attribute:
        member = vars(module).get(imported.attribute) if module else None
        submodule = sys.modules.get(f"{imported.module}.{imported.attribute}")
        return value is not None and (member is value or submodule is value)
    if imported.name == imported.module:  # `import a.b` binds `a`
        module = sys.modules.get(imported.module.partition(".")[0])
    return module is value


def _code_of_class(kind: type) -> types.CodeType | None:
    members = (inspect.unwrap(each) for each in vars(kind).values() if callable(each))
    codes = (getattr(each, "__code__", None) for each in members)
    own = (code for code in codes if code and not code.co_filename.startswith("<string>"))
    return next(own, None)


def _covers(node: ast.stmt, whole: Any, code: types.CodeType | None) -> bool:
    """Say whether this statement has made the function, or the class with this method."""
    if isinstance(whole, type) and isinstance(node, ast.ClassDef) and node.name == whole.__name__:
        return True
    return (
        code is not None
        and not isinstance(whole, type)
        and min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        <= code.co_firstlineno
        <= (node.end_lineno or node.lineno)
    )


def _text(source: str, node: ast.stmt) -> str:
    """Give a statement's lines, with its decorators and the comments right above it."""
    lines = source.splitlines()
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    return "\n".join(lines[first - 1 : node.end_lineno])


@functools.lru_cache(maxsize=4096)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


_PLAIN_TYPES = (dict, list, tuple, set, str, bytes, int, float, bool, complex, type(None))


@dataclass(frozen=True, slots=True)
class File:
    """Names whose values share objects, or one alone, in one file.

    `needs` are names of the notebook that it takes to read them, `module` is what reads them.
    """

    names: tuple[str, ...]
    kind: Literal["npy", "pkl", "pt"]
    needs: frozenset[str] = frozenset()
    weights_only: bool = True

    @property
    def name(self) -> str:
        """Of the file itself."""
        return f"{self.names[0]}.{self.kind}"

    @property
    def module(self) -> str:
        """The name of the module that reads it, as the script has it."""
        return {"npy": "np", "pkl": "pickle", "pt": "torch"}[self.kind]

    @property
    def code(self) -> str:
        """The line of the script that reads it."""
        path = f'DATA / "{self.name}"'
        only = "" if self.weights_only else ", weights_only=False"
        load = {
            "npy": f"np.load({path})",
            "pkl": f"pickle.loads(({path}).read_bytes())",
            "pt": f'torch.load({path}, map_location="cpu"{only})',
        }
        return f"{', '.join(self.names)} = {load[self.kind]}"

    def write(self, folder: Path, namespace: Mapping[str, Any]) -> int:
        """Write the values; how many bytes the file has.  Raises OSError."""
        value = _value(self.names, namespace)
        with (folder / self.name).open("wb") as file:
            match self.kind:
                case "npy":
                    sys.modules["numpy"].save(file, value)
                case "pkl":
                    pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
                case "pt":
                    sys.modules["torch"].save(value, file)
            return file.tell()


def sharing(values: Mapping[str, Any], namespace: dict[str, Any]) -> list[list[str]]:
    """Group names whose values have an object in common: these must be read together."""
    looks = {}
    for name, value in values.items():
        try:
            looks[name] = look_at({name: value}, namespace, sketch=True)
        except PICKLING_ERRORS:
            continue
    groups: list[tuple[list[str], set[int]]] = []
    for name in values:
        objects = set(looks[name].shared) if name in looks else set()
        meet = [group for group in groups if not objects.isdisjoint(group[1])]
        groups = [group for group in groups if group not in meet]
        names = [each for group in meet for each in group[0]]
        groups.append(([*names, name], objects.union(*(group[1] for group in meet))))
    return [names for names, _ in groups]


def file_of(names: Iterable[str], namespace: Mapping[str, Any]) -> File | str:
    """Choose the file for the values of these names; or say why there can be none."""
    names = (*names,)
    value = _value(names, namespace)
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    if type(value) is array and not value.dtype.hasobject:
        return File(names, "npy")
    pickler = _Noting(_Nowhere())
    try:
        pickler.dump(value)
    except PICKLING_ERRORS as error:
        return f"{type(error).__name__}: {one_line(str(error))}"
    kind: Literal["pt", "pkl"] = "pt" if pickler.has_tensors else "pkl"
    return File(names, kind, frozenset(pickler.needs), pickler.is_plain)


def _value(names: tuple[str, ...], namespace: Mapping[str, Any]) -> Any:
    values = tuple(namespace[name] for name in names)
    return values[0] if len(values) == 1 else values


class _Nowhere(io.RawIOBase):
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _Noting(pickle.Pickler):
    """Pickles as anybody does, but for tensors, and notes what the reader will have to have."""

    def __init__(self, file: _Nowhere) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.needs: set[str] = set()
        self.has_tensors = False
        self.is_plain = True
        self._tensor = getattr(sys.modules.get("torch"), "Tensor", None)

    def persistent_id(self, value: Any) -> str | None:
        """Note each object; only a tensor is not pickled here.  Called by pickle."""
        if self._tensor is not None and isinstance(value, self._tensor):
            self.has_tensors = True
            self.is_plain = self.is_plain and type(value).__module__.startswith("torch")
            return "tensor"
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__":
            self.needs.add(value.__qualname__.partition(".")[0])
        if type(value) not in _PLAIN_TYPES:
            self.is_plain = False
        return None
