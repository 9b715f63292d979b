"""The options of the magics, and what is wrong with them in one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.magic_arguments import argument, argument_group, parse_argstring

from nbdist.config import OPTIONS, Option, WorldConfig
from nbdist.errors import UsageError, WorldSizeMismatch
from nbdist.notebook.border.flags import flags_of
from nbdist.notebook.border.habits import in_our_words, meant_by, our_flag
from nbdist.readers import read_environ, read_restarts, unquoted

if TYPE_CHECKING:
    from nbdist.world.world import World

RANKS = re.compile(r"(?:^|(?<=\s))(?:-r|--ranks)(?:\s*=\s*|\s+)(\[[^\]]*\]|\S+)")
"""`-r -1,0` would be read as an option without a value, and `-r [0, 2]` as two words."""

QUOTED = re.compile(r"""(?<!\S)(--[\w-]+)(?:=|\s+)(\w+=)?(["'])(.*?)\3(?!\S)""")
"""`--wrap="nice -n 5"` and `--env A="1 2"`, which IPython would split at the spaces."""

FLAG = re.compile(r"\s*(--?[A-Za-z][\w-]*)(=\S+)?(?=\s|$)")
VALUE = re.compile(r"""\s+(\[[^\]]*\]|"[^"]*"|'[^']*'|\S+)""")

GROUPS = {
    "which workers": ("n", "layout", "gpus", "share_gpus", "cpus", "backend", "name"),
    "how they are started": ("env", "env_file", "debug", "python", "wrap", "fork"),
    "on which machines": (
        *("launcher", "hosts", "salloc", "memory", "copy_env", "address", "link_timeout"),
        *("detach", "sync_code", "rdzv_backend", "rdzv_endpoint"),
    ),
    "when something goes wrong": ("on_failure", "hang_timeout", "free"),
}
"""The options of a world as the help of a magic has them; `--pool` is every magic's own."""

Magic = Callable[..., Any]


def world_options(magic: Magic) -> Magic:
    """Add all that `WorldConfig` has flags for, as `%dist_init` and `%%distributed` have it."""
    for title, names in reversed(GROUPS.items()):
        for name in reversed(names):
            magic = _add(name, OPTIONS[name])(magic)
        magic = argument_group(title)(magic)
    return magic


def size_option(magic: Magic) -> Magic:
    """Add `-n` alone, for help that leaves the others to `%dist_init`."""
    return _add("n", OPTIONS["n"])(magic)


def pool_option(magic: Magic) -> Magic:
    """Add `--pool`: which of several worlds."""
    return _add("pool", OPTIONS["pool"])(magic)


def _add(name: str, option: Option) -> Callable[[Magic], Magic]:
    """Make a decorator that gives a magic this option; None of what is not said."""
    how: dict[str, Any] = {"dest": name, "help": option.help.replace("%", "%%")}
    default = WorldConfig.__dataclass_fields__[name].default
    if isinstance(default, bool):
        how |= {"action": "store_const", "const": not default}
    elif name == "env":
        how |= {"action": "append", "metavar": option.metavar}
    else:
        how |= {"type": lambda text: option.read(unquoted(text)), "metavar": option.metavar}
    return argument(option.flag, **how)


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Take the arguments of `World` that were given; the pool is none, it is where they go."""
    found = {name: getattr(options, name, None) for name in OPTIONS if name != "pool"}
    found = {name: value for name, value in found.items() if value is not None}
    return {**found, "env": read_environ(found["env"])} if "env" in found else found


def at_once(options: argparse.Namespace) -> dict[str, Any]:
    """Take those of them that workers can be given which exist already."""
    return {name: value for name, value in given(options).items() if OPTIONS[name].at_once}


def check_same(world: World, options: argparse.Namespace) -> None:
    """Raise UsageError where a cell's options are not true of the workers that run."""
    asked = {name: value for name, value in given(options).items() if not OPTIONS[name].at_once}
    if "n" in asked and (size := world.session.resolve(asked.pop("n"))) != world.size:
        raise WorldSizeMismatch(world.size, size, world.session.config.other_pool)
    # What was chosen for it, where nothing had been said.
    session = world.session
    chosen = {"backend": session.backend, "name": session.name}
    is_full = not isinstance(session.config.n, int)  # no fewer workers than `-j` has room for
    chosen["layout"] = (is_full and session.config.layout) or session.layout
    chosen["launcher"] = session.config.launched_by
    for name, wanted in asked.items():
        option, has = OPTIONS[name], chosen.get(name, getattr(session.config, name))
        if name == "env":
            wanted = {key: text for key, text in wanted.items() if has.get(key) != text}
            has = {key: has[key] for key in wanted if key in has}
        if wanted != has:
            again = option.again(wanted)
            is_said = has and not isinstance(has, bool)
            said = f"`{option.again(has)}`, not `{again}`" if is_said else f"no `{option.flag}`"
            raise UsageError(
                f"The running workers have {said}. `%dist_restart {again}` starts new ones."
            )


def restarts_option(magic: Magic) -> Magic:
    """Add what torchrun calls by the same name."""
    add = argument("--max-restarts", metavar="N", type=read_restarts, default=0,
                   help="run it again when it fails, at most N times; ranks that died are "
                       "restarted (0)"
                   "")  # fmt: skip
    return add(magic)  # type: ignore[no-any-return]


def ranks_option(magic: Magic) -> Magic:
    """Add `-r`: which ranks run it."""
    add = argument("-r", "--ranks", help="which ranks: 0  0,2-3  1:3  ::2  -1  all (the default)")
    return add(magic)  # type: ignore[no-any-return]


ARGPARSE = (
    (re.compile(r"^unrecognized arguments: (\S+).*"), r"unexpected `\1`"),
    (re.compile(r"^the following arguments are required: (.*)"), r"it needs \1"),
    (re.compile(r"^argument (?:\S+/)?(\S+): expected one argument"), r"`\1` needs a value"),
)
"""What it says, and how that is worded here."""


def parse(magic: Magic, name: str, line: str) -> argparse.Namespace:
    """Read the options in a magic's line; UsageError in one line that says where to read more.

    `name` is the magic's, as people type it.
    """
    flags = flags_of(magic)
    try:
        line = RANKS.sub(_ranks_in_a_word, in_our_words(line, flags))
        options = parse_argstring(magic, QUOTED.sub(r"\1 \3\2\4\3", line))
    except (IPythonUsageError, ValueError) as error:
        text = str(error)
        said = meant_by(text, flags) or f"{_in_our_words(text).rstrip('.')}."
        raise UsageError(f"`{name}`: {said} `{name}?` shows all options.") from None
    for option, value in vars(options).items():
        setattr(options, option, _unquoted(value))
    return options  # type: ignore[no-any-return]


def split_code(magic: Magic, line: str) -> tuple[str, str]:
    """Divide `-r 0 x = 1` into the options that come first and the code after them."""
    flags, at = flags_of(magic), 0
    while found := FLAG.match(line, at):
        option, at = flags.get(our_flag(found[1], flags)), found.end()
        if option and option.takes_value and not found[2] and (value := VALUE.match(line, at)):
            at = value.end()
    return line[:at].strip(), line[at:].strip()


def _in_our_words(text: str) -> str:
    """Say what argparse says as people would."""
    for said, ours in ARGPARSE:
        text = said.sub(ours, text)
    return text


def names_in(words: Iterable[str]) -> list[str]:
    """Divide what was typed at its commas too: `a b`, `a, b` and `a,b` are two names."""
    return [name for word in words for name in word.split(",") if name]


def _ranks_in_a_word(found: re.Match[str]) -> str:
    return f"--ranks={''.join(found[1].split())}"


def _unquoted(value: Any) -> Any:
    """Strip the quotes around the value, or around each of several."""
    if isinstance(value, list):
        return [_unquoted(each) for each in value]
    return unquoted(value) if isinstance(value, str) else value
