"""What all workers of a world have in common, worked out from its options and the notebook.

A task brings what has changed in the notebook's folder, `sys.path` and environment since then.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from nbdist import topology
from nbdist.config import DEFAULT_POOL, LOCAL, WorldConfig
from nbdist.errors import BadTopology, UsageError
from nbdist.system import folders
from nbdist.system.limits import memory_limits
from nbdist.topology import Position, seat_more
from nbdist.wire.spec import NBDIST_DECIDES, NBDIST_SETS, WorldSpec, check_nvls, versions_here
from nbdist.wire.work import Surroundings
from nbdist.words import count, one_line, size_text

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_COMMENT = re.compile(r"\s+#.*|^#.*")
_SINGLE = re.compile(r"'([^']*)'(.*)")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"(.*)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def read_env_file(path: str) -> dict[str, str]:
    """Read what a `.env` file sets, with nothing run or expanded; UsageError with file and line."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"`--env-file {path}`: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"`--env-file {path}`: it is not a text in UTF-8.") from None
    found = {}
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            found.update(parse_line(line.strip()))
        except ValueError as why:
            shown = one_line(line, 40).partition("=")[0]  # what follows may be a secret
            raise UsageError(
                f"{path}, line {number} (`{shown}`): {why}. Lines are NAME=value, "
                "NAME='value', export NAME=value, or # comments."
            ) from None
    return found


def parse_line(line: str) -> dict[str, str]:
    """Read the variable that a line of a `.env` file sets, or none; ValueError with the reason."""
    if not line or line.startswith("#"):
        return {}
    found = _LINE.fullmatch(line)
    if not found:
        raise ValueError("that is no NAME=value")
    return {found[1]: _value(found[2])}


def _value(text: str) -> str:
    if not text.startswith(("'", '"')):
        return _COMMENT.sub("", text).rstrip()
    is_single = text[0] == "'"
    quoted = (_SINGLE if is_single else _DOUBLE).fullmatch(text)
    if not quoted:
        raise ValueError("a quote is not closed")
    if quoted[2].strip() and not _COMMENT.fullmatch(quoted[2]):
        raise ValueError("something follows the closing quote")
    if is_single:
        return quoted[1]
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), quoted[1])


DEBUG_VARIABLES: Mapping[str, str] = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "PYTHONFAULTHANDLER": "1",
}
"""torchx's `--debug`; the last is for processes that a worker starts, it has its own.

But for NCCL_DESYNC_DEBUG, with which torch ends a worker whose collective waits too long.
"""

READ_AT_START = re.compile(
    r"(LD|MALLOC|KMP|GOMP|MKL|OPENBLAS|GLIBC)_.*|PYTHON(?!_EXEC|FAULTHANDLER|PATH).*"
    r"|TORCH_(LOGS|LOGS_.*|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES)"
)
"""What an interpreter, or a library on import, reads once: too late for a fork of either."""

DEFAULT_LOG_LIMIT = "200M"
LEAST_MEMORY = 20 << 20  # bytes of its own that a worker has at least, of some 45 MB
HOME_STATE = "~/.local/state"

