"""What people type of workers, nodes, hosts and GPUs, and what it means: who sits where."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from nbdist import topology
from nbdist.errors import BadRanks, BadTopology, NotEnoughGpus
from nbdist.readers import Host, parse_hosts, read_hosts
from nbdist.topology import (
    Layout,
    Position,
    Seat,
    gpus_of,
    parse_layout,
    ranks_on,
    reseat,
    seat_more,
    seat_of,
)
from tests.waiting import SOON


@pytest.mark.parametrize(
    ("text", "workers"),
    [("4", 4), (" 1 ", 1), ("auto", "auto"), ("gpu", "gpu"), ("cpu", "cpu"), ("023", 23)],
)
def test_workers(text, workers):
    """`-n` takes a number or one of three words."""
    assert topology.parse_workers(text) == workers


@pytest.mark.parametrize("text", ["0", "x", "-3", "2.5", "", "1e3", "4 4", "٤", "9" * 5000, "AUTO"])
def test_bad_workers(text):
    """Anything else for `-n` is answered with what was typed and the right forms."""
    with pytest.raises(BadTopology, match="Use `-n 4`, `-n auto`, `-n gpu` or `-n cpu`") as error:
        topology.parse_workers(text)
    assert str(error.value).startswith(f"`-n {text}`: ")


@pytest.mark.parametrize(
    ("workers", "gpus", "cores", "number"),
    [
        ("auto", 0, 2, 2),
        ("auto", 0, 64, 4),
        ("auto", 8, 2, 8),
        ("cpu", 8, 64, 64),
        (23, 0, 2, 23),
    ],
)
def test_how_many(workers, gpus, cores, number):
    """`auto` is one per GPU, else one per core and at most 4; the others are what they say."""
    assert topology.resolve(workers, gpus, cores) == number


def test_gpu_without_gpus():
    """`-n gpu` on a machine without one is refused, with what is possible there."""
    with pytest.raises(BadTopology, match=r"no GPU is visible.* Use `-n 4`, `-n auto` or `-n cpu`"):
        topology.resolve("gpu", 0, 4)


@pytest.mark.world
def test_usable_cores():
    """A process bound to one core counts one."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system binds no processes to cores")
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from nbdist.topology import usable_cores; print(usable_cores())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON
    )
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize(
    ("devices", "installed", "visible"),
    [
        (None, 2, ("0", "1")),
        ("0,1", 4, ("0", "1")),
        ("3, 1", 4, ("3", "1")),
        ("", 4, ()),
        ("-1", 4, ()),
        ("0,-1,1", 4, ("0",)),
        ("0,9,1", 4, ("0",)),
        ("1,1", 4, ()),
        ("0,1", 0, ()),
        ("GPU-8f6e,GPU-1b2c", 2, ("GPU-8f6e", "GPU-1b2c")),
        ("GPU-8f6e,GPU-1b2c", 1, ("GPU-8f6e",)),
        ("MIG-8f6e,MIG-1b2c", 1, ("MIG-8f6e", "MIG-1b2c")),
    ],
)
def test_visible_gpus(devices, installed, visible):
    """GPUs are counted as CUDA would: up to the first entry that names none."""
    environ = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    assert topology.visible_gpus(environ, installed) == visible


def fake_nvidia_smi(folder, monkeypatch, script):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(topology, "DRIVER_FOLDER", folder / "no driver")


TWO_GPUS = "printf 'GPU 0: H200 (UUID: GPU-8f)\\n  MIG 1g Device 0: (UUID: MIG-1)\\nGPU 1: x\\n'"


@pytest.mark.world
@pytest.mark.parametrize(
    ("script", "gpus"),
    [(TWO_GPUS, 2), (f"{TWO_GPUS}; exit 9", 0), (f"{TWO_GPUS}; exec sleep 5", 0)],
)
def test_gpus_by_nvidia_smi(tmp_path, monkeypatch, script, gpus):
    """Without the driver's files nvidia-smi is asked; one that fails or hangs counts as no GPU."""
    fake_nvidia_smi(tmp_path, monkeypatch, script)
    monkeypatch.setattr(topology, "NVIDIA_SMI_TIMEOUT", 0.5)
    assert topology.installed_gpus() == gpus


