"""Tests of the package's structure: its imports, their cost, and the files at the top level.

No ten lines of the package occur twice.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import pytest

from tests import folders
from tests.sources import PACKAGE, nodes_of, sources
from tests.tiers import LONGEST
from tests.waiting import SOON

ROOT = PACKAGE.parent

# Each room (a folder or module of the package), and the rooms or modules below, which alone the
# room may import.  The notebook's side imports no agent or worker: they are other processes.
OPTIONS = {"words", "errors", "topology", "config"}
BETWEEN = {"words", "errors", "system", "values", "wire"}  # imported in all processes
FLOORS = {
    "words": set(),
    "plugins": set(),
    "errors": {"words"},
    "topology": {"words", "errors"},
    "config": OPTIONS - {"config"} | {"system.secrets"},
    "system": {"words", "errors"},
    "output": {"words", "errors"},
    "values": {"words", "errors", "system"},
    "wire": (BETWEEN - {"wire"}) | {"topology", "config", "output.events"},
    "world": OPTIONS | BETWEEN | {"plugins", "output"},
    "agent": BETWEEN | {"topology", "output.events"},
    # The head does all that an agent does, except for having workers.
    "cluster": BETWEEN | {"plugins", "topology", "config", "output.events", "agent"},
    "notebook": OPTIONS | BETWEEN | {"plugins", "world", "output"},
    "terminal": OPTIONS | BETWEEN | {"plugins", "world", "output"},
    # Each tool's magic runs in the notebook, its op (`*_op.py`) in workers.
    "tools": BETWEEN | {"output", "world", "notebook", "worker"},
    "worker": BETWEEN | {"plugins", "output.events", "output.mimes"},
    # The package itself imports the public names from all rooms of the notebook's side; every
    # room may import the package.
    "__init__": OPTIONS | BETWEEN | {"world", "notebook", "output", "tools", "worker.tracking"},
}

# Exceptions from FLOORS: the fork server becomes a worker when it forks.
DOORS = {("agent/fork_server.py", "worker")}

# Rooms that a room may import only inside functions: the cluster is loaded only if hosts or a
# launcher are named.
LATE = {("agent", "cluster"), ("terminal", "cluster")}

# Files that may import torch at once, when they are imported.
TORCH_ROOMS = ("worker/", "agent/fork_server.py", "tools/diff_op.py", "tools/timeline_op.py")
TORCH_ROOMS += ("tools/digests.py", "tools/watch_op.py")

RECENT_COMMITS, LONGEST_SUBJECT = 200, 72  # many older subjects are longer

TOP_LEVEL = {"pyproject.toml", "nbdist", "tests", "notebooks", "docs", "README.md", "LICENSE"}
TOP_LEVEL |= {"CITATION.cff", "CHANGELOG.md"}  # GitHub and readers expect the files here


HOW_IT_WORKS = "docs/how-it-works.md"
FOR_CONTRIBUTORS = (HOW_IT_WORKS, "docs/contributing.md", ".github/CONTRIBUTING.md")


class Import(NamedTuple):
    """An imported name, with its file and line, and whether importing the file imports the name."""

    file: str
    line: int
    name: str
    at_once: bool

    @property
    def importer(self) -> str:
        """The room that the file is in."""
        return self.file.partition("/")[0].removesuffix(".py")

    @property
    def room(self) -> str | None:
        """The room of nbdist that is imported, or None for another package."""
        head, _, rest = self.name.partition(".")
        if head != "nbdist":
            return None
        room = rest.partition(".")[0]
        return room if room in FLOORS or _is_module(room) else "__init__"

    def __str__(self) -> str:
        return f"nbdist/{self.file}:{self.line} imports {self.name}"


def _is_module(room: str) -> bool:
    return bool(room) and ((PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file())


@cache
def imports_of(file: str, source: str) -> tuple[Import, ...]:
    """Return the imports of a file, also those inside functions."""
    return tuple(_imports(file, source))


def _imports(file: str, source: str) -> Iterator[Import]:
    package = ["nbdist", *file.split("/")[:-1]]
    waiting = [(nodes_of(source)[0], True)]
    while waiting:
        node, at_once = waiting.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, at_once)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield Import(file, node.lineno, f"{module}.{alias.name}", at_once)
        for child in ast.iter_child_nodes(node):
            waiting.append((child, at_once and _runs(node, child)))


def _runs(node: ast.AST, child: ast.AST) -> bool:
    """Whether importing the file runs this part of a statement."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return False
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return child in node.orelse
    return True


