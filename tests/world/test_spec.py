"""Tests of `nbdist.world.spec`: what workers get from options and from the notebook's process."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nbdist import topology
from nbdist.config import WorldConfig
from nbdist.errors import NotEnoughGpus, UsageError
from nbdist.topology import place_ranks
from nbdist.wire.spec import NBDIST_SETS, WorldSpec, torchrun_variables
from nbdist.world.spec import Here, make_spec, parse_line, read_env_file, scaled


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the environment variables that a world reads."""
    for name in ("OMP_NUM_THREADS", "PYTHON_EXEC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def spec_of(**options: object) -> WorldSpec:
    return make_spec(WorldConfig(**options))[0]  # type: ignore[arg-type]


def test_env_wins_over_file_and_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--env` wins over the file of `--env-file`, and the file over `--debug` and the notebook."""
    file = tmp_path / ".env"
    file.write_text("A=file\nB=file\nTORCH_DISTRIBUTED_DEBUG=INFO\n")
    for name in "ABC":
        monkeypatch.setenv(name, "notebook")
    environ = spec_of(n=1, env={"A": "env"}, env_file=str(file), debug=True).environ
    assert [environ[name] for name in "ABC"] == ["env", "file", "notebook"]
    assert environ["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    assert environ["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "CUDA_LAUNCH_BLOCKING" not in os.environ


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": {"RANK": "1"}}, "`--env`: RANK is set by nbdist and cannot be changed."),
        ({"env": {"A B": "1"}}, "`--env`: 'A B' and its value cannot be in an environment."),
        ({"env_file": "/nowhere/.env"}, "`--env-file /nowhere/.env`: No such file or directory."),
        ({"env_file": "/"}, "`--env-file /`: Is a directory."),
        ({"python": "/nowhere/python"}, "`--python /nowhere/python`: this program does not exist."),
        ({"python": __file__}, f"`--python {__file__}`: it cannot be executed."),
        ({"n": 100_000}, "`-n 100000`: 100,000 workers take more than"),
    ],
)
def test_an_impossible_option_is_refused_in_one_line(
    options: dict[str, object], message: str
) -> None:
    """The error is a line that names the option and the cause."""
    with pytest.raises(UsageError) as caught:
        spec_of(**options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_threads_are_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS is cores / workers unless the user has set it or has given `--cpus`."""
    cores = len(os.sched_getaffinity(0))

    def threads(**options: object) -> tuple[int, str]:
        spec = spec_of(**options)
        return spec.threads, torchrun_variables(spec, 0, 0)["OMP_NUM_THREADS"]

    for n in (1, 2 * cores):
        share = max(1, cores // n)
        assert threads(n=n) == (share, str(share))
    assert threads(layout="2x1") == (max(1, cores // 2), str(max(1, cores // 2)))
    assert threads(n=2, cpus=3) == (3, "3")
    assert threads(n=2, env={"OMP_NUM_THREADS": "5"}) == (5, "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert threads(n=2, cpus=3) == (4, "4,2")


def test_workers_that_need_a_new_interpreter_are_spawned() -> None:
    """Wrappers, other interpreters, and variables that are read at a start exclude a fork."""
    assert spec_of(n=1).config.fork
    assert not spec_of(n=1, wrap="nice -n 5").config.fork
    assert not spec_of(n=1, debug=True).config.fork
    assert not spec_of(n=1, python="/bin/sh").config.fork
    for name in ("TORCH_LOGS", "LD_LIBRARY_PATH"):
        assert not spec_of(n=1, env={name: "x"}).config.fork


def test_another_interpreter_has_its_own_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another interpreter gets PYTHONPATH and entries added to `sys.path`, but no site-packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHON_EXEC", "/bin/sh")
    spec = spec_of(n=1, env={"PYTHONPATH": "/first:/second"})
    assert (spec.python, spec.own_path) == ("/bin/sh", True)
    assert spec.sys_path[:3] == ("/first", "/second", str(tmp_path))
    assert not any("site-packages" in entry for entry in spec.sys_path)
    monkeypatch.delenv("PYTHON_EXEC")
    spec = spec_of(n=1)
    assert (spec.python, spec.own_path, spec.sys_path) == (sys.executable, False, tuple(sys.path))


def test_ranks_share_a_gpu_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks share a GPU only with `share_gpus`, with a warning, also after scaling."""
    monkeypatch.setattr(topology, "installed_gpus", lambda: 1)
    with pytest.raises(NotEnoughGpus, match="`--share-gpus` for several on one"):
        spec_of(n=4)
    spec, warning = make_spec(WorldConfig(n=4, share_gpus=True))
    assert (spec.gpus, spec.backend) == (("0",), "cpu:gloo,cuda:nccl")
    slow = " ranks of nccl on 1 GPU with `--share-gpus`: slow"
    assert warning.startswith(f"4{slow}")
    assert scaled(spec, 8)[1].startswith(f"8{slow}")


def test_a_class_of_nccl_counts_as_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend such as `nccl-legacy` has nccl's variables, and needs a GPU for each rank."""
    monkeypatch.setattr(topology, "installed_gpus", lambda: 2)
    spec = spec_of(n=2, backend="cpu:gloo,cuda:nccl-legacy")
    assert spec.backend == "cpu:gloo,cuda:nccl-legacy"
    assert "NCCL_RAS_ENABLE" in torchrun_variables(spec, 0, 1)
    with pytest.raises(NotEnoughGpus):
        spec_of(n=3, backend="nccl-legacy")


def test_each_rank_has_a_mig_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a MIG slice of its own; NCCL_NVLS_ENABLE is refused if ranks share a GPU."""
    monkeypatch.setattr(topology, "installed_gpus", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    spec, warning = make_spec(WorldConfig(n=2))
    assert (spec.backend, warning) == ("cpu:gloo,cuda:nccl", "")
    assert [spec.gpus_of(rank) for rank in (0, 1)] == [("MIG-a",), ("MIG-b",)]
    with pytest.raises(NotEnoughGpus, match="3 ranks asked, 2 GPUs visible"):
        spec_of(n=3)
    on = {"NCCL_NVLS_ENABLE": "1"}
    with pytest.raises(UsageError, match="cannot work where several ranks are on one GPU"):
        spec_of(n=2, env=on)
    assert make_spec(WorldConfig(n=2, env=on, backend="gloo"))[1] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert make_spec(WorldConfig(n=1, env=on))[1].startswith("NCCL_NVLS_ENABLE=1: faster, but")
    elsewhere = WorldConfig(hosts="a,b", share_gpus=True, env=on)
    with pytest.raises(UsageError, match="NCCL_NVLS_ENABLE=1 cannot work"):
        make_spec(elsewhere)


HERE = Here(
    environ={"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", "NBDIST_LOG_LIMIT": "1M"},
    cwd="/work",
    sys_path=("", "/added", "/usr/lib/python3", "/venv/lib"),
    argv=("train.py", "--lr", "1"),
    python="/venv/bin/python",
    prefixes=("/venv", "/usr"),
    cores=8,
)


def test_the_spec_follows_from_options_and_process() -> None:
    """The spec follows from the options and from `Here` alone; `-j` places ranks on nodes."""
    spec, warning = make_spec(WorldConfig(n=2), "run", HERE)
    assert (spec.backend, warning, spec.name, spec.log_limit) == ("gloo", "", "run", 1 << 20)
    assert (spec.environ, spec.cwd, spec.argv) == (HERE.environ, "/work", HERE.argv)
    assert (spec.python, spec.sys_path, spec.threads) == (HERE.python, HERE.sys_path, 4)
    assert make_spec(WorldConfig("auto"), "run", HERE)[0].world_size == topology.AUTO_LIMIT
    assert make_spec(WorldConfig("cpu"), "run", HERE)[0].world_size == 8
    assert make_spec(WorldConfig(9), "run", HERE)[1].startswith("9 workers on 8 CPU cores")
    spec = spec_of(layout="2x1")
    assert (spec.world_size, spec.slots) == (2, ((0, 0), (1, 0)))
    assert spec_of(layout="1x2").slots == ()  # a single node needs no slots
    # `parse_args()` in a cell would fail on a kernel's arguments, which come from Jupyter.
    for argv in (("x.py", "-f", "/k-1.json"), ("x.py", "--f=/k-1.json", "--debug")):
        assert make_spec(WorldConfig(1), "run", replace(HERE, argv=argv))[0].argv == argv[:1]
    # NBDIST_SETS names exactly the variables that nbdist sets for a worker.
    with_nccl = replace(spec_of(n=1), backend="nccl", gpus=("0",))
    assert torchrun_variables(with_nccl, 0, 0).keys() == NBDIST_SETS


def test_simulated_nodes_are_scaled_as_they_were() -> None:
    """After scaling down, new ranks first take the free slots; further ranks get new nodes."""
    spec = make_spec(WorldConfig(layout="2x2"), "run", HERE)[0]
    assert spec.slots == place_ranks((), (2, 2), 4)
    shrunk = scaled(spec, 1, 8)[0]
    assert (shrunk.slot(0).nodes, shrunk.slot(0).local_world_size) == (1, 1)
    assert scaled(shrunk, 3, 8)[0].slots == place_ranks((), (2, 2), 3)
    assert scaled(shrunk, 5, 8)[0].slots == place_ranks((), (2, 2, 2), 5)


def test_the_spec_has_all_options() -> None:
    """The spec has all options, and nbdist's choice for each option that was not given."""
    config = WorldConfig(salloc="-p x", copy_env="LD_*", log_dir="/logs")
    process = replace(HERE, environ={"LD_LIBRARY_PATH": "/x"})
    chosen = {"launcher": "slurm", "name": "run", "python": sys.executable, "fork": False}
    spec = make_spec(config, "run", process)[0]
    assert spec.config == replace(config, **chosen)  # type: ignore[arg-type]
    config = make_spec(WorldConfig(2), "run", HERE)[0].config
    assert (config.launcher, config.name, config.python) == ("local", "run", None)


def test_other_machines_get_only_named_variables() -> None:
    """Other machines get variables of `--env` and `--copy-env`, but none that names a rank."""
    environ = {"HF_HOME": "/hf", "HF_TOKEN": "x", "SECRET": "y", "RANK": "0", "LANG": "C"}
    process = replace(HERE, environ=environ)
    config = WorldConfig(1, hosts="a", copy_env="HF_*, LANG,RA*", env={"A": "1", "LANG": "de"})
    expected = {"HF_HOME": "/hf", "HF_TOKEN": "x", "A": "1", "LANG": "de"}
    assert make_spec(config, "run", process)[0].environ == expected


def test_a_world_elsewhere_is_not_judged_by_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machines may have more GPUs; a size is refused only by the slots of `--hosts`."""
    monkeypatch.setattr(topology, "installed_gpus", lambda: 0)
    config = WorldConfig(hosts="a:4,b:2", gpus="0,1", env={"LD_LIBRARY_PATH": "/x"})
    spec, warning = make_spec(config, "run", HERE)
    assert (spec.gpus, spec.config.fork, warning) == ((), False, "")
    remote = replace(spec, backend="nccl", slots=place_ranks((), (4, 2), 6), world_size=6)
    assert scaled(remote, 5) == (replace(remote, world_size=5), "")
    with pytest.raises(UsageError, match="`-n 7 --hosts a:4,b:2`: the hosts have room for 6 w"):
        scaled(remote, 7)


def test_env_files_are_read_without_expansion() -> None:
    """Comments, `export` and quotes are understood; nothing is run or expanded."""
    for line, value in (
        ("A=1", "1"),
        ("A = 1", "1"),
        ("export A=1", "1"),
        ("A=", ""),
        ("A=a b  # why", "a b"),
        ("A= # why", ""),
        ("A=a#b", "a#b"),
        ("A=b=c", "b=c"),
        ("A='$HOME # `x` \"'  # why", '$HOME # `x` "'),
        (r'A="x\ny\"\\z $HOME" # why', 'x\ny"\\z $HOME'),
        ("A=$(rm -rf x)", "$(rm -rf x)"),
    ):
        assert parse_line(line) == {"A": value}, line
    assert [parse_line(line) for line in ("", "# A=1")] == [{}, {}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"A=1\n\nno value here\n", ", line 3 (`no value here`): lines are NAME=value, NAME='v"),
        (b"2A=secret", ", line 1 (`2A`): lines are NAME=value,"),
        *((text, ", line 1 (`A`): lines are") for text in (b"A='secret", b'A="secret\\"')),
        (b"A='secret' more", ", line 1 (`A`): lines are"),
        (b"A=\xff\n", "`: it is not a text in UTF-8."),
    ],
)
def test_a_bad_env_file_is_refused_with_its_line(tmp_path: Path, text: bytes, message: str) -> None:
    """The error shows no value, which may be secret; a byte-order mark and CRLF are ignored."""
    file = tmp_path / ".env"
    file.write_bytes(text)
    with pytest.raises(UsageError) as caught:
        read_env_file(str(file))
    assert str(caught.value).removeprefix("`--env-file ").startswith(f"{file}{message}")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    file.write_bytes(b"\xef\xbb\xbfA=1\r\nA=2\r\n")
    assert read_env_file(str(file)) == {"A": "2"}
