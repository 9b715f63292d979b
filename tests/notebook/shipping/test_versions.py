"""Versions of values, conflicts between the notebook and ranks, and gathered names."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from nbdist.notebook.free_names import Gathered, assigned_in
from nbdist.notebook.shipping import atomic_version, plan, push, version_now
from nbdist.values import scan
from nbdist.world.name_table import NameTable


def test_a_version_changes_with_the_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change deep inside, in memory or of the type is a new version; huge memory is sampled."""
    assert len({atomic_version(value) for value in (1, True, 1.0, 1 + 0j, "1", b"1")}) == 6
    names: dict[str, Any] = {"deep": [[1], "x" * 99], "big": numpy.zeros(1 << 20, dtype="uint8")}
    table = NameTable(names)
    before = {name: version_now(name, table) for name in names}
    assert {name: version_now(name, table) for name in names} == before
    names["deep"][0].append(2)
    names["big"][12345] = 1
    assert all(version_now(name, table) != before[name] for name in names)
    names["deep"][0].pop()
    names["big"][12345] = 0
    assert {name: version_now(name, table) for name in names} == before
    monkeypatch.setattr(scan, "QUICK_BYTES", 1 << 19)
    monkeypatch.setattr(scan, "WHOLE_LIMIT", 1 << 20)
    names.update(big=numpy.zeros((1 << 20) + 1, dtype="uint8"), tensor=torch.zeros(1 << 19))
    before = {name: version_now(name, table) for name in names}
    names["big"][0] = 1
    names["tensor"][0] = 1
    assert {n for n in names if version_now(n, table) != before[n]} == {"big", "tensor"}


ALL = (0, 1)
KEPT = (
    "`{}` was changed on the ranks since it was sent, and in the notebook: the ranks keep theirs. "
    "`%dist_push {name}` sends the notebook's, `%dist_gather {name} --as {name}_ranks` brings "
    "theirs"
)


def question_of(house: Any, source: str, ranks: tuple[int, ...] = ALL) -> Any:
    """Return the objects and variables that ranks are asked about, and the ranks, or None."""
    question = plan(source, house.table, ranks).question
    if question is None:
        return None
    objects = [house.table.objects.links.find(key) for key in question.objects]
    return objects, question.names, question.ranks


def test_ranks_are_asked_only_before_something_is_replaced(house: Any) -> None:
    """Ranks are asked before a changed or new object is sent, not at a first sending or a push."""
    house.cell("xs = [1]\nn = 1\nclass Net: pass\ndef f(x=[]): return Net, xs")
    assert question_of(house, "xs, n, f") is None
    house.distributed("xs, n, f() and 0")
    assert question_of(house, "xs, n, f") is None
    house.cell("xs.append(2)\nn = 2\nNet.size = f.size = 3")
    objects, names, ranks = question_of(house, "xs, n, f")
    expected = [house.notebook.names[name] for name in ("xs", "Net", "f")]
    assert len(objects) == 3
    assert all(any(each is other for other in objects) for each in expected)
    assert (names, ranks) == ((), ALL)
    assert house.names("xs, n, f") == {"n"}
    assert push(["xs"], house.table, ALL).question is None
    house.cell("xs = xs + [3]")
    assert question_of(house, "xs")[1:] == (("xs",), ALL)


def test_only_changed_parts_of_an_object_conflict(house: Any) -> None:
    """Ranks are only asked about parts that the notebook changed; other parts do not conflict."""
    house.cell("cfg = {'lr': 1, 'layers': 2}")
    house.distributed("cfg['layers'] = 'theirs'")
    house.cell("cfg['lr'] = 3")
    (parts,) = plan("cfg", house.table, ALL).question.objects.values()
    assert parts == {"lr"}
    assert house.distributed("cfg") == {"lr": 3, "layers": "theirs"}
    assert house.notices == []
    house.cell("cfg['layers'] = cfg['new'] = 5")
    for _ in range(2):
        assert house.distributed("cfg") == {"lr": 3, "layers": "theirs", "new": 5}
    kept = KEPT.format("cfg['layers']", name="cfg")
    assert house.notices == [kept.replace("the notebook's,", "all of the notebook's `cfg`,")]


