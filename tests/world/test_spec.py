"""Tests of `nbdist.world.spec` and `nbdist.world.environ`: what was asked for, made precise."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nbdist import topology
from nbdist.errors import NotEnoughGpus, UsageError
from nbdist.wire.environ import NBDIST_SETS, sharing_variables, torchrun_variables
from nbdist.wire.messages import Resources, WorldSpec
from nbdist.world.environ import parse_line, read_env_file
from nbdist.world.spec import Asked, make_spec, scaled


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has set what a world looks at."""
    for name in ("OMP_NUM_THREADS", "PYTHON_EXEC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def spec_of(**asked: object) -> WorldSpec:
    return make_spec(Asked(**asked))[0]  # type: ignore[arg-type]


# --- .env files -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", {}),
        ("# A=1", {}),
        ("A=1", {"A": "1"}),
        ("A = 1", {"A": "1"}),
        ("export A=1", {"A": "1"}),
        ("A=", {"A": ""}),
        ("A=a b  # why", {"A": "a b"}),
        ("A= # why", {"A": ""}),
        ("A=a#b", {"A": "a#b"}),
        ("A=b=c", {"A": "b=c"}),
        ("A='$HOME # `x` \"'  # why", {"A": '$HOME # `x` "'}),
        (r'A="x\ny\"\\z $HOME" # why', {"A": 'x\ny"\\z $HOME'}),
        ("A=$(rm -rf x)", {"A": "$(rm -rf x)"}),
    ],
)
def test_lines_of_env_files(line: str, found: dict[str, str]) -> None:
    """Comments, `export` and quotes are understood; nothing is run or expanded."""
    assert parse_line(line) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=1\n\nno value here\n", "line 3 (`no value here`): that is no NAME=value."),
        ("2A=secret", "line 1 (`2A`): that is no NAME=value."),
        ("A='secret", "line 1 (`A`): a quote is not closed."),
        ('A="secret\\"', "line 1 (`A`): a quote is not closed."),
        ("A='secret' more", "line 1 (`A`): something follows the closing quote."),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path: Path, text: str, said: str) -> None:
    """One line with file and line number, and not what may be secret."""
    file = tmp_path / ".env"
    file.write_text(text)
    with pytest.raises(UsageError) as found:
        read_env_file(str(file))
    assert str(found.value).startswith(f"{file}, {said}")
    assert "secret" not in str(found.value)
    assert "\n" not in str(found.value)


# --- what was asked for -----------------------------------------------------------------


def test_whose_value_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--env` before the file, the file before `--debug`, and that before the notebook."""
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
    ("asked", "said"),
    [
        ({"n": 8, "layout": "2x4"}, "`-n 8 -j 2x4`: one of both."),
        ({"env": {"RANK": "1"}}, "`--env`: RANK tells a worker who it is, and cannot be set."),
        ({"env": {"A B": "1"}}, "`--env`: 'A B' and its value cannot be in an environment."),
        ({"env_file": "/nowhere/.env"}, "`--env-file /nowhere/.env`: No such file or directory."),
        ({"env_file": "/"}, "`--env-file /`: Is a directory."),
        ({"copy_env": "HF_*,a b"}, "`--copy-env HF_*,a b`: `a b` is no pattern of names"),
        ({"python": "/nowhere/python"}, "`--python /nowhere/python`: there is no such program."),
        ({"python": __file__}, f"`--python {__file__}`: it cannot be executed."),
        ({"wrap": ""}, '`--wrap ""`: a command and its arguments'),
        ({"wrap": "nice 'x"}, "`--wrap nice 'x`: no closing quotation."),
        ({"name": "../x"}, "`--name ../x`: it names a folder below the log folder"),
        ({"name": "/x"}, "`--name /x`: it names a folder below the log folder"),
        ({"name": "a//b"}, "`--name a//b`: it names a folder below the log folder"),
        ({"name": "a/."}, "`--name a/.`: it names a folder below the log folder"),
        ({"name": "x" * 101}, f"`--name {'x' * 101}`: it names a folder below the log folder"),
        ({"cpus": "many"}, "`--cpus many`: a number of cores for each worker, such as 4."),
        ({"cpus": 0}, "`--cpus 0`: a number of cores for each worker, such as 4."),
        ({"memory": "16"}, "`--memory 16`: for each worker, such as 16G or 500M."),
    ],
)
def test_what_cannot_be_is_told_in_one_line(asked: dict[str, object], said: str) -> None:
    """Which option, why, and what would be right."""
    with pytest.raises(UsageError) as found:
        spec_of(**asked)
    assert str(found.value).startswith(said)
    assert "\n" not in str(found.value)


