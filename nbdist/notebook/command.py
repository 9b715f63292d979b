"""Makes magics from functions with the decorator `@command`.

Runs in the notebook's process.  Every function with `@command` in a file of
`nbdist.notebook.commands` becomes a magic, which calls the function with a `MagicCall`.
"""

from __future__ import annotations

import argparse
import dis
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, wraps
from importlib import import_module
from importlib.metadata import EntryPoint
from inspect import cleandoc
from typing import Any, Literal

from IPython.core.magic import no_var_expand
from IPython.core.magic_arguments import magic_arguments

from nbdist import plugins
from nbdist.errors import Interrupted, NbdistError, UsageError, WorkerError, WorldNotStarted
from nbdist.notebook import commands
from nbdist.notebook.cell_text import remove_comment
from nbdist.notebook.cells import fetch_results
from nbdist.notebook.display import CellDisplay, CommandOutput, has_panels
from nbdist.notebook.idle import command_stops, delay_stops, is_in_subshell
from nbdist.notebook.options import (
    HELP_FLAGS,
    HELP_MAGIC,
    Magic,
    flags_of,
    old_flags,
    parse,
    pool_option,
    size_option,
    split_code,
    words_of,
    world_options,
)
from nbdist.notebook.output_count import OUTPUTS
from nbdist.notebook.pool import Pool, Pools
from nbdist.topology import parse_ranks
from nbdist.wire.messages import RequestBody
from nbdist.wire.work import OpCall
from nbdist.words import in_pool, name_ranks, one_line
from nbdist.world import inbox
from nbdist.world.outcome_texts import healing_text
from nbdist.world.result import raised
from nbdist.world.states import WorldState
from nbdist.world.world import World

MORE_OPTIONS = (
    "\n\nWhere it starts workers it also takes the options that `%dist_init?` shows, such as"
    "\n`--backend`, `--gpus` and `--hosts`."
)

Split = Callable[[Magic, str], tuple[str, list[str]]]
"""Divides a magic's line into the text that argparse reads, and further words for the magic.

For example, the words after `%dist_run -n 4` are a script and its arguments.
"""


class MagicCall:
    """A call of a magic, with the typed text, the parsed options, and the pool, world and display.

    The attribute `pool` is the pool that `--pool` names, or the default pool.  The attribute
    `pools` is a list: only the named pool, or all pools if none is named.  `words` are the words of
    the line that argparse does not read.
    """

    def __init__(self, command: Command, pools: Pools, text: str, cell: str = "") -> None:
        self.command = command
        self.auto = pools.auto
        self.text = f"{command.shown_name} {text}"
        self.cell = cell
        option_text, self.words = command.split(command.run, text)
        self.options: argparse.Namespace = parse(command.run, command.shown_name, option_text)
        for warning in old_flags(option_text, flags_of(command.run)):
            sys.stdout.write(f"{warning}\n")
        self.pool = pools.find_or_make(self.options.pool)
        self.pools = [self.pool] if self.options.pool else [*pools]
        self.pool_of = pools.find_or_make

    @property
    def world(self) -> World:
        """The pool's world; first waits for jobs on the ranks of `-r`, by default on all.

        Raises WorldNotStarted, with the magic's name, if no workers were started or they were shut
        down.  If the agent was lost, returns the world without workers.
        """
        if self.pool.jobs.running:
            selects = getattr(self.options, "ranks", None) is not None
            self.pool.jobs.wait(self.display, self.ranks if selects else None)
        return self.busy_world

    @property
    def busy_world(self) -> World:
        """The pool's world, without waiting for jobs; raises WorldNotStarted as `world` does."""
        if self.pool.world is None or self.pool.world.state is WorldState.STOPPED:
            raise WorldNotStarted(f"`{self.command.shown_name}`")
        return self.pool.world

    def query_agent(self, pool: Pool, request: RequestBody) -> Any:
        """Return the agent's answer to a request, also while a cell runs.

        Returns () if there are no workers, or if no answer comes.
        """
        if pool.world is None:
            return ()
        engine = pool.world.engine
        # In a subshell another thread may run a cell, and only that thread receives messages.
        is_beside = is_in_subshell(pool.shell)
        return engine.ask_from_thread(request) if is_beside else inbox.ask(engine, request)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the option `-r`; all ranks by default."""
        return self.ranks_of(self.options.ranks)

    def ranks_of(self, text: str | None) -> tuple[int, ...]:
        """Return the ranks that a text such as `0,2-3` selects; None selects all ranks.

        Ranks whose workers have died can be selected too.  Raises BadRanks if the text is not
        valid or names a rank that does not exist, and WorldNotStarted if the pool has no world.
        """
        return parse_ranks("all" if text is None else text, (self.pool.world or self.world).size)

    def call(self, op: str, **arguments: Any) -> dict[int, Any]:
        """Call an op, such as "memory", on the magic's `ranks`, and return its results by rank."""
        task = self.world.task(OpCall(op, arguments), ranks=self.ranks)
        return fetch_results(self.pool, self.world, task)

    @cached_property
    def display(self) -> CellDisplay:
        """The display of this magic's output, made at the first use."""
        return self.pool.display(is_quiet=getattr(self.options, "quiet", False))

    def end_display(self) -> None:
        """Close this magic's display if it was used (see `PanelDisplay.close`)."""
        if "display" in vars(self):
            with delay_stops():
                self.display.close()


