"""Parses options about workers, nodes, hosts, GPUs, backends and ranks, and places ranks on nodes.

All processes may import this file.  The notebook's kernel must not initialise CUDA, so GPUs are
counted from the driver's files or by nvidia-smi.  On one machine, environment variables of the
ranks simulate the nodes of `-j 2x4`.
"""

from __future__ import annotations

import operator
import os
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, SupportsIndex, TypeAlias, TypeGuard, cast

from nbdist.errors import BadRanks, BadTopology, NotEnoughGpus, UsageError
from nbdist.words import count

WorkerCount = int | Literal["auto", "gpu", "cpu"]

# The default backend of init_process_group() on a machine with GPUs; with it, collectives of CPU
# tensors and of objects work too.
GPU_BACKEND = "cpu:gloo,cuda:nccl"

AUTO_LIMIT, NVIDIA_SMI_TIMEOUT = 4, 5.0
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
AMD_FOLDER = Path("/sys/class/kfd/kfd/topology/nodes")
SLICES_FOLDER = Path("/proc/driver/nvidia/capabilities")
DRIVER_VERSION = Path("/sys/module/nvidia/version")

WORKERS_FORMS = "Use `-n 4`, `-n auto`, `-n gpu` or `-n cpu`."
_WITHOUT_GPU = "Use `-n 4`, `-n auto` or `-n cpu`."
_LAYOUT_FORMS = "Use `-j 4`, `-j 2x4` (2 nodes with 4 workers each), or `-j 1:2x4` (1 node to 2)."
# From torch 2.14 on, torch has two classes for NCCL: "nccl-legacy" and "nccl2" each name one of
# them, and "nccl" names torch's default.
_NCCL = ("nccl", "nccl-legacy", "nccl2")
_BACKENDS = {"cpu": ("gloo",), "cuda": ("gloo", *_NCCL), "xpu": ("xccl",)}
_BACKEND_FORMS = f'Use `--backend gloo`, `nccl`, `"{GPU_BACKEND}"` or `none`.'
_GPUS_FORM = "Use numbers with commas, `--gpus 0,1,3` or `0-3`."

# At most six digits: for thousands of digits int() would raise ValueError.
_LAYOUT = re.compile(r"(?:(?:([0-9]{1,6}):)?([0-9]{1,6})x)?([0-9]{1,6})")
_RANK_NUMBER = re.compile(r"[0-9]{1,6}")
_RANK_SPAN = re.compile(r"([0-9]{1,6})-([0-9]{1,6})")
_SIGNED = re.compile(r"-?[0-9]{1,6}")
_DRIVER = re.compile(r"^Driver Version\s*: (\S+)", re.MULTILINE)
_MIG_SLICE = re.compile(r"^\s+MIG .*\(UUID: (MIG-[^)]+)\)", re.MULTILINE)
_RANK_SLICE = re.compile(r"(-?[0-9]{1,6})?:(-?[0-9]{1,6})?(?::(-?[0-9]{1,6})?)?")


# --- how many workers -----------------------------------------------------------------


def parse_workers(text: str) -> WorkerCount:
    """Return the value of `-n`: a number from 1 on, `auto`, `gpu`, `cpu`; or raise BadTopology."""
    word = text.strip()
    if word in ("auto", "gpu", "cpu"):
        return cast(WorkerCount, word)
    if not _RANK_NUMBER.fullmatch(word):
        raise BadTopology("-n", text, "that is not a number of workers", WORKERS_FORMS)
    if int(word) < 1:
        raise BadTopology("-n", text, "it takes at least one worker", WORKERS_FORMS)
    return int(word)


def resolve(workers: WorkerCount, gpus: int, cores: int) -> int:
    """Return the number of workers; `auto` is one per GPU, or without GPUs one per core up to 4.

    Raises BadTopology for `gpu` if there is no GPU.
    """
    if workers == "auto":
        return gpus or max(1, min(cores, AUTO_LIMIT))
    if workers == "cpu":
        return max(1, cores)
    if workers == "gpu":
        if not gpus:
            raise BadTopology("-n", "gpu", "no GPU is visible here", _WITHOUT_GPU)
        return gpus
    return workers


def usable_cores() -> int:
    """Return the number of cores that this process may use, which `taskset` can reduce."""
    return len(os.sched_getaffinity(0))


