"""Tests of names: private names of libraries, names of constants, and names in docstrings."""

from __future__ import annotations

import ast
import builtins
import importlib
import keyword
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

import pytest

from tests.sources import nodes_of, sources

LIBRARIES = {"torch", "IPython", "ipykernel", "jupyter_client", "traitlets"}
"""Libraries with base classes of nbdist's classes."""

SEAM = {f"worker/compat/{name}.py" for name in ("torch", "nccl", "models", "ipython")}

# Names of Python that its documentation describes, in spite of the underscore.
DOCUMENTED = {
    *("_thread", "os._exit", "sys._current_exceptions", "sys._current_frames"),
    *("asyncio._enter_task", "asyncio._leave_task"),
}

# Names of named tuples, which are documented too.
OF_TUPLES = {"_asdict", "_fields", "_make", "_replace"}

DEFINITIONS, CLASS_IDS = "values/definitions.py", "values/class_ids.py"
CHILDREN = "values/child_definitions.py"

# Allowed uses outside of the seam, by file and name, with their reasons.
ALLOWED = {
    # Names of Python, IPython and Jupyter.
    ("worker/main.py", "atexit._run_exitfuncs"): "os._exit runs none",
    ("world/result.py", "error._render_traceback_"): "how exceptions show themselves in IPython",
    ("worker/ops/run.py", "asyncio._set_running_loop"): "asyncio.run refuses where one runs",
    ("worker/ops/run.py", "runpy._get_module_details"): "as `python -m` finds a module",
    ("wire/control.py", "_jupyter_types_experimental"): "a key of replies that front ends read",
    # Names that are used on both sides of the wire, and so not only in workers.
    (DEFINITIONS, "by_value._DYNAMIC_CLASS_TRACKER_BY_ID"): "cloudpickle looks too late",
    (CLASS_IDS, "by_value._DYNAMIC_CLASS_TRACKER_BY_CLASS"): "whether a class has an id",
    (CLASS_IDS, "by_value._lookup_class_or_track"): "the one place that registers an id",
    (DEFINITIONS, "by_value._class_setstate"): "cloudpickle fills what it has itself",
    (CHILDREN, "by_value._get_or_create_tracker_id"): "a class's mark in all processes",
    (DEFINITIONS, "_filename_map"): "IPython's, of cells that ran in another process",
    ("notebook/options.py", "magic.parser._actions"): "argparse lists what it knows nowhere else",
    ("values/tensors.py", "tensor._version"): "torch's version counter has no public name",
    ("values/tensors.py", "tensor._backward_hooks"): "nothing else tells of a tensor's hooks",
    ("values/tensors.py", "_post_accumulate_grad_hooks"): "nor of its other hooks",
    ("values/tensors.py", "_untyped_storage"): "the public name warns",
}


class Use(NamedTuple):
    """A use of a private name of a library, with its place."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"nbdist/{self.file}:{self.line} uses {self.name}"


def is_private(name: str) -> bool:
    """`_name`, but neither `_` nor `__name__`."""
    is_name = name.isidentifier() and name.strip("_") != "" and name not in OF_TUPLES
    return is_name and name.startswith("_") and not name.endswith("__")


def uses_in(file: str, source: str, inherited: Collection[str] = frozenset()) -> Iterator[Use]:
    """Yield each use of a private name that the file does not define, or inherit on `self`."""
    nodes = nodes_of(source)
    own = set(_own_names(nodes))
    for node in nodes:
        for name in _names_used(node):
            holder, _, last = name.rpartition(".")
            if last not in own and not (holder == "self" and last in inherited):
                yield Use(file, node.lineno, name)  # type: ignore[attr-defined]
        if isinstance(node, ast.ClassDef):
            yield from _overridden(file, nodes, node)


def _names_used(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names):
            yield from (each.name for each in names if any(map(is_private, each.name.split("."))))
        case ast.ImportFrom(module, names) if not (module or "").startswith("nbdist"):
            parts = (module or "").split(".")
            for each in names:
                if any(map(is_private, [*parts, each.name])):
                    yield f"{module}.{each.name}"
        case ast.Attribute(value, name) if is_private(name):
            yield f"{ast.unparse(value)}.{name}"
        case ast.Call(ast.Name("getattr" | "hasattr" | "setattr" | "delattr"), [_, told, *_]):
            if isinstance(told, ast.Constant) and is_private(str(told.value)):
                yield str(told.value)
        # A constant of the file that stands for a name: `SHOW = "_showtraceback"`.
        case ast.Assign([ast.Name()], ast.Constant(str(text))) if is_private(text):
            yield text


def _own_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Private names that the file's classes and functions give themselves."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(ast.Name(name)) | ast.Assign([ast.Name(name)]):
                yield name
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name


def _overridden(file: str, nodes: Iterable[ast.AST], kind: ast.ClassDef) -> Iterator[Use]:
    """Private methods and attributes of a library's class that a class of ours replaces."""
    bases = tuple(_foreign_bases(nodes, kind)) if kind.bases else ()
    for node in kind.body:
        for name in filter(is_private, _own_names(ast.walk(node))):
            if any(hasattr(base, name) for base in bases):
                yield Use(file, node.lineno, f"{kind.name}.{name}")


