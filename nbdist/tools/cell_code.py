"""Turns code of the notebook into plain Python for a script: cells, definitions and small values.

`nbdist.tools.export` calls these functions in the notebook's process.  Most text stays as it was
typed.  Code that needs IPython becomes plain Python, or is left out with a comment that says why.
Calls that make or destroy the process group are left out, since the script does both itself.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import pickle
import re
import shlex
import sys
import types
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import Any

from nbdist.notebook.free_names import names_bound, names_used
from nbdist.values.definitions import cell_source
from nbdist.values.payload import is_atomic
from nbdist.words import one_line

Transform = Callable[[str], str]
"""IPython's function that replaces magics by calls in Python: `shell.transform_cell`."""

_OUR_LINE = re.compile(r"# %%(?:distributed|rank)\b[^\n]*(?:\n|$)")
_FIRST_LINE_MAGIC = re.compile(r"\s*%%(\w+)[^\n]*(?:\n|$)")
_BRACES = re.compile(r"\{([^{}]+)\}")
_DOLLAR = re.compile(r"\$(\$?)\{?([A-Za-z_]\w*)\}?")
_OPTIONS = re.compile(r"^(?:\s*-\w+(?:\s+\d+)?)+\s+")

_GROUP = ("init_process_group", "destroy_process_group")
_LOOK_ON = ("time", "prun", "memit", "mprun", "lprun", "capture")


def cell_code(
    source: str, transform: Transform, variables: Collection[str] = (), *, shows_value: bool = False
) -> tuple[str, list[str]]:
    """Return a cell as code for a script, and a line for each thing that the code leaves out.

    `variables` are names that shell commands can use as `$name`.  With `shows_value`, the code
    prints the value of the last statement if this is an expression without calls of IPython.  A
    cell that is no Python becomes comments.
    """
    source = _OUR_LINE.sub("", source, count=1) if source.startswith("# %%") else source
    magic = _FIRST_LINE_MAGIC.match(source)
    if magic and magic[1] in ("distributed", "rank", *_LOOK_ON):
        return cell_code(source[magic.end() :], transform, variables, shows_value=shows_value)
    try:
        text = transform(source)
        tree, is_async = ast.parse(text), has_top_level_await(text)
    except SyntaxError:
        why = "it cannot be read as Python"
        return f"# {why}:\n{source}".replace("\n", "\n# "), [why]
    edits, omitted = _without_ipython(tree, text.encode().split(b"\n"), variables)
    match tree.body:
        case [*_, ast.Expr(value)] if shows_value and not any(map(_is_shell_call, ast.walk(value))):
            shown = ast.get_source_segment(text, value)
            bare = isinstance(value, ast.Tuple)  # a tuple may lack its brackets: `a, b`
            edits.append((value, f"print(repr(({shown})))" if bare else f"print(repr({shown}))"))
    text = _apply_edits(text, edits).strip("\n")
    new_code = "".join(new for _, new in edits)
    modules = [each for each in ("subprocess", "pathlib") if f"{each}." in new_code]
    if is_async:
        omitted.append("tasks that it leaves running end with its event loop")
    return "\n".join([*(f"import {each}" for each in modules), text]), omitted


def guard_by_rank(text: str, ranks: Iterable[int]) -> str:
    """Return code that runs the code `text` only on these ranks."""
    first, *others = sorted(ranks)
    condition = f"rank in {(first, *others)}" if others else f"rank == {first}"
    body = text if ast.parse(text).body else f"{text}\npass"
    return f"if {condition}:\n{indent(body)}"


def indent(text: str) -> str:
    """Indent code by four spaces, except the lines that are inside of a string of several lines."""
    inside = {
        number
        for node in ast.walk(ast.parse(text))
        if type(node).__name__ in ("Constant", "JoinedStr", "TemplateStr")
        for number in range(node.lineno + 1, node.end_lineno + 1)  # type: ignore[attr-defined]
    }
    return "\n".join(
        line if number in inside or not line.strip() else f"    {line}"
        for number, line in enumerate(text.split("\n"), 1)
    )


