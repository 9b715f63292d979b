"""Loads nbdist into an IPython shell, and takes all of it out again."""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from nbdist.notebook.requirements import check_libraries
from nbdist.notebook.settings import NbDist
from nbdist.world.link import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.notebook.command import Command
    from nbdist.notebook.pools import Pools

_loaded: WeakKeyDictionary[InteractiveShell, tuple[Pools, list[tuple[str, str]], ExitStack]]
_loaded = WeakKeyDictionary()


def load(shell: InteractiveShell) -> None:
    """Register the magics and the settings, and have torch imported in the background.

    Raises UsageError, and does nothing then.
    """
    check_libraries()
    settings = NbDist(parent=shell)
    link = prestart() if settings.prestart else None
    # The rest of the extension is imported while the agent starts.
    from nbdist.notebook.command import find_commands
    from nbdist.notebook.pools import Pools
    from nbdist.notebook.rest_of_cell import RestOfCell

    pools = Pools(shell, settings)
    pools.default.take_over(link)
    commands = [*find_commands()]
    shell.configurables.append(settings)  # type: ignore[arg-type]
    registered = [*register(shell, pools, commands)]
    shell.events.register("post_run_cell", pools.notice_names)
    atexit.register(pools.close)
    stack = help_at_border(shell, pools, commands)
    RestOfCell(shell)
    _loaded[shell] = pools, registered, stack


def register(
    shell: InteractiveShell, pools: Pools, commands: Sequence[Command]
) -> Iterator[tuple[str, str]]:
    """Register the magics, and what refuses cell magics in the middle of a cell.

    Yields kind and name of each.
    """
    from nbdist.notebook.border.first_line import MAGICS
    from nbdist.notebook.cell_source import refuse_place

    wanted: list[tuple[Callable[..., Any], str, str]] = [
        (each.magic(pools), each.kind, each.name) for each in commands
    ]
    wanted += [(partial(refuse_place, shell, f"%{name}"), "line", f"%{name}") for name in MAGICS]
    wanted += [(each.line_magic(pools), "line", each.name) for each in commands if each.in_a_line]
    for magic, kind, name in wanted:
        # The manager's own method: the shell's has the manager's signature for mypy.
        shell.magics_manager.register_function(magic, kind, name)
        yield kind, name


def help_at_border(shell: InteractiveShell, pools: Pools, commands: Sequence[Command]) -> ExitStack:
    """Wrap the methods of the shell and its kernel that help whoever types; closed, they are out.

    A terminal's shell has no kernel.
    """
    from nbdist.notebook.auto_cells import AutoCells
    from nbdist.notebook.border.completion import Completion
    from nbdist.notebook.border.first_line import transform_first_lines
    from nbdist.notebook.border.name_errors import Border
    from nbdist.notebook.border.while_busy import WhileBusy
    from nbdist.notebook.commands.debug import RanksDebugger
    from nbdist.notebook.wrapping import Wrapped

    completion, auto = Completion(pools, commands), AutoCells(pools)
    border = Border(pools, commands)
    kernel: Any = getattr(shell, "kernel", None)
    wanted: list[tuple[object, str, Any]] = [
        (shell, "showtraceback", border.show_traceback),
        (shell, "debugger", RanksDebugger(pools).debug),
        (shell, "user_expressions", auto.user_expressions),
        (shell, "var_expand", border.expand),
        (shell.history_manager, "store_inputs", auto.store_inputs),
    ]
    if kernel is not None:
        wanted += [
            (kernel, "do_complete", completion.complete),
            (kernel, "do_inspect", completion.inspect),
            (kernel, "do_execute", auto.do_execute),
            (kernel, "do_shutdown", partial(_shut_down, pools)),
        ]
    else:
        wanted += [
            (shell, "run_cell", auto.run_cell),
            (shell.Completer, "completions", completion.completions),
        ]
    # Not every kernel is an ipykernel.
    wrapped = [Wrapped(*each) for each in wanted if hasattr(each[0], each[1])]
    stack = ExitStack()
    while_busy = WhileBusy(shell, completion)
    if while_busy.is_possible:
        while_busy.begin()
        stack.callback(while_busy.end)
    # Before IPython takes leading blank lines away, and with them the numbers of all others.
    transform = partial(transform_first_lines, local_is_plain=kernel is not None)
    shell.input_transformers_cleanup.insert(0, transform)
    stack.callback(shell.input_transformers_cleanup.remove, transform)
    for each in wrapped:
        stack.callback(each.undo)
    return stack


def _shut_down(pools: Pools, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have no cell be stopped that is to go on; called in the kernel's control thread."""
    pools.leave()
    return original(*args, **kwargs)


def prestart() -> Link:
    """Start an agent, which has its fork server import torch meanwhile."""
    link = Link()
    link.open()
    return link


def unload(shell: InteractiveShell) -> None:
    """End the workers and leave the shell as it was."""
    pools, registered, help_given = _loaded.pop(shell)
    help_given.close()
    pools.close()
    atexit.unregister(pools.close)
    shell.events.unregister("post_run_cell", pools.notice_names)
    shell.configurables.remove(pools.settings)  # type: ignore[arg-type]
    for kind, name in registered:
        shell.magics_manager.magics[kind].pop(name, None)
        vars(shell.magics_manager.user_magics).pop(name, None)
