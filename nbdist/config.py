"""What a world is asked to be: each option once, with its flag, its help and its check.

`World(...)` takes the fields as arguments, the magics have them as flags, and
`nbdist.world.spec` works out of them what agents and workers get.  Pure; runs in the notebook.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from inspect import Signature
from typing import Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar, Unpack, get_args

from nbdist.errors import UsageError
from nbdist.topology import parse_backend, parse_layout, parse_workers

P = ParamSpec("P")
S = TypeVar("S")

DEFAULT_POOL = "default"
"""The pool of a world that names none; torchrun's name for the role of such workers."""

OnFailure = Literal["heal", "restart-all", "stop"]
"""What a death leads to: the dead replaced, all started anew (torchrun's way), or all ended."""

HANG_TIMEOUT = 4.0
"""Seconds into a cell whose ranks are all at work; what is said then is said within 5 s."""

CONTROL_TIMEOUT = 4.5
"""Seconds from Stop until control is given back, though ranks may still be leaving: with what
else there is to do it is 5 s at most.  Their agent goes on with them meanwhile."""

_NAME_LIMIT = 200
_PART_LIMIT = 100

SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
"""In the names of variables whose values are not shown."""


# --- reading values: from a flag's text, or an argument of Python -----------------------------


def whole_number(
    flag: str, what: str, least: int = 1, most: int = 999_999_999
) -> Callable[[Any], int]:
    """Make a reader of a flag's whole numbers, also for argparse's `type`.

    It raises UsageError with what the number is: `--tail x`: a number, such as `--tail 1`.
    """

    def read(value: object) -> int:
        text = unquoted(str(value))
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
        if not is_number or not least <= int(text) <= most:
            raise UsageError(f"`{flag} {text}`: {what}.")
        return int(text)

    return read


def unquoted(text: str) -> str:
    """Strip the quotes around a text, which IPython leaves there."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if is_quoted else text


read_restarts = whole_number(
    "--max-restarts", "a number of attempts after the first, such as 3, or 0", least=0
)


def number_of_seconds(flag: str) -> Callable[[Any], float]:
    """Make a reader of a flag's seconds, also for argparse's `type`; it raises UsageError."""

    def read(value: Any) -> float:
        text = unquoted(value) if isinstance(value, str) else value
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise UsageError(f"`{flag} {text}`: a number of seconds, such as 30 or 0.5.")
        return seconds

    return read


def read_policy(text: str) -> OnFailure:
    """Read the value of `--on-failure`."""
    for policy in get_args(OnFailure):
        if text == policy:
            return policy  # type: ignore[no-any-return]
    raise UsageError(f"`--on-failure {text}`: there are heal (the default), restart-all and stop.")


def read_name(name: str) -> str:
    """Read the value of `--name`, which can be a folder below the log folder, and stays there."""
    parts: Sequence[str] = name.split("/")
    bad = any(part in ("", ".", "..") or len(part) > _PART_LIMIT for part in parts)
    if bad or not name.isprintable() or len(name) > _NAME_LIMIT:
        raise UsageError(
            f"`--name {name}`: it names a folder below the log folder, such as `exp` or `exp/run1`."
        )
    return name


def read_wrap(text: str) -> str:
    """Read the value of `--wrap`, which a shell could read."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"`--wrap {text}`: {str(error).lower()}.") from None
    if not words:
        raise UsageError('`--wrap ""`: a command and its arguments, such as `--wrap "nice -n 5"`.')
    return text


def read_environ(given: Mapping[str, object] | Iterable[str] | None) -> dict[str, str]:
    """Read the variables of `env`, or of all `--env`, each `NAME=VALUE`."""
    if given is None or isinstance(given, Mapping):
        return {str(name): str(value) for name, value in (given or {}).items()}
    found = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier() or not name.isascii():
            raise UsageError(f"`--env {name}`: a name and its value, such as `--env SEED=1`.")
        found[name] = unquoted(value)
    return found


# --- the options ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """How a field of `WorldConfig` is typed at a magic, and what it is.

    `flag` is "" for what only Python can say; `read` makes the field's value of text, or of
    what Python gives, and raises UsageError where it cannot be.  What is `at_once` a running
    world can be given too; all else only new workers have.
    """

    flag: str
    help: str
    read: Callable[[Any], Any] = str
    metavar: str = ""
    at_once: bool = False

    @property
    def usage(self) -> str:
        """The flag, and what stands after it."""
        return f"{self.flag} {self.metavar}".rstrip()

    def again(self, value: Any) -> str:
        """Write the option as it would be typed: `--name run`; of an environment no secrets."""
        if isinstance(value, bool):
            return self.flag
        if isinstance(value, Mapping):
            return " ".join(f"{self.flag} {name}={text}" for name, text in shown(value).items())
        text = str(value)
        return f'{self.flag} "{text}"' if " " in text else f"{self.flag} {text}"


def shown(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without what is secret."""
    return {name: "..." if SECRET.search(name) else text for name, text in environ.items()}


