"""The Python inside the strings that IPython makes of magics and `!` lines; pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

# Magics whose text is no Python of the notebook: words in it must not be taken for names.
_NOT_PYTHON = frozenset(
    {
        *("distributed", "rank"),
        *("bash", "cmd", "perl", "ruby", "script", "sh", "system", "sx"),
        *("html", "javascript", "js", "latex", "markdown", "svg", "writefile"),
        *(
            "cat",
            "cd",
            "cp",
            "ls",
            "man",
            "mkdir",
            "more",
            "mv",
            "pushd",
            "rm",
            "rmdir",
            "writefile",
        ),
        *("alias", "autoreload", "bookmark", "colors", "config", "env", "load", "load_ext"),
        *(
            "matplotlib",
            "pylab",
            "reload_ext",
            "run",
            "set_env",
            "unload_ext",
            "conda",
            "pip",
            "uv",
        ),
    }
)
_BRACES = re.compile(r"\{([^{}]+)\}")
_DOLLAR = re.compile(r"(?<!\$)\$\{?([A-Za-z_]\w*)")
_OPTION = re.compile(r"\s*(-\S+|\d+)")
_MAGIC_LINE = re.compile(r"^[ \t]*[%!].*$", re.MULTILINE)


def code_in_magic(call: ast.Call) -> list[ast.stmt]:
    """Parse what a call like `get_ipython().run_line_magic("time", "f(x)")` would run.

    What `{x}` and `$x` would fill in comes as expressions.  Nothing for other calls.
    """
    match call.func:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=method):
            pass
        case _:
            return []
    texts = [
        argument.value
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    match method:
        case "system" | "getoutput" | "getoutput_all":
            return [*_filled_in(texts)]
        case "run_line_magic" | "run_cell_magic" if texts:
            name, *texts = texts
            code = [] if name in _NOT_PYTHON else [_python(text) for text in texts]
            return [*_filled_in(texts), *(statement for body in code for statement in body)]
        case _:
            return []


def names_in_commands(python: str) -> list[str]:
    """Find the names that a cell's own commands and lines of magics would fill in.

    Those of functions may be theirs, and are not looked at.
    """
    texts = [
        argument.value
        for call in _outside_functions(ast.parse(python))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in ("system", "getoutput", "run_line_magic")
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    return [*dict.fromkeys(name for text in texts for name in names_filled_in(text))]


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _outside_functions(child)


def names_filled_in(text: str) -> list[str]:
    """Find the names that `{x}` and `$x` would fill into a command, but for the shell's own."""
    found = [
        node.id
        for statement in _filled_in([text])
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
    ]
    return [name for name in dict.fromkeys(found) if not _is_the_shells(name, text)]


def _is_the_shells(name: str, text: str) -> bool:
    """Say whether the command itself gives it a value: `for i in 1 2; do echo $i; done`."""
    return (
        re.search(
            rf"(?:\bfor\s+{name}\s+in\b|\bread\s+(?:\w+\s+)*{name}\b|(?:^|[\s;]){name}=)", text
        )
        is not None
    )


def _python(text: str) -> list[ast.stmt]:
    """Parse `text`, or what follows its options, as Python; nothing if it is not Python."""
    while True:
        found = _parsed(text) or _parsed(_MAGIC_LINE.sub("", text))
        option = _OPTION.match(text)
        if found or not option:
            return found
        text = text[option.end() :].lstrip(" ")


def _filled_in(texts: list[str]) -> Iterator[ast.stmt]:
    for text in texts:
        for expression in (*_BRACES.findall(text), *_DOLLAR.findall(text)):
            # Python's own way to part an expression from its format: `{x:.3f}`.
            yield from _parsed(f"f{'{' + expression + '}'!r}")


def _parsed(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):  # ValueError: null bytes.
        return []
