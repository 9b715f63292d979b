"""Tests of `nbdist.config`: options of a world, as flags and arguments, and their launchers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import jedi
import pytest
from jedi.api.environment import InterpreterEnvironment

from nbdist import World
from nbdist.config import (
    OPTIONS,
    RDZV_HANDLERS,
    Patience,
    WorldConfig,
    launcher_for,
    unquoted,
    whole_number,
)
from nbdist.errors import UsageError
from tests.reference import PAGE, WORLD_OPTIONS_HEAD, rows_in, world_option_rows
from tests.sources import PACKAGE


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"n": 8, "layout": "2x4"}, "`-n 8 -j 2x4`: `-j 2x4` is nodes x workers per node"),
        ({"wrap": ""}, '`--wrap ""`: a command and its arguments'),
        ({"wrap": "nice 'x"}, "`--wrap nice 'x`: no closing quotation."),
        *(
            ({"name": name}, f"`--name {name}`: it names a folder below the log folder")
            for name in ("../x", "/x", "a//b", "x" * 101)
        ),
        ({"cpus": "many"}, "`--cpus many`: a number of cores for each worker, such as 4."),
        ({"env": ["A"]}, "`--env A`: a name and its value, such as `--env SEED=1`."),
        ({"env": ["2A=1"]}, "`--env 2A`: a name and its value, such as `--env SEED=1`."),
        ({"n": 0}, "`-n 0`: it takes at least one worker. Use `-n 4`"),
        ({"layout": "x"}, "`-j x`: that is not nodes and workers. Use `-j 4`"),
        ({"backend": "mpi"}, "`--backend mpi`: that is not a backend. Use"),
        ({"on_failure": "retry"}, "`--on-failure retry`: there are heal (the default), "),
        *(
            ({"hang_timeout": text}, f"`--hang-timeout {text}`: a number of seconds, such as 30")
            for text in (0, "nan", "soon", None)
        ),
        ({"hang_timeout": []}, "`--hang-timeout []`: a number of seconds, such as 30"),
        ({"layout": 4}, "`layout=`: a text as in `-j [MIN:]NODESxN` is expected, not int."),
        ({"env": 4}, "`env=`: a text as in `--env K=V` is expected, not int."),
        ({"wrap": ["nice"]}, "`wrap=`: a text as in `--wrap COMMAND` is expected, not list."),
        ({"link_timeout": "1"}, "`--link-timeout 1`: a number of seconds from 2 on, such as 30."),
        ({"link_timeout": 30}, "`--link-timeout 30`: it is for `--launcher ssh`"),
        ({"hosts": "a", "launcher": "local"}, "`--hosts a`: it is for `--launcher ssh`, and not"),
        ({"launcher": "ssh"}, "`--launcher ssh`: on which machines?"),
        ({"launcher": "join", "rdzv_backend": "c10d"}, "`--rdzv-backend c10d`: it takes both"),
        (
            {"launcher": "join", "rdzv_backend": "etc", "rdzv_endpoint": "a:1"},
            "`--rdzv-backend etc`: the known names are c10d, static, etcd, etcd-v2.",
        ),
        ({"layout": "5:2x4"}, "`-j 5:2x4`: 5 nodes are more than 2. Use `-j 4`"),
        ({"layout": "2x4", "hosts": "a"}, "`-j 2x4 --hosts a`: 2 nodes, but 1 host."),
        ({"n": 7, "hosts": "a:4,b:2"}, "`-n 7 --hosts a:4,b:2`: the hosts have room for 6 w"),
        ({"memory": "16"}, "`--memory 16`: memory for each worker, such as 16G or 500M."),
        ({"memory": "0G"}, "`--memory 0G`: memory for each worker, such as 16G or 500M."),
        ({"copy_env": "A B"}, "`--copy-env A B`: names of variables, such as"),
        ({"copy_env": ""}, "`--copy-env `: names of variables, such as"),
        ({"address": "-x"}, "`--address -x`: an address of this machine or a network"),
        *(
            ({"rdzv_endpoint": end}, f"`--rdzv-endpoint {end}`: HOST:PORT, such as")
            for end in ("a", "a:99999")
        ),
        ({"salloc": " "}, '`--salloc ""`: options of salloc, such as'),
        ({"salloc": "-p 'x"}, "`--salloc -p 'x`: no closing quotation."),
        ({"cpus": 10_000}, "`--cpus 10000`: a number of cores for each worker, such as 4."),
    ],
)
def test_an_impossible_option_is_refused_in_one_line(said: dict[str, Any], told: str) -> None:
    """The error for an option that can never work names the option and the reason in one line."""
    with pytest.raises(UsageError) as found:
        WorldConfig(**said)
    assert str(found.value).startswith(told)
    assert "\n" not in str(found.value)


def test_a_package_can_add_a_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendezvous backend of a package's entry point is accepted, and listed as known."""
    (about := tmp_path / "meet-1.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: meet\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{RDZV_HANDLERS}]\nmeet = meet:make\n")
    monkeypatch.syspath_prepend(tmp_path)
    asked = {"launcher": "join", "rdzv_endpoint": "a:1"}
    assert WorldConfig(**asked, rdzv_backend="meet").rdzv_backend == "meet"  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="etcd-v2, meet"):
        WorldConfig(**asked, rdzv_backend="met")  # type: ignore[arg-type]


