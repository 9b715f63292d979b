"""Magics and their options as people type them: each magic is found and documented."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from IPython.core.magic_arguments import argument, magic_arguments

from nbdist import World
from nbdist.config import OPTIONS
from nbdist.errors import NbdistError, UsageError, WorldNotStarted
from nbdist.notebook import commands
from nbdist.notebook.cell_text import MagicLine
from nbdist.notebook.command import find_commands, is_used
from nbdist.notebook.commands.cells import distributed
from nbdist.notebook.options import (
    OPTION_GROUPS,
    SAME,
    NbDist,
    check_same,
    flags_of,
    hint_on_argument,
    hint_on_magic,
    immediate_options,
    names_in,
    old_flags,
    our_flag,
    parse,
    pool_option,
    ranks_option,
    restarts_option,
    split_code,
    typed_options,
    words_of,
    world_options,
)
from nbdist.notebook.pool import Pools
from tests.reference import CELL_OPTIONS_HEAD, PAGE, cell_option_rows, in_markdown, rows_in


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


def test_all_options_of_a_world_can_be_typed() -> None:
    """Each option of a magic becomes the argument of `World` of the same name, with its value."""
    local = options(
        "-n 4 --backend GLOO --gpus 0,1 --share-gpus --name exp/run --env A=1 --env 'B=x y'"
        " --env-file .env --debug --python py --wrap 'nice -n 5' --cpus 2 --launcher local"
        " --no-fork --on-failure stop --hang-timeout 0.5 --no-release --pool trainer"
    )
    assert typed_options(local) == {
        **{"n": 4, "backend": "gloo", "gpus": "0,1", "share_gpus": True, "name": "exp/run"},
        **{"env": {"A": "1", "B": "x y"}, "env_file": ".env", "debug": True, "python": "py"},
        **{"wrap": "nice -n 5", "cpus": 2, "launcher": "local", "fork": False},
        **{"on_failure": "stop", "hang_timeout": 0.5, "release": False},
    }
    elsewhere = options(
        "-j 1:2x1 --hosts a:1,b --salloc '-p x' --memory 2g --copy-env 'HF_*,A' --address eth0"
        " --link-timeout 30 --detach --sync-code --rdzv-backend etcd-v2 --rdzv-endpoint a:2379"
    )
    assert typed_options(elsewhere) == {
        **{"layout": "1:2x1", "hosts": "a:1,b", "salloc": "-p x", "memory": "2G"},
        **{"copy_env": "HF_*,A", "address": "eth0", "detach": True, "sync_code": True},
        **{"link_timeout": 30},
        **{"rdzv_backend": "etcd-v2", "rdzv_endpoint": "a:2379"},
    }
    assert local.pool == "trainer"
    assert immediate_options(local) == {"on_failure": "stop", "hang_timeout": 0.5, "release": False}
    nothing = options("")
    assert typed_options(nothing) == {}
    assert (nothing.pool, nothing.ranks, nothing.max_restarts) == (None, None, 0)
    only_in_python = {name for name, option in OPTIONS.items() if not option.flag}
    all_given = typed_options(local).keys() | typed_options(elsewhere).keys()
    assert all_given == OPTIONS.keys() - only_in_python - {"pool"}


def test_values_may_be_quoted_and_names_divided_by_commas() -> None:
    """A value may follow `=` or be in quotes of either kind; ranks such as `-1` are no option.

    Names are divided by commas or blanks.
    """
    for line, ranks in (("-r -1,0", "-1,0"), ("--ranks=::2", "::2"), ("-r 0 a", "0")):
        assert options(line).ranks == ranks
    # If `-r` is repeated, the ranks of all its values count, whatever their notations.
    for line, ranks in (("-r 0 -r 2-3", "0,2-3"), ("-r [0, 2] --ranks=[3] -r -1", "0,2,3,-1")):
        assert options(line).ranks == ranks
        assert MagicLine("distributed", line, 0).ranks == ranks
    for line in ("--wrap='nice -n 5'", '--wrap "nice -n 5"'):
        assert typed_options(options(line)) == {"wrap": "nice -n 5"}
    assert typed_options(options('--env A="1 2"')) == {"env": {"A": "1 2"}}
    assert typed_options(options("--hang-timeout '3'")) == {"hang_timeout": 3.0}
    for words in (["a", "b"], ["a,", "b"], ["a,b"], ["a", ",", "b"]):
        assert names_in(words) == ["a", "b"]


def test_a_wrong_option_is_an_error_of_one_line() -> None:
    """The error names the option, the mistake, and a right value or where to find one."""
    for line, message in (
        (
            "--backnd gloo",
            "`%magic`: unknown option `--backnd`: did you mean `--backend`? `%magic?`",
        ),
        ("-n x", "`-n x`: that is not a number of workers. Use `-n 4`, `-n auto`, `-n gpu` or"),
        ("--hang-timeout soon", "`--hang-timeout soon`: a number of seconds, such as 30 or 0.5."),
        ("--max-restarts -1", "`--max-restarts -1`: a number of attempts after the first, such"),
        ("--rdzv-endpoint localhost:0", "`--rdzv-endpoint localhost:0`: HOST:PORT, such as"),
        ("--name 'x", "`%magic`: No closing quotation. `%magic?` shows all options."),
    ):
        with pytest.raises(UsageError) as raised:
            typed_options(options(line))
        assert str(raised.value).startswith(message)
        assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def world() -> World:
    """A world with some options, which is not started."""
    return World(2, backend="gloo", name="run", env={"A": "1", "TOKEN": "x"}, wrap="nice", cpus=2)


def test_options_equal_to_the_workers_are_accepted(world: World) -> None:
    """A cell may repeat the workers' options; options that need no restart are not compared."""
    for line in (
        "-n 2 --backend gloo --name run -j 1x2 --env A=1 --wrap nice --cpus 2",
        "--on-failure stop --hang-timeout 3 --no-release --pool other",
    ):
        check_same(world, options(line))


