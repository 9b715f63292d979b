"""How a value looked, and whether it has changed since."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from nbdist.errors import UsageError
from nbdist.notebook.free_names import Gathered, assigned_in
from nbdist.notebook.shipping import Shipment, atomic_version, plan, push
from nbdist.values import pickling
from nbdist.values.pickling import content_version, is_compared_whole, pickle


def test_contents_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also deep inside, in buffers, and of other types; what is too big is sampled."""
    assert len({atomic_version(value) for value in (1, True, 1.0, 1 + 0j, "1", b"1")}) == 6
    assert _version([[1], "x" * 99]) == _version([[1], "x" * 99])
    assert _version([[1]]) != _version([[2]])
    big = numpy.zeros(1 << 20, dtype="uint8")
    before = _version(big)
    assert _version(big.copy()) == before
    big[12345] = 1
    assert _version(big) != before
    monkeypatch.setattr(pickling, "WHOLE_LIMIT", 1 << 20)
    big, tensor = numpy.zeros((1 << 20) + 1, dtype="uint8"), torch.zeros(1 << 19)
    assert not is_compared_whole(pickle(big, {}))
    before, of_tensor = _version(big), _version(tensor)
    assert _version(big[:-1]) != before
    big[0] = 1
    assert _version(big) != before
    tensor[-1] = 1
    assert _version(tensor) != of_tensor


def _version(value: Any) -> bytes:
    return content_version(pickle(value, {}))


ALL = (0, 1)


def planned(house: Any, source: str) -> Shipment:
    """What a cell would take along."""
    return plan(source, house.table, ALL)


def changed(house: Any, *names: str, ranks: tuple[int, ...] = ALL) -> None:
    """What the ranks would answer that were asked."""
    house.table.changed_in_place(dict.fromkeys(ranks, names))


def test_ranks_are_asked_only_before_something_is_replaced(house: Any) -> None:
    """Not where it comes for the first time, is bound again, is a definition, or is pushed."""
    house.cell("xs = [1]\nn = 1\nclass Net: pass\ndef f(x=[]): return Net, xs")
    assert planned(house, "xs, n, f").replaces == {}
    house.distributed("xs, n, f() and 0")
    house.cell("xs.append(2)\nn = 2\nNet.size = f.size = 3")
    sent = planned(house, "xs, n, f")
    assert {*sent.names} >= {"xs", "n", "Net"}
    assert sent.replaces == {"xs": {0, 1}}
    assert push(["xs"], house.table, ALL).replaces == {}
    house.cell("xs = xs + [3]")
    assert planned(house, "xs").replaces == {}


def test_what_ranks_have_changed_stays_theirs(house: Any) -> None:
    """It is said once, with push and gather, where the notebook changed it too."""
    house.cell("xs = [1]")
    house.distributed("xs")
    house.cell("xs.append(2)")
    changed(house, "xs")
    assert house.table.owners() == {"xs": ("workers", {0, 1})}
    for _ in range(2):
        assert house.distributed("xs") == [1]
    house.cell("xs.append(3)")
    house.distributed("xs")
    assert house.notices == [
        "xs was changed on the ranks since it was sent; the notebook's change was not sent: "
        "`%dist_push xs` sends it, `%dist_gather xs` brings theirs"
    ]
    house.cell("xs = [5]")
    assert house.distributed("xs") == [5]
    changed(house, "xs", ranks=(0,))
    house.distributed("xs")
    assert len(house.notices) == 1
    house.cell("xs.append(2)")
    house.distributed("xs")
    assert house.notices[1].startswith("xs was changed on rank 0 since it was sent; the notebook's")


def test_a_rank_that_lacks_it(house: Any) -> None:
    """Those that have it, or an older one, are asked, and keep it; else it goes to the others."""
    house.cell("xs = [1]")
    house.distributed("xs", ranks=(0,))
    sent = planned(house, "xs")
    assert (sent.names, sent.replaces, sent.stays) == (("xs",), {"xs": {0}}, {0: {"xs"}})
    changed(house, "xs", ranks=(0,))
    sent = planned(house, "xs")
    assert (sent.names, sent.notices) == (
        (),
        (
            "xs was changed on rank 0 since it was sent; rank 1 does not have it: `%dist_sync xs "
            "--from 0` copies it, `%dist_push xs` sends the notebook's",
        ),
    )
    house.cell("ys = [1]")
    house.distributed("ys")
    house.cell("ys.append(2)")
    house.distributed("ys", ranks=(0,))
    sent = planned(house, "ys")
    assert (sent.replaces, sent.stays) == ({"ys": {0, 1}}, {0: {"ys"}})


