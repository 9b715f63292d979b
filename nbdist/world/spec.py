"""Makes the specification of a world's workers, from its options and the notebook's surroundings.

Runs in the notebook's process; `Engine` calls `make_spec` before a start.  Later changes of the
notebook's folder, `sys.path` and environment are sent with tasks (`NotebookSurroundings`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import wraps
from inspect import Signature
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from nbdist import topology
from nbdist.config import DEFAULT_POOL, LOCAL, OPTIONS, WorldConfig, renamed_options
from nbdist.errors import BadTopology, UnknownArgument, UsageError
from nbdist.system import folders
from nbdist.system.limits import memory_limits
from nbdist.topology import Position, place_ranks
from nbdist.wire.spec import (
    DEBUG_VARIABLES,
    NBDIST_DECIDES,
    NBDIST_SETS,
    READ_AT_START,
    WorldSpec,
    check_nvls,
    versions_here,
)
from nbdist.wire.work import Surroundings
from nbdist.words import count, one_line, size_text

_ENV_LINE = re.compile(
    r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*="
    r"""(?:\s*(?:'([^']*)'|"((?:[^"\\]|\\.)*)")\s*(?:#.*)?|(?!\s*['"])(.*))"""
)
_ENV_COMMENT = re.compile(r"\s#.*|^#.*")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def read_env_file(path: str) -> dict[str, str]:
    """Return the variables that a `.env` file sets; `$NAME` and commands are not expanded.

    Raises UsageError if the file cannot be read or has a line that is not valid.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text in UTF-8"
        raise UsageError(f"`--env-file {path}`: {why}.") from None
    variables = {}
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            variables.update(parse_line(line.strip()))
        except ValueError as why:
            shown = one_line(line, 40).partition("=")[0]  # the value may be a secret
            raise UsageError(f"{path}, line {number} (`{shown}`): {why}.") from None
    return variables


def parse_line(line: str) -> dict[str, str]:
    """Return the variable that a line of a `.env` file sets, as a dict with its name and value.

    `line` has no outer blanks.  The result is empty for a comment or an empty line.  Raises
    ValueError if the line is not valid.
    """
    if not line or line.startswith("#"):
        return {}
    if not (match := _ENV_LINE.fullmatch(line)):
        forms = "NAME=value, NAME='value', export NAME=value, or # comments"
        raise ValueError(f"lines are {forms}, with each quote closed")
    name, single, double, plain = match.groups()
    if double is not None:
        return {name: _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), double)}
    return {name: _ENV_COMMENT.sub("", plain).strip() if single is None else single}


DEFAULT_LOG_LIMIT = "200M"
LEAST_MEMORY = 20 << 20  # bytes; any worker needs more: about 45 MB that it shares with no other

_SIZE = re.compile(r"([0-9]{1,9})\s*([MG])(?:i?B)?", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORKERS = re.compile(r"[+-]?[0-9]{1,6}")
_SIZE_FORMS = "Use `%dist_scale 4`, or `+2` and `-1` for more or fewer."
_CONNECTION_FILE = re.compile(r"(-f|--f|--IPKernelApp.connection_file)[ =].*\.json( .*)?")


@dataclass(frozen=True)
class Here:
    """What new workers take over from this process, such as its environment and `sys.path`.

    `prefixes` are the folders of this process's interpreter.  Workers with another interpreter must
    not import packages from these folders.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: str = field(default_factory=folders.current_folder)
    sys_path: tuple[str, ...] = field(default_factory=lambda: (*sys.path,))
    argv: tuple[str, ...] = field(default_factory=lambda: (*sys.argv,))
    python: str = sys.executable
    prefixes: tuple[str, ...] = (sys.prefix, sys.base_prefix)
    cores: int = field(default_factory=topology.usable_cores)


