"""Decides, in auto mode, which lines of a cell run in the notebook and which on the workers.

Runs in the notebook's process.  `AutoCells` wraps the kernel's `do_execute`, or `run_cell` of a
terminal's shell, and replaces a cell by code that sends lines to the workers.  The tag
`distributed` has the same effect on a cell without auto mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from IPython.core.inputtransformer2 import find_end_of_continued_line, make_tokens_by_line

from nbdist.config import DEFAULT_POOL
from nbdist.notebook.cell_text import as_magic, cell_magic, is_python
from nbdist.notebook.free_names import names_filled_in
from nbdist.notebook.pool import Pools
from nbdist.world.name_table import WORKERS_MODULES, WORKERS_OWN
from nbdist.world.world import World

# --- which lines of a cell in auto mode run in the notebook, and which on the ranks -----------

RunTarget = Literal["here", "there", "both", "command"]
"""Where a line runs: in the notebook ("here"), on the ranks ("there"), or on both sides ("both").

"command" stands for a command of the system, for which `_place_of` chooses a side.
"""

REASONS: dict[RunTarget, dict[str, str]] = {
    "here": {
        "nbdist's own": "local distributed rank",
        "installs for all ranks at once": "pip conda mamba micromamba uv",
        "the notebook's folder and environment, which the ranks follow": "cd pushd popd dirs dhist"
        " bookmark env set_env",
        "reads or changes the notebook's page, history or log": "load loadpy edit ed history hist"
        " recall rep rerun macro save notebook pastebin page logon logoff logstart logstop"
        " logstate store",
        "sets how the notebook takes input": "colors automagic autocall autoawait doctest_mode gui",
        "shows the notebook's help": "magic lsmagic quickref pprint connect_info qtconsole",
        "looks at the rank that failed by itself": "debug pdb tb",
        "has one server or client for all": "tensorboard sql bigquery",
    },
    "both": {
        "loads magics, or settings of figures, that either side can need": "load_ext reload_ext"
        " unload_ext matplotlib pylab config",
        "changes how modules are loaded, or what is shown": "autoreload aimport xmode precision",
    },
    "command": {
        "a command of the system, as after `!`": "sx system cat cp mv rm mkdir rmdir ls ll lf lk"
        " ldir lx less more man"
    },
}
"""Line magics by the place where they run, and then by the reason for that place.

Any other line magic runs on the ranks, unless only the notebook has the magic (`SideRules`).  Lines
such as `%load_ext nbdist` and `%config NbDist.seconds = "all"` run only in the notebook.