def all_imports() -> list[Import]:
    """The imports of the package, in reading order."""
    return sorted(each for file, text in sources().items() for each in imports_of(file, text))


def module_of(file: str) -> str:
    """The dotted name under which a file of the package is imported."""
    parts = ["nbdist", *file.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle_in(sources: Mapping[str, str]) -> set[str]:
    """Return a circle of files that import one another, or an empty set.

    The package's own `__init__` is in no circle: every room may import the version from it.
    """
    files = {module_of(file): file for file in sources}

    def imported(file: str) -> Iterator[str]:
        for each in imports_of(file, sources[file]):
            name = each.name
            while name not in files and name:
                name = name.rpartition(".")[0]
            if name not in ("", "nbdist"):
                yield files[name]

    try:
        TopologicalSorter({file: {*imported(file)} - {file} for file in sources}).prepare()
    except CycleError as error:
        return {*error.args[1]}
    return set()


def points_up(each: Import) -> bool:
    """Whether a room imports a room that is not below, without an exception from FLOORS."""
    room = each.room
    if room is None or room in (each.importer, "__init__") or (each.file, room) in DOORS:
        return False
    if (each.importer, room) in LATE and not each.at_once:
        return False
    below = FLOORS.get(each.importer, set())
    module = ".".join(each.name.split(".")[1:3])
    return room not in below and module not in below


def is_early_torch(each: Import) -> bool:
    """Whether a file imports torch at once without being in TORCH_ROOMS."""
    is_torch = each.name.partition(".")[0] == "torch"
    return is_torch and each.at_once and not each.file.startswith(TORCH_ROOMS)


@pytest.mark.parametrize(
    ("file", "source", "told"),
    [
        (
            "wire/x.py",
            "def f():\n    from nbdist.world import spec",
            "2 imports nbdist.world.spec",
        ),
        ("world/x.py", "from ..notebook import y", "1 imports nbdist.notebook.y"),
        ("agent/x.py", "if TYPE_CHECKING:\n    import nbdist.worker", "2 imports nbdist.worker"),
        ("agent/x.py", "from nbdist.cluster import y", "1 imports nbdist.cluster.y"),
        ("agent/x.py", "def f():\n    from nbdist.cluster import y", None),
        ("wire/x.py", "from nbdist.output.events import Done", None),
        ("worker/x.py", "from . import y\nfrom nbdist.values.payload import Payload", None),
    ],
)
def test_an_import_that_points_up_is_found(file, source, told):
    """An import that points up is found, with its file and line."""
    found = [str(each) for each in imports_of(file, source) if points_up(each)]
    assert found == ([] if told is None else [f"nbdist/{file}:{told}"])


def test_no_import_points_up():
    """A room imports only rooms below it, also inside functions and for type checkers."""
    assert "\n".join(str(each) for each in all_imports() if points_up(each)) == ""


def test_only_workers_import_torch():
    """Only modules of workers and the fork server import torch at once, when they are imported.

    All modules may import torch in functions and for type checkers.
    """
    assert "\n".join(str(each) for each in all_imports() if is_early_torch(each)) == ""
    early = "import torch.nn\nclass C:\n    import torch\nimport torchless"
    late = "def f():\n    import torch\nif TYPE_CHECKING:\n    import torch"
    found = imports_of("wire/x.py", f"{early}\n{late}")
    assert {each.line for each in found if is_early_torch(each)} == {1, 3}
    assert not any(map(is_early_torch, imports_of("worker/x.py", early)))


def test_packages_that_are_imported_at_once_are_installed():
    """pip installs each package that nbdist imports at once: torch alone would bring no numpy."""
    text = (ROOT / "pyproject.toml").read_text()
    named = {
        re.split("[<>=~,;]", each)[0] for each in tomllib.loads(text)["project"]["dependencies"]
    }
    brought = named | {"nbdist", "zmq", "traitlets"}  # zmq by pyzmq, traitlets by IPython
    at_once = [each for each in all_imports() if each.at_once]
    packages = {each.name.partition(".")[0].lower(): str(each) for each in at_once}
    assert {packages[name] for name in packages.keys() - brought - sys.stdlib_module_names} == set()


def test_no_files_import_one_another():
    """No file imports itself through other files, also not for type checkers only."""
    assert circle_in(sources()) == set()
    detour = {
        "x/a.py": "if TYPE_CHECKING:\n    from nbdist.x.b import B",
        "x/b.py": "def f():\n    from . import c",
        "x/c.py": "from nbdist.x import a",
        "d.py": "from nbdist.x import a",
    }
    assert circle_in(detour) == {"x/a.py", "x/b.py", "x/c.py"}
    package = {"y/__init__.py": "from nbdist.y.a import A", "y/a.py": "from nbdist.y import A"}
    assert circle_in(package) == {"y/__init__.py", "y/a.py"}


def test_every_room_is_in_the_table_of_floors():
    """Each folder and module at the top of the package is in FLOORS."""
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert rooms - {"__pycache__", "py.typed"} <= set(FLOORS)


def test_modules_that_begin_first_exist():
    """Each module in LONGEST exists, also after modules have been renamed."""
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_no_folder_exceeds_its_limits():
    """No folder exceeds its limits; a commit that needs more raises them, and says why."""
    assert folders.more_than_allowed(folders.counted()) == []


def tables(page: str) -> list[list[list[str]]]:
    """Return the tables of a page in Markdown: the cells of each row, without the heads."""
    found = re.findall(r"^\|[-|]+\|\n((?:\|.*\|\n)+)", (ROOT / page).read_text(), re.MULTILINE)
    return [[row.strip("| ").split(" | ") for row in table.splitlines()] for table in found]


def files_in(text: str) -> list[str]:
    """Return the files and folders of the repository that a text in Markdown names as code."""
    return re.findall(r"`((?:nbdist|tests|docs|notebooks)/[\w./-]+)`", text)


@pytest.mark.parametrize("page", FOR_CONTRIBUTORS)
def test_pages_for_contributors_name_files_that_exist(page: str) -> None:
    """Each file and folder that a page for contributors names exists."""
    named = files_in((ROOT / page).read_text())
    assert named
    assert [each for each in named if not (ROOT / each).exists()] == []


def test_the_manual_says_where_to_look() -> None:
    """The last table of `how-it-works.md` names one to three files for each change."""
    counts = {change: len(files_in(files)) for change, files in tables(HOW_IT_WORKS)[-1]}
    assert "a restart" in counts
    assert {change for change, count in counts.items() if not 1 <= count <= 3} == set()


def test_steps_in_the_manual_are_functions() -> None:
    """Each function and class that `how-it-works.md` names beside its file is in that file."""
    rows = [row for table in tables(HOW_IT_WORKS) for row in table if len(row) == 3]
    assert len(rows) > 10
    lacking = []
    for _, names, file in rows:
        defined = {*definitions(nodes_of((ROOT / file.strip("`")).read_text())[0])}
        lacking += [each for each in names.replace("`", "").split(", ") if each not in defined]
    assert lacking == []


def definitions(tree: ast.AST) -> Iterator[str]:
    """Yield the functions and classes of a module, and methods as `Class.method`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            if isinstance(node, ast.ClassDef):
                yield from (f"{node.name}.{each}" for each in definitions(node))


@pytest.mark.world
def test_commit_subjects_are_short():
    """The subjects of the last commits fit a line of `git log`: 72 characters at most."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not in a git checkout, so there are no commits")
    command = ["git", "log", f"--max-count={RECENT_COMMITS}", "--no-merges", "--format=%s"]
    log = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SOON, check=True
    ).stdout
    assert [subject for subject in log.splitlines() if len(subject) > LONGEST_SUBJECT] == []