def test_options_that_differ_from_the_workers_are_refused(world: World) -> None:
    """The error names the workers' option, and the `%dist_restart` that starts others."""
    for line, difference in (
        ("-j 2x1", "`-j 1x2`, not `-j 2x1`. `%dist_restart -j 2x1` starts new ones."),
        ("--no-fork", "no `--no-fork`. `%dist_restart --no-fork` starts new ones."),
        ("--env TOKEN=y", "`--env TOKEN=...`, not `--env TOKEN=...`. `%dist_restart"),
        ("--wrap 'nice -n 5'", '`--wrap nice`, not `--wrap "nice -n 5"`. `%dist_restart'),
    ):
        with pytest.raises(UsageError) as raised:
            check_same(world, options(line))
        assert str(raised.value).startswith(f"The running workers have {difference}")


def test_code_follows_the_options_in_a_line() -> None:
    """All text after the last option is code, even if it looks like an option."""
    for line, typed_options_text, code in (
        ("-r 0 -x", "-r 0 -x", ""),
        ("-r 0 -1 + x  # c", "-r 0", "-1 + x  # c"),
        ("-n=4 --ranks [0, 1] print(x)", "-n=4 --ranks [0, 1]", "print(x)"),
        ("-np 4 --no-wait --env 'A=1 2' f(-r)", "-np 4 --no-wait --env 'A=1 2'", "f(-r)"),
        ("", "", ""),
    ):
        assert split_code(distributed.run, line) == (typed_options_text, code)


COMMANDS = {each.name: each for each in find_commands()}
FLAGS = flags_of(COMMANDS["distributed"].run)
SHOWN = [each.shown_name for each in COMMANDS.values()]


