"""Commands that a cell shows as remedies work as they are shown, and lose nothing."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from tests.notebook.front_end import Notebook
from tests.objects import programs
from tests.objects.programs import Run, gives, here, hinting, ranks

pytestmark = [pytest.mark.shared_world, pytest.mark.kernel]
NEW_WORKERS = True

COMMAND = re.compile(r"`(%dist_[^`]+)`")
LINKED = "optimizer.param_groups[0]['params'][0] is model.weight"
KILL = f"import os\nif rank == 1: os.kill(os.getpid(), {int(signal.SIGKILL)})\ndist.barrier()"

Seen = Callable[[str], list[object]]


@pytest.fixture
def seen(two: Notebook, program: Run) -> Seen:
    """Evaluates an expression on the ranks, and returns each rank's value."""

    def evaluate(expression: str) -> list[object]:
        outcome = two.run(f"%%distributed -o seen\n{expression}")
        assert outcome.errors == [], outcome.seen
        return list(two.value("[seen[rank] for rank in sorted(dict(seen.items()))]"))

    return evaluate


def commands(two: Notebook, source: str) -> list[str]:
    """Run a cell and return the commands that the cell shows, each once."""
    text = re.sub(r"\s+", " ", two.run(source).seen)
    return [*dict.fromkeys(COMMAND.findall(text))]


def type_(two: Notebook, command: str) -> None:
    """Run a command, which must not fail."""
    outcome = two.run(command)
    assert outcome.errors == [], outcome.seen


def names_of(two: Notebook) -> set[str]:
    """Return the notebook's variables."""
    return {each for each in two.value("[*globals()]") if not each.startswith("_")}


CONFLICTS = {
    "a dict": ("x = {'a': 0}", "x['a'] = 1", "x['a'] = 2", "x['a']"),
    "a list": ("x = [0]", "x.append(1)", "x.append(2)", "x[-1]"),
    "a tensor": ("x = torch.zeros(1)", "x += 1", "x += 2", "x.item()"),
    "an array": ("x = np.zeros(1)", "x += 1", "x += 2", "float(x[0])"),
    "an instance": ("class A: pass\nx = A(); x.a = 0", "x.a = 1", "x.a = 2", "x.a"),
    "a class": ("class x: a = 0", "x.a = 1", "x.a = 2", "x.a"),
    "a function": ("def x(v, to=[0]): to.append(v)", "x(1)", "x(2)", "x.__defaults__[0][-1]"),
    "a closure": (
        "def make():\n    n = 0\n    def up(by):\n        nonlocal n; n = by; return n\n"
        "    return up\nx = make()",
        *("x(1)", "x(2)", "x.__closure__[0].cell_contents"),
    ),
    "a frame": (
        "import pandas as pd\nx = pd.DataFrame({'a': [0]})",
        *("x.loc[0, 'a'] = 1", "x.loc[0, 'a'] = 2", "int(x.a[0])"),
    ),
    "a model": (
        "x = net()",
        *("x.weight.data += 1", "x.weight.data += 2", "x.weight[0, 0].item()"),
    ),
}
"""Cells that make `x`, change it on the ranks and in the notebook; the expression to read."""


def begin_conflict(two: Notebook, program: Run, name: str) -> list[str]:
    """Have both sides change `x`, and return the commands that the next cell shows."""
    made, there, then, read = CONFLICTS[name]
    program([here(made), ranks("keeper = [x]"), ranks(there), here(then)])
    return commands(two, f"%%distributed\n{read}")


@programs.table({name: [] for name in CONFLICTS})
def test_push_replaces_the_ranks_value_by_the_notebooks(
    two: Notebook, program: Run, seen: Seen, name: str
) -> None:
    """The shown `%dist_push x` changes the ranks' object in place; the notebook's object stays."""
    read = CONFLICTS[name][3]
    shown = begin_conflict(two, program, name)
    (push,) = (each for each in shown if each.startswith("%dist_push"))
    assert seen(f"({read}, keeper[0] is x)") == [(1, True)] * 2
    type_(two, push)
    assert seen(f"({read}, keeper[0] is x)") == [(2, True)] * 2
    assert two.value(read) == 2
    assert commands(two, f"%%distributed\n{read}") == []


