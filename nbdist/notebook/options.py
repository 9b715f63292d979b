"""The options of the magics, the notebook's settings, and hints on mistyped options and magics.

Runs in the notebook's process.  Commands add options by the decorators here, and `MagicCall` reads
them with `parse`.
"""

from __future__ import annotations

import argparse
import os
import re
from argparse import SUPPRESS
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError as IPythonUsageError
from IPython.core.magic_arguments import argument, argument_group
from traitlets import Bool, Enum, default
from traitlets.config import Configurable

from nbdist.config import DEFAULT_POOL, OPTIONS, Option, WorldConfig, read_restarts
from nbdist.errors import UsageError, WorldSizeMismatch

if TYPE_CHECKING:
    from nbdist.world.world import World


POOL = re.compile(r"(?<!\S)--pool(?:\s*=\s*|\s+)(\S+)")

RANKS = re.compile(r"(?<!\S)(?:-r|--ranks)(?:\s*=\s*|\s+)(\[[^\]]*\]|\S+)")

OPTION = re.compile(r"\s*(--?[A-Za-z][\w-]*)(?=[=\s]|$)")
WORD = re.compile(r"""\s*((\w+=)?("[^"]*"|'[^']*'|\[[^\]]*\])(?!\S)|\S+)""")
"""Matches a word of a line; `"nice -n 5"`, `A="1 2"` and `[0, 2]` are single words here."""

HELP_MAGIC, HELP_FLAGS = "dist_help", ("-h", "--help")
"""The magic that shows the help of a magic, and the options with which any magic calls it."""

OPTION_GROUPS = {
    "n": "which workers",
    "env": "how they are started",
    "launcher": "on which machines",
    "on_failure": "when something goes wrong",
}
"""The groups of a world's options in the help of a magic, by the first option of each group."""

READ_LATE = {"env", "rdzv_endpoint"}
"""Options whose text argparse passes on as it is; `typed_options` reads the text afterwards.

`--env` can be repeated, and all of its texts together make one value.  `%dist_run` may ignore
`--rdzv-endpoint`, so argparse must not refuse an invalid value.
"""

Magic = Callable[..., Any]


def world_options(magic: Magic) -> Magic:
    """Add the options of a world, such as `-n` and `--gpus`, to a magic that can start workers."""
    for name, option in reversed([*OPTIONS.items()]):
        if option.flag and name != "pool":  # every magic has `--pool` in any case
            magic = _add(name, option)(magic)
        if name in OPTION_GROUPS:
            magic = argument_group(OPTION_GROUPS[name])(magic)
    return magic


def _add(name: str, option: Option) -> Callable[[Magic], Magic]:
    """Return a decorator that adds an option of a world to a magic.

    The option's value is None if the user has not typed the option.
    """
    how: dict[str, Any] = {"dest": name, "help": option.help.replace("%", "%%")}
    default = WorldConfig.__dataclass_fields__[name].default
    if isinstance(default, bool):
        how |= {"action": "store_const", "const": not default}
    elif name == "env":
        how |= {"action": "append", "metavar": option.metavar}
    elif name in READ_LATE:
        how |= {"metavar": option.metavar}
    else:
        how |= {"type": option.read, "metavar": option.metavar}
    return argument(option.flag, **how)


class JoinRanks(argparse.Action):
    """Lets `-r` be given several times, so that `-r 0 -r 2-3` selects the ranks of `-r 0,2-3`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add the value of this `-r` to the earlier values; argparse calls this for each `-r`."""
        earlier = getattr(namespace, self.dest)
        texts = [values] if earlier is None else [earlier, values]
        setattr(namespace, self.dest, join_ranks(texts))


def join_ranks(texts: Sequence[str]) -> str | None:
    """Return one text that selects the ranks of all these values of `-r`; None for no values."""
    if len(texts) < 2:
        return texts[0] if texts else None
    listed = (text.removeprefix("[").removesuffix("]") for text in texts)
    return ",".join("".join(each.split()) for each in listed)


RANKS_FORMS = "one (`0`), several (`0,2-3`), a slice (`1:3`, `::2`), the last (`-1`), or `all`"
"""The forms of `-r`, for the help of magics."""

size_option = _add("n", OPTIONS["n"])
"""The option `-n`, for the help of magics such as `%%distributed`.

Such a magic takes all options for starting workers, but its help lists only this one of them.
"""

