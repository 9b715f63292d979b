"""Loads nbdist into an IPython shell, and removes nbdist from the shell again.

Runs in the notebook's process; `%load_ext nbdist` leads to `load`, `%unload_ext` to `unload`.
"""

from __future__ import annotations

import ast
import atexit
import os
import sys
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from IPython.core.error import UsageError as IPythonUsageError

import nbdist
from nbdist.config import DEFAULT_POOL
from nbdist.errors import NbdistError, UsageError, WrongVersion
from nbdist.notebook.cell_text import NBDIST_CELL_MAGICS, refuse_magic, transform_first_lines
from nbdist.notebook.free_names import names_filled_in
from nbdist.notebook.options import NbDist, hint_on_magic
from nbdist.plugins import requirements
from nbdist.words import name_ranks
from nbdist.world.agent_link import Link
from nbdist.world.name_table import WORKERS_MODULES, WORKERS_OWN

if TYPE_CHECKING:
    from types import CodeType

    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

    from nbdist.notebook.command import Command
    from nbdist.notebook.pool import Pool, Pools


_loaded: WeakKeyDictionary[InteractiveShell, tuple[Pools, ExitStack]] = WeakKeyDictionary()
"""The pools of each shell, and a stack of callbacks that remove nbdist from the shell."""


def load(shell: InteractiveShell) -> None:
    """Register nbdist's magics, settings and event handlers in a shell.

    With the setting `prestart`, an agent is started too, whose fork server imports torch.  Raises
    WrongVersion if an installed library has a version that nbdist does not support.
    """
    check_libraries()
    settings = NbDist(parent=shell)
    link = Link() if settings.prestart else None
    if link is not None:
        link.open()  # starts an agent, whose fork server imports torch in the background
    # The rest of the extension is imported while the agent starts.
    from nbdist.notebook.command import find_commands
    from nbdist.notebook.pool import Pools

    pools, stack = Pools(shell, settings), ExitStack()
    pools.default.prestarted = link
    commands = [*find_commands()]
    shell.configurables.append(settings)  # type: ignore[arg-type]
    stack.callback(shell.configurables.remove, settings)  # type: ignore[arg-type]
    register(shell, pools, commands, stack)
    for event, follow in (
        ("pre_run_cell", pools.show_news),
        ("post_run_cell", pools.notice_names),
        ("post_run_cell", lambda _: pools.pages.end_cell()),
    ):
        shell.events.register(event, follow)
        stack.callback(shell.events.unregister, event, follow)
    atexit.register(pools.close)
    stack.callback(atexit.unregister, pools.close)
    stack.callback(pools.close)
    wrap_methods(shell, pools, commands, stack)
    read_rest_of_cell(shell)
    _loaded[shell] = pools, stack


def pools_of(shell: InteractiveShell) -> Pools | None:
    """Return the pools of a shell, or None if the shell has not loaded the extension."""
    return _loaded[shell][0] if shell in _loaded else None


def unload(shell: InteractiveShell) -> None:
    """Remove nbdist from the shell; end the workers, or detach those with `--detach`."""
    _, stack = _loaded.pop(shell)
    stack.close()


def register(
    shell: InteractiveShell, pools: Pools, commands: Sequence[Command], stack: ExitStack
) -> None:
    """Register the magics of `commands`; closing `stack` removes them again.

    Also registers `refuse_magic`, for cell magics below other code.
    """
    magics: list[tuple[Callable[..., Any], str, str]] = [
        (each.magic(pools), each.kind, each.name) for each in commands
    ]
    magics += [
        (partial(refuse_magic, shell, f"%{name}"), "line", f"%{name}")
        for name in NBDIST_CELL_MAGICS
    ]
    magics += [(each.line_magic(pools), "line", each.name) for each in commands if each.in_a_line]
    manager: Any = shell.magics_manager
    user_magics: Any = vars(manager.user_magics)
    for magic, kind, name in magics:
        manager.register_function(magic, kind, name)
        stack.callback(manager.magics[kind].pop, name, None)
        stack.callback(user_magics.pop, name, None)


