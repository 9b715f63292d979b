"""`%dist_export` writes the distributed cells as a script that torchrun runs without nbdist.

Runs in the notebook's process.  The notebook's own functions, classes and imports come first in the
script, as they were typed.  Before each cell the script binds the variables of the notebook that
the cell uses: small values as code, other values from a file that `torch.save` has written.
"""

from __future__ import annotations

import builtins
import inspect
import math
import os
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.command import MagicCall, command
from nbdist.notebook.display import CommandOutput, block
from nbdist.notebook.free_names import (
    names_bound,
    names_read_first,
    names_used,
)
from nbdist.notebook.shipping import version_now
from nbdist.system.folders import whole_file
from nbdist.tools.cell_code import (
    POSTPONED,
    Statements,
    Transform,
    attributes_since,
    cell_code,
    definitions_to_read,
    guard_by_rank,
    has_top_level_await,
    literal,
    names_read_at_once,
    wrap_in_event_loop,
)
from nbdist.values.definitions import SYSTEM_NAMES
from nbdist.words import count, one_line, size_text
from nbdist.world.name_table import WORKERS_MODULES, WORKERS_OWN, NameTable, list_names
from nbdist.world.spec import given_environ
from nbdist.world.task_history import PastTask, SentName, TaskHistory

if TYPE_CHECKING:
    from nbdist.world.world import World


@command(
    argument("file", nargs="?", help="the file to write, such as train.py"),
    argument("--force", action="store_true", help="overwrite existing files"),
)
def dist_export(line: MagicCall) -> CommandOutput:
    """Export the distributed cells as a torchrun script: `%dist_export train.py`.

    The script runs by `torchrun --nproc-per-node 4 train.py`, without nbdist.  It contains the
    functions, classes and small values of the notebook that the cells use; other values are in
    train_values.pt.  Lines below the summary say what the script could not carry over.
    """
    path, file = _free_paths(line.options.file, force=line.options.force)
    world, shell = line.world, line.pool.shell
    history = shell.history_manager.input_hist_parsed  # type: ignore[union-attr]
    # Cells that auto mode sent to the ranks are in the history of IPython too, but they have bound
    # nothing in the notebook.  For such cells `auto.ran` has the code that the notebook ran.
    cells = Statements(line.auto.ran.get(number, source) for number, source in enumerate(history))
    past, names = world.engine.past, world.engine.names
    composer = Composer(past, names, cells, shell.transform_cell)
    script = composer.compose(path, world.size, *group_of(world))
    if not script.cells:
        raise UsageError(
            "`%dist_export`: no `%%distributed` cell has succeeded since the workers were started."
        )
    line.display.show_status(f"writing {path} …")
    size = _write(script, path, file, shell.user_ns)
    saved = f" · {count(len(script.saved), 'variable')} in {file} ({size_text(size)})"
    summary = f"{path} · {count(script.cells, 'cell')}{saved if script.saved else ''}"
    lines = (
        ["not carried over:", *(f"  {each}" for each in script.omitted)] if script.omitted else []
    )
    if script.missing:
        lacks = f"{list_names(script.missing)}, which it uses and lacks"
        first = [f"{path} ends in a NameError until you add {lacks}", summary]
    else:
        first = [f"{summary} · `torchrun --nproc-per-node {world.size} {path}`"]
    return block("\n".join([*first, *lines]))


def _free_paths(text: str | None, *, force: bool) -> tuple[Path, Path]:
    """Return the paths of the script and of its file of values; `text` is the script's typed path.

    Raises UsageError if the name is not that of a Python file, or if the folder does not exist.
    Also raises it if one of the paths exists, unless `force` is given and the path is a file.
    """
    path = Path(text or "").expanduser()
    if not text or path.suffix != ".py":
        typed = f" {text}" if text else ""
        raise UsageError(
            f"`%dist_export{typed}`: the script needs a name that ends in .py: "
            "`%dist_export train.py`."
        )
    if not path.parent.is_dir():
        raise UsageError(f"`%dist_export {text}`: there is no folder {path.parent}.")
    paths = path, _values_file(path)
    if files := [each for each in paths if each.exists() and not (force and each.is_file())]:
        hint = "" if force else f" `%dist_export --force {path}` overwrites it."
        raise UsageError(f"`%dist_export`: {' and '.join(map(str, files))} already exists.{hint}")
    return paths


def _values_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}_values.pt")


