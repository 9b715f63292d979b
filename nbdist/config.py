"""The options of a world, each defined once with its flag, its help and its check.

`World(...)` takes the fields of `WorldConfig` as arguments, and magics take most fields as flags.
The notebook's process, or a script, makes the `WorldConfig`.  `nbdist.world.spec` makes from it
the `WorldSpec` that heads, agents and workers get.  The spec's field `config` is the `WorldConfig`,
in which some options, such as the name, have been filled in.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

from nbdist.errors import UsageError
from nbdist.system.secrets import SECRET
from nbdist.topology import (
    Host,
    Layout,
    WorkerCount,
    parse_backend,
    parse_hosts,
    parse_layout,
    parse_workers,
    read_hosts,
)
from nbdist.words import count

T = TypeVar("T")

DEFAULT_POOL = "default"
"""The pool of a world without `--pool`; the default of torchrun's `--role` is the same word."""

OnFailure = Literal["heal", "restart-all", "stop"]
"""What happens when a worker dies: "heal" restarts that worker, "restart-all" restarts all workers
as torchrun does, and "stop" ends all workers."""

HANG_TIMEOUT, CONTROL_TIMEOUT = 4.0, 4.5
"""Seconds until a running cell shows which ranks wait for which, and seconds from Stop until the
user gets control back although ranks still run.  Users should wait at most 5 s for each: the
remaining 0.5 to 1 s is left for other delays, such as drawing the panel."""


# --- parsers of options, which read a flag's text or an argument in Python ----------------------

_NAME_LIMIT, _PART_LIMIT = 200, 100
_BYTE_SIZE = re.compile(r"([0-9]{1,6})([MGT])(?:i?B)?", re.IGNORECASE)
_PATTERN = re.compile(r"[A-Za-z0-9_*?]+")
_LISTEN_ADDRESS = re.compile(r"(\[)?([A-Za-z0-9_:][A-Za-z0-9_.:%-]{0,100})(?(1)\])")
RDZV_BACKENDS, RDZV_HANDLERS = ("c10d", "static", "etcd", "etcd-v2"), "torchrun.handlers"
"""The rendezvous backends of torch, and the entry point group in which packages add others."""
_ENDPOINT = re.compile(r"(?:[A-Za-z0-9_.-]{1,250}|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


def _refusal(flag: str, text: object, what: str) -> UsageError:
    return UsageError(f"`{flag} {text}`: {what}.")


def whole_number(
    flag: str, what: str, minimum: int = 1, maximum: int = 999_999_999
) -> Callable[[Any], int]:
    """Return a function that reads a whole number from `minimum` to `maximum`.

    The function takes a text or an int and returns an int, so argparse can use it as a `type`.  For
    other values it raises UsageError; the message names `flag`, and `what` says what is expected.
    """

    def read(value: object) -> int:
        text = unquoted(str(value))
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(maximum))
        if not is_number or not minimum <= int(text) <= maximum:
            raise _refusal(flag, text, what)
        return int(text)

    return read


def unquoted(text: str) -> str:
    """Return the text without quotes around it, which IPython leaves in a magic's arguments."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if is_quoted else text


read_restarts = whole_number(
    "--max-restarts", "a number of attempts after the first, such as 3, or 0", minimum=0
)


def number_of_seconds(flag: str) -> Callable[[Any], float]:
    """Return a function that reads a number of seconds, and that argparse can use as a `type`.

    The function raises UsageError unless the number is above 0 and finite.
    """

    def read(value: Any) -> float:
        text = unquoted(value) if isinstance(value, str) else value
        try:
            seconds = float(text)
        except (TypeError, ValueError):
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise _refusal(flag, text, "a number of seconds, such as 30 or 0.5")
        return seconds

    return read


def _read_name(name: str) -> str:
    """Return a world's name; raise UsageError if the name cannot be a path below the log folder."""
    bad = any(part in ("", ".", "..") or len(part) > _PART_LIMIT for part in name.split("/"))
    if bad or not name.isprintable() or len(name) > _NAME_LIMIT:
        what = "it names a folder below the log folder, such as `exp` or `exp/run1`"
        raise _refusal("--name", name, what)
    return name


_PAIRS = re.compile(r",(?=[A-Za-z_]\w*=)")


