"""Auto mode's cells: sent to the workers, as is one with the tag `distributed`.

Around the kernel's `do_execute`, which sees what is silent, what is stored, and the cell's tags;
in a terminal around the shell's `run_cell`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.macro import Macro

from nbdist.config import DEFAULT_POOL
from nbdist.errors import NbdistError
from nbdist.notebook.auto_mode import Part, Side, in_one, parts_of
from nbdist.notebook.cell_text import as_magic, is_python
from nbdist.notebook.cells import bring
from nbdist.wire.work import Call
from nbdist.world.names import WORKERS_MODULES, WORKERS_OWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from nbdist.notebook.pool import Pool, Pools
    from nbdist.world.world import World

TAG = "distributed"
"""Of a cell, in place of the magic: JupyterLab sends a cell's tags along."""

LISTS_VARIABLES = re.compile(r"\b_VSCODE_|%who_ls\b")
"""Of code that a front end runs beside cells to show variables: VS Code does."""

_LOADS = re.compile(r"^%(?:re)?load_ext\s+([\w.]+)", re.MULTILINE)


class AutoCells:
    """Wraps the methods that run the cells of a person."""

    def __init__(self, pools: Pools) -> None:
        self._shell: Any = pools.shell
        self._pools = pools
        self._mode = pools.auto

    def __repr__(self) -> str:
        return f"<AutoCells {self._mode}>"

    def sent(self, code: str, tags: Iterable[str] = ()) -> str:
        """Return the cell that IPython is to run in place of a typed one."""
        mode = self._mode
        pool = DEFAULT_POOL if mode.pool is None and TAG in tags else mode.pool
        if pool is None:
            return code
        if isinstance(macro := self._shell.user_ns.get(code.strip()), Macro):
            code = macro.value
        parts = parts_for(self._pools, pool, code)
        if all(part.is_here for part in parts):
            return code
        if len(parts) == 1 or not is_python(self._shell, code):
            parts = [Part(0, code)]  # a syntax error names the typed line, and nothing runs
        for part in parts:
            mode.loaded |= {name.partition(".")[0] for name in _LOADS.findall(part.text)}
        other = "" if pool == DEFAULT_POOL else f" --pool {pool}"
        return in_one(code, parts, f"distributed --auto{other}")

    def do_execute(
        self,
        original: Callable[..., Any],
        code: str,
        silent: bool,  # noqa: FBT001 (as ipykernel calls it)
        store_history: bool = True,  # noqa: FBT001, FBT002
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Stand around the kernel's method of this name."""
        if store_history and not silent:
            code = self._given(code, self._tags())
        elif LISTS_VARIABLES.search(code) and (said := self._said_by_a_rank(code)) is not None:
            code = f"print({said!r}, end='')"
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
        """Stand around a terminal's method of this name."""
        if store_history and not silent:
            raw_cell = self._given(raw_cell)
        return original(raw_cell, store_history, silent, *args, **kwargs)

    def store_inputs(
        self,
        original: Callable[..., Any],
        line_num: int,
        source: str,
        source_raw: str | None = None,
    ) -> Any:
        """Stand around the history's method of this name: it has what was typed."""
        mode = self._mode
        if source_raw is None or not mode.running or source_raw.rstrip() != mode.running.rstrip():
            return original(line_num, source, source_raw)
        mode.ran[len(self._shell.history_manager.input_hist_parsed)] = source
        with suppress(SyntaxError):
            source = self._shell.transform_cell(mode.typed)
        return original(line_num, source, mode.typed)

    def _said_by_a_rank(self, code: str) -> str | None:
        """Have the first rank run what lists variables; None where it cannot."""
        pool, world = self._idle()
        if pool is None or world is None:
            return None
        with suppress(NbdistError):
            task = world.task(Call("call.answer", {"source": code}), ranks=(0,))
            return str(bring(pool, world, task)[0])
        return None

    def _idle(self) -> tuple[Pool | None, World | None]:
        """Give the pool of auto mode, and its world if that can be asked at once."""
        pool = self._pools.known(self._mode.pool) if self._mode.is_on else None
        world = pool.world if pool and pool.has_workers else None
        return pool, world if world is None or world.session.is_idle else None

    def user_expressions(
        self, original: Callable[..., dict[str, Any]], expressions: dict[str, str]
    ) -> dict[str, Any]:
        """Stand around the shell's method of this name: what only the ranks know, they say."""
        found = original(expressions)
        pool, world = self._idle()
        if pool is None or world is None:
            return found
        for key, told in found.items():
            if told.get("ename") == "NameError":
                task = world.task(fetch=(f"repr({expressions[key]})",))
                with suppress(NbdistError):  # the ranks do not know it either
                    plain = _plain(bring(pool, world, task))
                    found[key] = {"status": "ok", "data": {"text/plain": plain}, "metadata": {}}
        return found

    def _given(self, code: str, tags: Iterable[str] = ()) -> str:
        """Do as `sent`, and note what becomes of which cell."""
        self._mode.typed, sent = code, self.sent(code, tags)
        self._mode.running = sent if sent != code else ""
        return sent

    def _tags(self) -> tuple[str, ...]:
        """Read the tags of the cell that the front end wants run."""
        metadata = self._shell.get_parent().get("metadata", {})
        tags = metadata.get("tags") if isinstance(metadata, dict) else None
        return tuple(tags) if isinstance(tags, list) else ()


def _plain(texts: Mapping[int, str]) -> str:
    """Write what ranks say: a line where it is the same of all, else one for each."""
    if len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    return "\n".join(f"rank {rank}: {text}" for rank, text in texts.items())


def runs_there(pools: Pools, code: str) -> bool:
    """Say whether any of a cell runs on the ranks while auto mode is on."""
    pool = pools.auto.pool
    if pool is None:
        return False
    return not all(part.is_here for part in parts_for(pools, pool, code))


def parts_for(pools: Pools, name: str, code: str) -> list[Part]:
    """Split a cell by what the notebook knows of the pool's variables, and of its own magics."""
    pool, shell = pools.known(name), pools.shell
    world = pool.world if pool and pool.has_workers else None
    is_ours = partial(_is_ours, shell, frozenset(pools.auto.loaded))
    side = Side(partial(_is_theirs, world, shell.user_ns), is_ours)
    return parts_of(as_magic(shell, code, world), side)


def _is_theirs(world: World | None, ours: dict[str, Any], name: str) -> bool:
    """Say whether a cell on the ranks would find a value of theirs under the name."""
    if world is None:
        return False
    names = world.session.names
    if name in WORKERS_OWN or names.ranks_that_own(name):
        return True
    return name not in ours and (name in WORKERS_MODULES or bool(names.ranks_with(name)))


def _is_ours(shell: Any, loaded: frozenset[str], magic: str) -> bool:
    """Say whether the notebook has a magic that is not IPython's, and the ranks have not."""
    find = shell.find_cell_magic if magic.startswith("%%") else shell.find_line_magic
    found = find(magic.lstrip("%"))
    if found is None:
        return False
    package = str(getattr(found, "__module__", "") or "").partition(".")[0]
    return package not in {"IPython", "ipykernel", *loaded}