def test_objects_that_ranks_changed_stay_theirs(house: Any) -> None:
    """Ranks keep objects that they changed; a notice names both remedies once per change here."""
    house.cell("xs = [1]")
    house.distributed("xs.append('theirs')")
    assert house.distributed("xs") == [1, "theirs"]
    house.cell("xs.append(2)")
    for _ in range(2):
        assert house.distributed("xs") == [1, "theirs"]
    assert house.table.owners() == {"xs": ("notebook", {0, 1})}
    assert (house.table.changed_names(), house.table.theirs(0)) == (["xs"], ["xs"])
    house.cell("xs.append(3)")
    assert house.notices == [KEPT.format("xs", name="xs")]
    assert house.distributed("xs") == [1, "theirs"]
    assert house.notices == [KEPT.format("xs", name="xs")] * 2
    house.send(push(["xs"], house.table, ALL))
    assert house.table.changed_names() == []
    assert house.distributed("xs.append(4)\nxs") == [1, 2, 3, 4]
    house.cell("xs = [5]")
    assert house.distributed("xs") == [5]
    assert house.notices[2:] == [
        "the notebook's `xs` (list) replaces the ranks' `xs` (list, changed)"
    ]
    assert house.distributed("import os\nos.sep") == "/"
    house.cell("import os")  # the same module: nothing is replaced
    assert house.distributed("os.sep") == "/"
    assert len(house.notices) == 3
    house.cell("xs.append(6)")
    assert house.distributed("xs") == [5, 6]
    assert len(house.notices) == 3


def test_a_notice_names_variables_with_a_replaced_object(house: Any) -> None:
    """A notice names the ranks' variables that still hold a replaced object; they do not change."""
    house.cell("net = [1]\nother = 1")
    house.distributed("mine, wrapped = {'of': net}, [[net]]\nother")
    house.cell("net = [2]")
    assert house.distributed("net, mine, wrapped") == ([2], {"of": [1]}, [[[1]]])
    assert house.notices == [
        "the notebook's `net` (list) replaces the ranks' `net` (list); `mine` and `wrapped` on the "
        "ranks still belong to the old one"
    ]
    house.run("net = 'theirs'")
    house.cell("net = [3]")
    assert house.distributed("net") == [3]
    assert house.notices[1:] == [
        "the notebook's `net` (list) replaces the ranks' `net` (str, changed)"
    ]


def test_a_rank_that_lacks_a_variable_gets_it(house: Any) -> None:
    """Ranks with the variable keep it, others get the notebook's; a notice says if they differ."""
    house.cell("xs = [1]")
    house.distributed("xs", ranks=(0,))
    (packet,) = house.plan("xs").packets
    assert (packet.names, packet.ranks) == (("xs",), (1,))
    assert question_of(house, "xs") == ([[1]], (), (0,))
    house.run("xs.append('theirs')", ranks=(0,))
    sent = house.settled(plan("xs", house.table, ALL), 0)
    assert [(each.names, each.ranks) for each in sent.packets] == [(("xs",), (1,))]
    assert sent.notices == (
        "`xs` was changed on rank 0 since it was sent; rank 1 gets the notebook's: "
        "`%dist_sync xs --from 0 -r 1` copies theirs",
    )


def test_a_new_rank_does_not_get_an_outdated_variable(house: Any) -> None:
    """A new rank gets no variable that other ranks have changed; a notice names both remedies."""
    house.cell("xs = [1]")
    house.distributed("xs.append('theirs')")
    house.cell("xs.append(2)")
    house.distributed("xs")
    house.table.record_replaced([1])
    house.table.record_lost([1])
    sent = house.settled(plan("xs", house.table, ALL), 0)
    assert sent.packets == ()
    assert sent.notices == (
        "`xs` was changed on rank 0 since it was sent; rank 1 does not have it: "
        "`%dist_sync xs --from 0` copies it, `%dist_push xs` sends the notebook's",
    )
    pushed = push(["xs"], house.table, ALL).shipment()
    assert [(each.names, each.ranks) for each in pushed.packets] == [
        (("xs",), (0,)),
        (("xs",), (1,)),
    ]