def _split_pairs(text: str) -> list[str]:
    """Return the assignments in a text such as `A=1,B=2`, which torchx also accepts.

    The text stays whole if any item between its commas is not `NAME=VALUE` with a single `=`: the
    commas then belong to one value, as in `A=0,1` and `A=b=1,c=2`.
    """
    pairs = _PAIRS.split(text)
    is_all = len(pairs) == text.count(",") + 1
    return pairs if is_all and all(each.count("=") == 1 for each in pairs) else [text]


def read_environ(given: Mapping[str, object] | Iterable[str] | None) -> dict[str, str]:
    """Return environment variables by name, from a mapping or from texts such as `A=1`.

    Raises UsageError for a text without `=`, or if the text before `=` is not a name.
    """
    if given is None or isinstance(given, Mapping):
        return {str(name): str(value) for name, value in (given or {}).items()}
    variables = {}
    for text in itertools.chain.from_iterable(map(_split_pairs, given)):
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier() or not name.isascii():
            raise _refusal("--env", name, "a name and its value, such as `--env SEED=1`")
        variables[name] = unquoted(value)
    return variables


def _shell_parser(flag: str, form: str) -> Callable[[str], str]:
    """Make a function that returns a command line unchanged if `shlex` can split it into words.

    The function raises UsageError for a quote that is not closed, and for a text without words.
    `flag` is the option that the message names, and `form` says what the option expects.
    """

    def read(text: str) -> str:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise _refusal(flag, text, str(error).lower()) from None
        if not words:
            raise _refusal(flag, '""', form)
        return text

    return read


_read_wrap = _shell_parser("--wrap", 'a command and its arguments, such as `--wrap "nice -n 5"`')
_read_salloc = _shell_parser(
    "--salloc", 'options of salloc, such as `--salloc "-p gpu -t 2:00:00"`'
)


def _read_memory(text: object) -> str:
    """Return the value of `--memory` as Slurm writes it: `16G`; raise UsageError for other text."""
    match = _BYTE_SIZE.fullmatch(str(text).replace(" ", ""))
    if not match or not int(match[1]):
        raise _refusal("--memory", text, "memory for each worker, such as 16G or 500M")
    return f"{int(match[1])}{match[2].upper()}"


def _read_patterns(text: str | Iterable[str]) -> str:
    text = text if isinstance(text, str) else ",".join(text)
    patterns = [each.strip() for each in text.split(",")]
    if not all(map(_PATTERN.fullmatch, patterns)):
        what = "names of variables, such as `--copy-env 'HF_*,WANDB_*'`"
        raise _refusal("--copy-env", text, what)
    return ",".join(patterns)


def _read_address(text: str) -> str:
    match = _LISTEN_ADDRESS.fullmatch(text.strip())
    if not match:
        what = "an address of this machine or a network interface, such as 10.0.0.1 or eth0"
        raise _refusal("--address", text, f"{what}; the port is found")
    return match[2]


def _read_rdzv_backend(text: str) -> str:
    if text not in RDZV_BACKENDS:
        names = sorted(entry_points(group=RDZV_HANDLERS).names)
        if text not in names:
            what = f"the known names are {', '.join((*RDZV_BACKENDS, *names))}"
            raise _refusal("--rdzv-backend", text, what)
    return text


def _read_endpoint(text: str) -> str:
    match = _ENDPOINT.fullmatch(text)
    if not match or not 0 < int(match[1]) < 1 << 16:
        raise _refusal("--rdzv-endpoint", text, "HOST:PORT, such as etcd.example.org:2379")
    return text


def _read_policy(text: str) -> OnFailure:
    if text not in get_args(OnFailure):
        raise _refusal("--on-failure", text, "there are heal (the default), restart-all and stop")
    return cast(OnFailure, text)


# --- the options ------------------------------------------------------------------------------

LOCAL = "local"
"""The launcher that starts workers on the notebook's machine."""

ELSEWHERE = ("ssh", "slurm", "join", "ray")
"""nbdist's launchers for other machines; other packages can add launchers."""


