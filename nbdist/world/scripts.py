"""Scripts, modules and executables: found before anything runs.

What they are is found without importing anything, which could import torch here.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from nbdist.errors import UsageError
from nbdist.wire.task import Kind, Script


def find_script(
    kind: Kind, name: str, args: Iterable[Any] = (), *, local_rank: bool = False
) -> Script:
    """Return the script that is meant; UsageError where there is none."""
    find = {"file": _find_file, "module": _find_module, "executable": _find_executable}[kind]
    file, root = find(name)
    near = os.path.relpath(file) if file else ""
    near = "" if near.startswith(os.pardir) else near
    return Script(kind, name, tuple(map(str, args)), file, root, local_rank, near)


def _find_file(name: str) -> tuple[str, str]:
    file = os.path.abspath(os.path.expanduser(name))
    if os.path.isdir(file):
        raise UsageError(f"`{name}` is a directory; a script is a file, such as `train.py`.")
    if not os.path.exists(file):
        near = "" if os.path.isabs(name) else f" in {os.getcwd()}"
        raise UsageError(
            f"there is no script `{name}`{near}. `-m {name}` runs a module, "
            f"`--no-python {name}` an executable."
        )
    try:
        with open(file, "rb") as opened:
            compile(opened.read(), file, "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"the script `{name}` cannot be read: {error.strerror}.") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"`{name}` is no Python: {_worded(error)}; nothing has run.") from None
    return file, os.path.dirname(file)


def _worded(error: SyntaxError | ValueError) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    return str(error)


def _find_module(name: str) -> tuple[str, str]:
    """Return its file, and the folder that its outermost package is in."""
    if name.endswith(".py") or os.sep in name:
        module = name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise UsageError(
            f"`-m {name}`: give either a script or `-m module`. Leave out `-m` to run the "
            f"script, or name the module: `-m {module}`."
        )
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
        if spec is None:
            raise UsageError(f"`-m {name}`: it is a package without a `__main__` module.")
    if spec is None:
        raise UsageError(
            f"`-m {name}`: there is no module of this name on the notebook's `sys.path`, "
            f"nor in {os.getcwd()}."
        )
    if not spec.has_location or not spec.origin:
        return "", ""
    root = os.path.dirname(spec.origin)
    if "site-packages" not in root:
        root = os.path.abspath(os.path.join(root, *[".."] * spec.name.count(".")))
    return spec.origin, root


def _find_spec(name: str) -> ModuleSpec | None:
    """Do as `importlib.util.find_spec`, without importing the packages that it is in."""
    path: list[str] | None = None
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find_one(".".join(parts[:end]), path)
        if spec is None:
            return None
        locations = spec.submodule_search_locations
        # A namespace package's would look for its parent among the imported modules.
        path = list(getattr(locations, "_path", locations) or ())
    return spec


def _find_one(name: str, path: list[str] | None) -> ModuleSpec | None:
    if path is None and (spec := PathFinder.find_spec(name, [os.getcwd()])):
        return spec
    for finder in sys.meta_path:  # editable installations have finders of their own
        try:
            if spec := finder.find_spec(name, path):
                return spec
        except KeyError:  # a folder without `__init__.py`, in a package that is not imported
            spec = ModuleSpec(name, None, is_package=True)
            folders = [os.path.join(folder, name.rpartition(".")[2]) for folder in path or ()]
            spec.submodule_search_locations = [*filter(os.path.isdir, folders)]
            return spec
    return None


def _find_executable(name: str) -> tuple[str, str]:
    if os.sep not in name:
        if file := shutil.which(name):
            return file, ""
        hint = f" `./{name}` runs the one in this folder." if os.path.isfile(name) else ""
        raise UsageError(f"`--no-python {name}`: there is no such executable on PATH.{hint}")
    file = os.path.abspath(os.path.expanduser(name))
    if os.path.isdir(file):
        raise UsageError(f"`--no-python {name}`: it is a directory.")
    if not os.path.exists(file):
        raise UsageError(f"`--no-python {name}`: there is no such file.")
    if not os.access(file, os.X_OK):
        raise UsageError(f"`--no-python {name}`: it is not executable. `!chmod +x {name}`")
    return file, ""
