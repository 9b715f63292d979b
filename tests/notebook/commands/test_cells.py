"""Tests of `nbdist.notebook.commands.cells`: a notebook in which plain cells run on workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nbdist
from nbdist.errors import UsageError
from nbdist.notebook.cell_text import AUTO_NOTE
from nbdist.notebook.command import MagicCall, find_commands
from nbdist.notebook.commands.cells import COMMAND_GROUPS, rank, summary
from nbdist.notebook.pool import Pools
from tests.notebook.front_end import Notebook
from tests.waiting import SOON


@pytest.fixture(scope="module")
def auto() -> Iterator[Notebook]:
    """A notebook with two workers, and auto mode on."""
    first = ("%load_ext nbdist", "%dist_init -n 2", "here = 'notebook'")
    notebook = Notebook(*first)
    assert "auto mode is on" in notebook.run("%dist_auto on").text
    yield notebook
    notebook.close()


def test_plain_cells_run_on_all_ranks(auto: Notebook) -> None:
    """Plain cells run on all ranks, as panels say; cells with `%%local` run in the notebook."""
    shown = auto.run("where = rank\nwhere").text
    assert "── rank 1 ──\n1" in shown
    assert AUTO_NOTE in shown
    failed = auto.run("# first\nraise ValueError(here)")
    assert "ranks 0-1 failed, of 2" in failed.errors[0]["evalue"]
    assert "line 2" in failed.panel["text/plain"]
    assert "ValueError: notebook" in failed.panel["text/plain"]
    assert "Docstring" in auto.run("torch.add?").text
    assert auto.run("%%local\nhere").results == [{"text/plain": "'notebook'"}]
    assert "rank" in auto.run("# on the notebook\n%%local\nrank").errors[0]["evalue"]
    assert "".join(auto.run("%automagic").streams).startswith("\nAutomagic is OFF")
    auto.run("%automagic on")


def test_plain_cells_complete_workers_names(auto: Notebook) -> None:
    """Plain cells offer names and help of the workers' objects; cells with `%%local` do not."""
    auto.run("import types\nthere = types.SimpleNamespace(layer=1)")

    def offered(code: str) -> list[str]:
        return [*auto.client.complete(code, reply=True, timeout=SOON)["content"]["matches"]]

    assert offered("there.la") == ["layer"]
    assert "there" in offered("x = the")
    assert "there" not in offered("%%local\nthe")
    help_content = auto.client.inspect("there", reply=True, timeout=SOON)["content"]
    assert "Rank:      0" in help_content["data"]["text/plain"]


NOTEBOOKS = [  # a cell, its text from ranks (None: not run there), and text from the notebook
    ("%matplotlib inline\nimport torch, random\nacc = [rank]\nacc", "[1]", ""),
    ("%load_ext autoreload\n%autoreload 2\nimport os, sys, time", "", ""),
    ("%%time\nacc.append(7)\nlen(acc)", "Wall time", ""),
    ("%%timeit -n1 -r1\nlen(acc)", "per loop", ""),
    ("took = %timeit -o -q -n1 -r1 sum(acc)\ntook.loops", "1", ""),
    ("%%capture out\nprint('said', rank)\nx = 5", "", ""),
    ("out.stdout", "said 1", ""),
    ("%pip --version\nimport json\njson.dumps(x)", "5", "pip "),
    ("!echo file_{x}.bak $x", "file_5.bak 5", ""),
    ("name = f'n{rank}'\n!echo {name}.txt", "n1.txt", ""),
    ("%%writefile {folder}/made.py\nmade = 3", None, "Writing"),
    ("%run {folder}/made.py\nmade", "3", ""),
    ("%cd {folder}\nos.path.basename(os.getcwd())", "place", "place"),
    ("%env AUTO_MODE=3\nos.environ['AUTO_MODE']", "'3'", "AUTO_MODE=3"),
    (
        "from IPython.core.magic import register_line_magic\n"
        "@register_line_magic\ndef twice(line): return 2 * int(line)",
        "",
        "",
    ),
    ("%twice 4", "8", ""),
    ("%dist_gather acc\nlen(acc)", "2", ""),
    ("get_ipython().set_next_input('later = 1')", "later = 1", ""),
    ("from comm import create_comm\nc = create_comm(target_name='mine')", "`mine` wants", ""),
]