@pytest.mark.world
def test_slices_by_nvidia_smi(tmp_path, monkeypatch):
    """Where the driver has MIG slices it is these that ranks get, as nvidia-smi names them."""
    fake_nvidia_smi(tmp_path, monkeypatch, TWO_GPUS)
    monkeypatch.setattr(topology, "SLICES_FOLDER", tmp_path / "capabilities")
    assert topology.visible_gpus({}) == ("0", "1")
    (tmp_path / "capabilities/gpu0/mig/gi3/ci0").mkdir(parents=True)
    assert topology.visible_gpus({}) == ("MIG-1",)
    assert topology.visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == ("1",)


def test_gpus_of_amd(tmp_path, monkeypatch):
    """They count where torch is one for ROCm; a node without a number is a CPU."""
    monkeypatch.setattr(topology, "AMD_FOLDER", tmp_path)
    monkeypatch.setattr(topology, "DRIVER_FOLDER", tmp_path)
    for node, number in enumerate(("0", "51966", "4660")):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "gpu_id").write_text(f"{number}\n")
    monkeypatch.setattr(topology, "version", {"torch": "2.13.0+rocm7.0"}.get)
    assert topology.visible_gpus({}) == ("0", "1")
    monkeypatch.setattr(topology, "version", {"torch": "2.13.0+cu130"}.get)
    assert topology.installed_gpus() == 3


def test_gpus_by_driver(tmp_path, monkeypatch):
    """The driver's folder has an entry for each GPU, and no program needs to run."""
    fake_nvidia_smi(tmp_path, monkeypatch, TWO_GPUS)
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    monkeypatch.setattr(topology, "DRIVER_FOLDER", tmp_path / "gpus")
    assert topology.installed_gpus() == 3


@pytest.mark.parametrize(
    ("text", "visible", "chosen"),
    [
        ("0,1,3", "0123", ("0", "1", "3")),
        ("3, 0", "0123", ("3", "0")),
        ("0-2", "4567", ("4", "5", "6")),
        ("1", ("4", "GPU-8f"), ("GPU-8f",)),
    ],
)
def test_gpus(text, visible, chosen):
    """`--gpus` counts among the visible ones, and keeps the order."""
    assert topology.parse_gpus(text, tuple(visible)) == chosen


@pytest.mark.parametrize(
    ("text", "visible", "why"),
    [
        ("0,4", "0123", "there is no GPU 4, 0-3 are visible"),
        ("1", "0", "there is no GPU 1, only GPU 0 is visible"),
        ("0,0", "01", "a GPU is listed twice"),
        ("1-0", "01", "it runs backwards"),
        ("a", "01", "that is not a list of GPUs"),
        ("-1", "01", "that is not a list of GPUs"),
    ],
)
def test_bad_gpus(text, visible, why):
    """A GPU that is not there, or that cannot be read, is named with the right forms."""
    with pytest.raises(BadTopology) as error:
        topology.parse_gpus(text, tuple(visible))
    assert str(error.value) == (
        f"`--gpus {text}`: {why}. Use numbers with commas, `--gpus 0,1,3` or `0-3`."
    )


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("gloo", "gloo"),
        ("NCCL", "nccl"),
        ("nccl-legacy", "nccl-legacy"),
        ("cpu:gloo,cuda:nccl2", "cpu:gloo,cuda:nccl2"),
        ("none", "none"),
        ("cuda:gloo", "cuda:gloo"),
        ("cpu:gloo,xpu:xccl", "cpu:gloo,xpu:xccl"),
    ],
)
def test_backend(text, backend):
    """`--backend` takes what torch takes, and `none`."""
    assert topology.parse_backend(text) == backend


@pytest.mark.parametrize(
    "text",
    [
        *("", "glo", "cpu:nccl", "cpu:nccl-legacy", "xpu:nccl", "gloo,nccl", "nccl-lazy"),
        *("cpu:gloo,cpu:gloo", "tpu:gloo", "cpu:gloo:x"),
    ],
)
def test_bad_backend(text):
    """Any other backend is answered with the right forms."""
    with pytest.raises(BadTopology, match="Use `--backend gloo`, `nccl`, ") as error:
        topology.parse_backend(text)
    assert str(error.value).startswith(f"`--backend {text}`: ")