class Option(NamedTuple):
    """The flag, help and parser of a field of `WorldConfig`.

    `flag` is "" if the option can be given only in Python.  `read` makes the field's value from a
    text or a Python value, and may raise UsageError.  An option that `is_dynamic` can change while
    the world runs.  `launchers` are the launchers of nbdist that use the option, () for all.
    `metavar` stands for the value in the help.
    """

    flag: str
    help: str
    read: Callable[[Any], Any] = str
    metavar: str = ""
    is_dynamic: bool = False
    launchers: Collection[str] = ()

    def is_for(self, launcher: str) -> bool:
        """Return True if the option may be given together with the launcher of this name.

        With a launcher of another package, all options may be given.
        """
        is_other = launcher not in (LOCAL, *ELSEWHERE)
        return is_other or not self.launchers or launcher in self.launchers

    def as_typed(self, value: Any) -> str:
        """Return the option as users type it: `--name run`; secrets in `--env` become `...`.

        If the value is a bool, the result is the flag alone.
        """
        if isinstance(value, bool):
            return self.flag
        if isinstance(value, Mapping):
            shown = {name: "..." if SECRET.search(name) else text for name, text in value.items()}
            each = (_quoted(f"{name}={text}") for name, text in shown.items())
            return " ".join(f"{self.flag} {text}" for text in each)
        return f"{self.flag} {_quoted(str(value))}"


def _quoted(text: str) -> str:
    """Return the text, in quotes if it has a space, at which a magic would split it."""
    return f'"{text}"' if " " in text else text