@pytest.mark.world
def test_the_top_level_has_only_known_names():
    """The top level of the repository has the names of TOP_LEVEL and hidden ones, no others."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not in a git checkout, so there is no list of the repository's files")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SOON, check=True
    ).stdout
    names = {line.partition("/")[0] for line in listing.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


PROBE = """
import json, os, sys, threading

def opened():
    return sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                  if os.path.exists(f"/proc/self/fd/{fd}"))

before = opened()
environ = dict(os.environ)
for name in sys.argv[1:]:
    __import__(name)
print(json.dumps({
    "heavy": sorted({"torch", "zmq", "IPython", "numpy"} & set(sys.modules)),
    "opened": [each for each in opened() if each not in before],
    "threads": threading.active_count(),
    "environ": dict(os.environ) == environ,
}))
"""


def probe(*modules: str) -> dict[str, object]:
    """Import modules in a new process; return the libraries and files that they load and open."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *modules],
        capture_output=True,
        text=True,
        timeout=SOON,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, f"something is printed at import: {done.stdout}"
    return dict(json.loads(done.stdout))


@pytest.mark.world
def test_importing_nbdist_costs_nothing():
    """`import nbdist` loads neither torch, zmq nor IPython, opens nothing and starts nothing."""
    assert probe("nbdist") == {"heavy": [], "opened": [], "threads": 1, "environ": True}