# --- statements that need IPython ---------------------------------------------------------

Edits = list[tuple[ast.AST, str]]


class _LeftOut(Exception):
    """Raised if a statement must be left out.

    The arguments are the text that cannot stay in the script, such as `%who`, and the reason.
    """


def _without_ipython(
    tree: ast.Module, lines: Sequence[bytes], variables: Collection[str]
) -> tuple[Edits, list[str]]:
    """Return edits that make plain Python of a cell, and a line for each statement left out.

    The edits replace calls of IPython.  They also leave out calls that make or destroy the process
    group, since the script makes these calls itself.  Imports from `__future__` are left out
    without a line, since they can only stand at the top.  `lines` are the lines of the code.
    """
    edits: Edits = []
    omitted = []
    for statement in ast.walk(tree):
        parts = ast.iter_child_nodes(statement)
        inner = any(isinstance(each, ast.stmt | ast.match_case) for each in parts)
        if inner or not isinstance(statement, ast.stmt):
            continue
        calls = [node for node in ast.walk(statement) if _is_shell_call(node)]
        text = ast.unparse(statement)
        is_future = text.startswith("from __future__ ")
        try:
            if is_future:
                raise _LeftOut(text, "it stands at the top")
            called = text.partition("(")[0].rpartition(".")[2]
            if isinstance(statement, ast.Expr) and called in _GROUP:
                raise _LeftOut(text, "the script calls it itself")
            edits += [(call, _plain_call(call, variables)) for call in calls]  # type: ignore[arg-type]
        except _LeftOut as left:
            typed, why = map(one_line, left.args)
            _, column, last, end = _place(statement)
            shown = f"pass  # {typed}: {why}" if column else f"# {typed}: {why}"
            edits.append((statement, "pass" if b";" in lines[last - 1][end:] else shown))
            omitted += [] if is_future else [f"`{typed}`: {why}"]
    return edits, omitted


def _apply_edits(text: str, edits: Edits) -> str:
    source = text.encode()
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    for node, new in sorted(edits, key=lambda edit: _place(edit[0]), reverse=True):
        line, column, last, end = _place(node)
        before, after = source[: starts[line - 1] + column], source[starts[last - 1] + end :]
        source = before + new.encode() + after
    return source.decode()


def _place(node: Any) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _is_shell_call(node: ast.AST) -> bool:
    """Return True for a call of IPython: `get_ipython().run_line_magic("time", "f()")`."""
    func = node.func if isinstance(node, ast.Call) else None
    return isinstance(func, ast.Attribute) and ast.unparse(func.value) == "get_ipython()"


def _plain_call(call: ast.Call, variables: Collection[str]) -> str:
    assert isinstance(call.func, ast.Attribute)
    texts = [each.value for each in call.args if isinstance(each, ast.Constant)]
    match call.func.attr, texts:
        case "system" | "system_raw" | "system_piped", [str(command)]:
            return f"subprocess.run({_command(command, variables)}, shell=True, check=False)"
        case "getoutput" | "getoutput_all", [str(command)]:
            options = "shell=True, check=False, capture_output=True, text=True"
            return f"subprocess.run({_command(command, variables)}, {options}).stdout.splitlines()"
        case "run_line_magic", [str(name), str(line), *_]:
            return _line_magic(name, line.strip())
        case "run_cell_magic", ["bash" | "sh" as shell, "", str(body)]:
            return f'subprocess.run(["{shell}", "-c", {body!r}], check=True)'
        case "run_cell_magic", ["writefile" | "file", str(line), str(body)] if line[:1] != "-":
            return f"pathlib.Path({shlex.split(line)[0]!r}).write_text({body!r})"
        case "run_cell_magic", [str(name), str(line), *_]:
            why = "has no counterpart in a script; the code under it is left out"
            raise _LeftOut(f"%%{name} {line}".strip(), why)
        case _:
            raise _LeftOut(ast.unparse(call), "there is no IPython in a script")


