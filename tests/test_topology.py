"""Tests of `nbdist.topology`: options for workers, nodes, hosts and GPUs, and places of ranks."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest
import torch

from nbdist import topology
from nbdist.errors import BadRanks, BadTopology, UsageError
from nbdist.topology import (
    Host,
    Layout,
    Position,
    Slot,
    Slots,
    move_lost_ranks,
    parse_backend,
    parse_gpus,
    parse_hosts,
    parse_layout,
    parse_ranks,
    parse_workers,
    place_ranks,
    read_hosts,
    select_ranks,
)
from nbdist.wire.spec import WorldSpec
from nbdist.world.spec import parse_size

FOUR = ("0", "1", "2", "3")


def world(size: int, slots: Slots = (), gpus: str = "") -> WorldSpec:
    return WorldSpec(size, None, {}, "/", (), 1, "", tuple(gpus), slots=slots)


READ = [
    *((parse_workers, text, text) for text in ("auto", "gpu", "cpu")),
    *((parse_workers, text, int(text)) for text in ("4", " 1 ", "023")),
    (partial(parse_gpus, visible=FOUR), "0,1,3", ("0", "1", "3")),
    (partial(parse_gpus, visible=FOUR), "3, 0", ("3", "0")),
    (partial(parse_gpus, visible=("4", "5", "6", "7")), "0-2", ("4", "5", "6")),
    (partial(parse_gpus, visible=("4", "GPU-8f")), "1", ("GPU-8f",)),
    *((parse_backend, text, text) for text in ("gloo", "nccl-legacy", "none", "cuda:gloo")),
    *((parse_backend, text, text) for text in ("cpu:gloo,cuda:nccl2", "cpu:gloo,xpu:xccl")),
    (parse_backend, "NCCL", "nccl"),
    (partial(parse_ranks, world_size=4), "0", (0,)),
    (partial(parse_ranks, world_size=4), "0,2-3", (0, 2, 3)),
    (partial(parse_ranks, world_size=4), "2-3, 0, 3", (0, 2, 3)),
    (partial(parse_ranks, world_size=5), "::2", (0, 2, 4)),
    (partial(parse_ranks, world_size=4), "1:3", (1, 2)),
    (partial(parse_ranks, world_size=4), "-2:", (2, 3)),
    (partial(parse_ranks, world_size=3), "::-1", (0, 1, 2)),
    (partial(parse_ranks, world_size=4), "-1", (3,)),
    (partial(parse_ranks, world_size=3), "all", (0, 1, 2)),
    (partial(parse_ranks, world_size=1024), "0-1023", tuple(range(1024))),
    *((partial(parse_size, size=4), n, 3) for n in (3, "3", "-1")),
    *((partial(parse_size, size=4), n, size) for n, size in (("+2", 6), (" +1 ", 5), ("4", 4))),
    (parse_layout, "4", Layout(1, 4, 1)),
    *((parse_layout, text, Layout(2, 4, 2)) for text in ("2x4", " 2 x 4 ", "2:2x4")),
    (parse_layout, "1:2x4", Layout(2, 4, least=1)),
    (parse_hosts, " a:4 , me@b.org:2 ", (Host("a", 4), Host("b.org", 2, "me"))),
    (parse_hosts, "10.0.0.1,root@10.0.0.2:3", (Host("10.0.0.1"), Host("10.0.0.2", 3, "root"))),
    (parse_hosts, "[fe80::1%eth0]:2,[::0:A]", (Host("fe80::1%eth0", 2), Host("::a"))),
    (parse_hosts, "Node_1.,gpu-2", (Host("node_1"), Host("gpu-2"))),
]


@pytest.mark.parametrize(("read", "text", "value"), READ)
def test_each_form_of_an_option_is_read(read, text, value):
    """Each form of each option is read; layouts and hosts that are written again are read alike."""
    assert read(text) == value
    if read is parse_layout:
        assert parse_layout(str(value)) == value
        assert value.world_size == value.nodes * value.per_node
    if read is parse_hosts:
        assert parse_hosts(read_hosts(text)) == value
        assert read_hosts([str(host) for host in value]) == read_hosts(text)
        # ssh expects an IPv6 address without brackets.
        assert parse_hosts("me@[fe80::1]:2")[0].destination == "me@fe80::1"


# The parser of each option, and the forms that its errors name.
FORMS = {
    "-n": (parse_workers, "Use `-n 4`, `-n auto`, `-n gpu` or `-n cpu`."),
    "--gpus": (partial(parse_gpus, visible=FOUR), "Use numbers with commas, `--gpus 0,1,3` or "),
    "-j": (parse_layout, "Use `-j 4`, `-j 2x4` (2 nodes with 4 workers each), or `-j 1:2x4` (1 "),
    "--backend": (parse_backend, "Use `--backend gloo`, `nccl`, "),
    "--hosts": (parse_hosts, "Use `--hosts a,b`, or "),
}
FEWEST, NO_LAYOUT = "it takes at least one node and one worker", "that is not nodes and workers"

REFUSED = [
    *(("-n", text, "") for text in ("0", "AUTO", "-3", "2.5", "", "1e3", "4 4", "٤", "9" * 5000)),
    ("--gpus", "0,4", "there is no GPU 4, 0-3 are visible"),
    ("--gpus", "0,0", "a GPU is listed twice"),
    ("--gpus", "1-0", "it runs backwards"),
    *(("--gpus", text, "that is not a list of GPUs") for text in ("a", "-1")),
    *(("--backend", text, "") for text in ("", "glo", "cpu:nccl", "cpu:nccl-legacy", "xpu:nccl")),
    *(("--backend", text, "") for text in ("gloo,nccl", "nccl-lazy", "tpu:gloo", "cpu:gloo:x")),
    ("--backend", "cpu:gloo,cpu:gloo", "a device is listed twice"),
    *(("-j", text, FEWEST) for text in ("0x0", "0", "0:2x4")),
    *(("-j", text, NO_LAYOUT) for text in ("2x4x1", "1:4", "-1x2", "", "9" * 5000)),
    ("-j", "5:2x4", "5 nodes are more than 2"),
    ("--hosts", "", "there is nothing next to a comma"),
    ("--hosts", "a:0", "`a:0` allows no worker"),
    *(("--hosts", text, f"`{text}` is not a host") for text in ("a:x", "a b", "fe80::1", "a@b@c")),
    # Options of ssh and commands of a shell are refused.
    *(("--hosts", text, f"`{text}` is not a host") for text in ("-oProxyCommand=x", "a;reboot")),
    *(("--hosts", text, f"`{text}` is not a host") for text in ("[fe80::1%;]", "10.0.0.300")),
    ("--hosts", "münchen", "`münchen` is not a host"),
    ("--hosts", "-l@a", "`-l` cannot be a user"),
    ("--hosts", "a,b,A:2", "a is listed twice"),
    ("--hosts", "[::1],me@[0::1]", "::1 is listed twice"),
]


@pytest.mark.parametrize(("option", "text", "why"), REFUSED)
def test_a_wrong_text_is_refused_in_one_line(option, text, why):
    """The error for a wrong text names the text, the reason and the right forms in one line."""
    parse, forms = FORMS[option]
    with pytest.raises(BadTopology) as error:
        parse(text)
    said = str(error.value)
    assert said.startswith(f"`{option} {text}`: {why}")
    assert f". {forms}" in said
    assert "\n" not in said


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
def test_words_for_numbers_of_workers_are_resolved(workers, gpus, cores, number, monkeypatch):
    """`auto` means a worker per GPU, else per core and at most 4; `cpu` means a worker per core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7}, raising=False)
    assert topology.usable_cores() == 1  # the cores that the process is bound to
    assert topology.resolve(workers, gpus, cores) == number
    with pytest.raises(BadTopology, match=r"no GPU is visible.* Use `-n 4`, `-n auto` or `-n cpu`"):
        topology.resolve("gpu", 0, cores)
    with pytest.raises(BadTopology, match="there is no GPU 1, only GPU 0 is visible"):
        parse_gpus("1", ("0",))


