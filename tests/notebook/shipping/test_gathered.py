"""Tests of `nbdist.notebook.shipping.gathered`: whose a value is that gather has brought."""

from __future__ import annotations

from typing import Any

from nbdist.notebook.shipping.gathered import Gathered, assigned_in
from nbdist.notebook.shipping.plan import plan, push

ALL = (0, 1)


def test_until_the_notebook_binds_the_name_itself() -> None:
    """An object until another one is there; of numbers and texts also an equal one counts."""
    names: dict[str, Any] = {"losses": [1, 2], "n": 3, "own": 4}
    gathered = Gathered(names)
    assert not gathered.has_any
    gathered.add(["losses", "n"])
    gathered.bound_in_notebook(["n", "losses", "own"])  # in the cell that has gathered them
    assert [name for name in names if name in gathered] == ["losses", "n"]
    assert repr(gathered) == "<Gathered ['losses', 'n']>"
    gathered.bound_in_notebook(["losses"])  # `if False: losses = []`
    assert "losses" in gathered
    names["alias"] = names["losses"]
    assert "alias" not in gathered
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
    """Not by a cell, nor with a function that uses it; ranks that have another are not passed over.

    What the notebook calls by another name is its own.
    """
    house.cell("acc = 0\nf = lambda: acc")
    house.distributed("acc, f()")
    house.notebook.names["acc"] = [0.5, 0.5]
    gathered = Gathered(house.notebook.names)
    gathered.add(["acc"])
    house.table.gathered("acc")
    first = plan("acc + f()", house.table, ALL, None, gathered)
    assert first is not None
    assert (first.names, first.notices) == (
        (),
        ("`acc` was gathered: the cell uses the ranks' own",),
    )
    assert plan("acc", house.table, ALL, None, gathered) is None, "it is said once"
    house.cell("alias = acc")
    sent = plan("alias", house.table, ALL, None, gathered)
    assert sent is not None
    assert sent.names == ("alias",)
    pushed = push(["acc"], house.table, ALL)
    assert pushed is not None
    assert pushed.names == ("acc",)
