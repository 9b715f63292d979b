"""`%dist_export`: the distributed cells as a script that torchrun runs without nbdist.

Before each cell stand the variables of the notebook that it uses: definitions as they were typed,
small values as text, others out of a file that `torch.save` writes.  Runs in the notebook.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import os
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.magic_arguments import argument

from nbdist.errors import NbdistError, UsageError
from nbdist.notebook.command import Line, command
from nbdist.notebook.display import Shown, block
from nbdist.notebook.free_names import (
    names_bound,
    names_read_first,
    names_used,
    names_used_later,
)
from nbdist.notebook.shipping import version_now
from nbdist.system.folders import whole_file
from nbdist.tools.cell_code import (
    POSTPONED,
    Statements,
    Transform,
    attributes_since,
    awaits,
    cell_code,
    guarded,
    imports_by,
    in_event_loop,
    literal,
    needed_to_read,
    run_by,
    subclasses_of,
)
from nbdist.values.definitions import SYSTEM_NAMES
from nbdist.words import count, one_line, size_text
from nbdist.world.names import WORKERS_MODULES, WORKERS_OWN, NameTable, list_names
from nbdist.world.past import Past, PastTask, SentName
from nbdist.world.spec import given_environ

if TYPE_CHECKING:
    from nbdist.world.world import World


@command(
    argument("file", nargs="?", help="the file to write, such as train.py"),
    argument("--force", action="store_true", help="overwrite existing files"),
)
def dist_export(line: Line) -> Shown:
    """Export the distributed cells as a torchrun script: `%dist_export train.py`.

    It runs under `torchrun --nproc-per-node 4 train.py`, without nbdist.  Functions, classes
    and small values of the notebook that the cells use are in it, others in train_values.pt.
    The lines below the summary say what it could not carry over.
    """
    path, file = _free_paths(line.options.file, force=line.options.force)
    world, shell = line.world, line.pool.shell
    history = shell.history_manager.input_hist_parsed  # type: ignore[union-attr]
    # What auto mode sent to the ranks was typed here, and bound nothing here.
    cells = Statements(line.auto.ran.get(number, source) for number, source in enumerate(history))
    past, names = world.session.past, world.session.names
    composer = Composer(past, names, cells, shell.transform_cell)
    script = composer.compose(path, world.size, *group_of(world))
    if not script.cells:
        raise UsageError(
            "`%dist_export`: no `%%distributed` cell has succeeded since the workers were started."
        )
    line.display.wait_for(f"writing {path} …")
    size = _write(script, path, file, shell.user_ns)
    saved = f" · {count(len(script.saved), 'variable')} in {file} ({size_text(size)})"
    said = f"{path} · {count(script.cells, 'cell')}{saved if script.saved else ''}"
    lost = ["not carried over:", *(f"  {each}" for each in script.lost)] if script.lost else []
    if script.missing:
        lacks = f"{list_names(script.missing)}, which it uses and lacks"
        first = [f"{path} ends in a NameError until you add {lacks}", said]
    else:
        first = [f"{said} · `torchrun --nproc-per-node {world.size} {path}`"]
    return block("\n".join([*first, *lost]))


def _free_paths(text: str | None, *, force: bool) -> tuple[Path, Path]:
    """Return where the script and its values go; raises UsageError where they cannot."""
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
    if there := [each for each in paths if each.exists() and not (force and each.is_file())]:
        hint = "" if force else f" `%dist_export --force {path}` overwrites it."
        raise UsageError(f"`%dist_export`: {' and '.join(map(str, there))} already exists.{hint}")
    return paths


def _values_file(path: Path) -> Path:
    return path.with_name(f"{path.stem}_values.pt")


def _write(script: Script, path: Path, file: Path, names: Mapping[str, object]) -> int:
    """Write both files, or none; return the size of the one with values."""
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


# --- what is around the cells ---------------------------------------------------------------


def group_of(world: World) -> tuple[str, tuple[str, ...]]:
    """Return the backend of a script, and what of the workers it does not have.

    "" is the backend that suits the machine, "none" no group.
    """
    config, lost = world.session.config, []
    if given := given_environ(config):
        lost.append(f"the environment of the workers: {', '.join(sorted(given))}")
    if config.gpus:
        lost.append(f"the choice of GPUs {config.gpus}: set CUDA_VISIBLE_DEVICES")
    backend = "none" if world.session.spec.backend is None else config.backend or ""
    return backend, tuple(lost)


def _docstring(path: Path, ranks: int, lost: Sequence[str]) -> str:
    notebook = os.path.basename(os.environ.get("JPY_SESSION_NAME", "")) or "a notebook"
    lines = [
        f"The distributed cells of {notebook}, written by `%dist_export` of nbdist.",
        f"\n    torchrun --nproc-per-node {ranks} {path.name}",
        *(["\nNot carried over:"] if lost else []),
        *(f"- {each}" for each in lost),
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
"""What cells find on every worker; the group comes after it."""

CHOSEN = '"cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"'

IMPORTS = ("import os", "import torch", "import torch.distributed as dist")


# --- the cells and the variables that they use -----------------------------------------------

_KNOWN = {*dir(builtins), *WORKERS_OWN, *WORKERS_MODULES, "os", "__file__", "__name__", "__doc__"}
_KNOWN -= {"display", "get_ipython"}

_IN_PLACE = {"display": "display = print", "track": "track = lambda **_: None"}
"""What the script has in place of what cells find."""

_EARLY = ("environ", "sys.path", "putenv", "set_start_method", "chdir", "write_text", "subprocess")
"""What an import has to come after where a cell has it before."""

_LOAD = 'torch.load(VALUES, map_location="cpu", weights_only=False)'


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text, the variables in the file beside it, and what it does not have.

    `lost` are lines on all that is not carried over; `missing` are names that the script uses, and
    that nothing in it binds.
    """

    text: str
    saved: tuple[str, ...]
    cells: int
    lost: tuple[str, ...]
    missing: tuple[str, ...] = ()