def test_options_of_other_tools_are_replaced_by_ours() -> None:
    """An option of torchrun, for example, becomes nbdist's; values and other words stay."""
    for line, expected in (
        ("--nproc_per_node=4 --debug", "-n=4 --debug"),
        ("--num-processes 2 --gpu-ids 0,1", "-n=2 --gpus=0,1"),
        ("--targets 0 --name --nproc", "-r=0 --name --nproc"),
        ("--env X=--targets", "--env=X=--targets"),
        ("--on_failure stop --max_restarts=3", "--on-failure=stop --max-restarts=3"),
    ):
        assert " ".join(word for word, *_ in words_of(distributed.run, line)) == expected


def test_former_flags_count_only_if_the_magic_has_ours() -> None:
    """A flag of another tool or former version is replaced if the magic has only nbdist's flag."""
    assert our_flag("--targets", {"-n": 1}) == "--targets"
    assert our_flag("--targets", {"-r": 1, "--targets": 1}) == "--targets"
    assert set(SAME.values()) <= set(FLAGS)
    flags = {"-r": 1, "--here-too": 1}
    assert [our_flag(each, flags) for each in ("--local", "--rank")] == ["--here-too", "-r"]
    notes = ["`--rank` is now `-r`", "`--local` is now `--here-too`"]
    assert old_flags("--local --rank=1 --local", flags) == notes
    assert old_flags("--rank 1", {"-n": 1}) == []
    assert old_flags("-r 1 --here-too", flags) == []