pool_option = _add("pool", OPTIONS["pool"])

ranks_option = argument(
    "-r", "--ranks", action=JoinRanks, help=f"which ranks: {RANKS_FORMS} (the default)"
)

# The option has the name of torchrun's option for the same purpose.
restarts_option = argument(
    "--max-restarts",
    metavar="N",
    type=read_restarts,
    default=0,
    help="run it again when it fails, at most N times; ranks that died are restarted (0)",
)


def typed_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return by name the options for `World` that the user has typed, except for `--pool`."""
    typed = {name: getattr(options, name, None) for name in OPTIONS if name != "pool"}
    typed = {name: value for name, value in typed.items() if value is not None}
    return typed | {name: OPTIONS[name].read(typed[name]) for name in READ_LATE & typed.keys()}


def immediate_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the typed options that apply to running workers at once, without a restart."""
    return {
        name: value for name, value in typed_options(options).items() if OPTIONS[name].is_dynamic
    }


def check_same(world: World, options: argparse.Namespace) -> None:
    """Raise UsageError if a typed option would need a restart of the running workers."""
    typed = {
        name: value
        for name, value in typed_options(options).items()
        if not OPTIONS[name].is_dynamic
    }
    if "n" in typed and (size := world.engine.resolve(typed.pop("n"))) != world.size:
        pool = world.engine.config.pool
        raise WorldSizeMismatch(world.size, size, "" if pool == DEFAULT_POOL else pool)
    # For options that the user had not typed, the start has chosen values: compare with these.
    engine, table = world.engine, world.engine.rank_table
    chosen = {"backend": table.backend, "name": table.spec.name}
    # If `-n` was not a number, all places of the layout (`-j`) have a worker.
    is_full = not isinstance(engine.config.n, int)
    chosen["layout"] = (is_full and engine.config.layout) or table.layout
    chosen["launcher"] = engine.config.launcher_name
    for name, new in typed.items():
        option, old = OPTIONS[name], chosen.get(name, getattr(engine.config, name))
        if name == "env":
            new = {key: text for key, text in new.items() if old.get(key) != text}
            old = {key: old[key] for key in new if key in old}
        if new != old:
            again = option.as_typed(new)
            is_said = old and not isinstance(old, bool)
            problem = (
                f"`{option.as_typed(old)}`, not `{again}`" if is_said else f"no `{option.flag}`"
            )
            raise UsageError(
                f"The running workers have {problem}. `%dist_restart {again}` starts new ones."
            )


def torchrun_options(magic: Magic) -> Magic:
    """Let a magic accept torchrun's options that nbdist does not need.

    The attribute `ignored` of the parsed options lists the options of torchrun that were typed; it
    is None if none was typed.
    """
    for flags, only in TORCHRUN_IGNORED.items():
        how: dict[str, Any] = {"dest": "ignored", "action": "append", "help": SUPPRESS}
        if flags[0] in _WITHOUT_VALUE:
            how |= {"action": "append_const", "const": flags[0]}
        else:
            how["type"] = partial(_read_ignored, flags[0], only)
        magic = argument(*flags, **how)(magic)
    return magic


def _read_ignored(flag: str, only: Collection[str], value: str) -> str:
    """Return an option of torchrun that nbdist ignores, as `flag=value`.

    `only` has the values that can be ignored; if it is empty, all can.  Raises UsageError for any
    other value.
    """
    if only and value not in only:
        raise UsageError(f"`{flag}={value}`: {TORCHRUN[flag]}.")
    return f"{flag}={value}"


ARGPARSE = (
    (re.compile(r"^unrecognized arguments: (\S+).*"), r"unexpected `\1`"),
    (re.compile(r"^the following arguments are required: (.*)"), r"it needs \1"),
    (re.compile(r"^argument (?:\S+/)?(\S+): expected one argument"), r"`\1` needs a value"),
)
"""Patterns of argparse's messages, and the texts that replace them in nbdist's messages."""


def parse(magic: Magic, name: str, line: str) -> argparse.Namespace:
    """Return the options in a magic's line; `name` is the magic's name in messages.

    Raises UsageError, which also says how to see all options, if the line is wrong.
    """
    try:
        return magic.parser.parse_args([word for word, *_ in words_of(magic, line)])  # type: ignore[attr-defined, no-any-return]
    except (IPythonUsageError, ValueError) as error:
        text = str(error)
        hint = hint_on_argument(text, flags_of(magic))
        if not hint:
            for pattern, replacement in ARGPARSE:
                text = pattern.sub(replacement, text)
            hint = f"{text.rstrip('.')}."
        raise UsageError(f"`{name}`: {hint} `{name}?` shows all options.") from None