def check_start(
    workers: int,
    gpus: int,
    cores: int,
    backend: str,
    visible_devices: str | None = None,
    *,
    share_gpus: bool = False,
) -> str | None:
    """Return a one-line warning about ranks that may be slow, or None.

    Ranks may be slow if they share GPUs or cores, or with nccl and `share_gpus`.  Raises
    NotEnoughGpus if nccl needs more GPUs; `visible_devices` is the value of CUDA_VISIBLE_DEVICES,
    for the text of the error.
    """
    if uses_nccl(backend) and workers > gpus and not (gpus and share_gpus):
        raise NotEnoughGpus(workers, gpus, visible_devices)
    if uses_nccl(backend) and share_gpus:
        shared = f"{count(workers, 'rank')} of nccl on {count(gpus, 'GPU')}"
        return f"{shared} with `--share-gpus`: slow, for debugging."
    if gpus and workers > gpus:
        return f"{count(workers, 'worker')} share {count(gpus, 'GPU')}."
    if not gpus and workers > cores:
        return (
            f"{count(workers, 'worker')} on {count(cores, 'CPU core')}: expect them to be slower."
        )
    return None


# --- on how many nodes ----------------------------------------------------------------


class Layout(NamedTuple):
    """At most `nodes` nodes with `per_node` workers each; `least` nodes are enough to start."""

    nodes: int
    per_node: int
    least: int

    def __str__(self) -> str:
        least = f"{self.least}:" if self.least < self.nodes else ""
        return f"{least}{self.nodes}x{self.per_node}"

    @property
    def world_size(self) -> int:
        """The number of workers once all nodes have joined."""
        return self.nodes * self.per_node


def parse_layout(text: str) -> Layout:
    """Return the layout that `-j` gives; raise BadTopology for other text.

    `4` means one node with 4 workers, `2x4` two such nodes, and `1:2x4` one or two.
    """
    match = _LAYOUT.fullmatch(text.replace(" ", ""))
    if not match:
        raise BadTopology("-j", text, "that is not nodes and workers", _LAYOUT_FORMS)
    nodes, per_node = int(match[2] or 1), int(match[3])
    least = nodes if match[1] is None else int(match[1])
    if nodes < 1 or per_node < 1 or least < 1:
        raise BadTopology("-j", text, "it takes at least one node and one worker", _LAYOUT_FORMS)
    if least > nodes:
        raise BadTopology("-j", text, f"{least} nodes are more than {nodes}", _LAYOUT_FORMS)
    return Layout(nodes, per_node, least)


# --- the machines of `--hosts` ------------------------------------------------------------


_HOSTS_FORMS = (
    "Use `--hosts a,b`, or `--hosts a:4,user@b:2` with the number of workers on each; write an "
    "IPv6 address in brackets, `[fe80::1]:2`."
)
_HOST_AND_PORT = r"\[([^\]%]*(?:%[A-Za-z0-9_.-]{1,15})?)\]|([^:\[\]]*)"
_HOST = re.compile(rf"(?:([^@]*)@)?(?:{_HOST_AND_PORT})(?::([0-9]{{1,6}}))?")
# A name must not begin with `-`, since ssh would take it for an option, and must have no character
# that is special in a shell.
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_DOTTED = re.compile(r"[0-9.]+")