def make_spec(
    config: WorldConfig, run: str = "", here: Here | None = None
) -> tuple[WorldSpec, str]:
    """Return the spec of a world with these options, and a warning for the user or "".

    If the options have no name, the world's name is `run`, or a new name if `run` is "".  `here`
    is by default read from this process.  Raises UsageError if the options are not possible here.
    """
    here, launcher, layout = here or Here(), config.launcher_name, config.shape
    given = given_environ(config)
    first, is_here = given.get("PYTHONPATH", ""), launcher == LOCAL
    if not is_here:  # copy variables, since other machines have another environment
        given = {**copied(config.copy_env or "", here.environ), **given}
    environ = {**here.environ, **given} if is_here else given
    python = find_python(config, environ) or here.python if is_here else ""
    is_foreign = python != here.python
    is_other = is_here and (is_foreign or bool(config.wrap))
    can_fork = not (is_other or any(map(READ_AT_START.fullmatch, given)))
    log_dir = default_log_dir(is_here=is_here) if config.log_dir is None else config.log_dir
    of = "" if config.pool == DEFAULT_POOL else f"-{config.pool}"
    usual = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{of}"
    pairs = (" ".join(here.argv[at : at + 2]) for at in range(1, len(here.argv)))
    is_kernel = any(map(_CONNECTION_FILE.fullmatch, pairs))  # Jupyter, not the user, wrote `argv`
    config = replace(
        config,
        launcher=launcher,
        name=config.name or run or usual,
        log_dir=log_dir,
        fork=config.fork and can_fork,
        # By default, the interpreter on other machines has the same path as this process's.
        python=config.python if is_here else config.python or sys.executable,
    )
    spec = WorldSpec(
        world_size=config.workers or (layout.world_size if layout else 1),
        backend=None if config.backend == "none" else config.backend or "gloo",
        environ=environ,
        cwd=here.cwd,
        sys_path=path_for(here, first, is_foreign=is_foreign),
        threads=config.cpus or 0,
        python=python,
        log_limit=log_limit(here.environ),
        versions=versions_here() if is_other else {},
        own_path=is_foreign,
        argv=here.argv[:1] if is_kernel else here.argv,
        config=config,
    )
    if is_here:
        if log_dir:
            _check_log_folder(log_dir, spec.name)
        return _on_this_machine(spec, here)
    # The head sets size, slots and backend once machines have come.  Until then assume that they
    # have GPUs.
    backend = config.backend or topology.GPU_BACKEND
    return spec, check_nvls(backend, given, shared=config.share_gpus)


def _check_log_folder(log_dir: str, name: str) -> None:
    """Raise UsageError if another user owns a symbolic link on the path to the log folder."""
    root = Path(log_dir)
    try:
        folders.check_links(root, root / name)
    except folders.Untrusted as problem:
        raise UsageError(
            f"`--name {name}`: {problem}, and log files would be written there. "
            "Choose another name, or another folder (NBDIST_LOG_DIR)."
        ) from None


def _on_this_machine(spec: WorldSpec, here: Here) -> tuple[WorldSpec, str]:
    config = spec.config
    visible = topology.visible_gpus(spec.environ)
    gpus = visible if config.gpus is None else topology.parse_gpus(config.gpus, visible)
    layout = config.shape
    if layout is None:
        workers = topology.parse_workers(str(config.n))
        layout = topology.Layout(1, topology.resolve(workers, len(gpus), here.cores), 1)
    spec = replace(
        spec,
        backend=spec.backend if config.backend else topology.default_backend(len(gpus)),
        gpus=gpus,
        room=(layout.per_node,) * layout.nodes if layout.nodes > 1 else (),
    )
    return scaled(spec, config.workers or layout.world_size, here.cores)