def words_of(magic: Magic, line: str) -> Iterator[tuple[str, bool, int]]:
    """Yield each word of a line, whether the word is an option, and where it ends in the line.

    An option and its value are one word: `-r -1,0` in the line gives `-r=-1,0`, since argparse
    would take `-1,0` for another option.  A flag of another tool, such as torchrun's
    `--nproc-per-node`, or of a former version is replaced by the flag of nbdist (`our_flag`).
    Raises ValueError if a quote is not closed.
    """
    flags, at = flags_of(magic), 0
    while line[at:].strip():
        if not (match := OPTION.match(line, at)):
            word, at = _word(line, at)
            yield word, False, at
            continue
        option, at = our_flag(match[1], flags), match.end()
        is_given = line.startswith("=", at)
        is_next = _takes_value(option, flags) and not OPTION.match(line, at) and line[at:].strip()
        if is_given or is_next:
            value, at = _word(line, at + is_given)
            option = f"{option}={value}"
        yield option, True, at


def _takes_value(flag: str, flags: Mapping[str, argparse.Action]) -> bool:
    # A flag may be abbreviated, as argparse allows.
    action = flags.get(flag) or next((flags[each] for each in flags if each.startswith(flag)), None)
    dashed = _dashed(flag)
    return action.nargs != 0 if action else dashed in TORCHRUN and dashed not in _WITHOUT_VALUE


def _word(line: str, at: int) -> tuple[str, int]:
    """Return the word that begins at the position `at` of a line, and the position of its end.

    Leaves out quotes around the word, or around the value in `A="1 2"`, and blanks in `[0, 2]`.  If
    no word is left, returns "" and the end of the line.  Raises ValueError if a quote is not
    closed.
    """
    match = WORD.match(line, at)
    if match is None:
        return "", len(line)
    word, name, group = match[1], match[2] or "", match[3]
    if word[0] in "\"'" and line.count(word[0], at) == 1:
        raise ValueError("No closing quotation")
    if group:
        word = name + ("".join(group.split()) if group.startswith("[") else group[1:-1])
    return word, match.end()


def split_code(magic: Magic, line: str) -> tuple[str, str]:
    """Divide `-r 0 x = 1` into the options that come first and the code after them."""
    end = 0
    with suppress(ValueError):  # a quote is not closed: the rest counts as code
        for _, is_option, after in words_of(magic, line):
            if not is_option:
                break
            end = after
    return line[:end].strip(), line[end:].strip()


def names_in(words: Iterable[str]) -> list[str]:
    """Return the names in words, split at commas: `a b`, `a, b` and `a,b` are all two names."""
    return [name for word in words for name in word.split(",") if name]


# --- the options and arguments of a magic -----------------------------------------------------


def arguments_of(magic: Magic) -> list[argparse.Action]:
    """Return the arguments and options of a magic, in the order of its help."""
    return magic.parser._actions  # type: ignore[attr-defined, no-any-return]


def flags_of(magic: Magic) -> dict[str, argparse.Action]:
    """Return the options of a magic by their flags; several flags can have the same option."""
    return {flag: each for each in arguments_of(magic) for flag in each.option_strings}


# --- flags of other tools, and typing errors ----------------------------------------

SAME = {
    "--nproc-per-node": "-n",  # torchrun
    "--nproc_per_node": "-n",
    "--num-processes": "-n",  # nbdistributed
    "--num_processes": "-n",  # accelerate
    "-np": "-n",  # mpirun
    "--gpu-ids": "--gpus",  # nbdistributed
    "--gpu_ids": "--gpus",  # accelerate
    "--targets": "-r",  # ipyparallel
}
"""Flags of other tools that are accepted in place of our flag."""

OLD = {"--rank": "-r", "--local": "--here-too", "--no-free": "--no-release"}
"""Former names of our flags, and the present names.

Former names still work; `old_flags` makes a line for the user that names the present flag.
"""

MEANT = {
    "--num-procs": "-n",
    "--nprocs": "-n",
    "--procs": "-n",
    "--num-workers": "-n",
    "--workers": "-n",
    "--world-size": "-n",
    "--ngpus": "-n",
    "--num-gpus": "-n",
    "--devices": "--gpus",
    "-t": "-r",
    "--noblock": "--no-wait",
}
"""Flags that are refused with the question whether our flag of similar meaning is meant."""