class Host(NamedTuple):
    """A machine that ssh reaches, with room for `slots` workers; None if no number was given."""

    address: str
    slots: int | None = None
    user: str = ""

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        user = f"{self.user}@" if self.user else ""
        return f"{user}{address}" + ("" if self.slots is None else f":{self.slots}")

    @property
    def destination(self) -> str:
        """The host as an argument of ssh, such as `user@host`."""
        return f"{self.user}@{self.address}" if self.user else self.address


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts that `--hosts` lists; raise BadTopology for a wrong or repeated host."""
    hosts: dict[str, Host] = {}
    try:
        for item in text.split(","):
            host = _parse_host(item.strip())
            if host.address in hosts:
                raise ValueError(f"{host.address} is listed twice")
            hosts[host.address] = host
    except ValueError as why:
        raise BadTopology("--hosts", text, str(why), _HOSTS_FORMS) from None
    return tuple(hosts.values())


def read_hosts(hosts: str | Iterable[str]) -> str:
    """Return hosts, given as a list or as text with commas, in the normal form of `--hosts`."""
    text = hosts if isinstance(hosts, str) else ",".join(map(str, hosts))
    return ",".join(map(str, parse_hosts(text)))


def _parse_host(item: str) -> Host:
    """Return the host in a text such as `user@b:2`; raise ValueError, with why, for other text."""
    if not item:
        raise ValueError("there is nothing next to a comma")
    match = _HOST.fullmatch(item)
    user, ipv6, name, slots = match.groups() if match else (None, None, "", None)
    if user is not None and not _HOST_NAME.fullmatch(user):
        raise ValueError(f"`{user}` cannot be a user")
    try:
        address = _address(name, ipv6)
    except ValueError:
        raise ValueError(f"`{item}` is not a host") from None
    if slots is not None and int(slots) < 1:
        raise ValueError(f"`{item}` allows no worker")
    return Host(address, None if slots is None else int(slots), user or "")


def _address(name: str, ipv6: str | None) -> str:
    """Return a host name or an IP address in its normal form; raise ValueError for other text.

    `ipv6` is an address that was given in brackets; if it is None, `name` is used.
    """
    # Imported here, because agents and workers import this file too, and do not need `ipaddress`.
    from ipaddress import IPv4Address, IPv6Address

    if ipv6 is not None:
        return str(IPv6Address(ipv6))
    if not _HOST_NAME.fullmatch(name):
        raise ValueError
    return str(IPv4Address(name)) if _DOTTED.fullmatch(name) else name.lower().rstrip(".")


# --- backends -------------------------------------------------------------------------


def default_backend(gpus: int) -> str:
    """Return the default backend: nccl beside gloo if there are GPUs, and gloo alone otherwise."""
    return GPU_BACKEND if gpus else "gloo"


def parse_backend(text: str) -> str:
    """Return the value of `--backend` as torch takes it, or `none`, which means no group."""
    backend = text.replace(" ", "").lower()
    if backend in ("gloo", *_NCCL, "xccl", "none"):
        return backend
    pairs = [pair.split(":") for pair in backend.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise BadTopology("--backend", text, "that is not a backend", _BACKEND_FORMS)
    for device, name in pairs:
        if device == "cpu" and name in _NCCL:
            raise BadTopology("--backend", text, "nccl has no CPU tensors", _BACKEND_FORMS)
        if name not in _BACKENDS.get(device, ()):
            why = f"`{device}:{name}` is not a device and its backend"
            raise BadTopology("--backend", text, why, _BACKEND_FORMS)
    if len({device for device, _ in pairs}) < len(pairs):
        raise BadTopology("--backend", text, "a device is listed twice", _BACKEND_FORMS)
    return backend


def uses_nccl(backend: str) -> bool:
    """Return True if the backend contains nccl, which needs a GPU for each rank."""
    return "nccl" in backend


# --- GPUs -----------------------------------------------------------------------------


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that are visible in this environment, as CUDA_VISIBLE_DEVICES names them.

    This function does not initialise CUDA.  It lists MIG slices instead of GPUs if the variable
    begins with a slice, or if the variable is not set and nvidia-smi finds slices.  CUDA gives a
    process only the first of several slices, so each rank must name its own slice.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = None if text is None else _cuda_list(text)
    if chosen == ():
        return ()
    number = installed_gpus()
    if chosen is None and next(SLICES_FOLDER.glob("gpu*/mig/gi*/ci*"), None):
        chosen = tuple(_MIG_SLICE.findall(_nvidia_smi_output("-L")))
    if not chosen:
        return tuple(map(str, range(number)))
    if is_slice(chosen[0]):
        return tuple(filter(is_slice, chosen)) if number else ()
    index = (int(each) if each.isdigit() else at for at, each in enumerate(chosen))
    absent = (at for at, gpu in enumerate(index) if max(at, gpu) >= number)
    return chosen[: next(absent, None)]


def is_slice(gpu: str) -> bool:
    """Return True if a name in CUDA_VISIBLE_DEVICES means a MIG slice, and not a whole GPU."""
    return gpu.startswith("MIG-")


def installed_gpus() -> int:
    """Return the number of the machine's GPUs, from files of the driver or from nvidia-smi.

    If the installed torch is a build for ROCm, AMD's GPUs are counted.
    """
    with suppress(PackageNotFoundError):
        if "+rocm" in version("torch"):
            return sum(node.read_text().strip() != "0" for node in AMD_FOLDER.glob("*/gpu_id"))
    try:
        return len(list(DRIVER_FOLDER.iterdir()))
    except OSError:
        # The driver is missing, or its files are hidden, as in WSL and some containers.  Indented
        # lines of nvidia-smi are MIG slices of the GPU above.
        return sum(line.startswith("GPU ") for line in _nvidia_smi_output("-L").splitlines())


def driver_version() -> str:
    """Return the version of NVIDIA's driver; "" if the version cannot be found."""
    try:
        return DRIVER_VERSION.read_text().strip()
    except OSError:  # the driver is missing, or its files are hidden, as in WSL
        match = _DRIVER.search(_nvidia_smi_output("-q"))
        return match[1] if match else ""