def scaled(
    spec: WorldSpec, size: int, cores: int | None = None, keep: Sequence[int] | None = None
) -> tuple[WorldSpec, str]:
    """Return the spec changed to `size` workers, and a warning for the user or "".

    `cores` is by default this machine's number of cores.  If the spec has slots or GPUs, the ranks
    in `keep`, by default all, keep their slots.  For other machines no slots are set, because the
    head sets them.  Raises UsageError if this number of workers is not possible.
    """
    config = spec.config
    if config.launcher_name != LOCAL:
        config.with_changes(n=size)
        return replace(spec, world_size=size), ""
    for memory in memory_limits():
        if size * LEAST_MEMORY > memory.limit:  # such a large number must be a typo
            why = f"{size:,} workers take more than the {size_text(memory.limit)} of {memory.where}"
            raise BadTopology("-n", str(size), why, topology.WORKERS_FORMS)
    cores = topology.usable_cores() if cores is None else cores
    devices = spec.environ.get("CUDA_VISIBLE_DEVICES")
    warning = topology.check_start(
        size, len(spec.gpus), cores, spec.backend or "none", devices, share_gpus=config.share_gpus
    )
    shared = config.share_gpus or any(map(topology.is_slice, spec.gpus))
    more = check_nvls(spec.backend or "none", spec.environ, shared=shared)
    # `OMP_NUM_THREADS=4,2` is for nested regions; torch uses the outer number.
    omp_threads = spec.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    share = config.cpus or max(1, cores // size)
    threads = max(1, int(omp_threads)) if omp_threads.isdigit() else share
    room = spec.room
    while room and sum(room) < size:  # add simulated nodes until all workers have room
        room = (*room, room[-1])
    slots = spec.slots
    # With GPUs each rank that stays keeps its GPU, and so its LOCAL_RANK.
    if keep is not None and [*keep] != [*range(len(keep))] and (slots or spec.gpus):
        slots = tuple(slots[rank] if slots else Position(0, rank) for rank in keep)
    slots = place_ranks(slots, room, size)
    spec = replace(spec, world_size=size, threads=threads, room=room, slots=slots)
    return spec, " ".join(filter(None, (warning, more)))


def parse_size(n: int | str, size: int) -> int:
    """Return the number of workers that `n`, such as 4 or "+2", means for a world of `size`.

    Raises UsageError if `n` is no number, or if no worker would be left.
    """
    text = str(n).strip()
    if not _WORKERS.fullmatch(text):
        raise UsageError(f"`%dist_scale {text}`: that is not a number of workers. {_SIZE_FORMS}")
    is_relative = isinstance(n, str) and text[0] in "+-"
    workers = int(text) + (size if is_relative else 0)
    if workers < 1:
        present = f" There are {size}." if is_relative else ""
        raise UsageError(
            f"`%dist_scale {text}`: it takes at least one worker.{present} "
            "`%dist_shutdown` ends them all."
        )
    return workers


def given_environ(config: WorldConfig) -> dict[str, str]:
    """Return the environment variables that `--env`, `--env-file` and `--debug` set.

    Raises UsageError for a bad file, for a variable of `NBDIST_DECIDES`, and for a name or value
    that cannot be in an environment.
    """
    file = config.env_file
    in_file = read_env_file(file) if file else {}
    for option, environ in ((f"--env-file {file}", in_file), ("--env", config.env)):
        for name, value in environ.items():
            if name in NBDIST_DECIDES:
                why = f"{name} is set by nbdist and cannot be changed"
                raise UsageError(f"`{option}`: {why}. Use `-n`, `-j`, `--pool` or `--name`.")
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise UsageError(f"`{option}`: {name!r} and its value cannot be in an environment.")
    return {**(DEBUG_VARIABLES if config.debug else {}), **in_file, **config.env}


def copied(patterns: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` whose names match `patterns`, such as "HF_*,WANDB_*".

    Variables of `NBDIST_DECIDES` are left out.
    """
    stripped = [pattern.strip() for pattern in patterns.split(",")]
    return {
        name: value
        for name, value in environ.items()
        if name not in NBDIST_DECIDES and any(fnmatchcase(name, each) for each in stripped)
    }


def find_python(config: WorldConfig, environ: Mapping[str, str]) -> str:
    """Return the path of the interpreter that `--python` or PYTHON_EXEC names; "" if neither does.

    Raises UsageError if the interpreter does not exist or cannot be executed.
    """
    text = config.python or environ.get("PYTHON_EXEC")
    if not text:
        return ""
    path = shutil.which(os.path.expanduser(text), path=environ.get("PATH"))
    if path is None:
        exists = Path(text).expanduser().exists()
        why = "it cannot be executed" if exists else "this program does not exist"
        raise UsageError(
            f"`--python {text}`: {why}. The path of an interpreter that has torch and nbdist, "
            "such as `/path/to/venv/bin/python`; PYTHON_EXEC in the environment sets it too."
        )
    # Links are not resolved: a virtual environment's interpreter is mostly a link to another one,
    # which does not use that environment.
    return os.path.abspath(path)


def default_log_dir(*, is_here: bool = True) -> str:
    """Return the log folder: NBDIST_LOG_DIR (empty for no log files), or the user's state folder.

    For workers on other machines (`is_here` is False) the state folder begins with `~`, which each
    machine expands itself, unless XDG_STATE_HOME is set on this machine.
    """
    if "NBDIST_LOG_DIR" in os.environ:
        return os.environ["NBDIST_LOG_DIR"]
    if is_here or os.environ.get("XDG_STATE_HOME"):
        return folders.state_folder()
    return "~/.local/state/nbdist"


def log_limit(environ: Mapping[str, str]) -> int:
    """Return the most bytes of a stream in a rank's log (NBDIST_LOG_LIMIT); 0 for no limit.

    Raises UsageError if the variable is not valid.
    """
    text = environ.get("NBDIST_LOG_LIMIT", "").strip() or DEFAULT_LOG_LIMIT
    match = _SIZE.fullmatch(text)
    if text != "0" and (not match or not int(match[1])):
        raise UsageError(
            f"`NBDIST_LOG_LIMIT={text}`: how much a rank's log keeps of each stream, such as "
            f"{DEFAULT_LOG_LIMIT}, 2G, or 0 for all."
        )
    return int(match[1]) << (30 if match[2] in "gG" else 20) if match else 0


def path_for(here: Here, given: str, *, is_foreign: bool) -> tuple[str, ...]:
    """Return the workers' `sys.path`: the entries of `given`, and then those of the notebook.

    `given` is the user's PYTHONPATH for the workers.  If `is_foreign` is True, the workers have
    another interpreter with its own packages, so the folders of the notebook's interpreter are left
    out.
    """
    first = [entry for entry in given.split(os.pathsep) if entry]
    if not is_foreign:
        return (*first, *here.sys_path)
    roots = tuple(f"{os.path.realpath(root)}/" for root in here.prefixes)
    inside = {each for each in here.sys_path if f"{os.path.realpath(each)}/".startswith(roots)}
    return (*first, *(each for each in here.sys_path if not each or each not in inside))


P = ParamSpec("P")
S = TypeVar("S")


def takes_options(
    method: Callable[Concatenate[S, P], None],
) -> Callable[Concatenate[S, P], None]:
    """Let a method whose arguments are options of a world also take the options' former names.

    The method then raises UnknownArgument for any other name.  The method's signature and docstring
    stay as they are written, because editors read both without running the code.
    """

    @wraps(method)
    def taking(self: S, /, *args: P.args, **options: P.kwargs) -> None:
        if len(args) > 1:  # all options but `n` are keyword arguments
            raise UnknownArgument(f"nbdist.{type(self).__name__}", repr(args[1]))
        named: Any = renamed_options(options)
        if unknown := next((name for name in named if name not in OPTIONS), None):
            raise UnknownArgument(f"nbdist.{type(self).__name__}", unknown, OPTIONS)
        method(self, *args, **named)

    # Without this, `World?` would show the annotations as strings in quotes.
    taking.__signature__ = Signature.from_callable(method, eval_str=True)  # type: ignore[attr-defined]
    return taking


# --- changes after the spec was made ---------------------------------------------------------


MAX_LISTED_VARIABLES = 6  # environment variables that a line names; others are only counted


class NotebookSurroundings:
    """Finds changes of the notebook's folder, `sys.path` and environment after a spec was made."""

    def __init__(self, spec: WorldSpec) -> None:
        self._config, self._spec = spec.config, spec
        self._start = self._last = Here()
        self._last_changes: Mapping[str, str | None] = {}
        self._new = dict[str, bool]()  # changed environment variables; True if ranks get the change
        # Compare at once: an attached world's spec has the folder of an earlier notebook.
        self._here = self._compare()

    def now(self) -> Surroundings | None:
        """Return the notebook's changes that ranks have to make too; None if there are none.

        These are changes since the spec was made or the world was attached.  Environment variables
        that the user or nbdist has set for the ranks are left out, and for other machines also
        variables that `--copy-env` does not name.
        """
        last = self._last
        with suppress(FileNotFoundError):  # the folder was removed: keep the last state
            folder, path, environ = os.getcwd(), (*sys.path,), dict(os.environ)
            if (folder, path, environ) != (last.cwd, last.sys_path, last.environ):
                self._last = replace(last, cwd=folder, sys_path=path, environ=environ)
                self._here = self._compare()
        return self._here

    def pop_note(self, cells: Iterable[str]) -> str:
        """Return a line about environment variables that have changed since the last call, or "".

        The line names only variables that occur in the sources `cells`, because imports also set
        variables that do not interest the user.
        """
        new, self._new = self._new, {}
        named = {*re.findall(r"\w+", " ".join(cells))} if new else set[str]()
        too = [name for name in new if new[name] and name in named]
        restart = [name for name in new if not new[name] and name in named]
        texts = [f"{_list(too)} changed in the notebook, and on the ranks too"] if too else []
        if restart:
            option = "" if self._config.launcher_name == LOCAL else f" --env {min(restart)}=..."
            subject = f"{_list(restart)} changed in the notebook after the workers started"
            texts.append(f"{subject}: `%dist_restart{option}` gives it to them")
        return " · ".join(texts)

    def _compare(self) -> Surroundings | None:
        now, path = self._last, None
        given: Mapping[str, str] = self._config.env
        with suppress(UsageError):  # `--env-file` was removed or is not valid now
            given = given_environ(self._config)
        if now.sys_path != self._start.sys_path:
            path = path_for(now, given.get("PYTHONPATH", ""), is_foreign=self._spec.own_path)
        before, fixed_names = self._start.environ, {*NBDIST_SETS, *given}
        names = {n for n in {**before, **now.environ} if not n.startswith("NBDIST_")}
        changes = {n: v for n in names if before.get(n) != (v := now.environ.get(n))}
        followed = {
            name: "" for name in {**self._last_changes, **changes} if name not in fixed_names
        }
        if self._config.launcher_name != LOCAL:  # values of this machine may be wrong on others
            followed = copied(self._config.copy_env or "", followed)
        sent = {name: value for name, value in changes.items() if name in followed}
        self._new |= self._changes_since_last(changes, followed)
        self._last_changes = changes
        if now.cwd == self._spec.cwd and path is None and not sent:
            return None
        return Surroundings(now.cwd, self._spec.cwd, path, sent)

    def _changes_since_last(
        self, changes: Mapping[str, str | None], followed: Collection[str]
    ) -> dict[str, bool]:
        """Return the names of environment variables that have changed since the last comparison.

        A value of the dict is True if running ranks get the change of the variable.  `changes` has
        all changes since the start, and `followed` the names that ranks follow.  Variables of
        `NBDIST_DECIDES`, such as RANK, are left out.
        """
        last_changes, absent = self._last_changes, object()
        names = {**last_changes, **changes}.keys() - NBDIST_DECIDES
        new = [
            name for name in names if last_changes.get(name, absent) != changes.get(name, absent)
        ]
        return {n: n in followed and not READ_AT_START.fullmatch(n) for n in new}


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in sorted(names)[:MAX_LISTED_VARIABLES])
    more = len(names) - MAX_LISTED_VARIABLES
    title = "environment variable" if len(names) == 1 else "environment variables"
    return f"{title} {shown}" + (f" and {count(more, 'other')}" if more > 0 else "")