@pytest.mark.parametrize(
    ("devices", "installed", "visible"),
    [
        (None, 2, ("0", "1")),
        ("3, 1", 4, ("3", "1")),
        ("", 4, ()),
        ("-1", 4, ()),
        ("0,9,1", 4, ("0",)),
        ("1,1", 4, ()),
        ("0,1", 0, ()),
        ("GPU-8f6e,GPU-1b2c", 1, ("GPU-8f6e",)),
        ("GPU-8f6e,0", 1, ("GPU-8f6e",)),
        ("MIG-8f6e,MIG-1b2c", 1, ("MIG-8f6e", "MIG-1b2c")),
    ],
)
def test_visible_gpus_are_counted_as_by_cuda(devices, installed, visible, monkeypatch):
    """GPUs are counted as CUDA would: up to the first entry that names no GPU."""
    environ = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    monkeypatch.setattr(topology, "installed_gpus", lambda: installed)
    assert topology.visible_gpus(environ) == visible


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Makes an `nvidia-smi` of a script, on a machine without the driver's files."""

    def make(script):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(topology, "DRIVER_FOLDER", tmp_path / "no driver")
    return make


TWO_GPUS = "printf 'GPU 0: H200 (UUID: GPU-8f)\\n  MIG 1g Device 0: (UUID: MIG-1)\\nGPU 1: x\\n'"


