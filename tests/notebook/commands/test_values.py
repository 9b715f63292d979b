"""Variables that the notebook and the ranks exchange, and snapshots of variables, in a kernel."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nbdist.notebook.commands.values import expressions_in
from tests.notebook.front_end import Notebook, body, lasting
from tests.waiting import SOON, wait_until

pytestmark = pytest.mark.shared_world


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a b[0, 1] c", ["a", "b[0, 1]", "c"]),
        *((line, [line]) for line in ("x + 1", "[x for x in y]", "(a, b)", "a) + (b")),
        ("f(1, 2) d['a b']", ["f(1, 2)", "d['a b']"]),
        ("a b(", ["a", "b("]),
        ("a,b[0, 1], f(1, 2)", ["a", "b[0, 1]", "f(1, 2)"]),
        ("a b, c", ["a", "b", "c"]),
        ("a, b c", ["a", "b", "c"]),
        ("d['é'], b", ["d['é']", "b"]),
    ],
)
def test_words_of_a_line_become_expressions(line, found):
    """Blanks and commas divide a line into expressions, but do not divide an expression."""
    assert [*expressions_in(line.split(" "))] == found


two = lasting(
    "%load_ext nbdist",
    "%%distributed -n 2\nt = torch.full((2,), float(rank)); n = rank + 1\nboth = [t]\n"
    "if rank == 0: only = 'here'",
)


def test_gather_binds_lists_by_rank(two: Notebook):
    """Each expression becomes a list by rank; shared objects stay so; a list can be assigned."""
    assert two.run("%dist_gather t n both").errors == []
    assert two.value("[each.tolist() for each in t], n") == ([[0.0, 0.0], [1.0, 1.0]], [1, 2])
    assert two.value("[all(a is b[0] for a, b in zip(t, both))]") == [True]
    for line in ("n + 1 --as more", "n t[0].item() --as m,v"):
        assert two.run(f"%dist_gather {line}").errors == []
    assert two.value("more, m, v") == ([2, 3], [1, 2], [0.0, 1.0])
    ran = two.run("x = %dist_gather n\nprint(x is n, x)")
    assert (ran.streams, ran.results, ran.displays) == (["True [1, 2]\n"], [], [])
    for line in ("%dist_gather n", "%dist_gather n;", "z = %dist_gather n;"):
        ran = two.run(line)
        assert (ran.errors, ran.results) == ([], []), line
    two.run("y = %dist_gather n * 10 --rank 1\nboth = %dist_gather n t[0].item()")
    assert two.value("y, both") == (20, ([1, 2], [0.0, 1.0]))
    assert two.value("[get_ipython().run_line_magic('dist_gather', 'n')]") == [[1, 2]]
    # The assigned name need not exist when the cell ends.
    for cell in ("x = %dist_gather n\ndel x", "if False:\n    never = %dist_gather n"):
        ran = two.run(f"{cell}\nother = 1")
        assert (ran.errors, ran.streams) == ([], []), cell
    # After `x = %dist_gather n` the ranks keep their own `x`: the notebook's counts as gathered.
    two.run("%%distributed\nx = 'theirs'")
    two.run("x = %dist_gather n")
    assert body(two.run("%%distributed\nx"))[-1] == "'theirs'"


def test_classes_of_a_cell_are_the_same_from_all_ranks(two: Notebook):
    """Equal objects of two ranks are equal here; a class made by a later cell is a new class."""
    cell = (
        "%%distributed\nimport dataclasses, enum\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int\n"
        "    class Kind(enum.Enum):\n        A, B = 1, 2\n"
        "class Own:\n    number = rank\npoint, kind, own = Point(7), Point.Kind.B, Own()"
    )
    assert two.run(cell).errors == []
    assert two.run("%dist_gather point kind own").errors == []
    assert two.value("point[0] == point[1], type(point[0]) is type(point[1])") == (True, True)
    assert two.value("kind[0] is kind[1] is type(point[0]).Kind.B") is True
    assert two.value("[each.number for each in own]") == [0, 1]
    assert two.run("before = point[0]").errors == []
    assert two.run(cell).errors == []
    assert two.run("%dist_gather point").errors == []
    assert two.value("point[0] == point[1], type(point[0]) is type(before)") == (True, False)
    # An object that is sent back to the ranks is of their own class.
    two.run("sent = point[1]")
    ran = two.run("%%distributed\nisinstance(sent, Point) and sent == point")
    assert body(ran) == ["── ranks 0-1 (same) ──", "True"]


def test_names_with_an_underscore_belong_to_ranks_too(two: Notebook):
    """Ranks keep a variable with a leading underscore that they have bound, like any other."""
    two.run("_cfg = {'lr': 1}\ndef _helper():\n    return 'notebook'")
    two.run("%%distributed\n_cfg = {'lr': 5}\ndef _helper():\n    return 'ranks'")
    assert body(two.run("%%distributed\n_cfg['lr'], _helper()"))[-1] == "(5, 'ranks')"
    assert two.value("_cfg['lr'], _helper()") == (1, "notebook")


def test_gather_can_bring_one_value_in_place_of_a_list(two: Notebook):
    """`-r 1` brings the value of a single rank; `--stack` and `--cat` join the values of ranks."""
    lines = ("n -r 1 --as one", "n -r -1 --as last", "n -r 0:1 --as first")
    lines += ("n --stack --as numbers", "n -r 1 --stack --as stacked")
    for line in (*lines, "t --stack --as s", "t --cat --as c", "t[None] --cat --dim 1 --as d"):
        assert two.run(f"%dist_gather {line}").errors == [], line
    assert two.value("one, last, first") == (2, 2, [1])
    assert two.value("[each.tolist() for each in (numbers, stacked, s, c, d)]") == [
        [1, 2], [2], [[0.0, 0.0], [1.0, 1.0]], [0.0, 0.0, 1.0, 1.0], [[0.0, 0.0, 1.0, 1.0]]
    ]  # fmt: skip
    assert two.run("%dist_gather n --rank 1 --as one").streams == ["`--rank` is now `-r`\n"]


def test_gather_says_why_a_value_cannot_be_gathered(two: Notebook):
    """The error says which rank has the variable, or what else is wrong; no name is bound here."""
    two.run("mine = 1\nz = 'as it was'")
    for line, error in (
        ("mine", "no rank has `mine`; the notebook has it: `%dist_push mine`."),
        ("n( --as z", "`n(` is no expression: "),
        ("t[:rank+1] --stack --as z", "`t[:rank+1]` cannot be put together by"),
        ("only n", "rank 1 has no `only`; rank 0 has it: `-r 0`."),
    ):
        assert two.run(f"%dist_gather {line}").error.startswith(f"UsageError: {error}")
    assert two.value("z, 'only' in globals()") == ("as it was", False)


def test_push_names_the_variables_and_the_ranks(two: Notebook):
    """The answer of `%dist_push` names variables and ranks; a note names a replaced variable."""
    two.run("lr, batch = 0.1, 8")
    assert two.run("%dist_push lr").text == "sent lr to 2 ranks"
    assert two.run("%dist_push lr batch -r 1").text == "sent batch and lr to rank 1"
    two.run("layers = [1]")
    two.run("%%distributed\nown = {'layers': layers}")
    two.run("layers = 'other'")
    answer, note = two.run("%dist_push layers").text.splitlines()
    assert answer == "sent layers to 2 ranks"
    assert note.startswith("the notebook's `layers` (str) replaces the ranks' `layers` (list")


def test_scattered_parts_belong_to_the_workers(two: Notebook):
    """Ranks keep their parts, and the notebook its value, until the notebook binds the name."""
    two.run("x = [1, 2, 3]\nimport numpy as np; grid = np.arange(6).reshape(2, 3)")
    two.run("%dist_scatter x")
    assert body(two.run("%%distributed\nprint(x)"))[1::2] == ["[1, 2]", "[3]"]
    assert two.value("x") == [1, 2, 3]
    two.run("x = 'another'")
    assert body(two.run("%%distributed\nprint(x)"))[1:] == [
        "another",
        "the notebook's `x` (str) replaces the ranks' `x` (list, changed)",
    ]
    answer = two.run("%dist_scatter grid --dim 1 --as column -r 1").text
    assert answer == "scattered column: 3 along dimension 1, 3 to rank 1"
    assert two.run("%dist_gather column -r 1").errors == []
    assert two.value("column.tolist()") == [[0, 1, 2], [3, 4, 5]]


# --- snapshots --------------------------------------------------------------------------------


kernel = lasting("%load_ext nbdist", NBDIST_SNAPSHOT_DIR="{folder}")


@pytest.fixture
def notebook(kernel: Notebook) -> Notebook:
    """The notebook with two ready workers and no snapshots."""
    shutil.rmtree(kernel.folder)
    kernel.folder.mkdir()
    kernel.run("%dist_snapshot --every 0")
    if kernel.run("%%distributed -n 2\npass").errors:
        assert kernel.run("%dist_restart -n 2").errors == []
    return kernel


def test_restore_brings_variables_back_after_a_restart(notebook: Notebook) -> None:
    """A line after a restart shows the `%dist_restore`; restored variables are the workers' own."""
    notebook.run("step = 1")
    notebook.run("%%distributed\nstep = 10 + rank\nnote = 'kept'\nimport _thread\n"
                 "lock = _thread.allocate_lock()")  # fmt: skip
    text = notebook.run("%dist_snapshot --name night").text
    assert text.startswith("saved note and step of 2 ranks · snapshot `night` · ")
    assert "left out: lock (TypeError: cannot pickle '_thread.lock' object)" in text
    text = " · `%dist_restore --name night` restores note and step of "
    assert f"worker variables cleared{text}" in notebook.run("%dist_restart").text
    text = notebook.run("%dist_restore").text
    assert text.startswith("restored note and step on ranks 0-1 from `night@")
    assert body(notebook.run("%%distributed\nstep"))[1::2] == ["10", "11"]
    notebook.run("%%distributed\nstep += 1")
    notebook.run("%dist_restore step -r 1")
    assert body(notebook.run("%%distributed\nstep")) == ["── ranks 0-1 (same) ──", "11"]
    assert notebook.value("step, 'torch' in __import__('sys').modules") == (1, False)
    assert notebook.run("%dist_restore --name night --from-rank 0").errors == []
    assert body(notebook.run("%%distributed\nstep")) == ["── ranks 0-1 (same) ──", "10"]
    # The error of a rank that died names the snapshot.
    error = notebook.run("%%distributed\nimport os\nif rank: os._exit(3)").error
    assert "`%dist_restore --name night` restores " in error