def test_what_shares_objects_with_it(house: Any) -> None:
    """It is not sent with a copy of its own, nor takes theirs along; push wants both named."""
    house.cell("inner = [1]\nouter = [inner]")
    house.distributed("inner, outer")
    house.cell("outer.append(2)")
    sent = planned(house, "outer")
    assert sent.replaces == {"outer": {0, 1}, "inner": {0, 1}}
    changed(house, "inner")
    house.cell("other = {'of': inner}")
    for _ in range(2):
        house.send(plan("outer, other", house.table, ALL))
        assert house.names("outer, other") == set()
    done = "inner was changed on the ranks since it was sent"
    assert sorted(house.notices) == [
        f"{done}; `{name}` shares objects with it and was not sent: "
        f"`%dist_push {name} inner` sends them"
        for name in ("other", "outer")
    ]
    with pytest.raises(UsageError, match=r"`%dist_push outer`: inner was .* `%dist_push outer inn"):
        push(["outer"], house.table, ALL)
    house.cell("inner.append(3)")
    house.distributed("inner")
    assert "`%dist_push inner` sends it" in house.notices[-1]
    changed(house, "outer")
    pushed = push(["outer", "inner"], house.table, ALL)
    assert {*pushed.names} == {"outer", "inner"}
    house.send(pushed)
    assert house.distributed("outer[0] is inner, outer, inner") == (True, [[1, 3], 2], [1, 3])


def test_until_the_notebook_binds_the_name_itself() -> None:
    """An object until another one is there; of numbers and texts also an equal one counts."""
    names: dict[str, Any] = {"losses": [1, 2], "n": 3, "own": 4}
    gathered = Gathered(names)
    assert not gathered.has_any
    gathered.add(["losses", "n"])
    gathered.bound_in_notebook(["n", "losses", "own"])  # in the cell that has gathered them
    assert [name for name in names if name in gathered] == ["losses", "n"]
    gathered.bound_in_notebook(["losses"])  # `if False: losses = []`
    names["alias"] = names["losses"]
    assert ("losses" in gathered, "alias" in gathered) == (True, False)
    names["losses"] = [1, 2]
    assert "losses" not in gathered
    gathered.bound_in_notebook(["losses", "n"])
    assert (gathered.has_any, "n" in gathered) == (False, False)
    gathered.add(["n"])
    del names["n"]
    assert "n" not in gathered


def test_what_a_cell_assigns_of_it() -> None:
    """Names and parts of them, and nothing of other magics or calls."""
    gather, status = (
        f"get_ipython().run_line_magic('{name}', 'y')" for name in ("dist_gather", "t")
    )
    cell = f"x = {gather}\na, (b, *c) = d = {gather}\ne = {status}\nf = [{gather}]\ng[x] = {gather}"
    assert assigned_in(cell) == {"x", "a", "b", "c", "d"}
    assert assigned_in("x = 1") == frozenset()


def test_is_sent_by_push_alone(house: Any) -> None:
    """Not by a cell, nor with a function that uses it; what another name has is the notebook's."""
    house.cell("acc = 0\nf = lambda: acc")
    house.distributed("acc, f()")
    house.notebook.names["acc"] = [0.5, 0.5]
    gathered = Gathered(house.notebook.names)
    gathered.add(["acc"])
    house.table.gathered("acc")
    first = plan("acc + f()", house.table, ALL, None, gathered)
    said = "`acc` was gathered: the cell uses the ranks' own"
    assert (first.names, first.notices) == ((), (said,))
    assert plan("acc", house.table, ALL, None, gathered) == Shipment(), "it is said once"
    house.cell("alias = acc")
    sent = plan("alias", house.table, ALL, None, gathered)
    pushed = push(["acc"], house.table, ALL)
    assert [each.names for each in (sent, pushed)] == [("alias",), ("acc",)]
