"""Tests of `nbdist.notebook.options`: lines of magics as people type them."""

from __future__ import annotations

import argparse

import pytest
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist import World
from nbdist.config import OPTIONS
from nbdist.errors import UsageError
from nbdist.notebook.command import find_commands
from nbdist.notebook.commands.cells import distributed
from nbdist.notebook.options import (
    SAME,
    NbDist,
    at_once,
    check_same,
    flags_of,
    given,
    hint_on_magic,
    meant_by,
    names_in,
    old_flags,
    our_flag,
    parse,
    pool_option,
    ranks_option,
    restarts_option,
    split_code,
    words_of,
    world_options,
)


@magic_arguments()
@argument("names", nargs="*", help="names")
@ranks_option
@restarts_option
@world_options
@pool_option
def magic() -> None:
    """Do nothing."""


def options(line: str) -> argparse.Namespace:
    return parse(magic, "%magic", line)


def test_all_options() -> None:
    """Each is the argument of `World` by its name, as the value that it means."""
    said = options(
        "-n 4 --backend GLOO --gpus 0,1 --share-gpus --name exp/run --env A=1 --env 'B=x y'"
        " --env-file .env --debug --python py --wrap 'nice -n 5' --cpus 2 --launcher local"
        " --no-fork --on-failure stop --hang-timeout 0.5 --no-free --pool trainer"
    )
    assert given(said) == {
        **{"n": 4, "backend": "gloo", "gpus": "0,1", "share_gpus": True, "name": "exp/run"},
        **{"env": {"A": "1", "B": "x y"}, "env_file": ".env", "debug": True, "python": "py"},
        **{"wrap": "nice -n 5", "cpus": 2, "launcher": "local", "fork": False},
        **{"on_failure": "stop", "hang_timeout": 0.5, "free": False},
    }
    elsewhere = options(
        "-j 1:2x1 --hosts a:1,b --salloc '-p x' --memory 2g --copy-env 'HF_*,A' --address eth0"
        " --link-timeout 30 --detach --sync-code --rdzv-backend etcd-v2 --rdzv-endpoint a:2379"
    )
    assert given(elsewhere) == {
        **{"layout": "1:2x1", "hosts": "a:1,b", "salloc": "-p x", "memory": "2G"},
        **{"copy_env": "HF_*,A", "address": "eth0", "detach": True, "sync_code": True},
        **{"link_timeout": 30},
        **{"rdzv_backend": "etcd-v2", "rdzv_endpoint": "a:2379"},
    }
    assert said.pool == "trainer"
    assert at_once(said) == {"on_failure": "stop", "hang_timeout": 0.5, "free": False}
    nothing = options("")
    assert given(nothing) == {}
    assert (nothing.pool, nothing.ranks, nothing.max_restarts) == (None, None, 0)
    only_in_python = {name for name, option in OPTIONS.items() if not option.flag}
    all_given = given(said).keys() | given(elsewhere).keys()
    assert all_given == OPTIONS.keys() - only_in_python - {"pool"}


def test_values_and_names() -> None:
    """In quotes of both kinds, and with `=`; a minus sign makes no option of ranks.

    Commas between names divide as blanks do.
    """
    for line, ranks in (("-r -1,0", "-1,0"), ("--ranks=::2", "::2"), ("-r 0 a", "0")):
        assert options(line).ranks == ranks
    for line in ("--wrap='nice -n 5'", '--wrap "nice -n 5"'):
        assert given(options(line)) == {"wrap": "nice -n 5"}
    assert given(options('--env A="1 2"')) == {"env": {"A": "1 2"}}
    assert given(options("--hang-timeout '3'")) == {"hang_timeout": 3.0}
    for words in (["a", "b"], ["a,", "b"], ["a,b"], ["a", ",", "b"]):
        assert names_in(words) == ["a", "b"]


def test_what_cannot_be_is_one_line() -> None:
    """The option, what is wrong with it, and what would be right."""
    for line, said in (
        (
            "--backnd gloo",
            "`%magic`: unknown option `--backnd`: did you mean `--backend`? `%magic?`",
        ),
        ("-n x", "`-n x`: that is not a number of workers. Use `-n 4`, `-n auto`, `-n gpu` or"),
        ("--hang-timeout soon", "`--hang-timeout soon`: a number of seconds, such as 30 or 0.5."),
        ("--max-restarts -1", "`--max-restarts -1`: a number of attempts after the first, such"),
        ("--name 'x", "`%magic`: No closing quotation. `%magic?` shows all options."),
    ):
        with pytest.raises(UsageError) as found:
            given(options(line))
        assert str(found.value).startswith(said)
        assert "\n" not in str(found.value)


@pytest.fixture(scope="module")
def world() -> World:
    """One that is described and not started."""
    return World(2, backend="gloo", name="run", env={"A": "1", "TOKEN": "x"}, wrap="nice", cpus=2)


def test_what_is_so_may_be_said(world: World) -> None:
    """Also what was chosen for a world; what can be changed at once is not compared."""
    for line in (
        "-n 2 --backend gloo --name run -j 1x2 --env A=1 --wrap nice --cpus 2",
        "--on-failure stop --hang-timeout 3 --no-free --pool other",
    ):
        check_same(world, options(line))