def _as(flag: str, text: str, read: Callable[[Any], Any] = str, **more: Any) -> dict[str, Option]:
    """Make the metadata of a field."""
    return {"option": Option(flag, text, read, **more)}


@dataclass(frozen=True)
class Patience:
    """How long a cell's ranks may wait for one another, and what happens then.

    After `hang_timeout` seconds a running cell says who waits for whom; with `aborts`, collectives
    that can never end are aborted, else that is for Stop.  After `timeout` seconds it is stopped,
    None for never.  `control_timeout` seconds after Stop control is given back, though ranks may
    still be leaving; None where nobody waits for it.
    """

    hang_timeout: float = HANG_TIMEOUT
    aborts: bool = True
    timeout: float | None = None
    control_timeout: float | None = CONTROL_TIMEOUT


@dataclass(frozen=True, repr=False)
class WorldConfig:
    """What a world was asked to be; its fields are the arguments of `World`.

    Raises UsageError for what can never be; what cannot be here and now `make_spec` finds.
    """

    # fmt: off
    n: int | str = field(default="auto", metadata=_as(
        "-n", "how many workers: a number, auto (one per GPU; without any one per core, at most 4),"
        " gpu or cpu (one per core)", lambda value: parse_workers(str(value)), metavar="N",
    ))
    _: KW_ONLY
    layout: str | None = field(default=None, metadata=_as(
        "-j", "nodes and workers on each instead of -n: 2x4; 4 is one node. On one machine the"
        " nodes are simulated", lambda text: str(parse_layout(text)), metavar="NODESxN",
    ))
    backend: str | None = field(default=None, metadata=_as(
        "--backend", "gloo, nccl, cpu:gloo,cuda:nccl, or none for no group; by default nccl for"
        " GPUs beside gloo for the CPU, or gloo alone", parse_backend, metavar="BACKEND",
    ))
    gpus: str | None = field(default=None, metadata=_as(
        "--gpus", "the GPUs to use, as torch counts them: 0,1,3", metavar="GPUS",
    ))
    share_gpus: bool = field(default=False, metadata=_as(
        "--share-gpus", "let several ranks of nccl have one GPU: to practise and debug on one card,"
        " for correctness and not for speed", bool,
    ))
    name: str | None = field(default=None, metadata=_as(
        "--name", "shown in %dist_status, and the log folder's name: run, or exp/run", read_name,
        metavar="NAME",
    ))
    pool: str = field(default=DEFAULT_POOL, metadata=_as(
        "--pool", "the workers of this name, which have a group of their own beside others",
        metavar="NAME",
    ))
    env: Mapping[str, str] = field(default_factory=dict, metadata=_as(
        "--env", "a variable of the workers' environment besides the notebook's; any number of"
        " them", read_environ, metavar="K=V",
    ))
    env_file: str | None = field(default=None, metadata=_as(
        "--env-file", "a .env file with such variables: parsed, not sourced", metavar="FILE",
    ))
    debug: bool = field(default=False, metadata=_as(
        "--debug", "CUDA_LAUNCH_BLOCKING, TORCH_DISTRIBUTED_DEBUG=DETAIL and the like: errors at"
        " their place, mismatched collectives named, C++ stacks; slow", bool,
    ))
    python: str | None = field(default=None, metadata=_as(
        "--python", "the interpreter of the workers, which has torch and nbdist; by default"
        " $PYTHON_EXEC, else the notebook's", metavar="PATH",
    ))
    wrap: str | None = field(default=None, metadata=_as(
        "--wrap", "what stands before each worker's command: 'nice -n 5', 'apptainer exec img'",
        read_wrap, metavar="COMMAND",
    ))
    cpus: int | None = field(default=None, metadata=_as(
        "--cpus", "cores for each worker: as many threads, unless OMP_NUM_THREADS is set",
        whole_number("--cpus", "a number of cores for each worker, such as 4", most=9999),
        metavar="N",
    ))
    launcher: str = field(default="local", metadata=_as(
        "--launcher", "how agents are started, a name of the entry points nbdist.launchers",
        metavar="NAME",
    ))
    fork: bool = field(default=True, metadata=_as(
        "--no-fork", "start each worker as a new interpreter instead of forking it from one that"
        " has imported torch", bool,
    ))
    on_failure: OnFailure = field(default="heal", metadata=_as(
        "--on-failure", "what the death of a worker leads to: heal replaces it, and the others"
        " keep their variables (the default), restart-all starts all anew, stop ends all",
        read_policy, metavar="WHAT", at_once=True,
    ))
    hang_timeout: float = field(default=HANG_TIMEOUT, metadata=_as(
        "--hang-timeout", "seconds after which a running cell says which ranks wait for which (4)",
        number_of_seconds("--hang-timeout"), metavar="SECONDS", at_once=True,
    ))
    free: bool = field(default=True, metadata=_as(
        "--no-free", "only say so: ranks that wait for what can never come stay as they are until"
        " Stop", bool, at_once=True,
    ))
    log_dir: str | None = field(default=None, metadata=_as(
        "", "where log files go, empty for none; by default $NBDIST_LOG_DIR, else"
        " ~/.local/state/nbdist",
    ))
    show: bool = field(default=True, metadata=_as(
        "", "write what ranks say in execute and run to stdout, a line at a time with its ranks:"
        " [0-3] epoch 1", bool, at_once=True,
    ))
    # fmt: on

    def __post_init__(self) -> None:
        for each in fields(self):
            given = getattr(self, each.name)
            if given is not each.default:
                object.__setattr__(self, each.name, OPTIONS[each.name].read(given))
        if self.layout and self.n != "auto":
            size = parse_layout(self.layout).world_size
            raise UsageError(
                f"`-n {self.n} -j {self.layout}`: one of both. `-j {self.layout}` is nodes and "
                f"workers on each, `-n {size}` as many workers on one node."
            )

    def __repr__(self) -> str:
        usual = WorldConfig().__dict__
        said = {name: value for name, value in vars(self).items() if value != usual[name]}
        if self.env:
            said["env"] = shown(self.env)
        return f"WorldConfig({', '.join(f'{name}={value!r}' for name, value in said.items())})"

    @property
    def other_pool(self) -> str:
        """The pool's name, to be said where it is not the default one; else ""."""
        return "" if self.pool == DEFAULT_POOL else self.pool

    @property
    def patience(self) -> Patience:
        """What holds for its cells."""
        return Patience(self.hang_timeout, self.free)

    def but(self, n: int | str | None = None, **changes: Unpack[Changes]) -> WorldConfig:
        """Make another that differs in these; of `n` and `layout` the newer holds, `env` grows."""
        new: dict[str, Any] = {**changes} if n is None else {**changes, "n": n}
        if "layout" in new or "n" in new:
            new = {"n": "auto", "layout": None, **new}
        if "env" in new:
            new["env"] = {**self.env, **read_environ(new["env"])}
        return replace(self, **new)


