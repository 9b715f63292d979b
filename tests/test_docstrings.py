"""What docstrings name in backticks is there: modules, classes and functions."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping

import pytest

from tests.sources import nodes_of, sources

# Names that are not the package's, and that no line of its code uses either.
OTHERS = {
    "Out",
    "RecvWork",
    "_i3",
    "_new_process_group_helper",
    "ddp_notebook",
    "gloo_tcp_loop",
    "init_device_mesh",
    "new_group",
    "pkg.mod",
    "pt_gloo_runloop",
    "rich.traceback.install",
    "set_custom_exc",
    "tcpi_last_data_recv",
}

NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")
"""A name, dotted or not, perhaps with `()`: no options, no examples of code."""


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Strings that stand alone, also those after a constant or a field: with their lines."""
    for node in nodes:
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, text


def names_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """All names that the code of a file defines or uses, in strings that are names too."""
    for node in nodes:
        match node:
            case ast.ClassDef(name) | ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                yield name
            case ast.Name(name) | ast.Attribute(attr=name) | ast.arg(name) | ast.keyword(str(name)):
                yield name
            case ast.alias(name, as_name):
                yield from [*name.split("."), as_name or ""]
            case ast.ImportFrom(str(name)):
                yield from name.split(".")
            case ast.Constant(str(text)) if NAME.fullmatch(f"`{text}`"):
                yield text


def is_telling(name: str) -> bool:
    """Whether it is to be looked for: `ClassName`, `some_name` or `dotted.name`, but no word."""
    if name.endswith(".py") or name.partition(".")[0] in sys.stdlib_module_names:
        return False
    is_word = name.islower() and "_" not in name and "." not in name
    return not is_word and not name.isupper() and not keyword.iskeyword(name)


def is_there(name: str, modules: Collection[str], names: Collection[str]) -> bool:
    """Whether it can be found: below which module a name stands is not looked at."""
    if name in names:
        return True
    head, _, last = name.rpartition(".")
    if name.startswith("nbdist."):
        # A module, or something in one.
        return name in modules or (head in modules and last in names)
    return last in names and (not head or is_there(head, modules, names))


def unknown_names(sources: Mapping[str, str]) -> Iterator[str]:
    """Files with lines, and what stands there in backticks and nowhere else."""
    nodes = {file: nodes_of(text) for file, text in sources.items()}
    names = set(dir(builtins)).union(*map(names_of, nodes.values()))
    modules = {
        ".".join(["nbdist", *file.removesuffix(".py").split("/")]).removesuffix(".__init__")
        for file in sources
    }
    names |= {module.rpartition(".")[2] for module in modules}
    for file, found in nodes.items():
        for line, text in docstrings(found):
            for name in NAME.findall(text):
                if is_telling(name) and not is_there(name, modules, names):
                    yield f"nbdist/{file}:{line} names {name}"


def test_names_in_docstrings_are_there():
    """A class, function or module that was renamed is renamed in what is said about it too."""
    found = list(unknown_names(sources()))
    names = {each.rpartition(" ")[2] for each in found}
    assert "\n".join(each for each in found if each.rpartition(" ")[2] not in OTHERS) == ""
    assert OTHERS - names == set(), "named nowhere, or known by now: take them out of OTHERS"


@pytest.mark.parametrize(
    ("doc", "told"),
    [
        *((f"`{name}`", name) for name in ("Gone", "gone_too", "nbdist.gone", "marks.Gone")),
        ("`nbdist.wire.marks.gone_too()`", "nbdist.wire.marks.gone_too"),
        ("`Mark`, `read_marks()`, `Mark.kind`, `nbdist.wire.marks.Mark`, `marks.Mark`", None),
        ("`ValueError`, `except`, `train.py`, `NAME`, `--no-fork`, `x = gone_too()`", None),
    ],
)
def test_a_name_that_is_not_there_is_told(doc, told):
    """The file, the line and the name."""
    code = "class Mark:\n    kind: str\n\n    def read_marks(self): pass\n"
    found = list(unknown_names({"wire/marks.py": f'"""{doc}"""\n{code}'}))
    assert found == ([] if told is None else [f"nbdist/wire/marks.py:1 names {told}"])
