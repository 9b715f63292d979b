"""What all workers of a world have in common, worked out from what was asked for."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nbdist import topology
from nbdist.errors import UsageError
from nbdist.layout import Layout, parse_layout
from nbdist.wire.messages import DEFAULT_POOL, Resources, WorldSpec
from nbdist.world.environ import (
    DEBUG_VARIABLES,
    READ_AT_START,
    check_names,
    parse_patterns,
    read_env_file,
)

_MEMORY = re.compile(r"([0-9]{1,9})\s*([MG])(?:i?B)?", re.IGNORECASE)
_NAME_LIMIT = 200
_PART_LIMIT = 100


@dataclass(frozen=True)
class Asked:
    """What a world was asked to be; the arguments of `World`, which documents them.

    `run` is the name that one without a `name` was given.
    """

    n: int | str = "auto"
    backend: str | None = None
    gpus: str | None = None
    name: str | None = None
    pool: str = DEFAULT_POOL
    log_dir: str | None = None
    nursery: bool = True
    layout: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    env_file: str | None = None
    copy_env: str = ""
    debug: bool = False
    python: str | None = None
    wrap: str | None = None
    cpus: int | str | None = None
    memory: str | None = None
    share_gpus: bool = False
    run: str = ""

    @property
    def other_pool(self) -> str:
        """Its name, to be said where it is not the default one; else ""."""
        return "" if self.pool == DEFAULT_POOL else self.pool

    def but(self, **changes: Any) -> Asked:
        """The same but for what is said: of `n` and `layout` the newer, and more of `env`."""
        if "layout" in changes or "n" in changes:
            changes = {"n": "auto", "layout": None, **changes}
        if "env" in changes:
            changes["env"] = {**self.env, **changes["env"]}
        return replace(self, **changes)

    @property
    def arguments(self) -> dict[str, Any]:
        """What another world like it is made with."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "run"}


