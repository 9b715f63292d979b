"""Tests of `nbdist.world.name_table`: which rank has which name, and which names are lost."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.output.events import Done
from nbdist.values.payload import Identity
from nbdist.values.states import ObjectState
from nbdist.world.name_table import NameTable, Sent, list_names
from nbdist.world.sent_objects import NOTHING_SENT, Parcel


@pytest.fixture
def table() -> NameTable:
    """The table of two ranks that have run a task."""
    table = NameTable({"x": 1, "model": [1]})
    for rank in (0, 1):
        bind(table, rank)
    return table


def bind(table: NameTable, rank: int, *names: str, **imported: str) -> None:
    """Record that a cell has bound names on a rank, some of them by imports."""
    table.record_finished(
        rank, Done("ok", 0.0, frozenset({*names, *imported}), imported), NOTHING_SENT
    )


def send(
    table: NameTable, *names: str, version: int = 1, ranks: tuple[int, ...] = (0, 1), **more: Any
) -> None:
    """Record that a cell has brought names of the notebook to ranks."""
    records = {name: Sent(version, Identity(table.namespace[name]), **more) for name in names}
    table.record_sent(records)
    for rank in ranks:
        table.record_finished(rank, Done("ok", 0.0), Parcel(records))


def test_a_sent_name_belongs_to_the_notebook(table: NameTable) -> None:
    """A name that ranks received belongs to the notebook, and a new process does not lack it."""
    table.record_sent({"x": Sent(1, Identity(1))})
    table.record_finished(0, Done("error", 0.0), NOTHING_SENT)  # the value could not be rebuilt
    assert table.owners() == {}
    send(table, "x", "model")
    assert table.owners() == {name: ("notebook", {0, 1}) for name in ("x", "model")}
    send(table, "x", version=2, ranks=(0,))
    assert table.ranks_that_have("x") == table.ranks_that_have("x", 2) == {0}
    assert table.ranks_that_have("x", 1) == {1}
    assert table.ranks_that_have("model", 1) == {0, 1}
    send(table, "x", version=3, ranks=(1,))
    assert (record := table.record("x")) is not None
    assert (record.version, table.record("y")) == (3, None)
    bind(table, 1, "x", "model")
    send(table, "x")
    table.record_replaced([1])
    assert table.lacking_text([1]) == "model"  # the notebook sends `x` again
    assert table.ranks_that_have("x") == {0}
    send(table, "model")
    assert table.lacking_text([1]) == ""


def test_a_name_belongs_to_ranks_that_bind_it(table: NameTable) -> None:
    """A name belongs to exactly the ranks that have bound it, until they delete it."""
    send(table, "x", "model")
    bind(table, 0, "x")
    bind(table, 1)
    assert (table.ranks_that_own("x"), table.ranks_that_have("x")) == ({0}, {1})
    assert table.owners()["x"] == ("workers", {0})
    assert (table.bound(0), table.bound(1)) == (["x"], [])
    table.record_finished(
        0, Done("ok", 0.0, gone=frozenset({"model", "x", "unknown"})), NOTHING_SENT
    )
    assert table.owners() == {name: ("notebook", {1}) for name in ("x", "model")}


@pytest.mark.parametrize("name", ["x", "model"])
def test_a_name_bound_again_is_the_notebooks(table: NameTable, name: str) -> None:
    """No rank owns a name that the notebook has bound to a new object, even before it is sent."""
    bind(table, 0, name)
    table.record_assigned([name])
    assert table.ranks_that_own(name) == ({0} if name == "model" else set())
    table.namespace[name] = [2]
    table.record_assigned([name])
    assert table.ranks_that_own(name) == set()
    assert table.bound(0) == [name]
    send(table, name)
    assert table.bound(0) == []
    assert table.owners() == {name: ("notebook", {0, 1})}


def test_gathered_names_stay_the_ranks_own(table: NameTable) -> None:
    """A rank still owns a name that the notebook has gathered, or has sent only to another rank."""
    send(table, "model")
    bind(table, 1, "x", "y")
    table.namespace.update(x=[1, 1], model=[[1], [1]])
    table.record_gathered("x", (0,))
    table.record_gathered("model", (0,))
    owners = {"model": {0}, "x": {0, 1}, "y": {1}}
    assert table.owners() == {name: ("workers", ranks) for name, ranks in owners.items()}
    bind(table, 1, "model")
    send(table, "model", ranks=(1,))
    assert table.ranks_that_own("model") == {0}
    table.namespace["model"] = [2]
    table.record_assigned(["model"])
    assert table.ranks_that_own("model") == set()


def test_variables_changed_in_place_are_the_ranks(table: NameTable) -> None:
    """Variables that lead to an object which ranks changed are listed, and lost with a rank."""
    states = {1: ObjectState({}), 2: ObjectState({}, (1,)), 3: ObjectState({})}
    tokens = {"model": (..., 1), "trainer": (..., 2), "x": (..., 3)}
    table.namespace.update(trainer=[1], x=[1])
    records = {
        name: Sent(1, Identity(table.namespace[name]), token=token)
        for name, token in tokens.items()
    }
    table.record_sent(records)
    for rank in (0, 1):
        table.record_finished(rank, Done("ok", 0.0), Parcel(records, states))
    assert table.holders("model") == {0, 1}
    assert (table.changed_names(), table.theirs(0)) == ([], [])
    table.objects.record_changed({1: frozenset({"a"})})
    assert table.owners()["model"] == ("notebook", {0, 1})
    assert {*table.changed_names()} == {"model", "trainer"}
    bind(table, 0, "loss")
    assert (table.theirs(0), table.theirs(1)) == (
        ["loss", "model", "trainer"],
        ["model", "trainer"],
    )
    table.record_replaced([1])
    assert table.is_missing("model", 1)
    table.record_lost([1])
    assert [table.is_missing(name, 1) for name in tokens] == [True, True, False]
    assert table.lacking_text([1]) == "model and trainer"
    table.objects.overwrite([1])
    assert table.changed_names() == []


def test_a_rank_has_the_object_that_was_sent(table: NameTable) -> None:
    """A rank has the object that it got, not an equal object to which the name is bound now."""
    model = table.namespace["model"]
    send(table, "model", token=(..., 1))
    assert table.ranks_that_have("model", (..., 1)) == {0, 1}
    assert table.ranks_that_have("model", (..., 2)) == set()
    assert not table.is_older("model", [0, 1])
    table.namespace["model"] = [1]
    assert table.is_older("model", [0, 1])
    table.record_assigned(["model"])
    assert table.ranks_that_have("model") == set()
    assert table.ranks_that_have("model", (..., 1)) == {0, 1}
    send(table, "model", token=(..., 2), ranks=(0,))
    assert table.ranks_that_have("model") == {0}
    table.namespace["model"] = model
    assert table.ranks_that_have("model", (..., 1)) == {1}


def test_ranks_that_assign_a_sent_name_are_listed(table: NameTable) -> None:
    """Ranks that have assigned a sent name are listed, until the notebook binds the name again."""
    send(table, "model")
    bind(table, 0, "model", "y")
    bind(table, 0, "model")
    assert (table.ranks_that_assigned("model"), table.ranks_that_assigned("y")) == ({0}, set())
    table.namespace["model"] = [2]
    table.record_assigned(["model"])
    assert table.ranks_that_assigned("model") == set()


def test_names_that_the_notebook_deletes_are_returned_once(table: NameTable) -> None:
    """A name that the notebook deletes is returned once per rank; a rank's own name stays."""
    send(table, "model", "x")
    bind(table, 1, "model")
    del table.namespace["model"]
    assert table.pop_deleted([0, 1]) == {}, "a cell may still be running"
    table.record_assigned(["model"])
    assert [table.pop_deleted([0, 1]) for _ in range(2)] == [{0: ("model",)}, {}]
    # The name is the rank's own until the rank reports the deletion.
    assert table.owners()["model"] == ("workers", {0})
    table.record_finished(0, Done("ok", 0.0, gone=frozenset({"model"})), NOTHING_SENT)
    assert table.owners() == {"x": ("notebook", {0, 1})}
    assert table.bound(1) == ["model"]
    del table.namespace["x"]
    table.record_assigned([])  # a cell that does not name `x`
    assert table.pop_deleted([0, 1]) == {0: ("x",), 1: ("x",)}