@pytest.mark.world
@pytest.mark.parametrize(
    ("script", "gpus"),
    [(TWO_GPUS, 2), (f"{TWO_GPUS}; exit 9", 0), (f"{TWO_GPUS}; exec sleep 5", 0)],
)
def test_gpus_are_counted_by_nvidia_smi(nvidia_smi, tmp_path, monkeypatch, script, gpus):
    """Without the driver's files nvidia-smi counts GPUs; if it fails or hangs, there are none."""
    nvidia_smi(script)
    monkeypatch.setattr(topology, "NVIDIA_SMI_TIMEOUT", 0.5)
    assert topology.installed_gpus() == gpus
    # The driver's folder has an entry for each GPU, and no program needs to run.
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    monkeypatch.setattr(topology, "DRIVER_FOLDER", tmp_path / "gpus")
    assert topology.installed_gpus() == 3


@pytest.mark.world
def test_mig_slices_are_the_visible_gpus(nvidia_smi, tmp_path, monkeypatch):
    """MIG slices of the driver are the visible GPUs, unless CUDA_VISIBLE_DEVICES names others."""
    nvidia_smi(TWO_GPUS)
    monkeypatch.setattr(topology, "SLICES_FOLDER", tmp_path / "capabilities")
    assert topology.visible_gpus({}) == ("0", "1")
    (tmp_path / "capabilities/gpu0/mig/gi3/ci0").mkdir(parents=True)
    assert topology.visible_gpus({}) == ("MIG-1",)
    assert topology.visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == ("1",)


def test_gpus_of_amd_count_for_rocm(tmp_path, monkeypatch):
    """GPUs of AMD count if torch is built for ROCm; a node whose number is 0 is a CPU."""
    monkeypatch.setattr(topology, "AMD_FOLDER", tmp_path)
    monkeypatch.setattr(topology, "DRIVER_FOLDER", tmp_path)
    for node, number in enumerate(("0", "51966", "4660")):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "gpu_id").write_text(f"{number}\n")
    monkeypatch.setattr(topology, "version", {"torch": "2.13.0+rocm7.0"}.get)
    assert topology.visible_gpus({}) == ("0", "1")
    monkeypatch.setattr(topology, "version", {"torch": "2.13.0+cu130"}.get)
    assert topology.installed_gpus() == 3


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
def test_too_many_workers_start_with_a_warning(workers, gpus, cores, backend, warning):
    """More workers than cores or GPUs may start, after one line of warning."""
    assert topology.check_start(workers, gpus, cores, backend) == warning


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9", "there is no rank 9"),
        ("0-", "`0-` cannot be read"),
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
def test_a_wrong_selection_of_ranks_is_refused(text, why):
    """A wrong selection of ranks is refused with the reason, the present ranks and the forms."""
    with pytest.raises(BadRanks, match="There is only rank 0"):
        topology.parse_ranks("1", 1)
    with pytest.raises(BadRanks) as error:
        topology.parse_ranks(text, 4)
    assert str(error.value).endswith(
        f" selects no ranks: {why}. There are ranks 0-3; "
        "select with `0`, `0,2-3`, `1:3`, `::2`, `-1` or `all`."
    )


SELECTED = [
    *((None, rank, (rank % 4,)) for rank in (0, 3, -1)),
    *((None, kind(2), (2,)) for kind in (np.int64, np.uint8, np.array)),
    (None, None, (0, 1, 2, 3)),
    *((kind((1, 2)), None, (1, 2)) for kind in (list, tuple, np.array, iter)),
    (range(1, 4, 2), None, (1, 3)),
    ([2, 0, 2], None, (2, 0)),
    ([0, -1], None, (0, 3)),
    *((text, None, topology.parse_ranks(text, 4)) for text in ("0,2-3", "::2", "-1", "all", "1:3")),
]


@pytest.mark.parametrize(("ranks", "rank", "selected"), SELECTED)
def test_arguments_select_ranks(ranks, rank, selected):
    """`rank=` takes integers of all kinds, `ranks=` also lists, ranges, arrays and texts of `-r`.

    Numbers keep their order, and each rank is selected once.
    """
    found = select_ranks(ranks, rank, 4)
    assert found == selected
    assert {*map(type, found)} == {int}