def _line_magic(name: str, line: str) -> str:
    if name in _LOOK_ON and is_python(code := _OPTIONS.sub("", line)):
        return code
    if name == "cd" and line and not line.startswith("-"):
        return f"os.chdir(os.path.expanduser({line!r}))"
    parts = re.split(r"\s*=\s*|\s+", line, maxsplit=1)
    if name in ("env", "set_env") and len(parts) == 2:
        return f"os.environ[{parts[0]!r}] = {parts[1]!r}"
    raise _LeftOut(f"%{name} {line}".strip(), "has no counterpart in a script")


def _command(command: str, variables: Collection[str]) -> str:
    """Return a shell command as code: a string, or an f-string if variables are filled into it."""

    def fill_in(match: re.Match[str]) -> str:
        is_name = not match[1] and match[2] in variables
        return f"{{{match[2]}}}" if is_name else match[0].replace("$$", "$")

    filled_in = _DOLLAR.sub(fill_in, command)
    fills_in = any(map(is_python, _BRACES.findall(filled_in)))
    text = f"f{filled_in!r}" if fills_in else repr(filled_in)
    if not is_python(text):
        raise _LeftOut(f"!{command}", "what is filled in cannot be written in a script")
    return text


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):  # some versions of Python raise ValueError for null bytes
        return False
    return True