def test_first_lines_of_public_notebooks_run(auto: Notebook, tmp_path: Path) -> None:
    """Magics and commands run where their variables are; the notebook's own run here, once."""
    folder = tmp_path / "place"
    folder.mkdir()
    assert auto.run("%cd").streams  # the home folder, away from the tests' files
    for code, on_ranks, in_notebook in NOTEBOOKS:
        done = auto.run(code.replace("{folder}", str(folder)))
        assert done.errors == [], code
        texts = [each["data"]["text/plain"] for each in (*done.displays, *done.updates)]
        panels = [text for text in texts if AUTO_NOTE in text]
        assert bool(panels) == (on_ranks is not None), code
        assert (on_ranks or "") in "".join(panels), code
        streams = "".join(done.streams).replace("\r", "")
        assert in_notebook in streams, code
        assert bool(in_notebook) == bool(streams), (code, streams)
    assert [each.name for each in folder.iterdir()] == ["made.py"]


def test_history_and_reset_know_the_ranks(auto: Notebook) -> None:
    """The history shows cells as typed; `%reset` also deletes the ranks' names, if confirmed."""
    auto.run("net = [rank]")
    for magic in ("%history -l 3", "%history -t -l 3", "%macro again 1-99", "%notebook /dev/null"):
        shown = "".join(auto.run(magic).streams)
        assert "--auto" not in shown, magic
    assert "nothing has run" in auto.run("net = 0\n%dist_gather net\ny = = 1").errors[0]["evalue"]
    refused = auto.run("%%local\n!touch {net[0]}.bak").error
    assert "`net` is on ranks 0-1" in refused
    (*_, kept) = auto.run("%reset", typed=["n"]).displays
    assert "nothing was deleted" in kept["data"]["text/plain"]
    auto.run("def reset(x): return x")
    assert "[0]" in auto.run("reset(net)").text  # the variable, not the magic
    done = auto.run("%reset\n'gone'", typed=["y"])
    assert "'gone'" in (done.updates or done.displays)[-1]["data"]["text/plain"]
    assert "of the notebook and of the ranks" in done.prompts[0]
    for cell in ("net", "%%local\nhere"):
        assert "NameError" in auto.run(cell).errors[0]["traceback"][-1]
    auto.run("%%local\nhere = 'notebook'")


def test_auto_mode_can_be_switched_off(auto: Notebook) -> None:
    """After `%dist_auto off` cells run in the notebook, with or without `%%local`."""
    assert "auto mode is on" in auto.run("%dist_auto").text
    assert "auto mode is off" in auto.run("%dist_auto off").text
    for cell in ("here", "%%local\nhere"):
        assert auto.run(cell).results == [{"text/plain": "'notebook'"}]
    assert auto.run("get_ipython().run_cell_magic('local', '', 'made = here')").errors == []
    assert auto.value("made") == "notebook"


def test_magics_without_their_sign_run_on_workers(auto: Notebook) -> None:
    """`cd /usr` and `ls` alone in a cell of the workers are magics, as everywhere in IPython."""
    auto.run("%%distributed\nimport os\npwd = os.getcwd()")
    for source, shown in (
        ("cd /usr", "/usr"), ("ls -d /usr", "/usr"), ("os.getcwd()", "'/usr'"),
        ("pwd", "'/"), ("cd -q /", ""),
    ):  # fmt: skip
        assert shown in auto.run(f"%%distributed\n{source}").text, source
    assert "invalid syntax (line 2" in auto.run("%%distributed\nnothing yet").errors[0]["evalue"]
    assert "line 2" in auto.run("%%distributed\nnowhere").panel["text/plain"]


pytestmark = pytest.mark.shared_world


def test_rank_cells_take_ranks_and_pool_in_any_order(pools: Pools):
    """Ranks may begin with a minus sign and have spaces; `--pool` may be before or after them."""
    for text, ranks, pool in (
        ("-1,0", "-1,0", "default"),
        ("0, 2-3", "0,2-3", "default"),
        ("1 --pool a", "1", "a"),
        ("--pool=a ::2", "::2", "a"),
    ):
        line = MagicCall(rank, pools, text, "pass")
        assert (line.options.ranks, line.pool.name) == (ranks, pool)
        assert (line.text, line.cell) == (f"%%rank {text}", "pass")


README = Path(__file__).parents[3] / "README.md"

COMMANDS = {each.name: each for each in find_commands()}


