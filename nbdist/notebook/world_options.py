"""The options that describe a world, one entry each: for `%%distributed`, `%dist_restart` ...

An option is an argument of `World` by the same name, unless the entry says otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from IPython.core.magic_arguments import argument

from nbdist.errors import UsageError, WorldChanged
from nbdist.layout import parse_layout
from nbdist.world.environ import SECRET, parse_pairs

if TYPE_CHECKING:
    from nbdist.world.world import World


@dataclass(frozen=True)
class WorldOption:
    """An option, the argument of `World` that it gives, and what argparse wants to know.

    `read` makes the argument of the option's value.
    """

    flag: str
    name: str
    help: str
    parser: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Any], Any] = lambda value: value

    @property
    def dest(self) -> str:
        """Its attribute of the parsed options."""
        return f"world_{self.name}"

    def again(self, value: Any) -> str:
        """The option as it would be typed: `--name run`."""
        if isinstance(value, bool):
            return self.flag
        if isinstance(value, Mapping):
            shown = ((name, "..." if SECRET.search(name) else value[name]) for name in value)
            return " ".join(f"{self.flag} {name}={text}" for name, text in shown)
        text = str(value)
        return f'{self.flag} "{text}"' if " " in text else f"{self.flag} {text}"


SWITCH = {"action": "store_true", "default": None}

WORLD_OPTIONS = (
    WorldOption("-n", "n", "how many workers: a number, auto (one per GPU; without any one per"
                " core, at most 4), gpu or cpu", {"metavar": "N"}),
    WorldOption("-j", "layout", "nodes and workers on each instead of -n: 2x4, or 1:2x4 for 1 to"
                " 2 nodes; -j 4 is one node. On one machine the nodes are simulated",
                {"metavar": "[MIN:]MAXxN"}),
    WorldOption("--backend", "backend", "gloo, nccl, cpu:gloo,cuda:nccl, or none for no group"),
    WorldOption("--gpus", "gpus", "the GPUs to use, as torch counts them: 0,1,3"),
    WorldOption("--share-gpus", "share_gpus", "let several ranks of nccl have one GPU: to practise"
                " and debug on one card, for correctness and not for speed", SWITCH),
    WorldOption("--name", "name", "shown in %%dist_status, and the log folder's name: run, or"
                " exp/run"),
    WorldOption("--env", "env", "a variable of the workers' environment besides the notebook's;"
                " any number of them", {"action": "append", "metavar": "K=V"}, parse_pairs),
    WorldOption("--env-file", "env_file", "a .env file with such variables: parsed, not sourced",
                {"metavar": "FILE"}),
    WorldOption("--copy-env", "copy_env", "which of the notebook's variables workers on other"
                " hosts get, 'HF_*,WANDB_*'; on this machine they have all of them",
                {"metavar": "PATTERNS"}),
    WorldOption("--debug", "debug", "CUDA_LAUNCH_BLOCKING, TORCH_DISTRIBUTED_DEBUG=DETAIL and the"
                " like: errors at their place, mismatched collectives told, C++ stacks; slow",
                SWITCH),
    WorldOption("--python", "python", "the interpreter of the workers, which has torch and nbdist"
                " (default: $PYTHON_EXEC, else the notebook's)", {"metavar": "PATH"}),
    WorldOption("--wrap", "wrap", "what stands before each worker's command: 'nice -n 5',"
                " 'apptainer exec img'", {"metavar": "COMMAND"}),
    WorldOption("--cpus", "cpus", "cores for each worker, for the launcher; on this machine as"
                " many threads", {"metavar": "N"}),
    WorldOption("--memory", "memory", "memory for each worker, 16G or 500M, for the launcher; on"
                " this machine there is no limit", {"metavar": "SIZE"}),
    WorldOption("--launcher", "launcher", "how agents are started (default: local)"),
    WorldOption("--no-nursery", "nursery", "start each worker as a new interpreter instead of"
                " forking it from one that has imported torch", SWITCH, lambda value: not value),
)  # fmt: skip


def add_world_options(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Give a magic all of them."""
    for option in reversed(WORLD_OPTIONS):
        word = {} if option.parser == SWITCH else {"metavar": option.flag.strip("-").upper()}
        settings = {"dest": option.dest, "help": option.help, **word, **option.parser}
        magic = argument(option.flag, **settings)(magic)
    return magic


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `World` that were given."""
    found = ((option, getattr(options, option.dest)) for option in WORLD_OPTIONS)
    return {option.name: option.read(value) for option, value in found if value is not None}


def check_same(world: World, options: argparse.Namespace) -> None:
    """What a cell's options say of the world has to be true of the one that runs."""
    asked = given(options)
    if "n" in asked and (size := world.resolve(asked.pop("n"))) != world.size:
        raise WorldChanged(world.size, size, world.asked.other_pool)
    for option in WORLD_OPTIONS:
        if option.name in asked:
            wanted, has = _difference(option.name, asked[option.name], _has(world, option.name))
            if wanted != has:
                again = option.again(wanted)
                said = f"`{option.again(has)}`, not `{again}`" if has else f"no `{option.flag}`"
                raise UsageError(
                    f"The running workers have {said}. `%dist_restart {again}` starts new ones."
                )


def _has(world: World, name: str) -> Any:
    """What the world has: of the backend and the layout what was chosen for it."""
    return getattr(world if hasattr(world, name) else world.asked, name)


def _difference(name: str, wanted: Any, has: Any) -> tuple[Any, Any]:
    """Both, made comparable; what is unsaid is false."""
    match name:
        case "nursery":
            return not wanted, not has
        case "layout":
            return parse_layout(wanted).shape, has
        case "env":
            other = {key: text for key, text in wanted.items() if has.get(key) != text}
            return other, {key: has[key] for key in other if key in has}
    return wanted, has