def test_what_is_not_so(world: World) -> None:
    """What the workers have, and the line that starts such ones."""
    for line, said in (
        ("-j 2x1", "`-j 1x2`, not `-j 2x1`. `%dist_restart -j 2x1` starts new ones."),
        ("--no-fork", "no `--no-fork`. `%dist_restart --no-fork` starts new ones."),
        ("--env TOKEN=y", "`--env TOKEN=...`, not `--env TOKEN=...`. `%dist_restart"),
        ("--wrap 'nice -n 5'", '`--wrap nice`, not `--wrap "nice -n 5"`. `%dist_restart'),
    ):
        with pytest.raises(UsageError) as found:
            check_same(world, options(line))
        assert str(found.value).startswith(f"The running workers have {said}")


def test_code_in_a_line() -> None:
    """What follows the options is code, whatever it looks like."""
    for line, ours, code in (
        ("-r 0 -x", "-r 0 -x", ""),
        ("-r 0 -1 + x  # c", "-r 0", "-1 + x  # c"),
        ("-n=4 --ranks [0, 1] print(x)", "-n=4 --ranks [0, 1]", "print(x)"),
        ("-np 4 --no-wait --env 'A=1 2' f(-r)", "-np 4 --no-wait --env 'A=1 2'", "f(-r)"),
        ("", "", ""),
    ):
        assert split_code(distributed.run, line) == (ours, code)


COMMANDS = {each.name: each for each in find_commands()}
FLAGS = flags_of(COMMANDS["distributed"].run)
SHOWN = [each.shown_name for each in COMMANDS.values()]


def test_what_means_the_same() -> None:
    """It is written as ours, and nothing else is touched."""
    for line, ours in (
        ("--nproc_per_node=4 --debug", "-n=4 --debug"),
        ("--num-processes 2 --gpu-ids 0,1", "-n=2 --gpus=0,1"),
        ("--targets 0 --name --nproc", "-r=0 --name --nproc"),
        ("--env X=--targets", "--env=X=--targets"),
        ("--on_failure stop --max_restarts=3", "--on-failure=stop --max-restarts=3"),
    ):
        assert " ".join(word for word, *_ in words_of(distributed.run, line)) == ours


def test_only_where_a_magic_has_ours() -> None:
    """Others' flags and old ones of ours are taken for ours, where a magic has these alone."""
    assert our_flag("--targets", {"-n": 1}) == "--targets"
    assert our_flag("--targets", {"-r": 1, "--targets": 1}) == "--targets"
    assert set(SAME.values()) <= set(FLAGS)
    flags = {"-r": 1, "--here-too": 1}
    assert [our_flag(each, flags) for each in ("--local", "--rank")] == ["--here-too", "-r"]
    said = ["`--rank` is now `-r`", "`--local` is now `--here-too`"]
    assert old_flags("--local --rank=1 --local", flags) == said
    assert old_flags("--rank 1", {"-n": 1}) == []
    assert old_flags("-r 1 --here-too", flags) == []


def test_what_was_meant() -> None:
    """By what argparse does not know; of other words it has said enough."""
    for typed, said in (
        ("--num-procs=4", "unknown option `--num-procs`: did you mean `-n 4`?"),
        ("--rdzv-id 7", "`--rdzv-id`: `--name` names the run."),
        (
            "--standalone --nnodes=1 --tee 3",
            "`--standalone`: leave it out, as one machine is the default; `--nnodes`: `-j 2x4` "
            "starts 2 nodes with 4 workers each, `--hosts a,b` names machines; `--tee`: all output "
            "of all ranks is shown and kept: `%dist_output --log`.",
        ),
        ("4", "unexpected `4`: did you mean `-n 4`?"),
        ("model", ""),
    ):
        assert meant_by(f"unrecognized arguments: {typed}", FLAGS) == said
    assert meant_by("argument -n: expected one argument", FLAGS) == ""


def test_a_magic_that_is_not_there() -> None:
    """One of ours that is spelt nearly so, or what does the same as somebody else's."""
    for message, said in (
        ("Line magic function `%dist_gahter` not found.", "Did you mean `%dist_gather`?"),
        ("Cell magic `%%distribute` not found.", "Did you mean `%%distributed`?"),
        ("Cell magic `%%px` not found.", "In nbdist begin the cell with `%%distributed`."),
        (
            "Line magic function `%distributed` not found (But cell magic `%%distributed` exists, "
            "did you mean that instead?).",
            "",
        ),
    ):
        assert hint_on_magic(message, SHOWN) == said


def test_display(monkeypatch: pytest.MonkeyPatch):
    """NBDIST_DISPLAY chooses; what is no display is no reason to fail; NBDIST_PRESTART=0 is off."""
    monkeypatch.delenv("NBDIST_DISPLAY", raising=False)
    monkeypatch.delenv("NBDIST_PRESTART", raising=False)
    assert (NbDist().display, NbDist().prestart) == ("auto", True)
    monkeypatch.setenv("NBDIST_PRESTART", "0")
    for value, display in (("plain", "plain"), ("panel", "panel"), ("pink", "auto")):
        monkeypatch.setenv("NBDIST_DISPLAY", value)
        assert (NbDist().display, NbDist().prestart) == (display, False)