_PORT = "ranks meet without a port; `--rdzv-endpoint HOST:PORT` has them meet at a store"
_LOGS = "all output of all ranks is shown and kept: `%dist_output --log`"

TORCHRUN = {
    "--standalone": "leave it out, as one machine is the default",
    "--nnodes": "`-j 2x4` starts 2 nodes with 4 workers each, `--hosts a,b` names machines",
    "--node-rank": "leave it out, as nbdist numbers the nodes",
    "--master-addr": "`--hosts a,b` names machines, which find one another",
    "--master-port": _PORT,
    "--local-addr": "`--address` is the notebook's address for other machines",
    "--rdzv-id": "`--name` names the run",
    "--rdzv-conf": _PORT,
    "--log-dir": "NBDIST_LOG_DIR in the environment is where logs are, `--name` names their folder",
    "--tee": _LOGS,
    "--redirects": _LOGS,
    "--local-ranks-filter": "`%dist_output -r 0` shows one rank's output",
    "--role": "`--pool` names a group of workers",
    "--start-method": "workers are forked from a process that has torch; `--no-fork` spawns them",
    "--monitor-interval": "leave it out, as a death is seen at once",
    "--run-path": "leave it out, as a script always runs by its path",
    "--use-env": "leave it out, as LOCAL_RANK is always in the environment",
}
"""Options of torchrun that have no flag here, and what to do instead, for hints."""

TORCHRUN_IGNORED: Mapping[tuple[str, ...], Collection[str]] = {
    ("--standalone",): (),
    ("--nnodes",): ("1", "1:1"),
    ("--node-rank",): ("0",),
    ("--master-addr",): (),
    ("--master-port",): (),
    ("--rdzv-id",): (),
    ("--rdzv-conf",): (),
    ("--tee", "-t"): (),
    ("--redirects",): (),
    ("--monitor-interval",): (),
    ("--run-path",): (),
    ("--use-env",): (),
}
"""Options of torchrun that `%dist_run` ignores, each with its allowed values; () allows all."""

_WITHOUT_VALUE = ("--standalone", "--run-path", "--use-env")

OTHER_TOOLS_MAGICS = {
    "px": "begin the cell with `%%distributed`",
    "autopx": "`%dist_auto on` sends plain cells to the workers",
    "pxresult": "`%dist_output` shows the last result again",
    "sync": "`dist.barrier()` in a cell waits for all ranks, `%dist_sync model` copies variables",
    "dist_mode": "`%dist_auto on` sends plain cells to the workers",
    "dist_reset": "`%dist_restart` restarts the workers",
    "dist_sync_ide": "completion knows the workers' variables; nothing needs to be copied",
    "dist_env": "`%%distributed` shows them: `import os; os.environ`",
    "dist_start": "`%dist_init -n 4` starts workers",
    "dist_stop": "`%dist_interrupt` stops the cell, `%dist_shutdown` ends the workers",
    "dist_kill": "`%dist_restart` restarts all workers, `%dist_shutdown` ends them",
    "dist_wait": "`job.wait()` waits for a cell that was sent with `--no-wait -o job`",
    "parallel": "begin the cell with `%%distributed`",
    "torchrun": "`%dist_run -n 4 train.py` runs a script",
}
"""Magics of ipyparallel, nbdistributed and others, with a hint on what to use in nbdist."""

_NOT_FOUND = re.compile(r"^(?:Line magic function|Cell magic) `(%%?)(\S+?)` not found\b")
_UNRECOGNIZED = re.compile(r"^unrecognized arguments: ((\S+).*)")
_FLAG = re.compile(r"(?<!\S)--?[A-Za-z][\w-]*(?=[=\s]|$)")

NEAR_FLAG, NEAR_MAGIC = 0.7, 0.75  # the least similarity, from 0 to 1, of a suggested name


def old_flags(line: str, flags: Collection[str]) -> list[str]:
    """Return a line for each former flag of ours in a magic's line, with the flag's new name."""
    typed = {*_FLAG.findall(line)}
    return [f"`{o}` is now `{now}`" for o, now in OLD.items() if o in typed and now in flags]


