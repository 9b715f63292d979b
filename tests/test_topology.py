"""nbdist.topology: what people type, and what it means."""

import os
import stat
import subprocess
import sys

import pytest

from nbdist import topology
from nbdist.errors import BadRanks, BadTopology, NotEnoughGpus
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
        ("auto", 1, 64, 1),
        ("gpu", 3, 64, 3),
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
        (None, 0, ()),
        (None, 2, ("0", "1")),
        ("0,1", 4, ("0", "1")),
        ("3, 1", 4, ("3", "1")),
        ("01", 4, ("1",)),
        ("", 4, ()),
        ("-1", 4, ()),
        ("NoDevFiles", 4, ()),
        ("0,-1,1", 4, ("0",)),
        ("0,9,1", 4, ("0",)),
        ("1,1", 4, ()),
        ("0,1", 0, ()),
        ("GPU-8f6e,GPU-1b2c", 2, ("GPU-8f6e", "GPU-1b2c")),
        ("GPU-8f6e,GPU-1b2c", 1, ("GPU-8f6e",)),
        ("MIG-8f6e,MIG-1b2c", 1, ("MIG-8f6e", "MIG-1b2c")),
        ("MIG-8f6e", 0, ()),
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
        ("0", "", "there is no GPU 0, none is visible"),
        ("0,0", "01", "a GPU is listed twice"),
        ("1-0", "01", "it runs backwards"),
        ("a", "01", "that is not a list of GPUs"),
        ("", "01", "that is not a list of GPUs"),
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
        ("cpu:gloo, cuda:nccl", "cpu:gloo,cuda:nccl"),
        ("cuda:gloo", "cuda:gloo"),
        ("xccl", "xccl"),
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


def test_default_backend():
    """Ranks with a GPU use nccl for its tensors, the others gloo."""
    assert topology.default_backend(0) == "gloo"
    assert topology.default_backend(2) == "cpu:gloo,cuda:nccl"


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
        (":2", 4, (0, 1)),
        ("-2:", 4, (2, 3)),
        ("::-1", 3, (0, 1, 2)),
        ("1:9", 4, (1, 2, 3)),
        ("-1", 4, (3,)),
        ("-4", 4, (0,)),
        ("all", 3, (0, 1, 2)),
        ("all,0", 1, (0,)),
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
        ("0-9", "there is no rank 9"),
        ("-5", "there is no rank -5"),
        ("0-999999", "there is no rank 999999"),
        ("0-", "`0-` cannot be read"),
        ("a", "`a` cannot be read"),
        ("1+1", "`1+1` cannot be read"),
        ("1:2:3:4", "`1:2:3:4` cannot be read"),
        ("٣", "`٣` cannot be read"),
        ("9" * 7, f"`{'9' * 7}` cannot be read"),
        ("", "it is empty"),
        ("  ", "it is empty"),
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


def test_selections_are_not_evaluated():
    """Python in the place of ranks is refused as text."""
    with pytest.raises(BadRanks, match="cannot be read"):
        topology.parse_ranks("__import__('os').getpid()", 4)


SIZES = [(3, 3), ("3", 3), ("+2", 6), ("-1", 3), (" +1 ", 5), ("4", 4)]


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_size(n, size):
    """A number, or how many more or fewer."""
    assert topology.parse_size(n, 4) == size