@pytest.mark.parametrize(
    ("workers", "gpus", "cores", "backend", "warning"),
    [
        (2, 0, 2, "gloo", None),
        (23, 0, 2, "gloo", "23 workers on 2 CPU cores: expect them to be slower."),
        (2, 0, 1, "none", "2 workers on 1 CPU core: expect them to be slower."),
        (4, 2, 64, "gloo", "4 workers share 2 GPUs."),
        (8, 8, 4, "cpu:gloo,cuda:nccl", None),
    ],
)
def test_more_workers_than_there_is_room(workers, gpus, cores, backend, warning):
    """More workers than cores or GPUs start with gloo, after one line of warning."""
    assert topology.check_start(workers, gpus, cores, backend) == warning


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_two_ranks_on_one_gpu(backend):
    """With nccl each rank needs a GPU of its own, and the error says which are visible."""
    with pytest.raises(NotEnoughGpus, match=r"^2 ranks asked, 1 GPU visible \(CUDA_.*=5\)"):
        topology.check_start(2, 1, 64, backend, "5")


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_ranks_that_share_a_gpu(backend):
    """With `--share-gpus` they start, after a line that says what it is for; not without a GPU."""
    assert topology.check_start(4, 1, 64, backend, share_gpus=True) == (
        "4 ranks of nccl on 1 GPU with `--share-gpus`: slow, for debugging."
    )
    assert topology.check_start(4, 1, 64, "gloo", share_gpus=True) == "4 workers share 1 GPU."
    with pytest.raises(NotEnoughGpus, match="0 GPUs visible"):
        topology.check_start(4, 0, 64, backend, share_gpus=True)


@pytest.mark.parametrize(
    ("text", "world_size", "ranks"),
    [
        ("0", 4, (0,)),
        ("0,2-3", 4, (0, 2, 3)),
        ("2-3, 0, 3", 4, (0, 2, 3)),
        ("::2", 5, (0, 2, 4)),
        ("1:3", 4, (1, 2)),
        ("-2:", 4, (2, 3)),
        ("::-1", 3, (0, 1, 2)),
        ("-1", 4, (3,)),
        ("all", 3, (0, 1, 2)),
        ("0-1023", 1024, tuple(range(1024))),
    ],
)
def test_ranks(text, world_size, ranks):
    """`-r` takes numbers, spans, slices and `all`, and gives each rank once, ascending."""
    assert topology.parse_ranks(text, world_size) == ranks


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9", "there is no rank 9"),
        ("-5", "there is no rank -5"),
        ("0-", "`0-` cannot be read"),
        ("1+1", "`1+1` cannot be read"),
        ("٣", "`٣` cannot be read"),
        ("9" * 7, f"`{'9' * 7}` cannot be read"),
        ("", "it is empty"),
        ("0,", "there is nothing next to a comma"),
        ("3-1", "`3-1` runs backwards"),
        ("2:2", "`2:2` is empty here"),
        ("7:", "`7:` is empty here"),
        ("::0", "a step cannot be 0"),
    ],
)
def test_bad_ranks(text, why):
    """A selection that cannot be read, or of ranks that are not there, says why and what can be."""
    with pytest.raises(BadRanks) as error:
        topology.parse_ranks(text, 4)
    assert str(error.value).endswith(
        f" selects no ranks: {why}. There are ranks 0-3; "
        "select with `0`, `0,2-3`, `1:3`, `::2`, `-1` or `all`."
    )


def test_bad_rank_of_one():
    """In a world of one the only rank is named."""
    with pytest.raises(BadRanks, match="There is only rank 0"):
        topology.parse_ranks("1", 1)


SIZES = [(3, 3), ("3", 3), ("+2", 6), ("-1", 3), (" +1 ", 5), ("4", 4)]


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_size(n, size):
    """A number, or how many more or fewer."""
    assert topology.parse_size(n, 4) == size