@dataclass(frozen=True)
class MagicResult:
    """A value that a magic returns if the cell uses the value, as in `x = %dist_gather loss`.

    If the cell does not use the value, it is dropped, so that IPython does not show it.
    """

    value: Any


Returned = CommandOutput | MagicResult | str | None
"""The result of a magic's function: an output or text to show, a value for the cell, or None."""


@dataclass(frozen=True, repr=False)
class Command:
    """A magic of nbdist; the function `run` is called with a `MagicCall`.

    `looks` are the options with which the magic changes nothing, such as "log".  With these options
    the magic may run in a subshell while a cell runs.  The entry "" means that the magic never
    changes anything.  `split` divides the magic's line.  `in_a_line` is True for a cell magic that
    is also a line magic.  `short_for` is the longer call that this magic abbreviates, or "".
    """

    run: Callable[[MagicCall], Returned]
    kind: Literal["line", "cell"]
    split: Split
    summary: str = ""
    looks: tuple[str, ...] = ()
    in_a_line: bool = False
    short_for: str = ""

    @property
    def name(self) -> str:
        """The name without `%`, under which IPython has the magic."""
        return self.run.__name__

    @property
    def shown_name(self) -> str:
        """The name as users type it: `%dist_init`, `%%distributed`."""
        return f"{'%%' if self.kind == 'cell' else '%'}{self.name}"

    @property
    def help_text(self) -> str:
        """The docstring of `run` without marks of reStructuredText: purpose, usage, options."""
        return (self.run.__doc__ or "").replace("\n\n::\n\n", "\n\nusage:\n\n", 1).rstrip()

    def asks_for_help(self, text: str) -> bool:
        """Return True if the magic's line has the option `-h` or `--help`.

        After the name of a script, these are options of the script and do not count.
        """
        if text.split(maxsplit=1)[:1] in ([flag] for flag in HELP_FLAGS):
            return True
        try:
            option_text, _ = self.split(self.run, text)
            words = words_of(self.run, option_text)
            return any(is_option and word in HELP_FLAGS for word, is_option, _ in words)
        except (UsageError, ValueError):  # the line is wrong: the magic will raise an error for it
            return False

    def short(self, name: str, option: str) -> Command:
        """Return a short form: a magic called `name` that runs this magic with an option added."""
        how = f"`{self.shown_name} {option}`"

        @wraps(self.run)  # copies the attribute `parser` too
        def run(line: MagicCall) -> Returned:
            return self.run(line)

        text, _, usage = (self.run.__doc__ or "").partition("\n\n::\n\n")
        summary, usage = f"Short for {how}.", usage.replace(self.shown_name, f"%{name}", 1)
        run.__name__, run.__doc__ = name, f"{summary}\n\n{text}\n\n::\n\n{usage}"
        return replace(
            self,
            run=run,
            split=lambda _, line: (f"{option} {line}", []),
            summary=summary,
            looks=("",) if {"", option.lstrip("-")}.intersection(self.looks) else (),
            short_for=how,
        )

    @property
    def looking(self) -> list[str]:
        """The calls of this magic that change nothing, such as `%dist_output --log`.

        Only these calls may run in a subshell, while a cell runs.
        """
        return [f"{self.shown_name} --{name}" if name else self.shown_name for name in self.looks]

    def magic(self, pools: Pools) -> Callable[..., Any]:
        """Return the function that IPython calls with a line, and with a cell if there is one."""

        @wraps(self.run)  # so that `%dist_init?` shows the help and the file of the function
        def magic(text: str, cell: str = "") -> Any:
            text = remove_comment(text)
            if self.asks_for_help(text):
                (helper,) = (each for each in find_commands() if each.name == HELP_MAGIC)
                return helper.magic(pools)(self.name)
            # Do not count outputs in a subshell: the count would include those of the main thread.
            is_panel = has_panels(pools.shell, pools.settings)
            is_counted = is_panel and not is_in_subshell(pools.shell)
            with OUTPUTS.counting() if is_counted else nullcontext():
                line = MagicCall(self, pools, text, cell)
                try:
                    return run(line)
                finally:
                    line.end_display()

        def run(line: MagicCall) -> Any:
            only_looks = any(not each or getattr(line.options, each) for each in self.looks)
            if not only_looks and is_in_subshell(pools.shell):
                looking = sorted(how for each in find_commands() for how in each.looking)
                raise UsageError(
                    f"`{self.shown_name}` cannot run in a subshell, beside other cells; "
                    f"these can run: {', '.join(f'`{how}`' for how in looking)}."
                )
            try:
                with command_stops():
                    shown = self.run(line)
            except KeyboardInterrupt as stop:
                raise _stopped(stop, line.pool.world) from None
            except WorkerError as error:
                _name_pool(error, line.pool)
                raise raised(error) from None
            except NbdistError as error:
                _name_pool(error, line.pool)
                raise
            match shown:
                case CommandOutput():
                    shown.show_on(line.display)
                case str():
                    line.display.answer(shown)
            return shown.value if isinstance(shown, MagicResult) and is_used() else None

        return magic

    def line_magic(self, pools: Pools) -> Callable[..., None]:
        """Return the line magic of a cell magic, such as `%distributed x = 1`.

        The line is Python code for the ranks, so IPython must not fill in values for `{x}`.
        """
        magic = self.magic(pools)

        @wraps(self.run)
        def in_a_line(text: str) -> None:
            options, code = split_code(self.run, text)
            if not code and not self.asks_for_help(options):
                raise UsageError(
                    f"`%{self.name}` runs one line, such as `%{self.name} x = 1`; "
                    f"`{self.shown_name}` on the first line of a cell runs the cell."
                )
            magic(options, code)

        return no_var_expand(in_a_line)