def _write(script: ExportedScript, path: Path, file: Path, names: Mapping[str, object]) -> int:
    """Write the script to `path`, and its file of values to `file` if the script needs one.

    `names` has the notebook's variables.  Returns the size in bytes of the file of values, 0 if
    there is none.  Raises UsageError if a file cannot be written or a value cannot be saved.
    """
    size = 0
    try:
        with whole_file(path) as written:
            written.write(script.text.encode())
            if script.saved:
                import torch

                with whole_file(file) as opened:
                    torch.save({name: names[name] for name in script.saved}, opened)
                    size = opened.tell()
    except Exception as error:  # noqa: BLE001 (a user's __reduce__ can raise anything)
        why = getattr(error, "strerror", None) or one_line(str(error))
        raise UsageError(f"`%dist_export {path}`: {why}.") from None
    return size


# --- the parts of a script around the cells -------------------------------------------------


def group_of(world: World) -> tuple[str, tuple[str, ...]]:
    """Return the backend for the script, and a line for each setting of the world that it lacks.

    The backend is "" if the script shall choose gloo or nccl by the ranks' device, and "none" if
    the world has no process group.
    """
    config, omitted = world.engine.config, []
    if given := given_environ(config):
        omitted.append(f"the environment of the workers: {', '.join(sorted(given))}")
    if config.gpus:
        omitted.append(f"the choice of GPUs {config.gpus}: set CUDA_VISIBLE_DEVICES")
    backend = "none" if world.engine.rank_table.spec.backend is None else config.backend or ""
    return backend, tuple(omitted)


def _docstring(path: Path, ranks: int, omitted: Sequence[str]) -> str:
    notebook = os.path.basename(os.environ.get("JPY_SESSION_NAME", "")) or "a notebook"
    lines = [
        f"The distributed cells of {notebook}, written by `%dist_export` of nbdist.",
        f"\n    torchrun --nproc-per-node {ranks} {path.name}",
        *(["\nNot carried over:"] if omitted else []),
        *(f"- {each}" for each in omitted),
    ]
    text = "\n".join(lines).replace("\\", "/").replace('"""', "'''")
    return f'"""{text}\n"""'


PROLOGUE = """\
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
else:
    device = torch.device("cpu")"""
"""Code that defines the names that every worker defines for cells, such as `rank` and `device`."""

# Without the barrier, a rank whose cells call no collective may end while gloo on a slow rank is
# still connecting: `init_process_group` there fails with "Connection closed by peer".
EPILOGUE = """\
# A rank that ends while another rank still connects to it would break the start of that rank.
dist.barrier()
dist.destroy_process_group()"""

CHOSEN = '"cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"'

IMPORTS = "import os\nimport torch\nimport torch.distributed as dist"

LOAD = 'torch.load(VALUES, map_location="cpu", weights_only=False)'
VALUES = f'VALUES = __file__.removesuffix(".py") + "_values.pt"\nNOTEBOOK = {LOAD}'


# --- the cells and the variables that they use -----------------------------------------------

_PREDEFINED = {
    *dir(builtins),
    *WORKERS_OWN,
    *WORKERS_MODULES,
    "os",
    "__file__",
    "__name__",
    "__doc__",
}
_PREDEFINED -= {"display", "get_ipython"}

_IN_PLACE = {"display": "display = print", "track": "track = lambda **_: None"}
"""The code with which a script replaces a function that every worker defines for cells."""


@dataclass(frozen=True, slots=True)
class ExportedScript:
    """A script, and what its users must know about it."""

    text: str
    saved: tuple[str, ...]  # the variables in the file of values
    cells: int  # the number of cells in the script
    omitted: tuple[str, ...]  # a line for each thing of the notebook that the script leaves out
    missing: tuple[str, ...] = ()  # names that the script uses without having bound them


@dataclass(frozen=True, slots=True)
class _Origin:
    """How the script gets a variable of the notebook: by code, or from the file of values."""

    text: str = ""  # code that binds the variable, if it is not in the file of values
    needs: frozenset[str] = frozenset()  # names that the script must bind for this variable
    problem: str = ""  # a line on what the script cannot carry over
    is_saved: bool = False  # True if the variable is in the file of values
    # True for an import, a function, a class, or a value that only a cell's statement can make.
    is_definition: bool = False
    after: tuple[str, ...] = ()  # statements that set attributes of the variable