def test_names_assigned_during_a_task_are_the_notebooks(table: NameTable) -> None:
    """No rank owns a name that the notebook assigns during a task, even if the task binds it."""
    since = table.record_sent({})
    table.namespace["model"] = [2]
    table.record_assigned(["model"])
    table.record_finished(0, Done("ok", 0.0, frozenset({"model", "x"})), NOTHING_SENT, since)
    assert (table.ranks_that_own("model"), table.ranks_that_own("x")) == (set(), {0})
    assert table.ranks_that_bound("model") == {0}


def test_an_earlier_notebook_may_have_sent_any_name(table: NameTable) -> None:
    """Ranks may have any name from an earlier notebook, until this notebook binds the name."""
    table.record_attached({1: {"y": None}}, (0, 1))
    assert table.holders("x") == table.holders("model") == {0, 1}
    assert table.holders("y") == set()
    table.record_assigned(["x"])
    assert table.holders("x") == set()
    send(table, "x", token=(..., 1))
    assert table.copy().holders("x") == {0, 1}


def test_a_copied_table_ignores_later_changes(table: NameTable) -> None:
    """A copied table changes only by `copy_entries`; the record of notices stays shared."""
    send(table, "x")
    assert [table.is_first_notice("model") for _ in range(2)] == [True, False]
    table.record_assigned(["model"])
    copy = table.copy()
    assert copy.is_first_notice("model")
    assert not table.is_first_notice("model")
    bind(table, 0, "x")
    table.record_replaced([1])
    bind(table, 1, "y")
    assert copy.owners() == {"x": ("notebook", {0, 1})}
    copy.copy_entries([1], table)
    assert copy.owners() == {"x": ("notebook", {0}), "y": ("workers", {1})}