@dataclass(frozen=True)
class CellOption:
    """An option that a plugin adds to `%%distributed`.

    `add` adds the option to the magic.  `around` is called for each `%%distributed` cell, and
    returns a context in which the notebook sends and follows the cell.
    """

    add: Callable[[Magic], Magic]
    around: Callable[[MagicCall], AbstractContextManager[None]]


def command(
    *options: Callable[[Magic], Magic],
    kind: Literal["line", "cell"] = "line",
    split: Split = lambda _, line: (line, []),
    looks: tuple[str, ...] = (),
    in_a_line: bool = False,
) -> Callable[[Callable[[MagicCall], Returned]], Command]:
    """Make a magic from a function of the same name, whose docstring is the magic's help.

    Args:
        options: decorators that add options, in the order of the help; `--pool` is always added.
        kind: "cell" for a magic on the first line of a cell.
        split: divides the line into a part that argparse reads, and words that it does not read,
            such as the arguments of a script.
        looks: the options with which the magic changes nothing, so that it may run in a subshell
            while a cell runs; "" if the magic never changes anything.  With these options the magic
            must use `MagicCall.query_agent` for all questions to the agent.
        in_a_line: whether the cell magic is also a line magic: `%distributed x = 1`.
    """

    def decorate(run: Callable[[MagicCall], Returned]) -> Command:
        # The world's options come last: they are in groups, and IPython's `magic_arguments` would
        # add any option that follows to the last group.
        own_options = [option for option in options if option is not world_options]
        shown = (*own_options, pool_option, *(set(options) - set(own_options)))
        for option in reversed(shown):
            option(run)
        help_text, run.__doc__ = cleandoc(run.__doc__ or ""), None
        magic_arguments()(run)  # sets `run.parser`, and a docstring with usage and options
        usage = _usage(run, shown)
        escape = "%%" if kind == "cell" else "%"
        run.__doc__ = f"{help_text}\n\n{usage.replace('  %', f'  {escape}', 1)}\n"
        return Command(run, kind, split, help_text.partition("\n")[0], looks, in_a_line)

    return decorate