@dataclass(slots=True)
class _Section:
    """A cell in its place: variables of the notebook that it uses stand before its code."""

    task: PastTask
    text: str
    before: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Origin:
    """How the script gets a variable of the notebook: `needs` are names to be there before.

    `after` are subclasses that a class registers, in their order; each has the class as its `root`.
    What `runs` names is run by a definition, and may change variables that the script has by then.
    """

    text: str = ""
    needs: frozenset[str] = frozenset()
    is_import: bool = False
    is_saved: bool = False
    problem: str = ""
    after: tuple[str, ...] = ()
    root: str = ""
    runs: frozenset[str] = frozenset()
    is_container: bool = False


class Composer:
    """Puts one script together."""

    def __init__(
        self, past: Past, names: NameTable, statements: Statements, transform: Transform
    ) -> None:
        self._past = past
        self._names = names
        self._statements = statements
        self._lost: list[str] = []
        self._missing = dict[str, None]()
        self._is_loaded = True  # the file of saved values, wherever the script stands
        self._imports = dict.fromkeys(IMPORTS)
        self._origins: dict[str, _Origin] = {}
        self._there: dict[str, object] = {}  # variables of the notebook so far, by their versions
        self._bound = set[str]()  # by the cells so far
        self._made = set[str]().union(*(task.made for task in past.tasks))
        self._sections = self._translated(transform)
        self._made = self._made.union(*(names_bound(each.text) for each in self._sections))

    def compose(
        self, path: Path, ranks: int, backend: str = "", lost: tuple[str, ...] = ()
    ) -> Script:
        """Put it together; what could not be carried over is in it too."""
        self._hoist_imports()
        saved = self._find_origins()
        if saved:
            self._imports["from pathlib import Path"] = None
            first, seen = self._sections[0], {*_KNOWN}
            sent = self._past.sent_before(first.task.last)
            self._is_loaded = False
            for name in sorted({need for each in saved for need in self._origins[each].needs}):
                self._give(name, first, sent, seen)
            self._is_loaded = True
            file = _values_file(path).name
            first.before += [f"VALUES = Path(__file__).with_name({file!r})", f"NOTEBOOK = {_LOAD}"]
        self._give_variables()
        self._lost += [*_left_out(self._past), *lost]
        lost = tuple(dict.fromkeys(self._lost))
        chosen = f'"{backend}"' if backend else CHOSEN
        begin, end = f"dist.init_process_group({chosen})", "dist.destroy_process_group()"
        if backend == "none":
            begin = end = ""
        parts = [
            _docstring(path, ranks, lost),
            "\n".join(sorted(self._imports, key=lambda line: "__future__" not in line)),
            f"{PROLOGUE}\n{begin}",
            *map(_shown, self._sections),
            end,
        ]
        text = "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
        return Script(text, (*saved,), len(self._sections), lost, (*self._missing,))

    def _imported(self) -> set[str]:
        """Find what the imports at the top bind."""
        return set[str]().union(*map(names_bound, self._imports))

    def _translated(self, transform: Transform) -> list[_Section]:
        sections = []
        tasks = [each for each in self._past.tasks if each.kind == "cell" and _is_written(each)]
        known = {each.name for each in self._past.sent} | self._made | WORKERS_OWN
        for task in sorted(tasks, key=lambda task: task.last):
            text, lost = cell_code(task.text, transform, known, shows_value=task.shows_value)
            lost += ["its figures are drawn and not shown"] if task.draws else []
            lost += [STOPPED] if task.status == "interrupted" else []
            self._lost += [f"{_title_of(task)}: {each}" for each in lost]
            self._imports |= {"import asyncio": None} if awaits(text) else {}
            sections.append(_Section(task, text))
        return sections

    def _hoist_imports(self) -> None:
        """Move the imports of cells to the top, where nothing before them can tell."""
        seen = {*dir(builtins), *WORKERS_OWN, *(each.name for each in self._past.sent)}
        is_early = False
        for section in self._sections:
            taken = set[int]()
            body = ast.parse(section.text).body
            for node in body:
                text, found = ast.unparse(node), {name for name, _ in imports_by(node)}
                lines = {*range(node.lineno, (node.end_lineno or 0) + 1)}
                shares = any({each.lineno, each.end_lineno} & lines for each in {*body} - {node})
                is_new = found.isdisjoint(seen | self._imported())
                is_free = section.task.on_all and not is_early and (is_new or text in self._imports)
                if found and not shares and (is_free or "from __future__" in text):
                    self._imports[text] = None
                    taken |= lines
                else:
                    seen |= names_used(text) | names_bound(text)
                    is_early = is_early or any(word in text for word in _EARLY)
            rest = enumerate(section.text.split("\n"), 1)
            text = "\n".join(line for number, line in rest if number not in taken)
            section.text = text.strip("\n")

    # --- variables of the notebook --------------------------------------------------------------

    def _find_origins(self) -> list[str]:
        """Find how the script can get each variable that it may need; return those to be saved."""
        sent = {each.name: each.shipped.needs for each in self._past.sent}
        known = _KNOWN | self._imported() | (self._made - sent.keys())
        waiting = {name for section in self._sections for name in names_used(section.text)}
        while waiting:
            name = waiting.pop()
            if name in known or (name not in sent and name not in self._names.namespace):
                continue
            known.add(name)
            if not SYSTEM_NAMES.fullmatch(name):
                self._origins[name] = self._find_origin(name)
                found = self._origins[name]
                waiting |= found.needs.union(found.after, sent.get(name, frozenset()))
        return sorted(name for name, each in self._origins.items() if each.is_saved)

    def _give_variables(self) -> None:
        """Write the variables that each cell uses before it, as they were sent to it."""
        there, in_functions = {*_KNOWN}, set[str]()
        for section in self._sections:
            sent = self._past.sent_before(section.task.last)
            seen = {*_KNOWN, *self._imported(), *(self._made - sent.keys())}
            for name in sorted(names_used(section.text) | (in_functions & sent.keys())):
                self._give(name, section, sent, seen)
            in_functions |= names_used_later(section.text)
            bound = names_bound(section.text)
            self._bound |= bound
            self._there = {name: v for name, v in self._there.items() if name not in bound}
            text = "\n".join([*section.before, section.text])
            # What a loop or a condition binds counts as bound for the lines below it.
            if POSTPONED in self._imports:
                text = f"{POSTPONED}\n{text}"
            own = names_bound(text) - names_read_first(text)
            for name in sorted(names_used(text) - there - self._imported() - own):
                if name in _IN_PLACE:
                    self._imports[_IN_PLACE[name]] = None
                    continue
                self._missing[name] = None
                if name in self._made:
                    title = _title_of(section.task)
                    self._lost.append(f"{title} uses {name}, which no cell before it binds")
                else:
                    self._lost.append(f"`{name}` is used and not there")
            there |= names_used(text) | names_bound(text)

    def _give(
        self, name: str, section: _Section, sent: Mapping[str, SentName], seen: set[str]
    ) -> None:
        """Write a variable before a cell, and before it those that it needs.

        As it was when it was sent if that is known.  A set-up cell has brought variables to new
        workers, of which no task is known to have sent them.
        """
        record, origin = sent.get(name), self._origins.get(name)
        is_there = record is not None or name in self._names.namespace
        if origin is None or name in seen or not is_there:
            return
        if origin.root and origin.root not in seen:
            self._give(origin.root, section, sent, seen)
            if name in seen:
                return
        seen.add(name)
        since, until = record.task if record else 0, section.task.last
        if any(name in each.made for each in self._past.tasks if since <= each.last < until):
            return  # workers have bound it since it was sent
        now = None
        with suppress(NbdistError, KeyError):
            now = version_now(name, self._names)
        version = record.shipped.version if record else now
        if (text := _atom(version)) is not None:
            origin = _Origin(f"{name} = {text}")
        for need in sorted(origin.needs.union(record.shipped.needs if record else ())):
            self._give(need, section, sent, seen)
        if self._there.get(name, self) == version:
            return
        if origin.is_saved and not self._is_loaded:
            self._give_first_form(name, section, sent, seen)
            return
        self._there[name] = version
        is_old = text is None and version != now
        if not record:
            is_old = name in names_used(section.text) and not origin.is_import
        if is_old:
            self._lost.append(f"`{name}` as it was sent: the script has it as it is now")
        self._lost += [origin.problem] if origin.problem else []
        if origin.is_import and name not in self._made:
            self._imports |= dict.fromkeys(origin.text.split("\n"))
        elif origin.is_saved and name in self._bound:
            section.before.append(f"{name} = {_LOAD}[{name!r}]")  # cells may have changed the first
        elif origin.text:
            section.before.append(origin.text)
        for each in origin.after:
            self._give(each, section, sent, seen)
        for each in sorted(self._reached(origin.runs) & self._there.keys()):
            if self._origins[each].is_container:  # the definition may have changed it
                section.before.append(self._origins[each].text)

    def _give_first_form(
        self, name: str, section: _Section, sent: Mapping[str, SentName], seen: set[str]
    ) -> None:
        """Write a variable as a cell has bound it first: definitions use it that its value needs.

        The value itself is read from the file once these are made.
        """
        text = self._statements.binding(name)
        if not text:
            self._lost.append(f"`{name}`, which definitions use before its value can be read")
        for need in sorted(names_used(text)):
            self._give(need, section, sent, seen)
        section.before += [text] if text else []

    def _reached(self, names: Iterable[str]) -> set[str]:
        """Find all variables that these need, directly or not, and themselves."""
        found, waiting = set[str](), [*names]
        while waiting:
            name = waiting.pop()
            if name not in found and name in self._origins:
                found.add(name)
                waiting += self._origins[name].needs
        return found

    def _find_origin(self, name: str) -> _Origin:
        if name not in self._names.namespace:
            return _Origin(problem=f"`{name}` was sent, and is gone from the notebook")
        value = self._names.namespace[name]
        if lines := self._statements.importing(name, value):
            return _Origin("\n".join(lines), is_import=True)
        if (text := literal(value)) is not None:
            is_container = isinstance(value, list | dict | set)
            return _Origin(f"{name} = {text}", is_container=is_container)
        problem = f"`{name}` was not defined in a cell"
        whole = inspect.unwrap(value) if callable(value) else value
        if not isinstance(whole, types.FunctionType | types.MethodType | type):
            try:
                needs = needed_to_read(value)
                return _Origin(f"{name} = NOTEBOOK[{name!r}]", needs, is_saved=True)
            except Exception as error:  # noqa: BLE001 (a user's __reduce__ can raise anything)
                why = one_line(f"{type(error).__name__}: {error}")
                problem = f"`{name}` cannot be saved ({why})"
        if text := self._statements.binding(name, whole):
            return self._definition(name, value, text)
        return _Origin(problem=problem)

    def _definition(self, name: str, value: object, text: str) -> _Origin:
        """Find how the script gets a function, a class, or what they have made."""
        if self._statements.postpones:
            self._imports[POSTPONED] = None
        # What cells bind may be there when its functions are called.
        needs = self._statements.names_used(text)
        runs, since, problem = run_by(text), list[str](), ""
        if isinstance(value, types.FunctionType | type):
            since, lost = attributes_since(name, value, text)
            if lost:
                problem = f"{list_names(lost)}, as set since the definition of `{name}`"
        bases = value.__mro__[1:] if isinstance(value, type) else ()
        after, roots = (
            [each.__name__ for each in kinds if self._names.namespace.get(each.__name__) is each]
            for kinds in (subclasses_of(value), filter(subclasses_of, bases))
        )
        return _Origin(
            "\n".join([text, *since]),
            needs - self._made,
            problem=problem,
            after=tuple(after),
            root=roots[-1] if roots else "",
            runs=runs,
        )