def test_threads_are_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS is cores / workers unless the user has set it, or `--cpus`."""
    cores = len(os.sched_getaffinity(0))

    def threads(**asked: object) -> tuple[int, str]:
        spec = spec_of(**asked)
        return spec.threads, torchrun_variables(spec, 0, 0)["OMP_NUM_THREADS"]

    for n in (1, 2, 3, 2 * cores):
        share = max(1, cores // n)
        assert threads(n=n) == (share, str(share))
    assert threads(layout="2x1") == (max(1, cores // 2), str(max(1, cores // 2)))
    assert threads(n=2, cpus=3) == (3, "3")
    assert threads(n=2, env={"OMP_NUM_THREADS": "5"}) == (5, "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert threads(n=2, cpus=3) == (4, "4,2")


def test_resources_and_patterns_are_kept_for_the_launcher() -> None:
    """What this machine does not need is in the spec for those that do."""
    spec = spec_of(n=1, cpus="4", memory="16G", copy_env="HF_*, WANDB_*")
    assert spec.resources == Resources(cpus=4, memory=16 * 1024)
    assert spec_of(n=1, memory="500 mb").resources.memory == 500
    assert spec.copy_env == ("HF_*", "WANDB_*")
    spec = spec_of(layout="1:2x1")
    assert (spec.world_size, spec.per_node, spec.min_nodes) == (2, 1, 1)


@pytest.mark.parametrize(
    "asked",
    [
        {"wrap": "nice -n 5"},
        {"debug": True},
        {"env": {"TORCH_LOGS": "+dynamo"}},
        {"env": {"LD_LIBRARY_PATH": "/x"}},
        {"python": "/bin/sh"},
    ],
)
def test_what_a_fork_would_miss_is_spawned(asked: dict[str, object]) -> None:
    """What an interpreter reads as it starts, and other interpreters, need a new one."""
    assert spec_of(n=1).use_nursery
    assert not spec_of(n=1, **asked).use_nursery


def test_another_interpreter_has_its_own_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the notebook's path it gets what was added by hand; PYTHON_EXEC chooses it too."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHON_EXEC", "/bin/sh")
    spec = spec_of(n=1, env={"PYTHONPATH": "/first:/second"})
    assert (spec.python, spec.own_path) == ("/bin/sh", True)
    assert spec.sys_path[:3] == ("/first", "/second", str(tmp_path))
    assert not any("site-packages" in entry for entry in spec.sys_path)
    monkeypatch.delenv("PYTHON_EXEC")
    spec = spec_of(n=1)
    assert (spec.python, spec.own_path, spec.sys_path) == (sys.executable, False, tuple(sys.path))


def test_all_names_are_listed() -> None:
    """What `%dist_env` shows without a pattern is what workers are given."""
    spec = spec_of(n=1)
    assert torchrun_variables(spec, 0, 0).keys() | {"CUDA_VISIBLE_DEVICES"} == NBDIST_SETS


def test_several_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only with `share_gpus`, which says what it is for, also when there are more later."""
    monkeypatch.setattr(topology, "installed_gpus", lambda: 1)
    with pytest.raises(NotEnoughGpus, match="`--share-gpus` for several on one"):
        spec_of(n=4)
    spec, backend, said = make_spec(Asked(n=4, share_gpus=True))
    assert (spec.share_gpus, spec.gpus, backend) == (True, ("0",), "cpu:gloo,cuda:nccl")
    assert said.startswith("4 ranks of nccl on 1 GPU with `--share-gpus`: for correctness")
    assert scaled(spec, 8)[1].startswith("8 ranks of nccl on 1 GPU with `--share-gpus`")
    assert Asked(share_gpus=True).but(n=3).share_gpus


def test_nccl_that_takes_several_ranks_on_one_gpu() -> None:
    """From 2.30 on one variable allows it; the user's own settings win."""
    theirs = {"NCCL_MAX_CTAS": "4", "NCCL_HOSTID": "node"}
    assert sharing_variables(3, (2, 30, 7), theirs) == {
        "NCCL_MAX_CTAS": "4",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    }


def test_nccl_that_refuses_several_ranks_on_one_gpu() -> None:
    """Each rank is on a host of its own, and meets the others on the loopback interface."""
    first, second = (sharing_variables(rank, (2, 28, 9), {}) for rank in (0, 1))
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert {**first, "NCCL_HOSTID": ""} == {
        "NCCL_MAX_CTAS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_HOSTID": "",
    }
    # Also where the user has named the host.
    assert sharing_variables(1, (2, 28), {"NCCL_HOSTID": "node"})["NCCL_HOSTID"] == "node-1"


def test_a_restart_changes_what_it_says() -> None:
    """The rest stays; of `n` and `layout` the newer holds, and `env` grows."""
    asked = Asked(layout="2x2", env={"A": "1"}, debug=True)
    assert asked.but(n=3) == Asked(n=3, env={"A": "1"}, debug=True)
    assert Asked(n=3).but(layout="2x2") == Asked(layout="2x2")
    assert asked.but(env={"B": "2"}).env == {"A": "1", "B": "2"}