class Composer:
    """Composes a script from the history of tasks and the notebook's variables.

    Imports and definitions of the notebook come first, with values that they read while they are
    defined, such as defaults of arguments.  The cells follow in the order in which they last ran.
    Before each cell the script binds the variables that the cell uses, and all variables that tasks
    had sent by then.  A small value is written as it was when it was sent, any other value as it is
    now.
    """

    def __init__(
        self, past: TaskHistory, names: NameTable, statements: Statements, transform: Transform
    ) -> None:
        self._past = past
        self._names = names
        self._statements = statements
        self._omitted = dict[str, None]()
        self._missing = dict[str, None]()
        # Names in the section of definitions that no cell written so far has bound again.
        self._defined = set[str]()
        self._lines: list[str] = []  # lines to write before the next cell
        # By name: how the value that was written last had been sent; None if no task had sent it.
        self._written = dict[str, SentName | None]()
        # By name: the version of the value that was written last.  Names are left out if a cell
        # has bound them since then.
        self._versions = dict[str, object]()
        self._bound = frozenset[str]().union(*(task.made for task in past.tasks))
        self._cells = [*self._translate_cells(transform)]
        self._bound = self._bound.union(*(names_bound(text) for _, text in self._cells))
        self._is_postponed = any(POSTPONED in task.text for task, _ in self._cells)
        self._is_starred = False
        self._unsent = self._bound - {each.name for each in past.sent}
        self._origins = dict[str, _Origin]()
        self._find_origins(
            set[str]().union(*(names_used(text) for _, text in self._cells)) - self._unsent
        )

    def compose(
        self, path: Path, ranks: int, backend: str = "", omitted: tuple[str, ...] = ()
    ) -> ExportedScript:
        """Return the whole script.

        Its docstring says how to run it with `ranks` ranks, and lists `omitted` and all else that
        the script is known to lack.  `backend` and `omitted` are what `group_of` returns.
        """
        chosen = f'"{backend}"' if backend else CHOSEN
        begin, end = f"dist.init_process_group({chosen})", EPILOGUE
        if backend == "none":
            begin = end = ""
        available = {*_PREDEFINED}
        sections = [self._definitions(available)]
        for task, text in self._cells:
            sent, used, self._lines = self._past.sent_before(task.last), names_used(text), []
            for name in sorted((used - self._bound) | sent.keys()):
                self._write_value(name, sent, is_used=name in used)
            self._record_missing(_title_of(task), text, available)
            self._versions = {n: v for n, v in self._versions.items() if n not in names_bound(text)}
            self._defined -= names_bound(text)
            sections.append(_cell_section(task, text, self._lines))
        self._omitted |= dict.fromkeys([*_omitted_tasks(self._past), *omitted])
        parts = [
            _docstring(path, ranks, [*self._omitted]),
            f"{POSTPONED}\n{IMPORTS}" if self._is_postponed else IMPORTS,
            f"{PROLOGUE}\n{begin}",
            *sections,
            end,
        ]
        text = "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
        return ExportedScript(
            text, (*self._saved,), len(self._cells), (*self._omitted,), (*self._missing,)
        )

    @property
    def _saved(self) -> list[str]:
        return sorted(name for name, each in self._origins.items() if each.is_saved)

    def _translate_cells(self, transform: Transform) -> Iterator[tuple[PastTask, str]]:
        tasks = [each for each in self._past.tasks if each.kind == "cell" and _is_written(each)]
        variables = WORKERS_OWN.union(self._bound, (each.name for each in self._past.sent))
        for task in sorted(tasks, key=lambda task: task.last):
            text, omitted = cell_code(task.text, transform, variables, shows_value=task.shows_value)
            omitted += ["its figures are drawn and not shown"] if task.draws else []
            omitted += [STOPPED] if task.status == "interrupted" else []
            self._omitted |= {f"{_title_of(task)}: {each}": None for each in omitted}
            yield task, text

    def _record_missing(self, title: str, text: str, available: set[str]) -> None:
        """Record the names that a section of the script uses before the script has bound them.

        `title` is the title of a cell, or "" for the section of definitions.  `available` has the
        names of earlier sections.  This method adds the names of this section to it, so that a
        missing name is recorded only once.  If a name of `_IN_PLACE` is missing, its replacement is
        added to the section.

        In the section of definitions, the body of a function may use a name that a cell or value
        binds later: such a name is not missing.
        """
        text = "\n".join([*([POSTPONED] if self._is_postponed else []), *self._lines, text])
        used, bound = names_used(text), names_bound(text)
        # A name that is bound in a loop or a condition counts as bound, although the statement that
        # binds the name may not run.
        missing = used - available - (bound - names_read_first(text))
        if not title:
            origins = (name for name, each in self._origins.items() if each.text or each.is_saved)
            missing -= self._bound.union(origins) - names_read_at_once(text)
        self._lines[:0] = [_IN_PLACE[name] for name in sorted(missing & _IN_PLACE.keys())]
        self._is_starred |= "import *" in text  # this import may bind any name
        for name in () if self._is_starred else sorted(missing - _IN_PLACE.keys()):
            self._missing[name] = None
            why = f"{title} uses {name}, which no cell before it binds"
            is_late = title and name in self._bound
            self._omitted[why if is_late else f"`{name}` is used and not there"] = None
        available |= used | bound

    # --- variables of the notebook --------------------------------------------------------------

    def _find_origins(self, names: Iterable[str]) -> None:
        """Find out how the script gets these variables, and all variables that they need."""
        sent = {each.name: each.shipped.needs for each in self._past.sent}
        waiting = {*names}
        while waiting:
            name = waiting.pop()
            is_known = name in self._origins or name in _PREDEFINED or SYSTEM_NAMES.fullmatch(name)
            if not is_known and (name in sent or name in self._names.namespace):
                origin = self._origins[name] = self._find_origin(name)
                waiting |= origin.needs | (sent.get(name, frozenset()) - self._unsent)

    def _find_origin(self, name: str) -> _Origin:
        if name not in self._names.namespace:
            return _Origin(problem=f"`{name}` was sent, and is gone from the notebook")
        value = self._names.namespace[name]
        if lines := self._statements.importing(name, value):
            return _Origin("\n".join(lines), is_definition=True)
        if (text := literal(value)) is not None:
            return _Origin(f"{name} = {text}")
        problem = f"`{name}` was not defined in a cell"
        whole = inspect.unwrap(value) if callable(value) else value
        if not isinstance(whole, types.FunctionType | types.MethodType | type):
            try:
                return _Origin(needs=definitions_to_read(value), is_saved=True)
            except Exception as error:  # noqa: BLE001 (a user's __reduce__ can raise anything)
                why = one_line(f"{type(error).__name__}: {error}")
                problem = f"`{name}` cannot be saved ({why})"
        if not (text := self._statements.binding(name, whole)):
            return _Origin(problem=problem)
        self._is_postponed |= self._statements.postpones
        texts, unset = attributes_since(name, value, text)
        problem = f"{list_names(unset)}, as set since the definition of `{name}`" if unset else ""
        needs = self._statements.names_used(text)
        # A value that a cell binds must come before this definition only if the definition reads it
        # at once.  The body of a function runs later, when a cell has bound the value.
        kinds = types.ModuleType | type | types.FunctionType | types.BuiltinFunctionType
        values = {n for n in self._unsent if not isinstance(self._names.namespace.get(n), kinds)}
        needs -= values - names_read_at_once(text)
        return _Origin(text, needs, problem, is_definition=True, after=tuple(texts))

    def _definitions(self, available: set[str]) -> str:
        """Return the section with imports and definitions, which also loads the file of values."""
        for name in sorted(name for name, each in self._origins.items() if each.is_definition):
            self._define(name)
        for _, origin in sorted(self._origins.items()):
            self._lines += origin.after
            self._omitted |= (
                {origin.problem: None} if origin.is_definition and origin.problem else {}
            )
        self._lines += [VALUES] if self._saved else []
        self._record_missing("", "", available)
        return "\n".join(["# --- from the notebook ---", *self._lines]) if self._lines else ""

    def _define(self, name: str) -> None:
        """Write a definition, after the definitions that it needs and the values that it reads.

        A list, dict or set that a definition reads is written as the statement that made it in a
        cell, not as its value now.  It may be a table in which functions register themselves, which
        must be empty at first, since the definitions in the script fill it again.
        """
        if name in self._defined:
            return
        self._defined.add(name)
        origin = self._origins[name]
        text = (
            origin.text if origin.is_definition else self._statements.binding(name) or origin.text
        )
        at_once = names_read_at_once(text)
        self._find_origins(at_once)
        run = [self._origins[each] for each in at_once & self._origins.keys()]
        inner = {need for each in run for need in each.needs if self._is_container(need)}
        for need in sorted(origin.needs.union(at_once, inner) & self._origins.keys()):
            if self._origins[need].is_definition or need in at_once or need in inner:
                self._define(need)
        if not origin.is_definition and (text == origin.text or not self._is_container(name)):
            if origin.text:
                text, self._versions[name] = origin.text, self._version_now(name)
            else:
                why = f"`{name}`: definitions run with the one that its cell makes, not its value"
                self._omitted[why] = None
        self._lines += [text] if text and text not in self._lines else []

    def _is_container(self, name: str) -> bool:
        return isinstance(self._names.namespace.get(name), list | dict | set)

    def _write_value(self, name: str, sent: Mapping[str, SentName], *, is_used: bool) -> None:
        """Write a value before a cell, unless the script has already bound the same version.

        `sent` has the variables that tasks had sent before the cell, and `is_used` says whether the
        cell itself uses the name.  A small value is written as it was when a task sent it.  All
        other values are written as they are now.  These are big values, and values that no recorded
        task has sent, for example because a set-up cell has brought them to new workers.
        """
        origin, record = self._origins.get(name), sent.get(name)
        if origin is None or self._written.get(name, self) is record:
            return
        is_again, self._written[name] = name in self._written, record
        now = _without_submodules(self._version_now(name))
        version = _without_submodules(record.shipped.version) if record else now
        for need in () if record else sorted(origin.needs):
            self._write_value(need, sent, is_used=False)
        if self._versions.get(name, self) == version:
            return
        self._versions[name] = version
        text = _atom(version)
        is_import = origin.text.startswith(("import ", "from "))
        if (text is None and version != now) if record else (is_used and not is_import):
            self._omitted[f"`{name}` as it was sent: the script has it as it is now"] = None
        if origin.problem:
            self._omitted[origin.problem] = None
        if text is not None:
            self._lines.append(f"{name} = {text}")
        elif origin.is_saved:  # the second time, load anew: cells may have changed the object
            self._lines.append(f"{name} = {LOAD if is_again else 'NOTEBOOK'}[{name!r}]")
        elif origin.text and not (origin.is_definition and name in self._defined):
            self._lines += [origin.text, *origin.after]

    def _version_now(self, name: str) -> object:
        with suppress(NbdistError, KeyError):
            return version_now(name, self._names)
        return None