def _atom(version: object) -> str | None:
    """Write a small value as it was sent; None for others, whose versions do not have them."""
    match version:
        case (str(kind), str(text)) if kind != "module":
            return literal(eval(text, {"inf": math.inf, "nan": math.nan, "Ellipsis": ...}))
    return None


def _shown(section: _Section) -> str:
    task, text = section.task, section.text
    if awaits(text):
        text = in_event_loop(text, f"cell_{task.number or task.last}")
    if text.strip() and not task.on_all:
        text = guarded(text, task.ranks)
    times = f", which ran {task.runs} times" if task.runs > 1 else ""
    stopped = [f"# {STOPPED[0].upper()}{STOPPED[1:]}."] if task.status == "interrupted" else []
    return "\n".join([f"# --- {_title_of(task)}{times} ---", *section.before, *stopped, text])


STOPPED = "this cell was stopped before its end, and the script runs all of it"


def _is_written(task: PastTask) -> bool:
    """Return True for a cell that is in the script: ranks keep what a stopped cell has done."""
    return task.status in ("ok", "interrupted")


def _left_out(past: Past) -> list[str]:
    """Say which tasks are not in a script, and what they had made."""
    said = []
    if past.forgotten:
        said.append(f"the first {count(past.forgotten, 'cell')}: they are no longer known")
    for task in past.tasks:
        ended = ""
        if task.kind == "cell" and not _is_written(task):
            ended = f" failed ({task.error})" if task.error else " failed"
        if ended or task.kind in ("script", "call"):
            made = f", which bound {list_names(task.made)}" if task.made else ""
            said.append(f"{_title_of(task)}{ended}{made}")
    if past.gathered:
        names = list_names(past.gathered)
        said.append(f"what the notebook itself did with {names}, which were gathered")
    return said


_MAGICS = {
    "values.bind_scattered": "%dist_scatter",
    "values.bind_synced": "%dist_sync",
    "values.give_back": "%dist_restart --keep",
    **{"snapshot": "%dist_restore", "run": "World.run"},
}
"""What people have typed, by op, or the op's module."""


def _title_of(task: PastTask) -> str:
    """Name a task as people see it: `In [5]`."""
    if task.kind == "call":
        return f"`{_MAGICS.get(task.text) or _MAGICS.get(task.text.partition('.')[0], task.text)}`"
    if task.kind == "script":
        return f"`%dist_run {task.text}`"
    return f"cell {task.last}" if task.number is None else f"In [{task.number}]"