def _option(flag: str, text: str, *how: Any, default: Any = None, **more: Any) -> Any:
    """Make a dataclass field with an `Option` in its metadata; `default` is the field's default.

    `text` is the help of the option; `how` and `more` are further arguments of `Option`.
    """
    metadata = {"option": Option(flag, text, *how, **more)}
    if default is dict:  # an environment, whose secrets must not be in a repr
        return field(default_factory=dict, repr=False, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Patience:
    """How long the ranks of a cell may wait for one another, and what happens after that.

    After `hang_timeout` seconds a running cell shows which ranks wait for which.  With `aborts`,
    collectives that can never complete are aborted; without `aborts` the user has to press Stop.
    After `timeout` seconds the cell is stopped; None means never.  `control_timeout` seconds after
    Stop the user gets control back although ranks may still be running; `control_timeout` is None
    for a cell in the background, for which nobody waits.  With `holds_stop` the first Stop
    interrupts no rank: the task must complete on all ranks or on none.
    """

    hang_timeout: float = HANG_TIMEOUT
    aborts: bool = True
    timeout: float | None = None
    control_timeout: float | None = CONTROL_TIMEOUT
    holds_stop: bool = False


@dataclass(frozen=True)
class WorldConfig:
    """The options of a world; the fields of this class are the arguments of `World`.

    Raises UsageError for wrong or contradictory values.  `make_spec` makes further checks that
    depend on the machine, such as whether the machine has enough GPUs.
    """

    # fmt: off
    n: int | str = _option(
        "-n", "how many workers: a number, auto (one per GPU; without any one per core, "
        "at most 4), gpu or cpu (one per core)", lambda value: parse_workers(str(value)), "N",
        default="auto")
    _: KW_ONLY
    layout: str | None = _option(
        "-j", "nodes x workers per node: 2x4; 4 is one node; MIN:NODESxN starts with MIN "
        "nodes and adds the rest when they arrive. With -n fewer of the workers are used. On one "
        "machine the nodes are simulated", lambda text: str(parse_layout(text)), "[MIN:]NODESxN")
    backend: str | None = _option(
        "--backend", "gloo, nccl, cpu:gloo,cuda:nccl, or none for no group; by default nccl "
        "for GPUs beside gloo for the CPU, or gloo alone", parse_backend, "BACKEND")
    gpus: str | None = _option(
        "--gpus", "the GPUs to use, as torch counts them: 0,1,3", str, "GPUS")
    share_gpus: bool = _option(
        "--share-gpus", "allow several ranks per GPU (slow; for debugging)", bool, default=False)
    name: str | None = _option(
        "--name", "shown in %dist_status, and the log folder's name: run, or exp/run",
        _read_name, "NAME")
    pool: str = _option(
        "--pool", "use worker pool NAME (separate workers and process group)",
        str, "NAME", default=DEFAULT_POOL)
    env: Mapping[str, str] = _option(
        "--env", "set an environment variable of the workers; can be repeated",
        read_environ, "K=V", default=dict)
    env_file: str | None = _option(
        "--env-file", "a .env file with environment variables: parsed, not sourced", str, "FILE")
    debug: bool = _option(
        "--debug", "slow debug mode: CUDA_LAUNCH_BLOCKING, TORCH_DISTRIBUTED_DEBUG=DETAIL "
        "and C++ stacks; names mismatched collectives", bool, default=False)
    python: str | None = _option(
        "--python", "Python interpreter of the workers, with torch and nbdist; by default "
        "$PYTHON_EXEC or the notebook's", str, "PATH")
    wrap: str | None = _option(
        "--wrap", "command prefix for each worker: 'nice -n 5', 'apptainer exec img'",
        _read_wrap, "COMMAND")
    fork: bool = _option(
        "--no-fork", "start each worker as a new interpreter instead of forking it from one "
        "that has imported torch", bool, default=True)
    cpus: int | None = _option(
        "--cpus", "cores for each worker: as many threads, unless OMP_NUM_THREADS is set",
        whole_number("--cpus", "a number of cores for each worker, such as 4", maximum=9999), "N")
    launcher: str | None = _option(
        "--launcher", "how machines are reached: local, ssh (default with --hosts), slurm "
        "(default with --salloc and in a Slurm allocation), join, ray, or an entry point of "
        "nbdist.launchers", str, "NAME")
    hosts: str | None = _option(
        "--hosts", "machines reached by ssh, and the number of workers on each: a:4,user@b:2",
        read_hosts, "HOSTS", launchers=("ssh",))
    salloc: str | None = _option(
        "--salloc", "options of Slurm's salloc, to request an allocation: '-p gpu "
        "--gpus-per-node=4'", _read_salloc, "OPTIONS", launchers=("slurm",))
    memory: str | None = _option(
        "--memory", "memory per worker to request from Slurm or Ray: 16G",
        _read_memory, "SIZE", launchers=("slurm", "ray"))
    copy_env: str | None = _option(
        "--copy-env", "environment variables of the notebook to copy to other machines: "
        "'HF_*,WANDB_*'", _read_patterns, "NAMES", launchers=ELSEWHERE)
    address: str | None = _option(
        "--address", "address or network interface of this machine for the other machines",
        _read_address, "ADDRESS", launchers=ELSEWHERE)
    link_timeout: int | None = _option(
        "--link-timeout",
        "seconds without a sign of life after which another machine counts as lost (10)",
        whole_number("--link-timeout", "a number of seconds from 2 on, such as 30", 2, 9999),
        "SECONDS", launchers=ELSEWHERE)
    detach: bool = _option(
        "--detach", "keep the workers when the notebook's kernel ends; %dist_attach finds "
        "them", bool, is_dynamic=True, default=False)
    sync_code: bool = _option(
        "--sync-code", "copy the notebook's folder to machines that do not have it, and "
        "keep it up to date", bool, default=False)
    rdzv_backend: str | None = _option(
        "--rdzv-backend", "torch's rendezvous backend: c10d, static, etcd, etcd-v2",
        _read_rdzv_backend, "NAME", launchers=ELSEWHERE)
    rdzv_endpoint: str | None = _option(
        "--rdzv-endpoint", "address of the rendezvous backend: HOST:PORT",
        _read_endpoint, "ENDPOINT", launchers=ELSEWHERE)
    on_failure: OnFailure = _option(  # noqa: RUF009 (it makes a field)
        "--on-failure", "what to do when a worker dies: heal (default) restarts it and "
        "the others keep their variables, restart-all restarts all, stop ends all",
        _read_policy, "WHAT", is_dynamic=True, default="heal")
    hang_timeout: float = _option(
        "--hang-timeout",
        "seconds until a running cell shows which ranks wait for which (4)",
        number_of_seconds("--hang-timeout"), "SECONDS", is_dynamic=True, default=HANG_TIMEOUT)
    release: bool = _option(
        "--no-release", "report deadlocked ranks but do not release them", bool, is_dynamic=True,
        default=True)
    log_dir: str | None = _option(
        "", "where log files go, empty for none; by default $NBDIST_LOG_DIR, else "
        "~/.local/state/nbdist")
    show: bool = _option(
        "", "print the output of ranks in execute, run and run_script, each line with its ranks: "
        "[0-3] epoch 1", bool, is_dynamic=True, default=True)
    # fmt: on

    def __post_init__(self) -> None:
        for each in fields(self):
            given = getattr(self, each.name)
            if given is not each.default:
                object.__setattr__(self, each.name, _read_value(each.name, given))
        size = self.shape.world_size if self.shape and self.n != "auto" else None
        if size and (not isinstance(self.n, int) or self.n >= size):
            raise UsageError(
                f"`-n {self.n} -j {self.layout}`: `-j {self.layout}` is nodes x workers per "
                f"node, {size} in total; `-n` with it may only use fewer of them."
            )
        self._check_machines()

    def _check_machines(self) -> None:
        """Raise UsageError if options do not fit the launcher or one another."""
        launcher, values = self.launcher_name, vars(self)
        for name, option in OPTIONS.items():
            if values[name] and not option.is_for(launcher):
                typed = option.as_typed(values[name])
                by = " or ".join(f"`--launcher {each}`" for each in option.launchers)
                raise UsageError(f"`{typed}`: it is for {by}, and not for `--launcher {launcher}`.")
        if launcher == "ssh" and not self.hosts:
            raise UsageError("`--launcher ssh`: on which machines? Such as `--hosts a:4,b:4`.")
        rdzv = [name for name in ("rdzv_backend", "rdzv_endpoint") if values[name]]
        if len(rdzv) == 1:
            both = "it takes both, `--rdzv-backend etcd-v2 --rdzv-endpoint HOST:2379`"
            raise UsageError(f"`{OPTIONS[rdzv[0]].as_typed(values[rdzv[0]])}`: {both}.")
        if self.hosts:
            self._check_room()

    def _check_room(self) -> None:
        """Raise UsageError if `--hosts` has too few hosts or slots for the nodes and workers."""
        hosts, layout = self.named_hosts, self.shape
        typed = f"`{f'-j {layout}' if layout else f'-n {self.n}'} --hosts {self.hosts}`"
        slots = [host.slots for host in hosts]
        room = None if None in slots else sum(filter(None, slots))
        if self.workers and room is not None and room < self.workers:
            raise UsageError(f"{typed}: the hosts have room for {count(room, 'worker')}.")
        if layout is None:
            return
        least, each = layout.least, layout.per_node
        if len(hosts) < least:
            raise UsageError(f"{typed}: {count(least, 'node')}, but {count(len(hosts), 'host')}.")
        small = [host for host in hosts if host.slots is not None and host.slots < each]
        if len(hosts) - len(small) < least:
            raise UsageError(f"{typed}: {small[0]} has no room for {count(each, 'worker')}.")

    @property
    def shape(self) -> Layout | None:
        """The parsed `layout`: nodes and workers per node; None if no layout is given."""
        return parse_layout(self.layout) if self.layout else None

    @property
    def launcher_name(self) -> str:
        """The launcher that the user named; without a name, the choice of `launcher_for`."""
        return self.launcher or launcher_for(vars(self), os.environ)

    @property
    def agent_options(self) -> tuple[object, ...]:
        """The options on which agents depend; if they change, a restart also starts new agents.

        For other machines, these are all options that cannot change while the world runs.  The
        agent of a world on this machine alone serves any options, so only the launcher counts.
        """
        if self.launcher_name == LOCAL:
            return (LOCAL,)
        return tuple(getattr(self, name) for name, each in OPTIONS.items() if not each.is_dynamic)

    @property
    def named_hosts(self) -> tuple[Host, ...]:
        """The machines that `--hosts` lists; () without that option."""
        return parse_hosts(self.hosts) if self.hosts else ()

    @property
    def min_nodes(self) -> int:
        """The fewest nodes that `-j` or `--hosts` allows at the start; 1 without these options."""
        return self.shape.least if self.shape else len(self.named_hosts) or 1

    @property
    def max_nodes(self) -> int | None:
        """The most nodes that can have ranks, by `-j` or `--hosts`; None without these options."""
        return self.shape.nodes if self.shape else len(self.named_hosts) or None

    @property
    def per_node(self) -> WorkerCount:
        """The number of workers on each node; `auto`, `gpu` or `cpu` if each node decides."""
        if self.shape:
            return self.shape.per_node
        return "auto" if isinstance(self.n, int) else parse_workers(self.n)

    @property
    def workers(self) -> int | None:
        """The number of workers that `-n` gives; None if `-n` is `auto`, `gpu` or `cpu`."""
        return self.n if isinstance(self.n, int) else None

    @property
    def wrapper(self) -> tuple[str, ...]:
        """The words of the command that `--wrap` gives; () without that option."""
        return tuple(shlex.split(self.wrap or ""))

    @property
    def patience(self) -> Patience:
        """The limits for a cell of this world: see `--hang-timeout` and `--no-release`."""
        return Patience(self.hang_timeout, self.release)

    def with_changes(self, n: int | str | None = None, **changes: Any) -> WorldConfig:
        """Return a copy with changed options; the variables of `env` are added to the present ones.

        A new `n` replaces the old `layout`, and a new `layout` the old `n`.  `changes` can name
        another launcher, or imply one, as `hosts` implies ssh.  Then the old options that the new
        launcher does not allow become None.
        """
        changes = renamed_options(changes)
        new: dict[str, Any] = {**self._contradicted_options(changes), **changes}
        if n is not None:
            new["n"] = n
        if "layout" in new or "n" in new:
            new = {"n": "auto", "layout": None, **new}
        if "env" in new:
            new["env"] = {**self.env, **read_environ(new["env"])}
        return replace(self, **new)

    def _contradicted_options(self, changes: Mapping[str, object]) -> dict[str, None]:
        """Return the options that become None because `changes` choose a launcher.

        `changes` choose a launcher by its name, or by an option that the present launcher does not
        allow, such as `hosts`.  The result then has the option `launcher` itself, and all options
        that the new launcher does not allow, except those that `changes` set.  If `changes` choose
        no launcher, the result is empty.
        """
        named = {name for name, each in OPTIONS.items() if each.launchers and changes.get(name)}
        is_taken = all(OPTIONS[name].is_for(self.launcher_name) for name in named)
        if "launcher" not in changes and is_taken:
            return {}
        launcher = str(changes.get("launcher") or launcher_for(changes, os.environ))
        old = {name for name, each in OPTIONS.items() if not each.is_for(launcher)}
        return dict.fromkeys({"launcher", *old} - named)

    def with_size(self, size: int) -> WorldConfig:
        """Return a copy for `size` workers; the layout stays if it has room for them."""
        room = self.shape.world_size if self.shape else 0
        if size > room:
            return self.with_changes(n=size)
        return replace(self, n="auto" if size == room else size)


OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(WorldConfig)}
"""The options by the names of their fields, which are the arguments of `World`."""