# --- lost names ---------------------------------------------------------------------------------


def test_a_new_rank_lacks_names_that_tasks_bound(table: NameTable) -> None:
    """A new rank lacks names bound there or by the task in which it died; modules come first."""
    for rank in (0, 1):
        bind(table, rank, "model", "x")
    table.record_replaced([1], {"late"})
    assert (table.lacking_text([1]), table.lacking_text([0])) == ("late, model and x", "")
    assert (table.bound(1), table.ranks_that_own("x")) == ([], {0})
    bind(table, 1, "x", "late")
    assert table.lacking_text([1]) == "model"
    kinds = {"net": 0, "opt": 1, "weights": 2}
    names = frozenset({*kinds, "a", "b"})
    table.record_finished(1, Done("ok", 0.0, names, kinds=kinds), NOTHING_SENT)
    table.record_replaced([1])
    assert table.lacking_text([1]) == "net, opt, weights, a, b, late and 2 more"
    table.record_finished(1, Done("ok", 0.0, names, kinds=kinds), NOTHING_SENT)
    table.record_replaced([0], made={"a", "net"})
    assert table.lacking_text([0]) == "net, a, model and x"


def test_a_new_rank_lacks_what_came_with_the_task_in_which_it_died(table: NameTable) -> None:
    """A name that was sent with the task is lost only if another rank has changed its object."""
    table.namespace["x"] = [1]
    tokens = {"model": (..., 1), "x": (..., 2)}
    records = {
        name: Sent(1, Identity(table.namespace[name]), token=token)
        for name, token in tokens.items()
    }
    table.record_sent(records)
    states = {1: ObjectState({}), 2: ObjectState({})}
    table.record_finished(0, Done("ok", 0.0), Parcel(records, states))
    table.record_replaced([1], brought={0: records, 1: records})
    table.objects.record_changed({1: frozenset({"a"})})
    table.record_lost([1])
    assert [table.is_missing(name, 1) for name in tokens] == [True, False]


def test_lost_imports_are_returned_once(table: NameTable) -> None:
    """A replaced rank's imports are returned once; a name bound again since is lacking instead."""
    bind(table, 1, "made", "hidden", np="numpy", time="time", hides="numpy")
    bind(table, 1, "time", hidden="torch")
    assert table.bound(1) == ["made", "time"]
    table.record_replaced([1])
    assert table.lacking_text([1]) == "made and time"
    assert table.pop_lost_imports([0]) == {}
    lost = {1: {"np": "numpy", "hides": "numpy", "hidden": "torch"}}
    assert [table.pop_lost_imports([0, 1]) for _ in range(2)] == [lost, {}]


def test_an_added_rank_lacks_names_of_all_ranks(table: NameTable) -> None:
    """An added rank lacks all names that ranks have bound, and has to repeat their imports."""
    send(table, "x")
    bind(table, 0, "a", "both")
    bind(table, 1, "b", both="numpy", np="numpy")
    table.renumber({0: 0, 1: 1}, 3)
    assert table.lacking_text([2]) == "a, b and both"
    assert table.lacking_text([0, 1]) == ""
    assert table.pop_lost_imports([2]) == {2: {"np": "numpy"}}
    assert table.ranks_that_have("x") == {0, 1}
    table.renumber({0: 0}, 1)
    assert table.owners().keys() == {"x", "a", "both"}
    assert table.lacking_text([1, 2]) == ""


def test_new_ranks_never_lack_predefined_names(table: NameTable) -> None:
    """Names such as `rank` are never lacking; other names are listed by a rank that has them."""
    bind(table, 0, "rank", "world_size", "device", "local_rank", "dist", "x", "y")
    bind(table, 1, "z", "y")
    bind(table, 2, "gone")
    table.renumber({0: 0, 1: 1}, 3)
    assert table.lacking_text([2]) == "gone, x, y and z"
    assert table.sources_of_lacking([2]) == {0: ["x", "y"], 1: ["z"]}
    table.record_replaced([0])
    assert table.lacking_text([0]) == "x and y"
    assert table.sources_of_lacking([0]) == {1: ["y"]}


def test_ranks_that_have_a_name_are_listed(table: NameTable) -> None:
    """A rank has a name that was sent, bound or imported there, unless the name was lost."""
    send(table, "x", ranks=(0,))
    bind(table, 1, "loss", nn="torch.nn")
    assert (table.ranks_with("x"), table.ranks_with("loss")) == ((0,), (1,))
    assert (table.import_path("nn"), table.import_path("loss"), table.import_path("x")) == (
        "torch.nn",
        None,
        None,
    )
    table.record_replaced([1])
    assert table.ranks_with("loss") == table.ranks_with("nope") == ()


def test_long_lists_of_names_are_cut() -> None:
    """Names are listed in alphabetical order, and of many names only some."""
    assert [*map(list_names, ("", "ba", "cab"))] == ["", "a and b", "a, b and c"]
    assert list_names("abcdefghi") == "a, b, c, d, e, f and 3 more"
