"""Each module has a test module of its own, and a name that means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path, PurePath

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parent.parent
PACKAGE, TESTS = ROOT / "nbdist", ROOT / "tests"

# Names of files that stand in several rooms.  Only to become fewer.
NAMED_TWICE = {
    "records.py",
}

# A feature is two files with one name: its command and what it has the workers do.
FEATURE = ("notebook/commands", "worker/ops")


def modules_in(folder: Path) -> list[str]:
    """The files of a folder and those below it that hold more than what a folder offers."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return sorted(file for file in found if not PurePath(file).name.startswith("__"))


def place_of_tests(file: str) -> str:
    """Where the tests of a module are: in the same place of another tree."""
    path = PurePath(file)
    return path.with_name(f"test_{path.name}").as_posix()


def names_module(file: str, source: str) -> bool:
    """Whether a test module imports that module, or says in its docstring that it tests it."""
    module = "nbdist." + file.removesuffix(".py").replace("/", ".")
    tree = ast.parse(source)
    told = f"`{module}`" in (ast.get_docstring(tree) or "")
    return told or any(f"{name}.".startswith(f"{module}.") for name in _imported(tree))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (each.name for each in names)
            case ast.ImportFrom(module, names):
                yield from (f"{module}.{each.name}" for each in names)


def is_tested(file: str) -> bool:
    """Whether there is a test module of its own, which names it."""
    tests = TESTS / place_of_tests(file)
    return tests.is_file() and names_module(file, tests.read_text())


def named_twice(files: Collection[str]) -> set[str]:
    """Names that files in several folders have, but for the two files of a feature."""
    folders = defaultdict(set)
    for file in files:
        folder, _, name = file.rpartition("/")
        folders[name].add(FEATURE[0] if folder in FEATURE else folder)
    return {name for name, found in folders.items() if len(found) > 1}


def test_each_module_has_a_test_module():
    """tests/ROOM/test_MODULE.py names nbdist/ROOM/MODULE.py."""
    untested = [file for file in modules_in(PACKAGE) if not is_tested(file)]
    assert untested == [], "tests/ROOM/test_MODULE.py is missing, or names them not"


def test_a_name_means_one_thing():
    """No two files have one name, but for a command and its op."""
    twice = named_twice(modules_in(PACKAGE))
    assert twice - NAMED_TWICE == set(), "there is another file of that name"
    assert NAMED_TWICE - twice == set(), "one file only has that name: take it out of NAMED_TWICE"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("from nbdist.wire.marks import Mark", True),
        ("def test():\n    from nbdist.wire import marks", True),
        ("import nbdist.wire.marks", True),
        ('"""Tests of `nbdist.wire.marks`."""', True),
        ("from nbdist.wire.marksmen import Mark", False),
        ("from nbdist.wire import payload  # nbdist.wire.marks", False),
        ("", False),
    ],
)
def test_a_test_module_names_its_module(source, told):
    """By an import, wherever it stands, or by its docstring's backticks."""
    assert names_module("wire/marks.py", source) == told


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["a/x.py", "b/x.py"], {"x.py"}),
        (["x.py", "b/c/x.py"], {"x.py"}),
        (["a/x.py", "a/y.py"], set()),
        (["notebook/commands/x.py", "worker/ops/x.py"], set()),
        (["notebook/commands/x.py", "worker/ops/x.py", "world/x.py"], {"x.py"}),
    ],
)
def test_a_second_meaning_is_told(files, told):
    """The name of the files."""
    assert named_twice(files) == told


def test_the_longest_are_there():
    """Files that are begun first are renamed there too."""
    assert [name for name in LONGEST if not (TESTS / name).is_file()] == []