def _read_value(name: str, given: Any) -> Any:
    """Read the argument that was given for an option; raises UsageError if it is not valid."""
    option = OPTIONS[name]
    try:
        return option.read(given)
    except (AttributeError, TypeError):  # such as `layout=4`: the parsers expect texts
        form, kind = f"{option.flag} {option.metavar}", type(given).__name__
        raise UsageError(f"`{name}=`: a text as in `{form}` is expected, not {kind}.") from None


OLD_NAMES = {"free": "release"}
"""Former names of arguments, which version 0.2 will refuse, and the present names."""


def renamed_options(options: Mapping[str, T]) -> dict[str, T]:
    """Return the options by their present names; warn of former names."""
    for name in OLD_NAMES.keys() & options.keys():
        warnings.warn(f"`{name}=` is now `{OLD_NAMES[name]}=`", FutureWarning, stacklevel=3)
    return {OLD_NAMES.get(name, name): value for name, value in options.items()}


def launcher_for(options: Mapping[str, object], environ: Mapping[str, str]) -> str:
    """Return the launcher: ssh with `--hosts`, slurm with `--salloc` or in a Slurm job, else local.

    A job of Slurm does not count if this machine is the job's only node.
    """
    if options.get("hosts"):
        return "ssh"
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")
    # Slurm sets SLURMD_NODENAME only on a job's nodes; the shell of `salloc` may run elsewhere.
    is_this_machine = nodes == "1" and "SLURMD_NODENAME" in environ
    is_in_job = environ.get("SLURM_JOB_ID") and not is_this_machine
    return "slurm" if options.get("salloc") or is_in_job else LOCAL