def test_every_takes_snapshots_after_cells(notebook: Notebook) -> None:
    """`--every 2` saves after every second successful cell; a failed snapshot adds only a line."""
    folder = notebook.folder
    notebook.run("%%distributed\nx = 1")
    assert "again after every 2 cells" in notebook.run("%dist_snapshot --name auto --every 2").text
    for cell, count in (("x = 2", 1), ("raise ValueError", 1), ("x = 3", 2)):
        notebook.run(f"%%distributed\n{cell}")
        assert len([each for each in (folder / "auto").iterdir() if each.name[0] != "."]) == count
    shutil.rmtree(folder)
    folder.write_text("in the way")
    notebook.run("%%distributed\npass")
    failed = notebook.run("%%distributed\npass")
    assert failed.errors == []
    line = failed.texts[-1]
    assert line.startswith("no snapshot `auto` after this cell: No snapshot was written: ")
    assert "\n" not in line
    folder.unlink()
    folder.mkdir()
    assert notebook.run("%dist_snapshot --every 0").text == "automatic snapshots are off"


def test_restore_takes_this_notebooks_newest_snapshot(
    notebook: Notebook, fresh: Callable[..., Notebook], tmp_path: Path
) -> None:
    """Without a name, the notebook's newest snapshot is restored, also after reloading nbdist."""
    folder = notebook.folder
    notebook.run("%%distributed\nx = 'first'")
    notebook.run("%dist_snapshot x --name first")
    env = {"NBDIST_SNAPSHOT_DIR": str(folder), "JPY_SESSION_NAME": str(tmp_path / "My train.ipynb")}
    start = ("%load_ext nbdist", "%dist_init -n 2")
    other = fresh(*start, env=env)
    error = other.run("%dist_restore").error
    assert "No snapshot is known to be this notebook's. Available: `first`." in error
    assert "`%dist_restore --name first` restores one of them." in error
    lines = other.run("%dist_restore --list").text.splitlines()
    assert lines[0].split() == ["snapshot", "taken", "saved", "by", "ranks", "size", "variables"]
    assert lines[1].startswith("first@")
    assert "another session" in lines[1]
    other.run("%%distributed\nx = 'second'")
    assert "snapshot `My-train` · " in other.run("%dist_snapshot").text
    other.run("%dist_snapshot x --name first")
    for each, by in ((other, "this notebook"), (notebook, env["JPY_SESSION_NAME"])):
        lines = each.run("%dist_restore --list").text.splitlines()[1:-1]
        assert [by in line for line in lines] == [True, True, False]
    assert " from `first@" in notebook.run("%dist_restore").text
    assert body(notebook.run("%%distributed\nx"))[-1] == "'first'"
    assert notebook.run("%dist_restore --name My-train").text.endswith("this notebook did not save")
    assert "not save" not in notebook.run("%dist_restore --name first").text
    assert body(notebook.run("%%distributed\nx"))[-1] == "'first'"
    for cell in ("%unload_ext nbdist", *start):
        assert other.run(cell).errors == []
    assert " from `first@" in other.run("%dist_restore").text
    assert body(other.run("%%distributed\nx"))[-1] == "'second'"
    assert "removed `first@" in other.run("%dist_snapshot --remove first").text
    assert " from `first@" in notebook.run("%dist_restore").text
    assert "removed `first@" in notebook.run("%dist_snapshot --remove first").text
    assert [each.name for each in folder.iterdir()] == ["My-train"]