def _foreign_bases(nodes: Iterable[ast.AST], kind: ast.ClassDef) -> Iterator[object]:
    """Yield the base classes that the file imports by name from a library or the seam."""
    bases = {ast.unparse(base) for base in kind.bases}
    for node in nodes:
        module = (isinstance(node, ast.ImportFrom) and node.module) or ""
        if module.split(".")[0] in LIBRARIES or module.startswith("nbdist.worker.compat."):
            for each in node.names:  # type: ignore[attr-defined]
                if (each.asname or each.name) in bases:
                    yield getattr(importlib.import_module(module), each.name)


@cache
def all_uses() -> tuple[Use, ...]:
    """Return the uses in all files of the package except the seam, in reading order."""
    rest = {file: source for file, source in sources().items() if file not in SEAM}
    own = {name for source in rest.values() for name in _own_names(nodes_of(source))}
    return tuple(use for file, source in rest.items() for use in uses_in(file, source, own))


def test_private_names_of_libraries_stay_in_the_seam():
    """No file outside of the seam uses a private name of a library, but for those in ALLOWED."""
    unknown = (use for use in all_uses() if use.name not in DOCUMENTED)
    found = [use for use in unknown if (use.file, use.name) not in ALLOWED]
    assert "\n".join(map(str, found)) == ""


def test_torch_is_asked_for_devices_in_one_file():
    """Only `worker/compat/accelerator.py` uses `torch.cuda` and other modules for devices."""
    modules = {f"torch.{name}" for name in ("accelerator", "cuda", "mtia", "xpu")}
    found = {
        f"nbdist/{file}:{node.lineno}"
        for file, source in sources().items()
        for node in nodes_of(source)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in modules
    }
    assert {place.partition(":")[0] for place in found} == {"nbdist/worker/compat/accelerator.py"}


def test_allowed_private_names_are_still_used():
    """Each name in ALLOWED and DOCUMENTED is still used."""
    assert set(ALLOWED) <= {(use.file, use.name) for use in all_uses()}
    assert {use.name for use in all_uses()} >= DOCUMENTED


KERNEL = "from ipykernel.kernelbase import Kernel\n"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("from torch._C import _distributed_c10d", "1 uses torch._C._distributed_c10d"),
        ("def f(group):\n    return group._get_backend()", "2 uses group._get_backend"),
        ("class C:\n    def f(self):\n        self._topic(1)", "3 uses self._topic"),
        ("getattr(shell, '_last_traceback', ())", "1 uses _last_traceback"),
        ("NAME = '_showtraceback'", "1 uses _showtraceback"),
        (f"{KERNEL}class Ours(Kernel):\n    def _topic(self): pass", "3 uses Ours._topic"),
        ("class C:\n    def __init__(self):\n        self._x = 1\n    def f(c): return c._x", None),
        ("from nbdist.world.agent_link import _x", None),
        ("x.__dict__, _, __file__", None),
    ],
)
def test_the_use_of_a_private_name_is_found(source: str, told: str | None):
    """The use of a private name is found, with its file and line."""
    found = [str(use) for use in uses_in("x.py", source)]
    assert found == ([] if told is None else [f"nbdist/x.py:{told}"])