def our_flag(flag: str, flags: Collection[str]) -> str:
    """Return nbdist's flag for a flag of another tool, such as `-n` for `--nproc_per_node`.

    Also replaces flags of former versions, and underscores in flags.  Returns `flag` unchanged if
    it is one of the magic's `flags`, or if the magic does not have nbdist's flag.
    """
    renamed = SAME.get(flag) or OLD.get(_dashed(flag)) or _dashed(flag)
    return renamed if renamed in flags and flag not in flags else flag


def _dashed(flag: str) -> str:
    return flag.replace("_", "-")


def hint_on_argument(message: str, flags: Collection[str]) -> str:
    """Return a hint on an argument that argparse has not recognized, from argparse's `message`.

    Returns "" for other messages and for most words that are no options.
    """
    match = _UNRECOGNIZED.match(message)
    if match is None:
        return ""
    words = [_dashed(word.partition("=")[0]) for word in match[1].split()]
    if hints := dict.fromkeys(f"`{word}`: {TORCHRUN[word]}" for word in words if word in TORCHRUN):
        return f"{'; '.join(hints)}."
    typed, _, value = match[2].partition("=")
    if typed.isdigit() and "-n" in flags:
        return f"unexpected `{typed}`: did you mean `-n {typed}`?"
    if not typed.startswith("-"):
        return ""
    flag_by_name = {flag.strip("-"): flag for flag in flags}
    near = get_close_matches(typed.strip("-"), flag_by_name, 1, NEAR_FLAG)
    meant = MEANT.get(typed) or (flag_by_name[near[0]] if near else "")
    if meant not in flags:
        return f"unknown option `{typed}`."
    return f"unknown option `{typed}`: did you mean `{meant}{' ' if value else ''}{value}`?"


def hint_on_magic(message: str, shown_names: Iterable[str]) -> str:
    """Return a hint on a magic that IPython has not found; "" if there is nothing to add.

    `message` is IPython's error, and `shown_names` has the names of all magics.
    """
    match = _NOT_FOUND.match(message)
    if match is None or " exists, " in message:  # IPython's message has a hint already
        return ""
    if answer := OTHER_TOOLS_MAGICS.get(match[2]):
        return f"In nbdist {answer}."
    shown_by_name = {name.lstrip("%"): name for name in shown_names}
    near = get_close_matches(match[2], shown_by_name, 1, NEAR_MAGIC)
    return f"Did you mean `{shown_by_name[near[0]]}`?" if near else ""


# --- settings ---------------------------------------------------------------------------------


class NbDist(Configurable):
    """Settings of nbdist in this notebook."""

    display = Enum(
        ["auto", "panel", "plain"],
        help="How cells show their output: a panel that is redrawn, or plain lines as they come."
        " auto: a panel in a notebook, plain lines in a terminal. NBDIST_DISPLAY sets it too.",
    ).tag(config=True)

    seconds = Enum(
        ["page", "all", "none"],
        help="Where a finished cell's panel says how long it took. page: on the page, not in its"
        " text/plain, so that outputs that are the same stay the same in a diff. none: nowhere,"
        " and the panel is drawn once, at the end, which nbval compares. NBDIST_SECONDS sets it"
        " too.",
    ).tag(config=True)

    layout = Enum(
        ["merged", "tabs"],
        help="How a finished cell's panel shows several ranks. merged: equal output once. tabs: a"
        " row of ranks, of which a click shows one with all that it has printed, in order."
        " NBDIST_LAYOUT sets it too.",
    ).tag(config=True)

    prestart = Bool(
        help="Import torch in the background as soon as the extension is loaded, so that the"
        " first cell starts at once. NBDIST_PRESTART=0 turns it off."
    ).tag(config=True)

    @default("display")
    def _display_from_environment(self) -> str:
        chosen = os.environ.get("NBDIST_DISPLAY", "auto")
        return chosen if chosen in ("panel", "plain") else "auto"

    @default("seconds")
    def _seconds_from_environment(self) -> str:
        chosen = os.environ.get("NBDIST_SECONDS", "page")
        return chosen if chosen in ("all", "none") else "page"

    @default("layout")
    def _layout_from_environment(self) -> str:
        chosen = os.environ.get("NBDIST_LAYOUT", "merged")
        return chosen if chosen == "tabs" else "merged"

    @default("prestart")
    def _prestart_from_environment(self) -> bool:
        return os.environ.get("NBDIST_PRESTART", "1") != "0"