@pytest.mark.own_agent
@pytest.mark.parametrize("place", ["", "/projects/"])
def test_a_nameless_notebook_restores_its_snapshot(
    notebook: Notebook, fresh: Callable[..., Notebook], place: str
) -> None:
    """After a restart, a notebook without a name restores its own snapshot; others do not."""
    env = {"NBDIST_SNAPSHOT_DIR": str(notebook.folder), "JPY_SESSION_NAME": place}
    start = ("%load_ext nbdist", "%dist_init -n 2")
    other, third = (fresh(*start, env=env) for _ in range(2))
    other.run("%%distributed -n 2\nx = 'saved'")
    assert " · snapshot `snapshot` · " in other.run("%dist_snapshot").text
    other.manager.restart_kernel(now=True)
    other.client.wait_for_ready(timeout=SOON)
    assert [*map(other.fails_at, ("%load_ext nbdist", "%dist_init -n 2"))] == ["", ""]
    assert "restored x on ranks 0-1 from `snapshot@" in other.run("%dist_restore").text
    assert "not save" not in other.run("%dist_restore").text
    assert "No snapshot is known to be this notebook's" in third.run("%dist_restore").error


def test_bad_input_gets_an_error_with_a_remedy(notebook: Notebook) -> None:
    """Each mistake with snapshots gets an error of one line, with a reason or a right form."""
    for source, text in (
        ("%dist_snapshot --name a/b", "`a/b` is not a name"),
        ("%dist_snapshot rank nowhere --name a", "no rank has `nowhere`."),
        ("%dist_snapshot rank --every x", "`--every 1`"),
        ("%dist_snapshot --remove a", "There are no snapshots in "),
        ("%dist_restore", "`%dist_snapshot model step`"),
        ("%dist_restore a --from-rank x", "`--from x`"),
    ):
        assert text in notebook.run(source).error


def test_stop_ends_a_slow_snapshot(notebook: Notebook) -> None:
    """After Stop in a slow snapshot no part of the snapshot is left, and the workers work on."""
    folder = notebook.folder
    notebook.run("%%distributed\nimport time\nclass Slow:\n    def __reduce__(self):\n"
                 "        time.sleep(30)\nslow = Slow()")  # fmt: skip
    request = notebook.client.execute("%dist_snapshot slow --name slow")
    wait_until(lambda: [*folder.glob("slow/.part-*/*")], "a part is being written")
    notebook.manager.interrupt_kernel()
    assert notebook.reply_to(request)["ename"] == "Interrupted"
    assert [each.name for each in (folder / "slow").iterdir()] == [".lock"]
    assert notebook.run("%%distributed\ndel slow").errors == []