def _without_submodules(version: object) -> object:
    """Return the version of a value, but for a module a version without its submodules.

    A version differs if the value has changed (`Sent.version`).  With submodules, the versions of a
    module would also differ if two cells used different submodules.
    """
    match version:
        case ("module", str(name), frozenset()):
            return "module", name
    return version


def _atom(version: object) -> str | None:
    """Return a small value as code, or None for any other value.

    `version` is the version of the value (`Sent.version`).  For a small value, it has the name of
    the value's type and the value's text.
    """
    match version:
        case (str(kind), str(text)) if kind != "module":
            return literal(eval(text, {"inf": math.inf, "nan": math.nan, "Ellipsis": ...}))
    return None


def _cell_section(task: PastTask, text: str, before: Sequence[str]) -> str:
    """Return the section of a cell: its title, the lines `before` that bind values, its code."""
    if has_top_level_await(text):
        text = wrap_in_event_loop(text, f"cell_{task.number or task.last}")
    if text.strip() and not task.on_all:
        text = guard_by_rank(text, task.ranks)
    times = f", which ran {task.runs} times" if task.runs > 1 else ""
    stopped = [f"# {STOPPED[0].upper()}{STOPPED[1:]}."] if task.status == "interrupted" else []
    return "\n".join([f"# --- {_title_of(task)}{times} ---", *before, *stopped, text])