def test_variables_share_objects_that_ranks_changed(house: Any) -> None:
    """New variables refer to the ranks' own objects; a push replaces all that a variable holds."""
    house.cell("inner = [1]\nouter = [inner]")
    house.distributed("kept = inner\ninner.append('theirs')\nouter")
    house.cell("outer.append(2)")
    assert house.distributed("outer, outer[0] is kept") == ([[1, "theirs"], 2], True)
    house.cell("other = {'of': inner}")
    assert house.names("outer, other") == {"other"}
    assert house.distributed("other['of'] is inner is kept, inner") == (True, [1, "theirs"])
    assert house.notices == []
    house.cell("inner.append(3)")
    assert house.distributed("inner") == [1, "theirs"]
    assert house.notices == [KEPT.format("inner", name="inner")]
    pushed = house.send(push(["outer"], house.table, ALL))
    assert pushed.names == ("outer",)
    assert house.distributed("outer[0] is inner is kept, outer") == (True, [[1, 3], 2])


def test_a_name_counts_as_gathered_until_bound_again() -> None:
    """A name is not gathered any more once bound to another object, or to an equal number."""
    names: dict[str, Any] = {"losses": [1, 2], "n": 3, "own": 4}
    gathered = Gathered(names)
    assert not gathered.has_any
    gathered.add(["losses", "n"])
    gathered.record_assigned(["n", "losses", "own"])  # by the cell of `%dist_gather`
    assert [name for name in names if name in gathered] == ["losses", "n"]
    gathered.record_assigned(["losses"])  # `if False: losses = []` did not run
    names["alias"] = names["losses"]
    assert ("losses" in gathered, "alias" in gathered) == (True, False)
    names["losses"] = [1, 2]
    assert "losses" not in gathered
    gathered.record_assigned(["losses", "n"])
    assert (gathered.has_any, "n" in gathered) == (False, False)
    gathered.add(["n"])
    del names["n"]
    assert "n" not in gathered


def test_assigned_in_finds_names_assigned_by_gather() -> None:
    """`assigned_in` finds names, also in tuples, that `%dist_gather` alone assigns."""
    gather, status = (
        f"get_ipython().run_line_magic('{name}', 'y')" for name in ("dist_gather", "t")
    )
    cell = f"x = {gather}\na, (b, *c) = d = {gather}\ne = {status}\nf = [{gather}]\ng[x] = {gather}"
    assert assigned_in(cell) == {"x", "a", "b", "c", "d"}
    assert assigned_in("x = 1") == frozenset()


def test_a_gathered_name_is_only_sent_by_push(house: Any) -> None:
    """No cell and no function sends a gathered name; another name of the value is sent as usual."""
    house.cell("acc = 0\nf = lambda: acc")
    house.distributed("acc, f()")
    house.notebook.names["acc"] = [0.5, 0.5]
    gathered = Gathered(house.notebook.names)
    gathered.add(["acc"])
    house.table.record_gathered("acc")
    first = plan("acc + f()", house.table, ALL, None, gathered).shipment()
    notice = "`acc` was gathered: the cell uses the ranks' own"
    assert (first.names, first.notices) == ((), (notice,))
    again = plan("acc", house.table, ALL, None, gathered).shipment()
    assert (again.names, again.notices) == ((), ()), "it is said once"
    house.cell("alias = acc")
    sent = plan("alias", house.table, ALL, None, gathered).shipment()
    pushed = push(["acc"], house.table, ALL).shipment()
    assert [each.names for each in (sent, pushed)] == [("alias",), ("acc",)]
