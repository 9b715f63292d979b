"""Tests of `nbdist.notebook.command`: what is in the folder is there, documented, and alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.errors import NbdistError, UsageError, WorldNotStarted
from nbdist.notebook import commands
from nbdist.notebook.command import find_commands, is_used
from nbdist.notebook.options import GROUPS
from nbdist.notebook.pool import Pools

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
ROW = re.compile(r"^\| `(%%?\w+)", re.MULTILINE)

FEATURE = '''
"""Says hello."""

from __future__ import annotations

from IPython.core.magic_arguments import argument

from nbdist.notebook.command import Line, command
from nbdist.notebook.options import ranks_option


@command(argument("--word", default="hello", help="what to say"), ranks_option)
def dist_hello(line: Line) -> str:
    """Say hello in as many words as there are workers."""
    return line.options.word * line.world.size


@command()
def dist_mute(line: Line) -> str:
    """Be stopped while it says something."""
    raise KeyboardInterrupt
'''


def test_the_manual_has_a_row_for_each_magic():
    """The tables of magics are what is registered but for short forms, no more and no less."""
    _, _, after = REFERENCE.read_text().partition("\n## Magics\n")
    rows = ROW.findall(after.partition("\n## ")[0])
    registered = [each.shown_name for each in find_commands() if not each.short_for]
    assert sorted(rows) == sorted(registered)


def test_each_magic_is_documented():
    """Its first line says what it does; cells have examples and their own options."""
    shown = {each.name: (each.run.__doc__ or "").split("\n\n::\n\n") for each in find_commands()}
    for each in find_commands():
        said, options = shown[each.name]
        assert re.fullmatch(r"[A-Z].*[.:]", said.partition("\n")[0]), each
        assert each.summary == said.partition("\n")[0]
        assert options.lstrip().startswith(f"{each.shown_name} ")
    said, options = shown["distributed"]
    assert len(re.findall(r"^    %%distributed", said, re.MULTILINE)) == 2
    usual = ("-n N", "-r RANKS", "-o NAME", "--no-wait", "--timeout", "--setup", "--here-too")
    assert [option for option in usual if option not in options] == []
    assert "--auto" not in options
    for name in ("distributed", "dist_run", "dist_restart"):
        assert "`%dist_init?`" in "".join(shown[name])
        assert "--hosts HOSTS" not in shown[name][1]
    _, options = shown["dist_init"]
    titles = (f"\n{title}:\n" for title in ("options", *GROUPS.values()))
    places = [options.index(text) for text in (*titles, "\n  --hosts HOSTS")]
    assert places[:-1] == sorted(places[:-1])
    assert places[0] < options.index("\n  --pool NAME") < places[1] < options.index("\n  -n N ")


def test_a_feature_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: Pools, capsys: pytest.CaptureFixture
):
    """A file in the folder is found; its options, workers and Stop are seen to."""
    (tmp_path / "hello.py").write_text(FEATURE)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    found = {each.name: each.magic(pools) for each in find_commands()}
    with pytest.raises(WorldNotStarted, match=re.escape("`%dist_hello` needs workers")):
        found["dist_hello"]("-r 0")
    with pytest.raises(UsageError) as wrong:
        found["dist_hello"]("--wrod x")
    assert str(wrong.value) == (
        "`%dist_hello`: unknown option `--wrod`: did you mean `--word`? "
        "`%dist_hello?` shows all options."
    )
    with pytest.raises(KeyboardInterrupt, match=re.escape("no workers were started.")):
        found["dist_mute"]("")
    found["dist_why"]("")
    assert capsys.readouterr().out == "nothing has failed yet\n"


@pytest.mark.parametrize("mode", ["exec", "single"])
def test_what_becomes_of_a_value(mode: str) -> None:
    """Also through calls of ours and IPython's; `single` is how the last line of a cell runs."""
    seen: list[bool] = []
    ours = {"__name__": "nbdist.notebook.command", "seen": seen, "is_used": is_used}
    exec("def f():\n    seen.append(is_used())\n    return seen and None", ours)
    for used, codes in (
        (True, ("x = f()", "x, y = f(), 1", "print(f())", "def g(): return f()\nx = g()")),
        (False, ("f()", "f(); x = 1", "for i in '1':\n    f()")),
    ):
        for code in codes:
            body = ast.parse(code).body
            tree = ast.Interactive(body) if mode == "single" else ast.Module(body, [])
            names = {"__name__": "__main__", "f": ours["f"], "print": repr}
            exec(compile(tree, "cell", mode), names)
            assert seen.pop() == used, code
    assert seen == []


def test_a_mistake(typed: Callable[[str], str]) -> None:
    """One line shows what is wrong and what is right, before anything is started."""
    for typed_in, said in (
        ("%%rank\n1", r"needs ranks: `%%rank 0`"),
        ("%%rank 0\n1", r"`%%rank` needs workers, and none are running. A `%%distributed -n 4`"),
        ("%%distributed --gpus 0,9\n1", r"--gpus"),
        ("%%distributed --launcher nowhere\n1", r"launcher.*local"),
        ("%%distributed --timeout 0\nx", r"`--timeout 0`: a number of seconds, such as 30 or 0.5."),
        ("%%distributed --num-gpus 4\nx", r"`--num-gpus`: did you mean `-n`\?"),
        ("%%distributed --nnodes 2\nx", r"`-j"),
        ("%%distributed --standalone\nx", r"`--standalone`: leave it out"),
        ("%%distributed -o 1x\nx", r"`-o 1x`: give a name for the result, such as `-o result`."),
        ("%%distributed\n# later", r"no code, so nothing has run. `%dist_init -n 4` starts"),
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
        with pytest.raises(NbdistError, match=said) as raised:
            typed(typed_in)
        assert "\n" not in str(raised.value)