def test_texts_and_values_of_options_are_equal() -> None:
    """Options as the texts of flags and as Python values give equal configurations."""
    typed = WorldConfig("4", cpus="2", env=["A=1", "B='x y'"], hang_timeout="3", backend="GLOO")  # type: ignore[arg-type]
    assert typed == WorldConfig(
        4, cpus=2, env={"A": "1", "B": "x y"}, hang_timeout=3.0, backend="gloo"
    )
    assert WorldConfig(layout=" 2 x 4").layout == "2x4"
    assert WorldConfig(**vars(typed)) == typed


def test_a_restart_changes_only_the_given_options() -> None:
    """Other options stay; the newer of `n` and `layout` counts, and new variables join `env`."""
    asked = WorldConfig(layout="2x2", env={"A": "1"}, debug=True)
    assert asked.with_changes(n=3) == WorldConfig(n=3, env={"A": "1"}, debug=True)
    assert WorldConfig(n=3).with_changes(layout="2x2") == WorldConfig(layout="2x2")
    assert asked.with_changes(env={"B": "2"}).env == {"A": "1", "B": "2"}
    assert WorldConfig(share_gpus=True).with_changes(n=3).share_gpus
    # A layout stays while all workers have room, and is dropped for more workers.
    asked = WorldConfig(layout="1:2x2", debug=True)
    assert asked.with_size(3) == WorldConfig(3, layout="1:2x2", debug=True)
    assert asked.with_size(3).with_size(1).with_size(4) == asked
    assert asked.with_size(3).with_size(5) == WorldConfig(5, debug=True)
    assert asked.with_size(3).with_changes(n=2) == WorldConfig(2, debug=True)
    assert asked.with_size(3).with_changes(layout="2x3") == WorldConfig(layout="2x3", debug=True)
    assert WorldConfig(2).with_size(3) == WorldConfig(3)


def test_a_newer_launcher_drops_options_of_an_older_one() -> None:
    """A new launcher drops options of the old one; contradictions in one command are refused."""
    here, ssh = WorldConfig(2), WorldConfig(2, hosts="a:2", copy_env="A")
    assert ssh.with_changes(launcher="local") == WorldConfig(2, launcher="local")
    assert ssh.with_changes(launcher="slurm") == WorldConfig(2, launcher="slurm", copy_env="A")
    assert ssh.with_changes(hosts="b:4", n=3) == WorldConfig(3, hosts="b:4", copy_env="A")
    assert ssh.with_changes(salloc="-p x") == WorldConfig(2, salloc="-p x", copy_env="A")
    assert here.with_changes(launcher="local").with_changes(hosts="a") == WorldConfig(2, hosts="a")
    assert (
        WorldConfig(launcher="ssh", hosts="a").with_changes(name="x", hosts="b").launcher == "ssh"
    )
    with pytest.raises(UsageError, match="`--hosts b`: it is for `--launcher ssh`, and not for"):
        ssh.with_changes(hosts="b", launcher="slurm")


def test_agents_are_restarted_for_options_of_their_own() -> None:
    """Agents elsewhere are restarted for most options, and a local agent for another launcher."""
    assert WorldConfig(2).agent_options == WorldConfig(3, debug=True).agent_options
    assert WorldConfig(2).agent_options != WorldConfig(2, hosts="a").agent_options
    assert WorldConfig(hosts="a").agent_options != WorldConfig(hosts="a,b").agent_options
    assert (
        WorldConfig(hosts="a").agent_options == WorldConfig(hosts="a", release=False).agent_options
    )


def test_options_are_written_as_people_type_them() -> None:
    """Messages name options as people type them, and leave out the values of secrets."""
    for name, value, typed in (
        ("n", 4, "-n 4"),
        ("fork", False, "--no-fork"),
        ("wrap", "nice -n 5", '--wrap "nice -n 5"'),
        ("env", {"A": "1", "MY_KEY": "x"}, "--env A=1 --env MY_KEY=..."),
        ("env", {"TITLE": "two words"}, '--env "TITLE=two words"'),
        ("env", {"AUTH": "x", "TOKENIZERS": "1"}, "--env AUTH=... --env TOKENIZERS=1"),
    ):
        assert OPTIONS[name].as_typed(value) == typed
    assert "very" not in repr(WorldConfig(4, env={"HF_TOKEN": "very"}))