@programs.table({name: [] for name in CONFLICTS})
def test_gather_brings_the_ranks_values(two: Notebook, program: Run, seen: Seen, name: str) -> None:
    """The shown `%dist_gather x` binds the ranks' values to a new name."""
    read = CONFLICTS[name][3]
    shown = begin_conflict(two, program, name)
    before = names_of(two)
    (gather,) = (each for each in shown if each.startswith("%dist_gather"))
    type_(two, gather)
    assert two.value(read) == 2, "the notebook's own is overwritten"
    (new,) = names_of(two) - before
    values = new if " -r " not in gather else f"[{new}]"
    # A class of the ranks becomes the notebook's own class: the line names an attribute.
    is_whole = gather.split()[1] == "x"
    one = f"(lambda x: {read})(each)" if is_whole else "each"
    assert {*two.value(f"[{one} for each in {values}]")} == {1}
    assert seen(f"({read}, keeper[0] is x)") == [(1, True)] * 2


def test_a_cell_names_all_that_a_new_rank_lacks(two: Notebook, program: Run, seen: Seen) -> None:
    """The shown commands, each run in turn, bring all missing variables, linked."""
    program([
        here("model = net(); optimizer = sgd(model); hist = []"),
        ranks("hist.append(train(model, optimizer))\nown = {'model': model}"),
        ranks(KILL, fails="killed"),
    ])  # fmt: skip
    shown = commands(two, "%%distributed\nprint(own, hist, train(model, optimizer, 0))")
    syncs = [each for each in shown if each.startswith("%dist_sync")]
    named = {word for each in syncs for word in each.partition(" --")[0].split()[1:]}
    assert named >= {"own", "hist", "model", "optimizer"}
    for command in syncs:
        type_(two, command)
    assert seen(f"({LINKED}, own['model'] is model, hist)") == [(True, True, [0.605])] * 2
    assert seen("train(model, optimizer)") == [0.004] * 2
    assert commands(two, "%%distributed\nprint(own, hist, model, optimizer)") == []


@pytest.mark.parametrize("way", ["%dist_restart -r 1", "%dist_scale 3"])
def test_commands_bring_back_training(two: Notebook, program: Run, seen: Seen, way: str) -> None:
    """Commands that a restart or a new rank shows bring back the trained model."""
    program([
        here("model = net(); optimizer = sgd(model)"),
        ranks("print(train(model, optimizer))"),
    ])  # fmt: skip
    shown = commands(two, way)
    shown += commands(two, "%%distributed\nprint(train(model, optimizer, 0))")
    syncs = [each for each in dict.fromkeys(shown) if each.startswith("%dist_sync")]
    assert syncs
    for command in syncs:
        type_(two, command)
    assert set(seen(f"({LINKED}, train(model, optimizer))")) == {(True, 0.004)}


def test_an_optimizer_may_come_before_its_model(two: Notebook, program: Run, seen: Seen) -> None:
    """After a death, an optimizer and then its model are synced, and the two are linked."""
    program([
        here("model = net(); optimizer = torch.optim.Adam(model.parameters(), lr=1.)"),
        ranks("print(train(model, optimizer))"),
        ranks(KILL, fails="killed"),
    ])  # fmt: skip
    for name in ("optimizer", "model"):
        type_(two, f"%dist_sync {name} --from 0")
    checks = f"({LINKED}, [*optimizer.state][0] is model.weight, train(model, optimizer))"
    first, second = seen(checks)
    assert first == second
    assert first[:2] == (True, True)  # type: ignore[index]