@pytest.mark.parametrize(
    ("text", "layout", "said"),
    [
        ("4", Layout(1, 4), "1x4"),
        ("2x4", Layout(2, 4), "2x4"),
        (" 2 x 4 ", Layout(2, 4), "2x4"),
        ("1:2x4", Layout(2, 4, least=1), "1:2x4"),
        ("2:2x4", Layout(2, 4), "2x4"),
    ],
)
def test_layouts_are_read(text: str, layout: Layout, said: str) -> None:
    """`NODESxN`, `MIN:MAXxN`, and a bare number of workers on one node."""
    assert parse_layout(text) == layout
    assert str(layout) == said
    assert layout.world_size == layout.nodes * layout.per_node


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0x0", "it takes at least one node and one worker"),
        ("0", "it takes at least one node and one worker"),
        ("2x4x1", "that is not nodes and workers"),
        ("1:4", "that is not nodes and workers"),
        ("5:2x4", "5 nodes are more than 2"),
        ("0:2x4", "it takes at least one node and one worker"),
        ("-1x2", "that is not nodes and workers"),
        ("", "that is not nodes and workers"),
        ("9" * 5000, "that is not nodes and workers"),
    ],
)
def test_bad_layouts_are_told_in_one_line(text: str, why: str) -> None:
    """The reason, and the forms that there are."""
    with pytest.raises(BadTopology) as found:
        parse_layout(text)
    forms = "Use `-j 4`, `-j 2x4` (2 nodes with 4 workers each), or `-j 1:2x4` (1 node to 2)."
    assert str(found.value) == f"`-j {text}`: {why}. {forms}"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a")]),
        ("a:4,b", [Host("a", 4), Host("b")]),
        (" a:4 , me@b.example.org:2 ", [Host("a", 4), Host("b.example.org", 2, "me")]),
        ("10.0.0.1,root@10.0.0.2:3", [Host("10.0.0.1"), Host("10.0.0.2", 3, "root")]),
        ("[fe80::1%eth0]:2,[2001:DB8::0:1]", [Host("fe80::1%eth0", 2), Host("2001:db8::1")]),
        ("Node_1.,gpu-2", [Host("node_1"), Host("gpu-2")]),
    ],
)
def test_hosts_are_read(text: str, hosts: list[Host]) -> None:
    """Names and addresses of both kinds, with users and room; written again they are the same."""
    assert [*parse_hosts(text)] == hosts
    assert [*parse_hosts(read_hosts(text))] == hosts
    assert read_hosts([str(host) for host in hosts]) == read_hosts(text)


def test_what_ssh_is_given() -> None:
    """The brackets of `--hosts` are not ssh's."""
    assert [host.destination for host in parse_hosts("a:4,me@[fe80::1]:2")] == ["a", "me@fe80::1"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is nothing next to a comma"),
        ("a:0", "`a:0` allows no worker"),
        ("a:x", "`a:x` is not a host"),
        ("a b", "`a b` is not a host"),
        ("fe80::1", "`fe80::1` is not a host"),
        ("[fe80::1%;]", "`[fe80::1%;]` is not a host"),
        ("10.0.0.300", "`10.0.0.300` is not a host"),
        ("-oProxyCommand=x", "`-oProxyCommand=x` is not a host"),
        ("a;reboot", "`a;reboot` is not a host"),
        ("münchen", "`münchen` is not a host"),
        ("-l@a", "`-l` cannot be a user"),
        ("a@b@c", "`a@b@c` is not a host"),
        ("a,b,A:2", "a is listed twice"),
        ("[::1],me@[0::1]", "::1 is listed twice"),
    ],
)
def test_what_is_no_host_is_told_in_one_line(text: str, why: str) -> None:
    """The reason, and the forms that there are; no option of ssh's gets through."""
    with pytest.raises(BadTopology) as found:
        parse_hosts(text)
    assert str(found.value).startswith(f"`--hosts {text}`: {why}. Use `--hosts a,b`, or ")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("room", "size", "seats"),
    [
        ((), 3, [Seat(0, 3, 0, 1), Seat(1, 3, 0, 1), Seat(2, 3, 0, 1)]),
        ((2, 2), 4, [Seat(0, 2, 0, 2), Seat(1, 2, 0, 2), Seat(0, 2, 1, 2), Seat(1, 2, 1, 2)]),
        ((2, 2), 3, [Seat(0, 2, 0, 2), Seat(1, 2, 0, 2), Seat(0, 1, 1, 2)]),
        ((1, 0, 2), 3, [Seat(0, 1, 0, 2), Seat(0, 2, 1, 2), Seat(1, 2, 1, 2)]),
    ],
)
def test_seats(room: tuple[int, ...], size: int, seats: list[Seat]) -> None:
    """Nodes are filled one after the other; the last has what is left, and empty ones no number."""
    filled = seat_more((), room, size)
    assert [seat_of(rank, size, filled) for rank in range(size)] == seats