class Changes(TypedDict, total=False):
    """What a world can be given anew besides its size: all other fields of `WorldConfig`."""

    layout: str | None
    backend: str | None
    gpus: str | None
    share_gpus: bool
    name: str | None
    pool: str
    env: Mapping[str, str]
    env_file: str | None
    debug: bool
    python: str | None
    wrap: str | None
    cpus: int | None
    launcher: str
    fork: bool
    on_failure: OnFailure
    hang_timeout: float
    free: bool
    log_dir: str | None
    show: bool


OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(WorldConfig)}
"""By the name of the field, which is that of the argument of `World`."""


def takes_options(
    config: Callable[P, WorldConfig],
) -> Callable[[Callable[[S, WorldConfig], None]], Callable[Concatenate[S, P], None]]:
    """Have a method that wants a `WorldConfig` take what that is made of.

    So type checkers, `help()` and editors show the fields as the method's parameters.
    """

    def decorate(method: Callable[[S, WorldConfig], None]) -> Callable[Concatenate[S, P], None]:
        def taking(self: S, /, *args: P.args, **options: P.kwargs) -> None:
            method(self, config(*args, **options))

        parameters = [*Signature.from_callable(method).parameters.values()][:1]
        parameters += Signature.from_callable(config, eval_str=True).parameters.values()
        taking.__signature__ = Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        taking.__name__, taking.__qualname__ = method.__name__, method.__qualname__
        taking.__doc__ = f"{method.__doc__}\n{_arguments()}"
        return taking

    return decorate


def _arguments() -> str:
    """Write the fields as a docstring has arguments."""
    found = {name: option.help for name, option in OPTIONS.items()}
    for name, option in OPTIONS.items():
        if option.flag.startswith("--no-"):
            found[name] = f"False to {option.help}"
    return "\n".join(f"    {name}: {text}." for name, text in found.items())