def test_an_unknown_argument_gets_a_hint() -> None:
    """A hint names the option that the user may mean; other messages of argparse get no hint."""
    for typed, hint in (
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
        assert hint_on_argument(f"unrecognized arguments: {typed}", FLAGS) == hint
    assert hint_on_argument("argument -n: expected one argument", FLAGS) == ""


def test_an_unknown_magic_gets_a_hint() -> None:
    """The hint names nbdist's magic with a similar name, or the one that replaces ipyparallel's."""
    for message, hint in (
        ("Line magic function `%dist_gahter` not found.", "Did you mean `%dist_gather`?"),
        ("Cell magic `%%distribute` not found.", "Did you mean `%%distributed`?"),
        ("Cell magic `%%px` not found.", "In nbdist begin the cell with `%%distributed`."),
        (
            "Line magic function `%distributed` not found (But cell magic `%%distributed` exists, "
            "did you mean that instead?).",
            "",
        ),
    ):
        assert hint_on_magic(message, SHOWN) == hint


def test_environment_variables_set_the_settings(monkeypatch: pytest.MonkeyPatch):
    """NBDIST_LAYOUT, NBDIST_DISPLAY and NBDIST_PRESTART set defaults; bad values are ignored."""
    for value, layout in (("tabs", "tabs"), ("pink", "merged"), ("", "merged")):
        monkeypatch.setenv("NBDIST_LAYOUT", value)
        assert NbDist().layout == layout
    monkeypatch.delenv("NBDIST_DISPLAY", raising=False)
    monkeypatch.delenv("NBDIST_PRESTART", raising=False)
    assert (NbDist().display, NbDist().prestart) == ("auto", True)
    monkeypatch.setenv("NBDIST_PRESTART", "0")
    for value, display in (("plain", "plain"), ("panel", "panel"), ("pink", "auto")):
        monkeypatch.setenv("NBDIST_DISPLAY", value)
        assert (NbDist().display, NbDist().prestart) == (display, False)


# --- magics: each file of the folder is found, and each magic is documented -------------------


ROW = re.compile(r"^\| `(%%?\w+)", re.MULTILINE)

FEATURE = '''
"""Says hello."""

from __future__ import annotations

from IPython.core.magic_arguments import argument

from nbdist.notebook.command import MagicCall, command
from nbdist.notebook.options import ranks_option


@command(argument("--word", default="hello", help="what to say"), ranks_option)
def dist_hello(line: MagicCall) -> str:
    """Say hello in as many words as there are workers."""
    return line.options.word * line.world.size


@command()
def dist_mute(line: MagicCall) -> str:
    """Be stopped while it says something."""
    raise KeyboardInterrupt
'''


def test_the_manual_has_a_row_for_each_magic():
    """The manual's tables list exactly the registered magics, without short forms."""
    _, _, after = PAGE.read_text().partition("\n## Magics\n")
    rows = ROW.findall(after.partition("\n## ")[0])
    registered = [each.shown_name for each in find_commands() if not each.short_for]
    assert sorted(rows) == sorted(registered)


def test_the_manual_has_a_row_for_each_option_of_a_cell():
    """The manual's table has each option of `%%distributed`, also those that tools add."""
    rows = rows_in(PAGE.read_text(), CELL_OPTIONS_HEAD)
    assert rows == [*cell_option_rows()], "`python -m tests.reference` writes them"
    flags = [row.split("`")[1].split()[0] for row in rows]
    lacking = {"-r", "-o", "--timeout", "--setup", "--max-restarts", "--watch"} - {*flags}
    assert (lacking, "--auto" in flags) == (set(), False)


def test_texts_of_help_become_markdown():
    """Options, patterns and names of variables become code; other characters are escaped."""
    for text, markdown in (
        ("with --hosts: 'HF_*,A_*'", "with `--hosts`: `'HF_*,A_*'`"),
        ("the ranks' own [0-3] a_b", r"the ranks' own \[0-3\] a\_b"),
        ("by `-r 0`, or $NBDIST_LOG_DIR", "by `-r 0`, or `$NBDIST_LOG_DIR`"),
        ("well-known %dist_init", "well-known `%dist_init`"),
    ):
        assert in_markdown(text) == markdown


def test_each_magic_is_documented():
    """A magic's help begins with a sentence; only `%dist_init` lists all options of a world."""
    shown = {each.name: (each.run.__doc__ or "").split("\n\n::\n\n") for each in find_commands()}
    for each in find_commands():
        text, options = shown[each.name]
        assert re.fullmatch(r"[A-Z].*[.:]", text.partition("\n")[0]), each
        assert each.summary == text.partition("\n")[0]
        assert options.lstrip().startswith(f"{each.shown_name} ")
    text, options = shown["distributed"]
    assert len(re.findall(r"^    %%distributed", text, re.MULTILINE)) == 2
    usual = ("-n N", "-r RANKS", "-o NAME", "--no-wait", "--timeout", "--setup", "--here-too")
    assert [option for option in usual if option not in options] == []
    assert "--auto" not in options
    for name in ("distributed", "dist_run", "dist_restart"):
        assert "`%dist_init?`" in "".join(shown[name])
        assert "--hosts HOSTS" not in shown[name][1]
    _, options = shown["dist_init"]
    titles = (f"\n{title}:\n" for title in ("options", *OPTION_GROUPS.values()))
    places = [options.index(text) for text in (*titles, "\n  --hosts HOSTS")]
    assert places[:-1] == sorted(places[:-1])
    assert places[0] < options.index("\n  --pool NAME") < places[1] < options.index("\n  -n N ")


def test_a_new_magic_needs_only_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: Pools, capsys: pytest.CaptureFixture
):
    """Magics of a new file in the folder are found, with errors for options, workers and Stop."""
    (tmp_path / "hello.py").write_text(FEATURE)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    magics = {each.name: each.magic(pools) for each in find_commands()}
    with pytest.raises(WorldNotStarted, match=re.escape("`%dist_hello` needs workers")):
        magics["dist_hello"]("-r 0")
    with pytest.raises(UsageError) as wrong:
        magics["dist_hello"]("--wrod x")
    assert str(wrong.value) == (
        "`%dist_hello`: unknown option `--wrod`: did you mean `--word`? "
        "`%dist_hello?` shows all options."
    )
    with pytest.raises(KeyboardInterrupt, match=re.escape("no workers were started.")):
        magics["dist_mute"]("")
    magics["dist_why"]("")
    assert capsys.readouterr().out == "nothing has failed yet\n"


