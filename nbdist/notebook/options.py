"""The options of the magics, and what is wrong with them in one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.magic_arguments import argument, parse_argstring

from nbdist.errors import UsageError
from nbdist.notebook.world_options import add_world_options
from nbdist.world.watch import Patience

RANKS = re.compile(r"(?:^|(?<=\s))(?:-r|--ranks)(?:\s*=\s*|\s+)(\S+)")
"""`-r -1,0` would be read as an option without a value."""

POOL = re.compile(r"(?:^|(?<=\s))--pool(?:\s*=\s*|\s+)(\S+)")

QUOTED = re.compile(r"""(?<!\S)(--[\w-]+)(?:=|\s+)(\w+=)?(["'])(.*?)\3(?!\S)""")
"""`--wrap="nice -n 5"` and `--env A="1 2"`, which IPython would split at the spaces."""

Magic = Callable[..., Any]


def world_options(magic: Magic) -> Magic:
    """What concerns a world: for `%dist_init`, `%%distributed` and `%dist_restart`.

    What describes its workers is in `nbdist.notebook.world_options`.
    """
    for add in (
        argument("--on-failure", metavar="WHAT", help="what the death of a worker leads to:"
                 " heal replaces it (the default), restart-all starts all anew, stop ends all"),
    ):  # fmt: skip
        magic = add(magic)
    return add_world_options(patience_options(pool_option(magic)))


def pool_option(magic: Magic) -> Magic:
    """Which of several worlds."""
    add = argument("--pool", metavar="NAME", help="the workers of this name, which have a group"
                   " of their own beside others")  # fmt: skip
    return add(magic)  # type: ignore[no-any-return]


def take_pool(line: str) -> tuple[str | None, str]:
    """The value of `--pool` in the line of a `%%rank`, None without, and the rest of the line."""
    found = POOL.search(line)
    return (found[1], POOL.sub(" ", line)) if found else (None, line)


def patience_options(magic: Magic) -> Magic:
    """When ranks that wait for one another are told of, and freed."""
    for add in (
        argument("--hang-timeout", metavar="SECONDS", help="seconds after which a running cell"
                 " says which ranks wait for which (4)"),
        argument("--no-free", action="store_true", help="only say so: ranks that wait for what"
                 " can never come stay as they are until Stop"),
    ):  # fmt: skip
        magic = add(magic)
    return magic


def patience(options: argparse.Namespace, default: Patience) -> Patience:
    """What the options say of it."""
    text = options.hang_timeout
    try:
        timeout = default.hang_timeout if text is None else float(text)
    except ValueError:
        timeout = -1.0
    if not 0 < timeout < float("inf"):
        raise UsageError(f"`--hang-timeout {text}`: a number of seconds, such as 30 or 0.5.")
    return Patience(timeout, default.frees and not options.no_free)


def restarts_option(magic: Magic) -> Magic:
    """What torchrun calls by the same name."""
    add = argument("--max-restarts", metavar="N", help="run it again where it fails, N times at"
                   " most, with new workers for those that have died (0)")  # fmt: skip
    return add(magic)  # type: ignore[no-any-return]


def ranks_option(magic: Magic) -> Magic:
    """Which ranks run it."""
    add = argument("-r", "--ranks", help="which ranks: 0  0,2-3  1:3  ::2  -1  all (the default)")
    return add(magic)  # type: ignore[no-any-return]


def parse(magic: Magic, line: str) -> argparse.Namespace:
    """The options in a magic's line; UsageError in one line that says where to read more."""
    name = magic.__name__
    sign = "%%" if name in ("distributed", "rank") else "%"
    try:
        line = QUOTED.sub(r"\1 \3\2\4\3", RANKS.sub(r"--ranks=\1", line))
        options = parse_argstring(magic, line)
    except (IPythonUsageError, ValueError) as error:
        text = str(error).rstrip(".")
        raise UsageError(f"`{sign}{name}`: {text}. `{sign}{name}?` shows all options.") from None
    for option, value in vars(options).items():
        setattr(options, option, _unquoted(value))
    return options  # type: ignore[no-any-return]


def _unquoted(value: Any) -> Any:
    """The value without the quotes around it, which IPython leaves there."""
    if isinstance(value, list):
        return [_unquoted(each) for each in value]
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value