@pytest.mark.world
def test_the_notebooks_side_loads_no_torch():
    """No module of the notebook's side or of the agent loads torch, also not by other modules."""
    modules = [
        "nbdist." + path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(TORCH_ROOMS)
        and path.name not in ("__main__.py", "__init__.py")
    ]
    found = probe(*modules)
    assert "torch" not in found["heavy"]
    assert (found["threads"], found["environ"]) == (1, True)


# --- no ten lines occur twice ---------------------------------------------------------------

LINES = 10


def telling_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file, without imports, comments and empty lines, with their numbers."""
    left_out: set[int] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#") and number not in left_out:
            yield number, text


def repeats(sources: Mapping[str, str]) -> list[str]:
    """Return all pairs of places at which the same lines occur, whatever their indentation."""
    places = defaultdict(list)
    for file, source in sources.items():
        lines = list(telling_lines(source))
        for start in range(len(lines) - LINES + 1):
            key = tuple(text for _, text in lines[start : start + LINES])
            places[key].append((file, lines[start][0]))
    return [
        f"{first[0]}:{first[1]} and {other[0]}:{other[1]}"
        for first, *others in places.values()
        for other in others
    ]


def test_no_ten_lines_occur_twice():
    """No ten lines occur twice: equal code is written once, as a function, a class or a table."""
    assert repeats(sources()) == []


TEN = "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\nf = 6\ng = 7\nh = 8\ni = 9\nj = 10\n"
IMPORTS = "from x import (\n" + "    a,\n" * LINES + ")\nimport e\n"


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (TEN, "def f():\n    a = 1\n\n    b = 2  \n    # d\n" + TEN[12:], ["x.py:1 and y.py:2"]),
        (TEN, TEN[6:], []),
        (TEN, TEN.replace("d", "dd"), []),
        (IMPORTS, IMPORTS, []),
    ],
)
def test_lines_that_occur_twice_are_found(one, other, told):
    """Repeated lines are found, whatever their indentation and comments; imports do not count."""
    assert repeats({"x.py": one, "y.py": other}) == told