def test_all_magics_have_a_line(typed: Callable[[str], str]) -> None:
    """`%dist_help --all` lists all magics by group, the everyday ones first, with summaries."""
    text = typed("%dist_help --all").partition("short forms\n")[0]
    shown = [line.partition(" ") for line in text.splitlines() if line.startswith("%")]
    names = [name.lstrip("%") for name, _, description in shown if not description.startswith("--")]
    assert [name for name in names if name != "dist_init"] == [
        name for group in COMMAND_GROUPS.values() for name in group if name != "dist_init"
    ]
    for name, _, description in shown:
        command = COMMANDS[name.lstrip("%")]
        assert description.strip() == summary(command) or description.startswith("--")
        assert len(description.strip()) > 10
    assert [line for line in text.splitlines() if line in COMMAND_GROUPS] == [*COMMAND_GROUPS]


def test_all_groups_of_magics_have_the_same_columns(typed: Callable[[str], str]) -> None:
    """The descriptions of magics begin in the same column in all groups and in the short forms."""
    *_, text = typed("%dist_help --all").partition("everyday\n")
    rows = [line for line in text.splitlines() if line.startswith(("magic ", "%"))]
    assert len(rows) > len(COMMANDS)
    (column,) = {len(re.split(r"(?<=  )(?=\S)", row)[0]) for row in rows}
    assert column == len("%dist_init --launcher join  ")


def test_each_magic_is_in_a_group_or_a_short_form(typed: Callable[[str], str]) -> None:
    """The same seven magics are for every day in `%dist_help`, the README and `help(nbdist)`."""
    grouped = [name for group in COMMAND_GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(n for n, each in COMMANDS.items() if not each.short_for)
    assert len(COMMAND_GROUPS["everyday"]) == 7
    first, every = typed("%dist_help"), typed("%dist_help --all")
    everyday, _, others = first.partition("\nothers\n")
    rows = [line for line in everyday.splitlines() if line.startswith("%")]
    assert len(rows) == 7
    shown = {COMMANDS[name].shown_name for name in grouped[7:]}
    assert {word for word in others.split() if word.startswith("%")} == shown | {"%dist_init"}
    short = {n: each.short_for.strip("`") for n, each in COMMANDS.items() if each.short_for}
    assert {*short} == {"dist_stack", "dist_log", "dist_why", "dist_clean"}
    for name, means in short.items():
        assert f"%{name}" not in first
        assert re.search(rf"^%{name} +{means}$", every, re.MULTILINE)
    names = [COMMANDS[name].shown_name for name in COMMAND_GROUPS["everyday"]]
    table = README.read_text().partition("| seven magics for every day |")[2]
    rows = re.findall(r"^\| `(%%?\w+)", table.partition("\n\n")[0], re.MULTILINE)
    assert rows == names
    assert re.findall(r"^    (%%?\w+)", str(nbdist.__doc__), re.MULTILINE) == names


@pytest.mark.parametrize(
    "line",
    [
        *("%dist_help gather", "%dist_help dist_gather", "%dist_help %dist_gather"),
        *("%dist_gather -h", "%dist_gather loss --help", "%dist_gather -r 0 -h"),
    ],
)
def test_help_of_a_magic_is_shown(typed: Callable[[str], str], line: str) -> None:
    """`%dist_help NAME` and the options `-h` and `--help` show what a magic does and takes."""
    shown = typed(line)
    assert shown.rstrip() == COMMANDS["dist_gather"].help_text
    assert shown.startswith(COMMANDS["dist_gather"].summary)
    assert "\nusage:\n\n  %dist_gather [-r RANKS]" in shown
    assert "::" not in shown.split("options:")[0]


def test_help_runs_nothing(typed: Callable[[str], str], pools: Pools) -> None:
    """A cell or line with `-h` shows help and runs nothing; a script gets its own `-h`."""
    for line in (
        "%%distributed -h\nthis is no code",
        "%%distributed -n 2 --help\npass",
        "%%rank -h",
    ):
        assert "\nusage:\n\n  %%" in typed(line)
    assert "\nusage:\n\n  %dist_run" in typed("%dist_run -h")
    assert not COMMANDS["dist_run"].asks_for_help("train.py -h")
    assert not COMMANDS["distributed"].asks_for_help("--name 'not closed")
    assert COMMANDS["distributed"].asks_for_help("-n 2 -h")
    COMMANDS["distributed"].line_magic(pools)("-h")


def test_help_of_an_unknown_magic_is_refused(typed: Callable[[str], str]) -> None:
    """An unknown name is refused with the nearest known name."""
    with pytest.raises(UsageError) as refused:
        typed("%dist_help gathr")
    assert str(refused.value) == (
        "`%dist_help gathr`: there is no such magic. Did you mean `%dist_help gather`? "
        "`%dist_help --all` lists all."
    )