def test_a_plain_cell_shows_how_to_gather(two: Notebook, program: Run) -> None:
    """The command that a plain cell shows for a variable of the ranks brings the variable."""
    program([ranks("theirs = {'r': rank}")])
    shown = commands(two, "theirs")
    (gather,) = (each for each in shown if each.startswith("%dist_gather"))
    type_(two, gather)
    assert two.value("theirs") == [{"r": 0}, {"r": 1}]


def test_a_gathered_name_is_pushed_after_a_restart(two: Notebook, program: Run, seen: Seen) -> None:
    """The shown command sends a gathered variable that new workers lack."""
    program([ranks("acc = [rank]"), here("%dist_gather acc"), here("%dist_restart")])
    shown = commands(two, "%%distributed\nprint(acc)")
    (push,) = (each for each in shown if each.startswith("%dist_push"))
    type_(two, push)
    assert seen("acc") == [[[0], [1]]] * 2


def test_a_line_names_holders_of_a_replaced_model(two: Notebook, program: Run, seen: Seen) -> None:
    """The ranks use the new model, and the line names variables that hold the old model."""
    program([
        here("model = net(); optimizer = sgd(model)"),
        ranks("wrapped = torch.nn.Sequential(model); print(train(wrapped, optimizer))"),
        here("model = net()"),
        hinting(ranks("model"), "Linear", "wrapped", "optimizer"),
    ])  # fmt: skip
    assert seen("wrapped[0] is model") == [False] * 2


DROPPED = r"ranks 0-1 have (trained|changed) `{}` and dropped it since"


def test_a_line_names_dropped_changes(program: Run) -> None:
    """A line says once that ranks get the notebook's object, only if they had changed theirs."""
    program([
        here("model = net(); optimizer = sgd(model); x = {'n': 0}; holder = [x]"),
        ranks("print(train(model, optimizer))\nx['n'] = 1"),
        here("weights = [model.weight]"),
        ranks("model = optimizer = x = None"),
        ranks("weights", DROPPED.format("weights")),
        gives("weights[0].tolist()", [[0, 0]]),
        here("model = net(); same = [model.weight]"),
        ranks("print(model(torch.ones(1, 2)))"),
        ranks("model = None"),
        gives("same[0].tolist()", [[0, 0]]),
    ])  # fmt: skip


def test_memory_that_ranks_still_use_is_not_gone(program: Run) -> None:
    """Memory that a view of the ranks holds keeps the ranks' values, and no line is shown."""
    program([
        here("x = torch.zeros(3)"),
        ranks("x += 1; view = x[1:]"),
        ranks("x = None"),
        here("again = [x]"),
        gives("again[0].tolist(), view.tolist()", ([1, 1, 1], [1, 1])),
    ])  # fmt: skip


def test_a_line_says_that_graph_and_hooks_are_not_sent(program: Run) -> None:
    """A tensor is sent without its graph and its hooks, and a line says so once."""
    program([
        here("model = net(); loss = model(torch.ones(1, 2)).sum()"),
        ranks("loss", "`loss` is sent without its autograd graph"),
        here("handle = model.weight.register_hook(lambda grad: grad * 0)"),
        ranks("model.training", "`model` is sent without the hooks"),
        here("loss = model(torch.ones(1, 2)).sum(); outputs = [net()(torch.ones(1, 2))]"),
        gives("loss.item(), model.training", (0, True)),
        ranks("len(outputs)", "`outputs` is sent without its autograd graph"),
    ])  # fmt: skip


def test_a_second_name_on_some_ranks_is_linked(program: Run) -> None:
    """All ranks have the object under both names, and no line speaks of an older object."""
    program([
        here("model = net()"),
        ranks("print(train(model, sgd(model), 1))"),
        here("best = model"),
        ranks("best.training", options="-r 0"),
        gives("best is model, best.weight.tolist()", (True, [[2, 2]])),
    ])  # fmt: skip