def test_commas_separate_variables_of_an_env() -> None:
    """Commas separate variables only if each part is a name with a value, as in torchx."""
    for text, variables in (
        ("A=1,B=2", {"A": "1", "B": "2"}),
        ("GPUS=0,1", {"GPUS": "0,1"}),
        ("A=x,y,B=2", {"A": "x,y,B=2"}),
        ("A=,B=b", {"A": "", "B": "b"}),
        ("LEVELS=cuda=1,xla=2", {"LEVELS": "cuda=1,xla=2"}),
    ):
        assert WorldConfig(env=[text]).env == variables


def test_world_takes_each_option_as_an_argument() -> None:
    """The signature of `World`, which is written out, has each option, its type and its default."""
    arguments = inspect.signature(World).parameters
    assert list(arguments) == [each.name for each in fields(WorldConfig)]
    assert arguments["n"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    kinds = {each.kind for name, each in arguments.items() if name != "n"}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    types = get_type_hints(WorldConfig) | {"env": Mapping[str, str] | None}
    assert {name: each.annotation for name, each in arguments.items()} == {
        name: types[name] for name in arguments
    }
    defaults = {each.name: each.default for each in fields(WorldConfig)} | {"env": None}
    assert {name: each.default for name, each in arguments.items()} == defaults
    with pytest.raises(TypeError, match="bogus"):
        World(bogus=1)  # type: ignore[call-arg]


def test_world_documents_each_argument_in_words_of_python() -> None:
    """`help(World)` describes each argument, without flags, which arguments are written for."""
    text = (inspect.getdoc(World) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): ((?:.+\n?)(?: {8}.*\n?)*)", text, re.MULTILINE)
    assert [name for name, _ in entries] == [*OPTIONS]
    for name, said in entries:
        outside_of_examples = re.sub(r'"[^"]*"', "", said)
        assert re.findall(r"(?<!\w)--?[a-z][\w-]*|%dist_\w+", outside_of_examples) == [], name
        if isinstance(default := WorldConfig.__dataclass_fields__[name].default, bool):
            assert said.startswith(f"{not default} "), name


def test_editors_show_the_arguments_of_world() -> None:
    """An editor that does not run the code finds the signature and the text of each argument."""
    source = "import nbdist\nnbdist.World("
    project = jedi.Project(PACKAGE.parent)
    # This environment is the present process; another one would be a process that stays.
    script = jedi.Script(source, project=project, environment=InterpreterEnvironment())
    (signature,) = script.get_signatures()
    assert [each.name for each in signature.params] == [*OPTIONS]
    assert signature.params[1].to_string() == "layout: str | None=None"
    assert "\n    hang_timeout: seconds until" in signature.docstring()


def test_each_option_is_in_the_manual_and_used() -> None:
    """The manual's table has the flag, argument and help of each option, and code uses each."""
    rows = rows_in(PAGE.read_text(), WORLD_OPTIONS_HEAD)
    assert rows == [*world_option_rows()], "`python -m tests.reference` writes them"
    assert [re.findall(r" \| `(\w+)` \| ", row) for row in rows] == [[name] for name in OPTIONS]
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    in_properties = {"hang_timeout", "release", "launcher", "hosts"}
    unread = {name for name in OPTIONS if not re.search(rf"\b(config|wanted)\.{name}\b", source)}
    assert unread == in_properties
    assert WorldConfig(hang_timeout=3, release=False).patience == Patience(3.0, aborts=False)
    with pytest.warns(FutureWarning, match="`free=` is now `release=`"):
        former: Any = World(2, free=False, log_dir="")  # type: ignore[call-arg]
    assert former.engine.config.release is False
    with pytest.warns(FutureWarning, match="`free=` is now `release=`"):
        assert not WorldConfig().with_changes(free=False).release
    found = [WorldConfig(), WorldConfig(hosts="a"), WorldConfig(salloc="-p x")]
    assert [config.launcher_name for config in found] == ["local", "ssh", "slurm"]
    assert WorldConfig(hosts="a", launcher="other").launcher_name == "other"


@pytest.mark.parametrize("text", ["x", "-1", "", "0", "1.5", "1e3", "٣", "9" * 5000])
def test_only_whole_numbers_are_accepted(text: str) -> None:
    """Texts other than whole numbers in the limits are refused; quotes of IPython are removed."""
    read = whole_number("--tail", "a number, such as `--tail 1`")
    with pytest.raises(UsageError) as found:
        read(text)
    assert str(found.value) == f"`--tail {text}`: a number, such as `--tail 1`."
    assert (read('"12"'), read(7)) == (12, 7)
    assert unquoted("'x") == "'x"


@pytest.mark.parametrize(
    ("option", "given", "value"),
    [
        ("memory", "16G", "16G"),
        ("memory", "0500 mib", "500M"),
        ("copy_env", "HF_*, WANDB_?", "HF_*,WANDB_?"),
        ("copy_env", ["A", "B*"], "A,B*"),
        ("address", "10.0.0.1", "10.0.0.1"),
        ("address", "[fe80::1%eth0]", "fe80::1%eth0"),
        ("address", "::1", "::1"),
        ("address", "ib0", "ib0"),
        ("rdzv_endpoint", "etcd.example.org:2379", "etcd.example.org:2379"),
        ("rdzv_endpoint", "[::1]:2379", "[::1]:2379"),
        ("salloc", "-p gpu -t 1:00", "-p gpu -t 1:00"),
    ],
)
def test_options_for_other_machines_have_one_form(option: str, given: object, value: str) -> None:
    """Each option for other machines is read into one form, in whatever form people type it."""
    assert OPTIONS[option].read(given) == value


@pytest.mark.parametrize(
    ("asked", "nodes", "per_node", "workers"),
    [
        ({"hosts": "a,b:4"}, (2, 2), "auto", None),
        ({"layout": "1:2x4", "launcher": "slurm"}, (1, 2), 4, None),
        ({"layout": "2x4", "launcher": "slurm"}, (2, 2), 4, None),
        ({"n": 6, "hosts": "a:4,b:2"}, (2, 2), "auto", 6),
        ({"n": 3, "layout": "2x2", "hosts": "a:4,b:2"}, (2, 2), 2, 3),
        ({"n": "gpu", "launcher": "slurm"}, (1, None), "gpu", None),
    ],
)
def test_options_give_the_numbers_of_nodes_and_workers(asked, nodes, per_node, workers):
    """Options give the least and most nodes, and the number of workers on each node or in all."""
    config = WorldConfig(**asked)
    assert ((config.min_nodes, config.max_nodes), config.per_node) == (nodes, per_node)
    assert config.workers == workers


SLURM, ONE = {"SLURM_JOB_ID": "17"}, {"SLURM_JOB_NUM_NODES": "1"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, "local"),
        (SLURM, "slurm"),
        ({**SLURM, **ONE}, "slurm"),
        ({**SLURM, "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "node1"}, "slurm"),
        ({**SLURM, **ONE, "SLURMD_NODENAME": "node1"}, "local"),
    ],
)
def test_the_launcher_in_an_allocation_is_slurm(environ: dict[str, str], launcher: str) -> None:
    """In an allocation the launcher is slurm, unless this machine is the allocation's only node."""
    assert launcher_for({}, environ) == launcher
    assert launcher_for({"hosts": "a"}, environ) == "ssh"


@pytest.mark.parametrize(
    ("launcher", "takes"),
    [("local", 0), ("ssh", 6), ("slurm", 7), ("join", 5), ("ray", 6), ("of-a-package", 8)],
)
def test_each_launcher_takes_only_its_own_options(launcher: str, takes: int) -> None:
    """An option is refused for a launcher without use for it; launchers of packages take all."""
    said = {
        **{"hosts": "a", "salloc": "-p x", "memory": "1G", "copy_env": "A", "address": "eth0"},
        **{"link_timeout": 9, "rdzv_backend": "c10d", "rdzv_endpoint": "x:1"},
    }
    assert said.keys() == {name for name, each in OPTIONS.items() if each.launchers}
    taken = {name: value for name, value in said.items() if OPTIONS[name].is_for(launcher)}
    assert len(taken) == takes
    assert WorldConfig(launcher=launcher, **taken).launcher_name == launcher  # type: ignore[arg-type]
    for name in said.keys() - taken:
        with pytest.raises(UsageError, match=f"`, and not for `--launcher {launcher}`.$") as found:
            WorldConfig(launcher=launcher, **taken, **{name: said[name]})  # type: ignore[arg-type]
        by = " or ".join(f"`--launcher {each}`" for each in OPTIONS[name].launchers)
        assert f"{OPTIONS[name].as_typed(said[name])}`: it is for {by}, and" in str(found.value)


def test_hosts_without_room_for_a_layout_are_refused() -> None:
    """A layout is refused if a host has too few slots; hosts beyond its nodes are spares."""
    for n, hosts in ((6, "a:4,b:2"), (7, "a:4,b")):
        assert WorldConfig(n, hosts=hosts).workers == n
    for layout, hosts in (("2x4", "a,b:4,c"), ("1:2x4", "a"), ("2x4", "a:4,b:2,c")):
        assert WorldConfig(layout=layout, hosts=hosts).layout == layout
    with pytest.raises(UsageError) as found:
        WorldConfig(layout="2x4", hosts="a:4,b:2")
    assert str(found.value) == "`-j 2x4 --hosts a:4,b:2`: b:2 has no room for 4 workers."