def test_ranks_of_a_node() -> None:
    """They need not follow one another; without seats one node has all."""
    seats = (Position(0, 0), Position(1, 0), Position(0, 1))
    assert [ranks_on(node, 3, seats) for node in (0, 1, 2)] == [(0, 2), (1,), ()]
    assert [ranks_on(node, 3, ()) for node in (0, 1)] == [(0, 1, 2), ()]


@pytest.mark.parametrize(
    ("room", "size", "gpus", "seen"),
    [
        ((), 2, "4567", ["4567", "4567"]),
        ((2, 2), 4, "4567", ["45", "45", "67", "67"]),
        ((2, 2), 4, "456", ["45", "45", "64", "64"]),
        ((2, 2), 4, "4", ["4"] * 4),
        ((2, 2), 2, "4567", ["4567"] * 2),
    ],
)
def test_gpus_of_simulated_nodes(
    room: tuple[int, ...], size: int, gpus: str, seen: list[str]
) -> None:
    """Each node has a slice, so that ranks of two nodes share no GPU where there are enough."""
    seats = seat_more((), room, size)
    assert ["".join(gpus_of(rank, seats, gpus)) for rank in range(size)] == seen


@pytest.mark.parametrize(
    ("counts", "lost", "room", "seats"),
    [
        # Ranks 2 and 3 sat on node 1.
        ((2, 2), {1}, {0: 4}, [(0, 0), (0, 1), (0, 2), (0, 3)]),
        ((2, 2), {1}, {0: 3, 2: 1}, [(0, 0), (0, 1), (0, 2), (2, 0)]),
        ((2, 2), {1}, {0: 2, 2: 8}, [(0, 0), (0, 1), (2, 0), (2, 1)]),
        ((2, 2), {1}, {0: 3}, None),
        ((1, 1, 1), {0, 2}, {1: 3}, [(1, 1), (1, 0), (1, 2)]),
    ],
)
def test_ranks_of_lost_nodes_get_seats_on_others(
    counts: tuple[int, ...],
    lost: set[int],
    room: dict[int, int],
    seats: list[tuple[int, int]] | None,
) -> None:
    """The lowest that is free on the first node with room; all others keep theirs."""
    found = reseat(seat_more((), counts, sum(counts)), lost, room)
    assert (None if found is None else [*found]) == seats


def test_seats_that_were_left_are_taken_first() -> None:
    """Local rank 0 of node 0 is free: its rank has moved away."""
    seats = (Position(1, 0), Position(0, 1), Position(2, 0))
    assert reseat(seats, {2}, {0: 2, 1: 1}) == ((1, 0), (0, 1), (0, 0))


@pytest.mark.parametrize(
    ("seats", "room", "size", "seated"),
    [
        ((), (), 4, ()),
        ((), (2, 2), 3, ((0, 0), (0, 1), (1, 0))),
        (((0, 0), (0, 1), (1, 0)), (2, 2), 2, ((0, 0), (0, 1))),
        # After ranks have left; a rank with a GPU keeps that, on one node too.
        (((0, 1), (1, 1)), (2, 2), 4, ((0, 1), (1, 1), (0, 0), (1, 0))),
        (((0, 0), (0, 3)), (), 4, ((0, 0), (0, 3), (0, 1), (0, 2))),
    ],
)
def test_more_are_seated(seats, room, size, seated):
    """Those that sit stay there, the others get the first free seats."""
    assert seat_more(seats, room, size) == seated