A "command" usually runs once, in the notebook: if each rank ran the command, each would copy or
remove the same files.  But the command runs on the ranks if its output is assigned to a variable,
or if the name in `{path}` or `$path` is a variable of the ranks or occurs in the lines above.
"""

CELLS_HERE = {
    "nbdist's own": "local distributed rank",
    "shows the same from each rank": "html HTML javascript js latex markdown svg SVG",
    "writes one file": "writefile file",
    "runs another program, which knows no variables": "bash sh script perl ruby pypy python"
    " python2 python3 system sx cmd !",
    "has one client for all": "sql bigquery",
}
"""Cell magics that always run in the notebook, by the reason why."""

# A cell with one of these cell magics runs in the notebook if it has code below the magic, and all
# of that code runs only in the notebook.  Otherwise the cell runs on the ranks.
WRAPPING_MAGICS = ("time", "capture")
# The arguments with which `%config` runs only in the notebook: nbdist's own settings, or none.
OWN_SETTINGS = re.compile(r"\s*(NbDist\b|$)")

_TARGETS = {
    name: place
    for place, groups in REASONS.items()
    for names in groups.values()
    for name in names.split()
}
_CELL_MAGICS_HERE = {name for names in CELLS_HERE.values() for name in names.split()}
_COMMAND_LINE = re.compile(
    r"(?P<bound>[^\W\d][\w, ]*=\s*)?(?:%(?P<name>[^\W\d]\w*)|(?P<bang>!!?)(?![=!]))(?P<rest>.*)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class SideRules:
    """The functions by which `split_cell` decides where the lines of a cell run.

    `is_on_ranks` returns True for a name that belongs to the ranks: each worker has its own, a cell
    has bound it on a rank since the notebook bound it, or only ranks have it.  `is_notebook_magic`
    returns True for a magic, such as `%name` or `%%name`, that the notebook has and that ranks
    probably lack.
    """

    is_on_ranks: Callable[[str], bool] = lambda name: False
    is_notebook_magic: Callable[[str], bool] = lambda magic: False


@dataclass(frozen=True, slots=True)
class CellPart:
    """Lines of a cell that run on the ranks, or in the notebook if `is_here`.

    `first` is the number of the part's first line in the cell, counted from 0.
    """

    first: int
    text: str
    is_here: bool = False


def split_cell(code: str, side: SideRules) -> list[CellPart]:
    """Split a cell between top-level statements into parts for the notebook and for the ranks.

    A line that runs in the notebook and on the ranks, such as `%matplotlib`, is in two parts.  A
    cell that begins with a cell magic is a single part.
    """
    if (magic := cell_magic(code)) is not None or code.lstrip().startswith("%%!"):
        name = magic.name if magic else "!"
        is_here = name in _CELL_MAGICS_HERE or (
            name not in _TARGETS and side.is_notebook_magic(f"%%{name}")
        )
        if name in WRAPPING_MAGICS:
            below = split_cell(code.lstrip().partition("\n")[2], side)
            is_here = bool(below) and all(part.is_here for part in below)
        return [CellPart(0, code, is_here=is_here)]
    lines = code.splitlines(keepends=True)
    parts: list[CellPart] = []
    begun = 0
    kept = [*lines]  # the cell for the ranks: `#` replaces lines that only the notebook runs
    for first, end, place in _magics(lines, side):
        text = "".join(lines[first:end])
        if place == "here":
            parts += _rank_parts(kept, begun, first)
            kept[first:end], begun = ["#\n"] * (end - first), end
        parts.append(CellPart(first, text, is_here=True))
    return [*parts, *_rank_parts(kept, begun, len(kept))]


def join_parts(code: str, parts: list[CellPart], magic: str) -> str:
    """Return code for the notebook that runs its own parts, and sends the other parts to the ranks.

    `code` is the cell as typed, and `parts` are its parts from `split_cell`.  `magic` is the name
    and the options of the cell magic that sends a part to the ranks.

    Lines keep their numbers, so that tracebacks are right.  There is one exception: if the notebook
    runs all lines of a part for the ranks too, the call of the magic needs a line of its own, and
    the lines of the notebook below it get higher numbers.
    """
    if len(parts) == 1:
        return code if parts[0].is_here else f"%%{magic}\n{code}"
    name, _, options = magic.partition(" ")
    lines = [""] * len(code.splitlines())
    for part in parts:
        if part.is_here:
            for number, line in enumerate(part.text.splitlines(), part.first):
                lines[number] = line
            continue
        last = part.first + len(part.text.splitlines()) - 1
        text = "#\n" * part.first + part.text
        call = f"get_ipython().run_cell_magic({name!r}, {options!r}, {text!r})"
        # The call takes the first line of the part that the notebook does not run.  If the notebook
        # runs all lines of the part too, the call is added below the last of them.
        at = next((at for at in range(part.first, last + 1) if not lines[at]), last)
        lines[at] = f"{lines[at]}\n{call}" if lines[at] else call
    return "\n".join(lines)


def _rank_parts(lines: list[str], first: int, end: int) -> list[CellPart]:
    selected = lines[first:end]
    has_code = any(line.strip() and not line.lstrip().startswith("#") for line in selected)
    return [CellPart(first, "".join(selected))] if has_code else []


def _magics(lines: list[str], side: SideRules) -> Iterator[tuple[int, int, RunTarget]]:
    """Yield the lines and the target of each top-level magic or command that the notebook runs.

    Each yielded tuple has the index of the magic's first line, the index after its last line, and
    the target "here" or "both".
    """
    remaining, end = [*lines], 0
    while True:
        # Blank each magic before the next search, as Python cannot tokenize text such as `it's`.
        for first in (row for row in _statement_rows(remaining) if row >= end):
            if match := _COMMAND_LINE.match(remaining[first]):
                break
        else:
            return
        end = find_end_of_continued_line(remaining, first) + 1
        whole = "".join(remaining[first:end])
        remaining[first:end] = ["\n"] * (end - first)
        match = _COMMAND_LINE.match(whole)
        assert match is not None
        place = _place_of(match, "".join(lines[:first]), side)
        if place != "there":
            yield first, end, place


def _place_of(match: re.Match[str], above: str, side: SideRules) -> RunTarget:
    name, text, is_bound = match["name"], match["rest"], bool(match["bound"])
    if name is not None and name.startswith("dist_"):
        return "here"
    place = _TARGETS.get(name or "", "there")
    if match["bang"] or place == "command":
        uses = names_filled_in(text)
        fills_in = any(side.is_on_ranks(use) or re.search(rf"\b{use}\b", above) for use in uses)
        return "there" if is_bound or fills_in else "here"
    is_own = name == "config" and OWN_SETTINGS.match(text)
    if place == "both" and (is_own or text.strip() == "nbdist"):  # such as `%load_ext nbdist`
        return "here"
    return "here" if name not in _TARGETS and side.is_notebook_magic(f"%{name}") else place


def _statement_rows(lines: list[str]) -> Iterator[int]:
    """Yield the numbers, from 0, of the lines on which statements without indentation begin.

    Yields nothing if Python cannot tokenize the lines because of wrong indentation.
    """
    try:
        statements = make_tokens_by_line(lines)
    except SyntaxError:  # wrong indentation: reported when the cell is sent
        return
    for tokens in statements:
        for token in tokens:
            if token.string.strip() and not token.string.startswith("#"):
                if token.start[1] == 0:
                    yield token.start[0] - 1
                break


# --- wrapping the methods that run a cell ---------------------------------------------------------

TAG = "distributed"  # a cell with this tag runs on ranks without a magic; JupyterLab sends tags

_LOAD_EXT = re.compile(r"^%(?:re)?load_ext\s+([\w.]+)", re.MULTILINE)


class AutoCells:
    """Wraps the methods by which IPython's kernel or shell runs cells and stores them.

    If lines of a cell must run on the ranks, the wrappers replace the cell by code that sends these
    lines.  IPython's history stores the cell as the user has typed it.
    """

    def __init__(self, pools: Pools) -> None:
        self._shell: Any = pools.shell
        self._pools = pools
        self._mode = pools.auto

    def code_to_run(self, code: str, tags: Iterable[str] = ()) -> str:
        """Return the code that IPython runs in place of a typed cell.

        `tags` are the cell's tags in the notebook document.  The code is the cell itself if no part
        of the cell runs on the ranks, or if auto mode is off and the cell lacks the tag
        `distributed`.
        """
        mode = self._mode
        pool = DEFAULT_POOL if mode.pool is None and TAG in tags else mode.pool
        if pool is None:
            return code
        parts = split_for_pool(self._pools, pool, code)
        if all(part.is_here for part in parts):
            return code
        if len(parts) == 1 or not is_python(self._shell, code):
            parts = [
                CellPart(0, code)
            ]  # the whole cell, so that a syntax error names the typed line
        for part in parts:
            mode.loaded |= {name.partition(".")[0] for name in _LOAD_EXT.findall(part.text)}
        other = "" if pool == DEFAULT_POOL else f" --pool {pool}"
        return join_parts(code, parts, f"distributed --auto{other}")

    def do_execute(
        self,
        original: Callable[..., Any],
        code: str,
        silent: bool,  # noqa: FBT001 (as ipykernel calls it)
        store_history: bool = True,  # noqa: FBT001, FBT002
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replace the cell by `code_to_run`, then call the kernel's own `do_execute` (`original`).

        A cell that IPython's history does not store, such as a silent request, is not replaced.
        """
        if store_history and not silent:
            metadata = self._shell.get_parent().get("metadata", {})
            tags = metadata.get("tags") if isinstance(metadata, dict) else None
            code = self._record_code(code, tags if isinstance(tags, list) else ())
        return original(code, silent, store_history, *args, **kwargs)

    def run_cell(
        self,
        original: Callable[..., Any],
        raw_cell: str,
        store_history: bool = False,  # noqa: FBT001, FBT002 (as IPython has it)
        silent: bool = False,  # noqa: FBT001, FBT002
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replace the cell by `code_to_run`, then call the `run_cell` of a terminal (`original`).

        A cell that IPython's history does not store is not replaced.
        """
        if store_history and not silent:
            raw_cell = self._record_code(raw_cell)
        return original(raw_cell, store_history, silent, *args, **kwargs)

    def store_inputs(
        self,
        original: Callable[..., Any],
        line_num: int,
        source: str,
        source_raw: str | None = None,
    ) -> Any:
        """Let IPython's `store_inputs` (`original`) store the cell as it was typed.

        Otherwise `original` would store the code that ran in place of the cell.
        """
        mode = self._mode
        if source_raw is None or not mode.running or source_raw.rstrip() != mode.running.rstrip():
            return original(line_num, source, source_raw)
        mode.ran[len(self._shell.history_manager.input_hist_parsed)] = source
        with suppress(SyntaxError):
            source = self._shell.transform_cell(mode.typed)
        return original(line_num, source, mode.typed)

    def _record_code(self, code: str, tags: Iterable[str] = ()) -> str:
        """Return the code that runs in place of a cell, and remember both for `store_inputs`."""
        self._mode.typed, replaced = code, self.code_to_run(code, tags)
        self._mode.running = replaced if replaced != code else ""
        return replaced


def runs_on_ranks(pools: Pools, code: str) -> bool:
    """Return True if auto mode is on and would run a part of this cell on the ranks."""
    pool = pools.auto.pool
    return pool is not None and not all(part.is_here for part in split_for_pool(pools, pool, code))


def split_for_pool(pools: Pools, name: str, code: str) -> list[CellPart]:
    """Split a cell into parts for the notebook and parts for the ranks of the pool `name`."""
    world, shell = pools.world_of(name), pools.shell
    is_notebook_magic = partial(_is_notebook_magic, shell, frozenset(pools.auto.loaded))
    side = SideRules(partial(_is_on_ranks, world, shell.user_ns), is_notebook_magic)
    return split_cell(as_magic(shell, code, world), side)


def _is_on_ranks(world: World | None, user_ns: dict[str, Any], name: str) -> bool:
    if world is None:
        return False
    names = world.engine.names
    if name in WORKERS_OWN or names.ranks_that_own(name):
        return True
    return name not in user_ns and (name in WORKERS_MODULES or bool(names.ranks_with(name)))


def _is_notebook_magic(shell: Any, loaded: frozenset[str], magic: str) -> bool:
    """Return True for a magic that the notebook has and that ranks probably lack.

    Ranks have the magics of IPython, and those of packages that cells have loaded there.
    """
    find = shell.find_cell_magic if magic.startswith("%%") else shell.find_line_magic
    function = find(magic.lstrip("%"))
    if function is None:
        return False
    package = str(getattr(function, "__module__", "") or "").partition(".")[0]
    return package not in {"IPython", "ipykernel", *loaded}