STOPPED = "this cell was stopped before its end, and the script runs all of it"


def _is_written(task: PastTask) -> bool:
    """Return True if a cell is written to the script.

    A cell that was stopped is written too, since it may have bound variables before.
    """
    return task.status in ("ok", "interrupted")


def _omitted_tasks(past: TaskHistory) -> list[str]:
    """Return a line for each task that the script leaves out, such as failed cells and scripts.

    The last line is about gathered values, if there are any: the script cannot contain what the
    notebook has done with them.
    """
    lines = []
    if past.forgotten:
        lines.append(f"the first {count(past.forgotten, 'cell')}: they are no longer known")
    for task in past.tasks:
        ended = ""
        if task.kind == "cell" and not _is_written(task):
            ended = f" failed ({task.error})" if task.error else " failed"
        if ended or task.kind in ("script", "call"):
            made = f", which bound {list_names(task.made)}" if task.made else ""
            lines.append(f"{_title_of(task)}{ended}{made}")
    if past.gathered:
        names = list_names(past.gathered)
        lines.append(f"what the notebook itself did with {names}, which were gathered")
    return lines


_MAGICS = {
    "values.bind_scattered": "%dist_scatter",
    "values.bind_synced": "%dist_sync",
    "values.bind_kept": "%dist_restart --keep",
    **{"snapshot": "%dist_restore", "run": "World.run"},
}
"""By op, or by the module of the op: the magic or method that users call."""


def _title_of(task: PastTask) -> str:
    """Return the name by which users know a task, such as `In [5]` or `%dist_run train.py`."""
    if task.kind == "call":
        return f"`{_MAGICS.get(task.text) or _MAGICS.get(task.text.partition('.')[0], task.text)}`"
    if task.kind == "script":
        return f"`%dist_run {task.text}`"
    return f"cell {task.last}" if task.number is None else f"In [{task.number}]"