NO_SELECTION = [
    ([0], 1, UsageError, "`ranks=[0], rank=1`: give `rank` for one rank, or `ranks`."),
    (0, None, UsageError, "`ranks=0`: write `rank=0`, or a list: `ranks=[0]`."),
    (1.5, None, UsageError, "`ranks=1.5`: give numbers, such as `ranks=[0, 2]`, or a text."),
    (None, "0", UsageError, "`rank='0'`: give the number of a rank, such as `rank=0`; "),
    (None, True, UsageError, "`rank=True`: "),
    (None, [0], UsageError, "`rank=[0]`: "),
    (None, torch.tensor(1.5), UsageError, "`rank=tensor(1.5000)`: "),
    ([], None, BadRanks, "`[]` selects no ranks: it is empty. There are ranks 0-3; "),
    ([0, 4], None, BadRanks, "`[0, 4]` selects no ranks: there is no rank 4. "),
    ([0, "1"], None, BadRanks, "`[0, '1']` selects no ranks: '1' is not the number of a rank. "),
    (None, -5, BadRanks, "`rank=-5` selects no ranks: there is no rank -5. "),
    ("x", None, BadRanks, "`x` selects no ranks: `x` cannot be read. "),
    ("", None, BadRanks, "`` selects no ranks: it is empty. "),
]


@pytest.mark.parametrize(("ranks", "rank", "kind", "said"), NO_SELECTION)
def test_arguments_that_select_no_ranks_are_refused(ranks, rank, kind, said):
    """A line says what is wrong with the argument, and how ranks are selected."""
    with pytest.raises(UsageError) as error:
        select_ranks(ranks, rank, 4)
    assert type(error.value) is kind
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("room", "size", "slots"),
    [
        ((), 3, [Slot(0, 3, 0, 1), Slot(1, 3, 0, 1), Slot(2, 3, 0, 1)]),
        ((2, 2), 4, [Slot(0, 2, 0, 2), Slot(1, 2, 0, 2), Slot(0, 2, 1, 2), Slot(1, 2, 1, 2)]),
        ((2, 2), 3, [Slot(0, 2, 0, 2), Slot(1, 2, 0, 2), Slot(0, 1, 1, 2)]),
        ((1, 0, 2), 3, [Slot(0, 1, 0, 2), Slot(0, 2, 1, 2), Slot(1, 2, 1, 2)]),
    ],
)
def test_nodes_are_filled_in_order(room: tuple[int, ...], size: int, slots: list[Slot]) -> None:
    """Nodes are filled in order; the last gets the other ranks, and empty nodes get no number."""
    spec = world(size, place_ranks((), room, size))
    assert [spec.slot(rank) for rank in range(size)] == slots


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
def test_simulated_nodes_divide_the_gpus(room, size, gpus, seen):
    """Each node has a slice of the GPUs, so that nodes share a GPU only if GPUs are too few."""
    spec = world(size, place_ranks((), room, size), gpus)
    assert ["".join(spec.gpus_of(rank)) for rank in range(size)] == seen


@pytest.mark.parametrize(
    ("counts", "lost", "room", "slots"),
    [
        # Ranks 2 and 3 were on node 1.
        ((2, 2), {1}, {0: 4}, [(0, 0), (0, 1), (0, 2), (0, 3)]),
        ((2, 2), {1}, {0: 3, 2: 1}, [(0, 0), (0, 1), (0, 2), (2, 0)]),
        ((2, 2), {1}, {0: 2, 2: 8}, [(0, 0), (0, 1), (2, 0), (2, 1)]),
        ((2, 2), {1}, {0: 3}, None),
        ((1, 1, 1), {0, 2}, {1: 3}, [(1, 1), (1, 0), (1, 2)]),
    ],
)
def test_ranks_of_lost_nodes_get_slots_on_others(counts, lost, room, slots):
    """A rank of a lost node gets the lowest free slot of the first node with room; others stay."""
    found = move_lost_ranks(place_ranks((), counts, sum(counts)), lost, room)
    assert (None if found is None else [*found]) == slots
    # Local rank 0 of node 0 is free: its rank has moved away.
    moved = (Position(1, 0), Position(0, 1), Position(2, 0))
    assert move_lost_ranks(moved, {2}, {0: 2, 1: 1}) == ((1, 0), (0, 1), (0, 0))


@pytest.mark.parametrize(
    ("slots", "room", "size", "placed"),
    [
        ((), (), 4, ()),
        (((0, 0), (0, 1), (1, 0)), (2, 2), 2, ((0, 0), (0, 1))),
        # After ranks have left; the others keep their slots, and so their GPUs, also on one node.
        (((0, 1), (1, 1)), (2, 2), 4, ((0, 1), (1, 1), (0, 0), (1, 0))),
        (((0, 0), (0, 3)), (), 4, ((0, 0), (0, 3), (0, 1), (0, 2))),
    ],
)
def test_new_ranks_get_the_first_free_slots(slots, room, size, placed):
    """Ranks with a slot keep it, and new ranks get the first free slots."""
    assert place_ranks(slots, room, size) == placed