_SIZE = re.compile(r"([0-9]{1,9})\s*([MG])(?:i?B)?", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONNECTION_FILE = re.compile(r"(-f|--f|--IPKernelApp.connection_file)[ =].*\.json( .*)?")


@dataclass(frozen=True)
class Here:
    """This process now, as far as new workers take after it: a cell may have changed all of it.

    `prefixes` are the folders of its interpreter, whose packages no other one has.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: str = field(default_factory=os.getcwd)
    sys_path: tuple[str, ...] = field(default_factory=lambda: (*sys.path,))
    argv: tuple[str, ...] = field(default_factory=lambda: (*sys.argv,))
    python: str = sys.executable
    prefixes: tuple[str, ...] = (sys.prefix, sys.base_prefix)
    cores: int = field(default_factory=topology.usable_cores)


def make_spec(
    config: WorldConfig, run: str = "", here: Here | None = None
) -> tuple[WorldSpec, str]:
    """Return the spec, by default named `run`, and a warning; UsageError for what cannot be."""
    here = here or Here()
    topology.check_class(config.backend or "", versions_here()["torch"])
    given = given_environ(config)
    first, is_here = given.get("PYTHONPATH", ""), config.launched_by == LOCAL
    if not is_here:  # other machines have an environment of their own
        given = {**copied(config.copy_env or "", here.environ), **given}
    environ = {**here.environ, **given} if is_here else given
    python = find_python(config, environ) or here.python if is_here else ""
    is_foreign = python != here.python
    is_other = is_here and (is_foreign or bool(config.wrap))
    can_fork = not (is_other or any(map(READ_AT_START.fullmatch, given)))
    spec = WorldSpec(
        world_size=size_of(config) or 1,
        backend=_backend(config.backend or "gloo"),
        environ=environ,
        cwd=here.cwd,
        sys_path=path_for(here, first, is_foreign=is_foreign),
        threads=config.cpus or 0,
        python=python,
        name=config.name or run or run_name(config.pool),
        pool=config.pool,
        log_dir=default_log_dir(is_here=is_here) if config.log_dir is None else config.log_dir,
        log_limit=log_limit(here.environ),
        use_fork_server=config.fork and can_fork,
        wrap=config.wrapper if is_here else (),  # elsewhere agents are wrapped
        versions=versions_here() if is_other else {},
        own_path=is_foreign,
        share_gpus=config.share_gpus,
        gpus_asked=config.gpus or "",
        argv=_argv(here.argv),
        sync_code=config.sync_code,
    )
    if is_here:
        return _on_this_machine(spec, config, here)
    # The size, seats and backend follow when machines have come, and each one's GPUs and cores.
    with_gpus = config.backend or topology.GPU_BACKEND
    return spec, check_nvls(with_gpus, given, shared=config.share_gpus)


def _backend(name: str) -> str | None:
    return None if name == "none" else name


def _on_this_machine(spec: WorldSpec, config: WorldConfig, here: Here) -> tuple[WorldSpec, str]:
    visible = topology.visible_gpus(spec.environ)
    gpus = visible if config.gpus is None else topology.parse_gpus(config.gpus, visible)
    layout = config.shape
    if layout is None:
        workers = topology.parse_workers(str(config.n))
        layout = topology.Layout(1, topology.resolve(workers, len(gpus), here.cores))
    spec = replace(
        spec,
        backend=_backend(config.backend or topology.default_backend(len(gpus))),
        gpus=gpus,
        room=(layout.per_node,) * layout.nodes if layout.nodes > 1 else (),
    )
    return scaled(spec, config, size_of(config) or layout.world_size, here.cores)


def scaled(
    spec: WorldSpec,
    config: WorldConfig,
    size: int,
    cores: int | None = None,
    keep: Sequence[int] | None = None,
) -> tuple[WorldSpec, str]:
    """Return the spec of `size` workers, otherwise the same, and a warning or "".

    The ranks in `keep`, or all, keep their seats, which other machines find themselves.  Raises
    NotEnoughGpus, and UsageError where hosts have no room.
    """
    if config.launched_by != LOCAL:
        config.but(n=size)
        return replace(spec, world_size=size), ""
    for found in memory_limits():
        if size * LEAST_MEMORY > found.limit:  # a slip of the finger
            why = f"{size:,} workers take more than the {size_text(found.limit)} of {found.where}"
            raise BadTopology("-n", str(size), why, topology.WORKERS_FORMS)
    cores = topology.usable_cores() if cores is None else cores
    devices = spec.environ.get("CUDA_VISIBLE_DEVICES")
    warning = topology.check_start(
        size, len(spec.gpus), cores, spec.backend or "none", devices, share_gpus=spec.share_gpus
    )
    shared = spec.share_gpus or any(map(topology.is_slice, spec.gpus))
    more = check_nvls(spec.backend or "none", spec.environ, shared=shared)
    # `OMP_NUM_THREADS=4,2` is for nested regions; torch has the outer ones.
    asked = spec.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    share = config.cpus or max(1, cores // size)
    threads = max(1, int(asked)) if asked.isdigit() else share
    room = spec.room
    while room and sum(room) < size:  # as many simulated nodes as it takes
        room = (*room, room[-1])
    seats = spec.seats
    # With GPUs each rank that stays keeps its own, and so LOCAL_RANK.
    if keep is not None and [*keep] != [*range(len(keep))] and (seats or spec.gpus):
        seats = tuple(seats[rank] if seats else Position(0, rank) for rank in keep)
    seats = seat_more(seats, room, size)
    spec = replace(spec, world_size=size, threads=threads, room=room, seats=seats)
    return spec, " ".join(filter(None, (warning, more)))


def wanted_elsewhere(config: WorldConfig, spec: WorldSpec) -> WorldConfig | None:
    """Return the options for a launcher, with what was chosen here; None for this machine."""
    if (launcher := config.launched_by) == LOCAL:
        return None
    python = config.python or sys.executable  # a path on the other machines
    fork = spec.use_fork_server
    return replace(config, launcher=launcher, name=spec.name, python=python, fork=fork)


def given_environ(config: WorldConfig) -> dict[str, str]:
    """Return what the workers have besides the notebook's environment; UsageError for bad names."""
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


def size_of(config: WorldConfig) -> int | None:
    """Read how many workers are asked for; None where that depends on the machines."""
    return config.workers or (config.shape.world_size if config.shape else None)


def copied(patterns: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with such names, but for those that say which rank a worker is."""
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    return {
        name: value
        for name, value in environ.items()
        if name not in NBDIST_DECIDES and any(fnmatchcase(name, each) for each in wanted)
    }


def find_python(config: WorldConfig, environ: Mapping[str, str]) -> str:
    """Find the interpreter that is asked for; "" where none is."""
    text = config.python or environ.get("PYTHON_EXEC")
    if not text:
        return ""
    found = shutil.which(os.path.expanduser(text), path=environ.get("PATH"))
    if found is None:
        there = Path(text).expanduser().exists()
        why = "it cannot be executed" if there else "this program does not exist"
        raise UsageError(
            f"`--python {text}`: {why}. The path of an interpreter that has torch and nbdist, "
            "such as `/path/to/venv/bin/python`; PYTHON_EXEC in the environment sets it too."
        )
    # Not resolved: a virtual environment's is a link to one that knows nothing of it.
    return os.path.abspath(found)


def run_name(pool: str) -> str:
    """Return the name of a world that was given none: when, and of which process."""
    of = "" if pool == DEFAULT_POOL else f"-{pool}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{of}"


def default_log_dir(*, is_here: bool = True) -> str:
    """Return `$NBDIST_LOG_DIR` (empty for no log files), else the user's state folder there."""
    if "NBDIST_LOG_DIR" in os.environ:
        return os.environ["NBDIST_LOG_DIR"]
    if is_here or os.environ.get("XDG_STATE_HOME"):
        return folders.state_folder()
    return f"{HOME_STATE}/nbdist"


def log_limit(environ: Mapping[str, str]) -> int:
    """Read `$NBDIST_LOG_LIMIT`, the most bytes of each stream in a rank's log; 0 for no limit."""
    text = environ.get("NBDIST_LOG_LIMIT", "").strip() or DEFAULT_LOG_LIMIT
    found = _SIZE.fullmatch(text)
    if text != "0" and (not found or not int(found[1])):
        raise UsageError(
            f"`NBDIST_LOG_LIMIT={text}`: how much a rank's log keeps of each stream, such as "
            f"{DEFAULT_LOG_LIMIT}, 2G, or 0 for all."
        )
    return int(found[1]) << (30 if found[2] in "gG" else 20) if found else 0


def path_for(here: Here, given: str, *, is_foreign: bool) -> tuple[str, ...]:
    """Put `--env PYTHONPATH=` before the notebook's path, which is of use to its interpreter alone.

    Another one has packages of its own, and gets what was added to the notebook's by hand.
    """
    first = [entry for entry in given.split(os.pathsep) if entry]
    if not is_foreign:
        return (*first, *here.sys_path)
    roots = tuple(f"{os.path.realpath(root)}/" for root in here.prefixes)

    def is_added(entry: str) -> bool:
        return not entry or not f"{os.path.realpath(entry)}/".startswith(roots)

    return (*first, *filter(is_added, here.sys_path))


def _argv(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the notebook's command line; of a kernel, whose arguments are Jupyter's, its name."""
    pairs = (" ".join(argv[at : at + 2]) for at in range(1, len(argv)))
    return (*argv[:1],) if any(map(_CONNECTION_FILE.fullmatch, pairs)) else (*argv,)


# --- what has changed since the workers were described --------------------------------------


SET_ON_IMPORT = re.compile(
    r"KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)|PYTORCH_NVML_BASED_CUDA_CHECK|TORCHINDUCTOR_CACHE_DIR"
    r"|QT_QPA_.*|PYDEVD_.*|WANDB_SERVICE|_.*"
)
"""Variables that sklearn, torch, Lightning, polars and others set: they are not mentioned."""

MOST_NAMES = 6  # variables that one line names


class NotebookSurroundings:
    """Compares the notebook's surroundings with those that the workers were described with."""

    def __init__(self, config: WorldConfig, spec: WorldSpec) -> None:
        self._config, self._spec = config, spec
        self._start = self._seen = Here()
        self._here: Surroundings | None = None
        self._said: Mapping[str, str | None] = {}
        self._note = ""
        # A notebook that takes a world over may be in another folder.
        if spec.cwd != self._start.cwd:
            self._here = Surroundings(self._start.cwd, spec.cwd)

    def now(self) -> Surroundings | None:
        """Return what has changed since the workers were described; None for nothing."""
        seen = self._seen
        with suppress(FileNotFoundError):  # the folder was removed: the last one stays
            folder, path, environ = os.getcwd(), (*sys.path,), dict(os.environ)
            if (folder, path, environ) != (seen.cwd, seen.sys_path, seen.environ):
                self._seen = replace(seen, cwd=folder, sys_path=path, environ=environ)
                self._here = self._compare()
        return self._here

    def take_note(self) -> str:
        """Return a line about variables that have changed since the last one, or ""."""
        said, self._note = self._note, ""
        return said

    def _compare(self) -> Surroundings | None:
        now, path = self._seen, None
        given: Mapping[str, str] = self._config.env
        with suppress(UsageError):  # the file of `--env-file` has gone
            given = given_environ(self._config)
        if now.sys_path != self._start.sys_path:
            first = given.get("PYTHONPATH", "")
            path = path_for(now, first, is_foreign=self._spec.own_path)
        changes, own = changed(self._start.environ, now.environ), {*NBDIST_SETS, *given}
        followed = {name: "" for name in {**self._said, **changes} if name not in own}
        if self._config.launched_by != LOCAL:  # what is right here need not be on others
            followed = copied(self._config.copy_env or "", followed)
        sent = {name: value for name, value in changes.items() if name in followed}
        self._note = self._text(changes, followed) or self._note
        self._said = changes
        if now.cwd == self._spec.cwd and path is None and not sent:
            return None
        return Surroundings(now.cwd, self._spec.cwd, path, sent)

    def _text(self, changes: Mapping[str, str | None], followed: Collection[str]) -> str:
        said, absent = self._said, object()
        names = [name for name in {**said, **changes} if not SET_ON_IMPORT.fullmatch(name)]
        new = [name for name in names if said.get(name, absent) != changes.get(name, absent)]
        restart = [name for name in new if name not in followed or READ_AT_START.fullmatch(name)]
        too = [name for name in new if name not in restart]
        texts = [f"{_list(too)} changed in the notebook, and on the ranks too"] if too else []
        if restart:
            option = "" if self._config.launched_by == LOCAL else f" --env {min(restart)}=..."
            said_of = f"{_list(restart)} changed in the notebook after the workers started"
            texts.append(f"{said_of}: `%dist_restart{option}` gives it to them")
        return " · ".join(texts)


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables of `after` that differ, and None for those that it lacks."""
    found: dict[str, str | None] = {n: v for n, v in after.items() if before.get(n) != v}
    found.update(dict.fromkeys(before.keys() - after.keys()))
    return {name: value for name, value in found.items() if not name.startswith("NBDIST_")}


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in sorted(names)[:MOST_NAMES])
    left = len(names) - MOST_NAMES
    title = "environment variable" if len(names) == 1 else "environment variables"
    return f"{title} {shown}" + (f" and {count(left, 'other')}" if left > 0 else "")