@pytest.mark.parametrize("mode", ["exec", "single"])
def test_a_magic_knows_whether_its_value_is_used(mode: str) -> None:
    """`is_used` looks at the code that calls a magic; IPython compiles a last line as `single`."""
    answers: list[bool] = []
    of_nbdist = {"__name__": "nbdist.notebook.command", "seen": answers, "is_used": is_used}
    exec("def f():\n    seen.append(is_used())\n    return seen and None", of_nbdist)
    for used, codes in (
        (True, ("x = f()", "x, y = f(), 1", "print(f())", "def g(): return f()\nx = g()")),
        (False, ("f()", "f(); x = 1", "for i in '1':\n    f()")),
    ):
        for code in codes:
            body = ast.parse(code).body
            tree = ast.Interactive(body) if mode == "single" else ast.Module(body, [])
            names = {"__name__": "__main__", "f": of_nbdist["f"], "print": repr}
            exec(compile(tree, "cell", mode), names)
            assert answers.pop() == used, code
    assert answers == []


def test_a_cell_without_code_is_no_error(typed: Callable[[str], str]) -> None:
    """A cell with only comments gets a note, no error, so later cells run; no worker starts."""
    for cell in ("%%distributed\n# later", "%%distributed -n 3 -o x\n\n  # a\n# b\n"):
        assert "no code, so nothing has run" in typed(cell)


def test_a_mistake_is_an_error_of_one_line(typed: Callable[[str], str]) -> None:
    """The error names the mistake or the right form in one line, before workers are started."""
    for typed_in, pattern in (
        ("%%rank\n1", r"needs ranks: `%%rank 0`"),
        ("%%rank 0\n1", r"`%%rank` needs workers, and none are running. A `%%distributed -n 4`"),
        ("%%distributed --gpus 0,9\n1", r"--gpus"),
        ("%%distributed --launcher nowhere\n1", r"launcher.*local"),
        ("%%distributed --timeout 0\nx", r"`--timeout 0`: a number of seconds, such as 30 or 0.5."),
        ("%%distributed --num-gpus 4\nx", r"`--num-gpus`: did you mean `-n`\?"),
        ("%%distributed --nnodes 2\nx", r"`-j"),
        ("%%distributed --standalone\nx", r"`--standalone`: leave it out"),
        ("%%distributed -o 1x\nx", r"`-o 1x`: give a name for the result, such as `-o result`."),
        ("%dist_init --hosts", r"`--hosts` needs a value"),
        ("%dist_restart -n x", r"`-n x`"),
        ("%dist_restart --keep 1a", r"names separated by commas, such as `step,history`"),
        ("%dist_restart -r 1 --debug", r"of workers can only be changed for all of them"),
        ("%dist_status 3", r"`%dist_status\?`"),
        ("%dist_memory x", r"`%dist_memory`: unexpected `x`."),
        ("%dist_auto maybe", r"`%dist_auto on` or `%dist_auto off`."),
        ("%dist_output", r"No distributed cell has run yet"),
        ("%dist_log", r"There are no workers whose log to show"),
        ("%dist_log --grep (", r"`--grep \(` is not a regular expression: "),
        ("%dist_gather", r"`%dist_gather`: it needs names."),
        ("%dist_gather loss.item()", r"give the result a name: `%dist_gather loss.item\(\) --as v"),
        ("%dist_gather n t --as z", r"2 values but 1 name after `--as`"),
        ("%dist_gather n n", r"two results would have the same name"),
        ("%dist_gather n --dim 1", r"`--dim 1` needs `--stack` or `--cat`."),
        ("%dist_gather n --stack --cat", r"use either `--stack` or `--cat`."),
        ("%dist_push", r"`%dist_push`: it needs names."),
        ("%dist_run", r"`%dist_run train.py --lr 0.1`"),
        ("%dist_run -m wrong.py", r"give either a script or `-m module`"),
        ("%dist_run --no-python -m pkg", r"a module needs python"),
        ("%dist_run --wrong wrong.py", r"unknown option `--wrong`. `%dist_run\?` shows"),
        ('%dist_run "a b.py', r"`%dist_run`: no closing quotation."),
    ):
        with pytest.raises(NbdistError, match=pattern) as raised:
            typed(typed_in)
        assert "\n" not in str(raised.value)