def wrap_methods(
    shell: InteractiveShell, pools: Pools, commands: Sequence[Command], stack: ExitStack
) -> None:
    """Wrap methods of the shell, and of its kernel if it has one; closing `stack` restores them.

    The wrappers complete and inspect names of workers, run auto mode, and add hints to errors.
    """
    from nbdist.notebook.auto_mode import AutoCells
    from nbdist.notebook.commands.run import debug_ranks
    from nbdist.notebook.completion import Completion
    from nbdist.notebook.debugger import CellDebugger, world_links

    completion, auto = Completion(pools, commands), AutoCells(pools)
    border = Border(pools, commands)
    kernel: Any = getattr(shell, "kernel", None)
    wrappers: list[tuple[object, str, Any]] = [
        (shell, "showtraceback", border.show_traceback),
        (shell, "debugger", partial(debug_ranks, pools)),
        (shell, "var_expand", border.expand),
        (shell.history_manager, "store_inputs", auto.store_inputs),
        (shell.extension_manager, "reload_extension", partial(keep_loaded, pools)),
    ]
    if kernel is not None:
        wrappers += [
            (kernel, "do_complete", completion.complete),
            (kernel, "do_inspect", completion.inspect),
            (kernel, "do_execute", auto.do_execute),
            (kernel, "do_shutdown", pools.do_shutdown),
        ]
    else:
        wrappers += [
            (shell, "run_cell", auto.run_cell),
            (shell.Completer, "completions", completion.completions),
        ]
    if getattr(kernel, "debugger", None) is not None:
        debugger = pools.debugger = CellDebugger(kernel, partial(world_links, pools))
        stack.callback(debugger.open())
        wrappers.append((kernel, "do_debug_request", debugger.answer))
    stack.callback(pools.pages.listen(kernel))
    # Insert the transformer before IPython's own transformers, which change line numbers when they
    # remove leading blank lines.
    transform = partial(transform_first_lines, local_is_plain=kernel is not None)
    shell.input_transformers_cleanup.insert(0, transform)
    stack.callback(shell.input_transformers_cleanup.remove, transform)
    for each in wrappers:
        if hasattr(each[0], each[1]):  # some kernels lack some of these methods
            stack.callback(wrap(*each))


def keep_loaded(pools: Pools, original: Callable[[str], object], module_str: str) -> object:
    """Keep nbdist loaded at `%reload_ext nbdist` if it has workers, which unloading would end.

    Wraps `reload_extension` of IPython, and calls it (`original`) in all other cases.
    """
    if module_str != nbdist.__name__ or not any(pool.has_workers for pool in pools):
        return original(module_str)
    sys.stdout.write("nbdist stays loaded, with its workers: `%unload_ext nbdist` ends them\n")
    return None


# --- wrapping methods of the shell and of its kernel, and restoring them ----------------------