def parse_gpus(text: str, visible: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs that `--gpus` names by their indices in `visible`, as torch counts GPUs.

    The names are those for CUDA_VISIBLE_DEVICES, in the given order: `0,2` of
    ("4", "5", "GPU-8f") gives ("4", "GPU-8f").  Raises BadTopology for other text, and for a GPU
    that does not exist or is listed twice.
    """
    numbers: list[int] = []
    for item in text.replace(" ", "").split(","):
        if span := _RANK_SPAN.fullmatch(item):
            numbers += range(int(span[1]), int(span[2]) + 1)
        elif _RANK_NUMBER.fullmatch(item):
            numbers.append(int(item))
        else:
            raise BadTopology("--gpus", text, "that is not a list of GPUs", _GPUS_FORM)
    if not numbers:
        raise BadTopology("--gpus", text, "it runs backwards", _GPUS_FORM)
    if len(set(numbers)) < len(numbers):
        raise BadTopology("--gpus", text, "a GPU is listed twice", _GPUS_FORM)
    if missing := [number for number in numbers if number >= len(visible)]:
        visible_texts = {0: "none is visible", 1: "only GPU 0 is visible"}
        visible_text = visible_texts.get(len(visible), f"0-{len(visible) - 1} are visible")
        why = f"there is no GPU {missing[0]}, {visible_text}"
        raise BadTopology("--gpus", text, why, _GPUS_FORM)
    return tuple(visible[number] for number in numbers)


def _cuda_list(text: str) -> tuple[str, ...]:
    """Return the names in CUDA_VISIBLE_DEVICES before the first bad name; () if names repeat."""
    entries: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if not (_RANK_NUMBER.fullmatch(entry) or entry.startswith(("GPU-", "MIG-"))):
            break
        entries.append(str(int(entry)) if entry.isdigit() else entry)
    return tuple(entries) if len(set(entries)) == len(entries) else ()


def _nvidia_smi_output(option: str) -> str:
    try:
        return subprocess.run(
            ["nvidia-smi", option], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=NVIDIA_SMI_TIMEOUT, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""


# --- ranks ----------------------------------------------------------------------------


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks that the value of `-r` selects, in ascending order, each once.

    The text has numbers, spans and Python's slices, with commas between them: `0`, `0,2-3`, `1:3`,
    `::2`, `-1`, `all`, or `[0,2]`.  Raises BadRanks for other text, and for a missing rank.
    """
    listed = text.strip()
    if listed[:1] + listed[-1:] == "[]":
        listed = listed[1:-1]
    if not listed.strip():
        raise BadRanks(text, world_size, "it is empty")
    chosen: set[int] = set()
    for item in listed.split(","):
        try:
            chosen.update(_select(item.strip(), world_size))
        except ValueError as why:
            raise BadRanks(text.strip(), world_size, str(why)) from None
    return tuple(sorted(chosen))


RankSelection: TypeAlias = str | Iterable[int]
"""The argument `ranks=` of functions: the text of an option `-r`, or the numbers of the ranks."""


def select_ranks(ranks: RankSelection | None, rank: int | None, world_size: int) -> tuple[int, ...]:
    """Return the ranks that the arguments `ranks=` and `rank=` select, each rank once.

        select_ranks("1:3", None, 4)  # (1, 2)
        select_ranks([2, 0], None, 4)  # (2, 0): numbers keep their order
        select_ranks(None, -1, 4)  # (3,): as in a text, negative numbers count from the end

    Without both arguments all ranks are returned.  Raises BadRanks if no rank is selected or a
    rank does not exist, and UsageError for both arguments at once or an argument of another type.
    """
    if ranks is not None and rank is not None:
        raise UsageError(f"`ranks={ranks!r}, rank={rank}`: give `rank` for one rank, or `ranks`.")
    if rank is not None and not _is_number(rank):
        raise UsageError(
            f"`rank={rank!r}`: give the number of a rank, such as `rank=0`; `ranks` takes several."
        )
    if _is_number(ranks):
        raise UsageError(f"`ranks={ranks}`: write `rank={ranks}`, or a list: `ranks=[{ranks}]`.")
    if isinstance(ranks, str):
        return parse_ranks(ranks, world_size)
    if ranks is not None and not hasattr(ranks, "__iter__"):
        raise UsageError(f"`ranks={ranks!r}`: give numbers, such as `ranks=[0, 2]`, or a text.")

    def refusal(why: str) -> BadRanks:
        return BadRanks(f"{ranks}" if rank is None else f"rank={rank}", world_size, why)

    numbers = range(world_size) if ranks is None else ranks
    chosen: dict[int, None] = {}
    for number in numbers if rank is None else (rank,):
        # Most tasks pass all of their ranks here.  Plain integers skip `_is_number`, to save time.
        if type(number) is not int and not _is_number(number):
            raise refusal(f"{number!r} is not the number of a rank")
        index = operator.index(number)
        if not -world_size <= index < world_size:
            raise refusal(f"there is no rank {number}")
        chosen[index % world_size] = None
    if not chosen:
        raise refusal("it is empty")
    return tuple(chosen)


def _is_number(value: object) -> TypeGuard[SupportsIndex]:
    """Return True for an integer, also of numpy or torch; False for bools and for arrays."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        return False
    if getattr(value, "shape", ()):
        return False
    try:
        operator.index(value)
    except TypeError:  # such as `torch.tensor(1.5)`
        return False
    return True


def _select(item: str, world_size: int) -> Sequence[int]:
    """Return the ranks that an item such as `2-3` selects; if there are none, raise ValueError."""
    if item == "all":
        return range(world_size)
    if _SIGNED.fullmatch(item):
        return (_rank(int(item), world_size),)
    if span := _RANK_SPAN.fullmatch(item):
        ranks = range(int(span[1]), int(span[2]) + 1)
        if not ranks:
            raise ValueError(f"`{item}` runs backwards")
        _rank(ranks[-1], world_size)
        return ranks
    if parts := _RANK_SLICE.fullmatch(item):
        start, stop, step = (None if part is None else int(part) for part in parts.groups())
        if step == 0:
            raise ValueError("a step cannot be 0")
        ranks = range(world_size)[start:stop:step]
        if not ranks:
            raise ValueError(f"`{item}` is empty here")
        return ranks
    raise ValueError(f"`{item}` cannot be read" if item else "there is nothing next to a comma")


def _rank(rank: int, world_size: int) -> int:
    if not -world_size <= rank < world_size:
        raise ValueError(f"there is no rank {rank}")
    return rank % world_size


# --- the node of each rank --------------------------------------------------------------------


class Position(NamedTuple):
    """The number of a rank's node, and the rank's local rank on that node."""

    node: int
    local_rank: int


Slots = tuple[Position, ...]
"""The position of each rank, by rank; () if all ranks are on one node without a limit of ranks."""


class Slot(NamedTuple):
    """LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE of a rank, as in torchrun."""

    local_rank: int
    local_world_size: int
    node: int
    nodes: int


def free_slots(room: Mapping[int, int], taken: Collection[Position] = ()) -> Iterator[Position]:
    """Yield the positions that are not `taken`, node by node.

    `room` maps the number of each node to the number of ranks that fit on the node.
    """
    for node, number in sorted(room.items()):
        for local_rank in range(number):
            if (position := Position(node, local_rank)) not in taken:
                yield position


def place_ranks(slots: Slots, room: Sequence[int], size: int) -> Slots:
    """Return the positions of `size` ranks: the first from `slots`, then free ones for new ranks.

    `room` has the number of ranks that fit on each node, () for a single node without a limit.
    Returns () if `room` and `slots` are both ().
    """
    kept = slots[:size]
    if not (room or kept):
        return ()
    free = free_slots(dict(enumerate(room or (size + len(kept),))), kept)
    return (*kept, *islice(free, size - len(kept)))


def move_lost_ranks(slots: Slots, lost: Collection[int], room: Mapping[int, int]) -> Slots | None:
    """Return the positions after ranks of the `lost` nodes have moved to free positions.

    `room` maps the number of each other node to the number of ranks that fit on the node.  Returns
    None if the free positions are too few.
    """
    taken = {position for position in slots if position.node not in lost}
    new = [*islice(free_slots(room, taken), len(slots) - len(taken))]
    if len(taken) + len(new) < len(slots):
        return None
    return tuple(position if position.node not in lost else new.pop(0) for position in slots)