def has_top_level_await(text: str) -> bool:
    """Return True if code has an `await`, `async for` or `async with` outside of functions."""
    code = compile(text, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return bool(code.co_flags & inspect.CO_COROUTINE)


def wrap_in_event_loop(text: str, title: str) -> str:
    """Return code that runs the code `text` in an `async` function, in an event loop of its own.

    `title` is the name of the function.  Names that `text` binds are declared as global, so that
    later cells find them.
    """
    bound = ", ".join(sorted(names_bound(text)))
    shared = f"    global {bound}\n" if bound else ""
    function = f"async def {title}():\n{shared}{indent(text)}"
    return f"import asyncio\n{function}\n\n\nasyncio.run({title}())"


# --- statements that bind variables of the notebook -----------------------------------------


_BINDING = ast.Assign | ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
"""The kinds of statements that can bind a variable of an exported script."""

POSTPONED = "from __future__ import annotations"
"""With this import annotations are not evaluated, so a class may name itself in an annotation."""


class Statements:
    """Finds the statements in a notebook's plain cells that have bound its variables."""

    def __init__(self, cells: Iterable[str]) -> None:
        self._cells = [cell for cell in cells if is_python(cell)]
        # From a cell with this import on, IPython postpones annotations in all cells.
        self.postpones = any(POSTPONED in cell for cell in self._cells)
        self._imports: dict[str, list[str]] = defaultdict(list)
        for cell in self._cells:
            for node in ast.walk(ast.parse(cell)):
                for name, text in _imports_by(node):
                    self._imports[name].append(text)

    def importing(self, name: str, value: Any) -> list[str]:
        """Return the imports that bind a variable to its present value.

        The imports in the cells are tried first, then an import from the module in the value's
        `__module__`.  Return [] if none of these imports gives the value.
        """
        guess = ""
        if isinstance(value, types.ModuleType):
            guess = f"import {value.__name__} as {name}"
        elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
            guess = f"from {value.__module__} import {value.__qualname__} as {name}"
        guess = guess.replace(f" {name} as {name}", f" {name}")
        for texts in (self._imports[name], [guess]):
            if matching := [each for each in texts if _binds_value(each, name, value)]:
                return [*dict.fromkeys(matching)]
        return []

    def names_used(self, text: str) -> frozenset[str]:
        """Return the global names that a statement of a cell reads."""
        return names_used(f"{POSTPONED}\n{text}" if self.postpones else text)

    def binding(self, name: str, value: Any = None) -> str:
        """Return the last statement that assigns or defines a variable, or "" if there is none.

        The cell that defined the `value` is searched first, then all cells, the last cell first.
        If the statement reads an earlier value of the variable, as `f = decorated(f)` does, the
        returned code begins with the statement that bound the earlier value.
        """
        texts: list[str] = []
        for cell in [*_cells_of(value), *reversed(self._cells)]:
            for node in reversed(ast.parse(cell).body):
                if isinstance(node, _BINDING):
                    text = _source_of(cell, node)
                    if name in text and name in names_bound(text):
                        texts.insert(0, text)
                        if name not in self.names_used(text):
                            return "\n".join(texts)
        return ""


def _imports_by(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each name that an import statement binds, with an import of only this name.

    For `from math import sin, cos`, this is `sin` with `from math import sin`, then `cos`.  An
    import of `*` and a relative import yield nothing.
    """
    match node:
        case ast.Import() | ast.ImportFrom(level=0) if node.names[0].name != "*":
            for each in node.names:
                alone = copy(node)
                alone.names = [each]
                yield each.asname or each.name.partition(".")[0], ast.unparse(alone)


def _binds_value(statement: str, name: str, value: Any) -> bool:
    """Execute an import, and return True if it binds `name` to the very object `value`."""
    namespace: dict[str, Any] = {}
    try:
        exec(statement, namespace)
    except (ImportError, SyntaxError):  # SyntaxError for a name such as `f.<locals>.g`
        return False
    return namespace.get(name) is value and "__main__" not in statement


def _cells_of(value: Any) -> Iterator[str]:
    """Yield the source of the cell that defined a function or class, if the cell is known."""
    for each in vars(value).values() if isinstance(value, type) else [value]:
        code = getattr(each, "__code__", None)
        cell = cell_source(code.co_filename) if isinstance(code, types.CodeType) else None
        if cell is not None and is_python(cell.text):
            yield cell.text
            return


def _source_of(source: str, node: ast.stmt) -> str:
    """Return a statement's lines, with its decorators and the comments right above it."""
    lines = source.split("\n")
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    return "\n".join(lines[first - 1 : node.end_lineno])


# --- attributes of functions and classes that were set since their definition -------------------


def names_read_at_once(text: str) -> frozenset[str]:
    """Return the names that code reads, assigns or deletes outside of the bodies of functions.

    The body of a function or lambda runs later, so the exported script may bind the names in the
    body after the definition.  Names that are only bound by `def`, `class` or `import` are left
    out, too.

    Names in the defaults and annotations of a function are included, since Python evaluates them at
    the definition.  (Python 3.14 evaluates only the defaults there.)  The annotations of generic
    functions are left out.
    """
    names, waiting = set[str](), list[Any](ast.parse(text).body)
    while waiting:
        match node := waiting.pop():
            case ast.Name(name):
                names.add(name)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                waiting += node.decorator_list
                # Leave out annotations of a generic function such as `def f[T](x: T)`: the function
                # itself binds the names of its type parameters, here `T`.
                if not getattr(node, "type_params", ()):
                    waiting += [node.returns, node.args]
                else:
                    waiting += [*node.args.defaults, *node.args.kw_defaults]
            case ast.Lambda():
                waiting.append(node.args)
            case ast.AST():
                waiting += ast.iter_child_nodes(node)
    return frozenset(names)


def attributes_since(name: str, value: Any, text: str) -> tuple[list[str], list[str]]:
    """Find the attributes of a function or class that were set after its definition `text`.

    Return statements that set the attributes again, and the names of the attributes whose values
    cannot be written in a statement.
    """
    *_, node = ast.parse(text).body
    # The attributes of named tuples, and of classes with a metaclass such as enumerations, differ
    # from what the body binds, although nobody has set them later.
    if type(value) not in (types.FunctionType, type, ABCMeta) or hasattr(value, "_fields"):
        return [], []
    typed: dict[str, ast.expr | None] = {}
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        match each:
            case ast.Assign([ast.Name(key)], shown) | ast.AnnAssign(
                ast.Name(key), value=ast.expr() as shown
            ):
                typed[key] = None if key in typed else shown
            case _:
                typed |= dict.fromkeys(names_bound(ast.unparse(each)))
    # Python adds the name of the class to an attribute `__private`: `_Class__private`.
    internal = ("__", "_abc_", f"_{getattr(node, 'name', '').lstrip('_')}__")
    texts, unset = [], []
    for key, now in vars(value).items():
        if key == "registry" and isinstance(now, types.MappingProxyType):  # set by `singledispatch`
            unset += [f"{name}.{key}"] if len(now) > 1 else []
        elif not key.startswith(internal) and not (key in typed and _is_as_typed(typed[key], now)):
            if (code := literal(now)) is not None:
                texts.append(f"{name}.{key} = {code}")
            elif key in typed or not getattr(node, "decorator_list", [node]):
                unset.append(f"{name}.{key}")
    return texts, unset


def _is_as_typed(typed: ast.expr | None, now: Any) -> bool:
    """Return False if an attribute surely has another value than the body of its class gave it.

    `typed` is the expression in the body that gave the value.  It is None if the body binds the
    attribute in another way, for example by `def`.  If the expression is no plain value, only the
    sizes of containers are compared.
    """
    if typed is None:
        return not isinstance(now, types.FunctionType) or "." in now.__qualname__
    try:
        then = ast.literal_eval(typed)
    except (ValueError, TypeError):
        is_call = isinstance(typed, ast.Call) and bool(typed.args or typed.keywords)
        size = len(getattr(typed, "elts", getattr(typed, "keys", ())))
        return is_call or not isinstance(now, list | dict | set) or len(now) == size
    # `now == then` could run code of the user, so compare the texts that `literal` writes.
    return type(then) is type(now) and literal(then) == literal(now)


# --- values -------------------------------------------------------------------------------

MAX_VALUE_PARTS, MAX_VALUE_LENGTH = 150, 1_000
"""The most parts, and the most characters, of a value that is written into the script as code."""


def literal(value: Any) -> str | None:
    """Return a small plain value, or a dtype of torch, as code; None for any other value."""
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")'
    if type(value).__name__ == "dtype" and type(value).__module__ == "torch":
        return str(value)
    waiting = [value]
    for _ in range(MAX_VALUE_PARTS):
        if not waiting:
            text = repr(value)
            return text if len(text) <= MAX_VALUE_LENGTH else None
        each = waiting.pop()
        if type(each) in (list, tuple, set, dict) and len(each) <= MAX_VALUE_PARTS:
            waiting += [*each, *each.values()] if type(each) is dict else each
        elif not is_atomic(each) or (type(each) is float and not math.isfinite(each)):
            return None
    return None


def definitions_to_read(value: Any) -> frozenset[str]:
    """Return the functions and classes of the notebook that a pickle of the value refers to.

    The script must define these names before it can read the value from its file.  Raises errors of
    pickle, and errors that methods of the value raise.
    """
    needs, tensor = set[str](), getattr(sys.modules.get("torch"), "Tensor", ())

    def record_need(part: Any) -> str | None:
        is_tensor = isinstance(part, tensor)
        definition = type(part) if is_tensor else part
        if (
            isinstance(definition, type | types.FunctionType)
            and definition.__module__ == "__main__"
        ):
            needs.add(definition.__qualname__.partition(".")[0])
        return "tensor" if is_tensor else None

    with open(os.devnull, "wb") as nowhere:
        pickler = pickle.Pickler(nowhere)
        pickler.persistent_id = record_need  # type: ignore[method-assign]
        pickler.dump(value)
    return frozenset(needs)