def make_spec(asked: Asked) -> tuple[WorldSpec, str, str]:
    """The spec, the name of its backend ("none" for no group), and a warning or "".

    From this process's environment, path and folder as they are now.  Raises UsageError
    for what cannot be.
    """
    given = given_environ(asked)
    environ = {**os.environ, **given}
    visible = topology.visible_gpus(environ)
    chosen = visible if asked.gpus is None else topology.parse_gpus(asked.gpus, visible)
    cores = topology.usable_cores()
    layout = layout_of(asked, len(chosen))
    size = layout.world_size
    named = asked.backend and topology.parse_backend(asked.backend)
    used = named or topology.default_backend(len(chosen))
    devices = environ.get("CUDA_VISIBLE_DEVICES")
    warning = topology.check_start(
        size, len(chosen), cores, used, devices, share_gpus=asked.share_gpus
    )
    resources = Resources(_cpus(asked.cpus), _memory(asked.memory))
    python = find_python(asked.python or environ.get("PYTHON_EXEC"), environ)
    wrap, is_foreign = _wrap(asked.wrap), python != sys.executable
    spec = WorldSpec(
        world_size=size,
        backend=None if used == "none" else used,
        environ=environ,
        cwd=os.getcwd(),
        sys_path=_sys_path(given.get("PYTHONPATH", ""), is_foreign=is_foreign),
        threads=_threads(environ, resources.cpus or max(1, cores // size)),
        python=python,
        gpus=chosen,
        name=_check_name(asked.name) if asked.name else asked.run or run_name(asked.pool),
        pool=asked.pool,
        log_dir=default_log_dir() if asked.log_dir is None else asked.log_dir,
        use_nursery=asked.nursery
        and not (wrap or is_foreign or any(map(READ_AT_START.fullmatch, given))),
        per_node=layout.per_node if layout.nodes > 1 else 0,
        min_nodes=layout.min_nodes,
        wrap=wrap,
        own_path=is_foreign,
        copy_env=parse_patterns(asked.copy_env),
        resources=resources,
        share_gpus=asked.share_gpus,
    )
    return spec, used, warning or ""


def scaled(spec: WorldSpec, size: int) -> tuple[WorldSpec, str]:
    """The spec of as many workers, otherwise the same, and a warning or "".

    Raises NotEnoughGpus.
    """
    cores, devices = topology.usable_cores(), spec.environ.get("CUDA_VISIBLE_DEVICES")
    backend = spec.backend or "none"
    warning = topology.check_start(
        size, len(spec.gpus), cores, backend, devices, share_gpus=spec.share_gpus
    )
    threads = _threads(spec.environ, spec.resources.cpus or max(1, cores // size))
    return replace(spec, world_size=size, threads=threads), warning or ""


def given_environ(asked: Asked) -> dict[str, str]:
    """What the workers have besides the notebook's environment; the later wins."""
    own = {str(name): str(value) for name, value in asked.env.items()}
    check_names(own, "--env")
    return {
        **(DEBUG_VARIABLES if asked.debug else {}),
        **(read_env_file(asked.env_file) if asked.env_file else {}),
        **own,
    }


def layout_of(asked: Asked, gpus: int) -> Layout:
    """The nodes and workers that `-j`, or else `-n`, means here."""
    if asked.layout is None:
        workers = topology.parse_workers(str(asked.n))
        return Layout(1, topology.resolve(workers, gpus, topology.usable_cores()), 1)
    layout = parse_layout(asked.layout)
    if asked.n != "auto":
        raise UsageError(
            f"`-n {asked.n} -j {asked.layout}`: one of both. `-j {asked.layout}` is nodes and "
            f"workers on each, `-n {layout.world_size}` as many workers on one node."
        )
    return layout


def find_python(text: str | None, environ: Mapping[str, str]) -> str:
    """The interpreter of the workers: the notebook's own unless another is asked for."""
    if not text:
        return sys.executable
    found = shutil.which(os.path.expanduser(text), path=environ.get("PATH"))
    if found is None:
        there = Path(text).expanduser().exists()
        why = "it cannot be executed" if there else "there is no such program"
        raise UsageError(
            f"`--python {text}`: {why}. The path of an interpreter that has torch and nbdist, "
            "such as `/path/to/venv/bin/python`; PYTHON_EXEC in the environment sets it too."
        )
    # Not resolved: a virtual environment's is a link to one that knows nothing of it.
    return os.path.abspath(found)


def run_name(pool: str) -> str:
    """A name for the run of a world that was given none: when, and of which process."""
    of = "" if pool == DEFAULT_POOL else f"-{pool}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{of}"


def default_log_dir() -> str:
    """`$NBDIST_LOG_DIR` (empty for no log files), else the user's state folder."""
    if "NBDIST_LOG_DIR" in os.environ:
        return os.environ["NBDIST_LOG_DIR"]
    return state_folder()


def state_folder() -> str:
    """Where the user keeps what outlives a run."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(state).expanduser() / "nbdist")


def _threads(environ: Mapping[str, str], share: int) -> int:
    """How many threads torch gets: the user's OMP_NUM_THREADS, or a share of the cores."""
    # `4,2` is for nested regions; torch has the outer ones.
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(first)) if first.isdigit() else share


def _sys_path(given: str, *, is_foreign: bool) -> tuple[str, ...]:
    """The notebook's path with `--env PYTHONPATH=` before it; of use to its interpreter alone.

    Another one has packages of its own, and gets what was added to the notebook's by hand.
    """
    first = [entry for entry in given.split(os.pathsep) if entry]
    if not is_foreign:
        return (*first, *sys.path)
    roots = {os.path.realpath(root) for root in (sys.prefix, sys.base_prefix)}
    real = ((entry, os.path.realpath(entry)) for entry in sys.path)
    return (*first, *(entry for entry, at in real if not entry or not _is_below(at, roots)))


def _is_below(path: str, roots: set[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def _wrap(text: str | None) -> tuple[str, ...]:
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise UsageError(f"`--wrap {text}`: {str(error).lower()}.") from None
    if text is not None and not words:
        raise UsageError('`--wrap ""`: a command and its arguments, such as `--wrap "nice -n 5"`.')
    return tuple(words)


def _check_name(name: str) -> str:
    """A name that can be a folder below the log folder, and stay there."""
    parts: Sequence[str] = name.split("/")
    bad = any(part in ("", ".", "..") or len(part) > _PART_LIMIT for part in parts)
    if bad or not name.isprintable() or len(name) > _NAME_LIMIT:
        raise UsageError(
            f"`--name {name}`: it names a folder below the log folder, such as `exp` or `exp/run1`."
        )
    return name


def _cpus(value: int | str | None) -> int:
    if value is None:
        return 0
    text = str(value)
    if not text.isdigit() or not 0 < int(text) < 10_000:
        raise UsageError(f"`--cpus {value}`: a number of cores for each worker, such as 4.")
    return int(text)


def _memory(text: str | None) -> int:
    """In MiB."""
    if text is None:
        return 0
    found = _MEMORY.fullmatch(text.strip())
    if not found or not int(found[1]):
        raise UsageError(f"`--memory {text}`: for each worker, such as 16G or 500M.")
    return int(found[1]) * (1024 if found[2] in "gG" else 1)