def wrap(holder: object, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Wrap a method of an object, and return a function that restores the method.

    `around` is called with the original method and its arguments.  If other code has wrapped the
    method since, the returned function cannot remove the wrapper.  It then lets the wrapper only
    call the original method.
    """
    was_on_instance, original, is_on = name in vars(holder), getattr(holder, name), True

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if is_on else original(*args, **kwargs)

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if vars(holder).get(name) is method:
            setattr(holder, name, original) if was_on_instance else delattr(holder, name)

    setattr(holder, name, method)
    return undo


# --- refusing to load if a library has a version that nbdist does not support -------------------


@cache
def check_libraries() -> None:
    """Raise WrongVersion if an installed library has a version that pyproject.toml excludes.

    Libraries that are not installed here are ignored: workers may run in another Python.
    """
    for each in requirements():
        if each.installed and not each.is_within:
            raise WrongVersion(each.name, each.installed, each.version_range)


# --- the lines below `%load_ext nbdist` in the same cell --------------------------------------


def read_rest_of_cell(shell: Any) -> None:
    """Let nbdist transform the rest of the cell that has just loaded nbdist.

    IPython transformed that cell when nbdist was not loaded yet, so a `%%distributed` below
    `%load_ext nbdist` was not found.  IPython now runs the cell statement by statement, each by a
    call of `run_code`.  If `transform_first_lines` changes the cell, a wrapper of `run_code`
    transforms and runs the whole cell in place of the next statement, and skips the statements
    after that.
    """
    is_running = has_run = False

    async def run_code(
        original: Callable[..., Any],
        code: CodeType,
        result: ExecutionResult | None = None,
        **options: Any,
    ) -> Any:
        nonlocal is_running, has_run
        cell = str(getattr(getattr(result, "info", None), "raw_cell", None) or "")
        lines = cell.splitlines(keepends=True)
        if has_run and not is_running:
            return False  # this statement is part of the cell that has run already
        if is_running or transform_first_lines(lines) == lines:
            return await original(code, result, **options)
        is_running = has_run = True
        try:
            nodes, run = ast.parse(shell.transform_cell(cell)).body, shell.run_ast_nodes
            return await run(nodes, code.co_filename, compiler=shell.compile, result=result)
        finally:
            is_running = False

    def end(*_: object) -> None:
        # The rest of this cell may run other cells: ignore the events of those cells.
        if not is_running:
            undo()
            for event in EVENTS:
                shell.events.unregister(event, end)

    undo = wrap(shell, "run_code", run_code)
    for event in EVENTS:
        shell.events.register(event, end)


EVENTS = ("pre_run_cell", "post_run_cell")


# --- hints if a plain cell uses a name of the workers, or a magic is misspelt ---------------------

PACKAGE_PREFIX = os.path.dirname(nbdist.__file__) + os.sep
OF_OURS = (NbdistError, KeyboardInterrupt, CancelledError)  # shown without frames of nbdist


class Border:
    """Adds hints to errors before IPython shows them.

    The hints say which ranks have a name that the notebook lacks, and which magic a misspelt name
    may mean.
    """

    def __init__(self, pools: Pools, commands: Iterable[Command]) -> None:
        self._pools = pools
        self._names = [each.shown_name for each in commands]

    def show_traceback(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add a hint to an error if there is one, then let `original` show the error.

        The traceback of an error of nbdist, or of Stop, is cut before.  Called in place of
        `InteractiveShell.showtraceback`, which is `original`.
        """
        given = args[0] if args else kwargs.get("exc_tuple")
        error = given[1] if given else sys.exc_info()[1]
        _cut_traceback(error)
        if isinstance(error, NbdistError):
            kwargs.pop("exc_tuple", None)
            # IPython would show the whole traceback of a SyntaxError, or of an error whose
            # context is an exception group.
            kind, error.__context__ = type(error), None
            if isinstance(error, SyntaxError):
                kind = type(kind.__name__, (NbdistError,), {})
            return original((kind, error, error.__traceback__), *args[1:], **kwargs)
        if type(error) is NameError and error.name and (hint := self.hint(error.name)):
            error.args = (hint,)
        elif type(error) is IPythonUsageError and (hint := hint_on_magic(str(error), self._names)):
            error.args = (f"{error} {hint}",)
        return original(*args, **kwargs)

    def expand(self, original: Callable[..., str], cmd: str, depth: int = 0, **how: Any) -> str:
        """Return `cmd` with values for its `{x}` and `$x`, as the shell's `var_expand` does.

        `original` is that method.  Raises UsageError if a name has no value here but on ranks.
        """
        # IPython reads names in the frame at `depth`; the wrapper adds two frames.
        expanded = original(cmd, depth + 2, **how)
        unfilled = names_filled_in(expanded)
        for name in names_filled_in(cmd):
            if name in unfilled and (hint := self.hint(name)):
                hint_end = f"; `$${name}` is the shell's own" if f"${name}" in cmd else ""
                raise UsageError(f"{hint}{hint_end}. Nothing has run.")
        return expanded

    def hint(self, name: str) -> str:
        """Return a hint on a name that the notebook lacks and workers of a pool have.

        Returns "" if the notebook has the name, or no worker does.
        """
        hints = (hint_of(pool, name) for pool in self._pools if pool.has_workers)
        return next(filter(None, hints), "")


def _cut_traceback(error: BaseException | None) -> None:
    """Cut the traceback of an error of nbdist, or of Stop, above the first frame of nbdist.

    So the frames of nbdist, and all that they called, are not shown.  Other errors keep their
    tracebacks.  The traceback of the error's cause, or of its context if it has no cause, is cut in
    the same way, and so on.
    """
    seen_ids: set[int] = set()
    while error is not None and id(error) not in seen_ids:
        seen_ids.add(id(error))
        tb = error.__traceback__ if isinstance(error, OF_OURS) else None
        while tb is not None:
            if tb.tb_next and tb.tb_next.tb_frame.f_code.co_filename.startswith(PACKAGE_PREFIX):
                tb.tb_next = None
            tb = tb.tb_next
        error = error.__cause__ or error.__context__


def hint_of(pool: Pool, name: str) -> str:
    """Return which ranks of the pool have a name that the notebook lacks, with a remedy.

    Returns "" if the notebook has the name, or no rank does.
    """
    world = pool.world
    if world is None or name in pool.shell.user_ns:
        return ""
    of_pool = "" if pool.name == DEFAULT_POOL else f" --pool {pool.name}"
    begin = f"begin the cell with %%distributed{of_pool}"
    ranks = world.engine.names.ranks_with(name)
    if ranks:
        text = f"`{name}` is on {name_ranks(ranks)}: {begin}"
        if world.engine.names.import_path(name):
            return f"{text}, or import it here too"
        return f"{text}, or `%dist_gather{of_pool} {name}`"
    if name in WORKERS_MODULES:
        of = WORKERS_MODULES[name]
        here = f"import {of}" if of == name else f"import {of} as {name}"
        return f"the workers have `{name}`: {begin}, or `{here}` here"
    return f"`{name}` is each worker's own: {begin}" if name in WORKERS_OWN else ""