def _usage(run: Magic, options: Sequence[Callable[[Magic], Magic]]) -> str:
    """Return the help on a magic's options.

    The options for starting workers are many, so only the help of `%dist_init` lists them all.
    """
    if world_options not in options or {*options} == {pool_option, world_options}:
        return (run.__doc__ or "").strip()

    def shown() -> None:
        pass

    shown.__name__, shown.__doc__ = run.__name__, None
    for option in reversed([size_option, *(each for each in options if each is not world_options)]):
        option(shown)
    magic_arguments()(shown)
    return f"{(shown.__doc__ or '').strip()}{MORE_OPTIONS}"


def find_commands() -> Iterator[Command]:
    """Yield the commands that files in `nbdist.notebook.commands` define, and those of plugins."""
    for file in sorted(pkgutil.iter_modules(commands.__path__), key=lambda each: each.name):
        module = import_module(f"{commands.__name__}.{file.name}")
        yield from (each for each in vars(module).values() if isinstance(each, Command))
    for point in _plugins().values():
        if point.group == plugins.COMMANDS_GROUP:
            yield _loaded(point)


def cell_options() -> list[CellOption]:
    """Return the options that plugins add to `%%distributed`.

    A plugin that cannot be imported is left out.
    """
    loaded: list[CellOption] = []
    for point in _plugins().values():
        if point.group == plugins.CELL_OPTIONS_GROUP:
            with suppress(Exception):  # importing a plugin can raise anything
                loaded.append(point.load())
    return loaded


@cache
def _plugins() -> Mapping[str, EntryPoint]:
    return plugins.entry_points(plugins.COMMANDS_GROUP, plugins.CELL_OPTIONS_GROUP)


def _loaded(point: EntryPoint) -> Command:
    """Load a plugin's magic; if that fails, return a magic of the same name that says why."""
    try:
        loaded = point.load()
        if isinstance(loaded, Command):
            return loaded
        why = "it is no command"
    except Exception as error:  # noqa: BLE001 (importing a plugin can raise anything)
        why = f"{type(error).__name__}: {one_line(str(error))}"
    problem = f"`%{point.name}` cannot be used: {point.value} was not imported ({why})."

    def run(_: MagicCall) -> None:
        raise UsageError(problem)

    run.__name__, run.__doc__ = point.name, problem
    return command(split=lambda _run, _line: ("", []))(run)


def _name_pool(error: NbdistError, pool: Pool) -> None:
    """Add `--pool` to the magics that an error advises, unless the pool is the default pool."""
    texts = (in_pool(each, pool.own_name) if isinstance(each, str) else each for each in error.args)
    error.args = tuple(texts)


def _stopped(stop: KeyboardInterrupt, world: World | None) -> KeyboardInterrupt:
    """Return the error for a command that Stop has ended, with a text on the workers' state."""
    if isinstance(stop, Interrupted) or world is None:
        return stop if isinstance(stop, Interrupted) else Interrupted(())
    if world.state is WorldState.STOPPING:
        recovery = "the workers are still shutting down; `%dist_shutdown` waits for them"
        return Interrupted((), outcome=recovery)
    if world.state is WorldState.BROKEN:
        return Interrupted((), outcome=healing_text(world.engine, range(world.size)))
    # Stop has interrupted this command, but not the jobs that ranks may run.
    if busy := world.engine.task_table.unfinished:
        run = "runs" if len(busy) == 1 else "run"
        return Interrupted((), outcome=f"{name_ranks(busy)} still {run} another cell")
    return Interrupted(range(world.size) if world.state.has_workers else ())


# --- whether a magic's value is used ----------------------------------------------------------

BETWEEN = ("nbdist.", "IPython.")
"""The beginnings of module names by which `is_used` skips frames between a magic and its cell."""

UNUSED = {("POP_TOP", ""), ("PRINT_EXPR", ""), ("CALL_INTRINSIC_1", "INTRINSIC_PRINT")}
"""CPython's instructions after a call whose value is dropped, or shown as the cell's last value.

Each entry has the name and the argument of an instruction.
"""


def is_used() -> bool:
    """Return True if the cell's code uses the value of the running magic, as `x = %magic` does.

    Looks at the instruction after the call, in the first frame outside of IPython and nbdist.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(BETWEEN):
        frame = frame.f_back
    if frame is None:
        return True
    instructions = dis.get_instructions(frame.f_code)
    following = (each for each in instructions if each.offset > frame.f_lasti)
    after = next(following, None)
    return after is None or (after.opname, after.argrepr) not in UNUSED