# --- one name, one meaning -------------------------------------------------------------------

# Constants that several files define with the same value and the same meaning.
SAME_IN_ALL_FILES = {
    "ALIGNMENT": "of memory that is sent",
    "PACKAGE": "the folder of the package",
    "READ_FROM": "the size from which on a pickle is read in pieces",
    "TCP_INFO": "an option of sockets in Linux, which Python does not name",
    "_BRACES": "how IPython finds expressions in a command's line",
    "_DOLLAR": "how IPython finds variables in a command's line",
    "_JUMPS": "the opcodes of CPython that jump",
}


def files_by_name(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the files that define each type and constant on their top level.

    Names of one letter, which type variables have, are left out.
    """
    files: dict[str, set[str]] = {}
    for file, source in sources.items():
        for statement in nodes_of(source)[0].body:  # type: ignore[attr-defined]
            match statement:
                case ast.ClassDef(name):
                    names = [name]
                case ast.Assign() | ast.AnnAssign():
                    stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
                    names = [node.id for node in stored if isinstance(node.ctx, ast.Store)]
                case _:
                    continue
            for name in names:
                if len(name) > 1 and (name.isupper() or name.lstrip("_")[:1].isupper()):
                    files.setdefault(name, set()).add(file)
    return files


def test_no_type_or_constant_has_two_meanings():
    """A type or constant has a name that no other file gives to something else."""
    several = {name: files for name, files in files_by_name(sources()).items() if len(files) > 1}
    unknown = {
        name: sorted(files) for name, files in several.items() if name not in SAME_IN_ALL_FILES
    }
    assert unknown == {}
    assert SAME_IN_ALL_FILES.keys() - several.keys() == set(), "one file defines each: remove them"


def test_names_of_types_and_constants_are_found():
    """Classes, aliases and constants count, also in tuples; variables and type variables do not."""
    source = (
        "class Aa: X = 1\nBb: object = int\nC_D, _E = 1, 2\nT = F(x := 1)\ndef G(): H = 1\ni = 1"
    )
    assert files_by_name({"x.py": source}) == {n: {"x.py"} for n in ("Aa", "Bb", "C_D", "_E")}


# --- modules, classes and functions that docstrings name in backticks exist ------------------

# Names of other packages and programs, which no code of nbdist uses.
OTHERS = {
    "Out",
    "RecvWork",
    "_i3",
    "_new_process_group_helper",
    "ddp_notebook",
    "gloo_tcp_loop",
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
    """Yield docstrings, also of constants and fields, with their lines."""
    for node in nodes:
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, text


def names_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that a file defines or uses, and strings that look like names."""
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
    """Whether a name must exist: `ClassName`, `some_name` or `dotted.name`, but no plain word."""
    if name.endswith(".py") or name.partition(".")[0] in sys.stdlib_module_names:
        return False
    is_word = name.islower() and "_" not in name and "." not in name
    return not is_word and not name.isupper() and not keyword.iskeyword(name)


def is_there(name: str, modules: Collection[str], names: Collection[str]) -> bool:
    """Whether a name exists; in which of the modules its last part exists does not matter."""
    if name in names:
        return True
    head, _, last = name.rpartition(".")
    if name.startswith("nbdist."):
        # The name of a module, or of a definition in a module.
        return name in modules or (head in modules and last in names)
    return last in names and (not head or is_there(head, modules, names))


def unknown_names(sources: Mapping[str, str]) -> Iterator[str]:
    """Yield files and lines with names in backticks that exist nowhere in the code."""
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


def test_names_in_docstrings_exist():
    """Each name in a docstring exists, also after a class, function or module was renamed."""
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
def test_a_wrong_name_in_a_docstring_is_found(doc, told):
    """A name in a docstring that does not exist is found, with its file and line."""
    code = "class Mark:\n    kind: str\n\n    def read_marks(self): pass\n"
    found = list(unknown_names({"wire/marks.py": f'"""{doc}"""\n{code}'}))
    assert found == ([] if told is None else [f"nbdist/wire/marks.py:1 names {told}"])
