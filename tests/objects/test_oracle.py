"""Random programs give the same on the ranks as in one plain kernel, whichever side runs what."""

from __future__ import annotations

import pytest

from tests.notebook.front_end import Notebook
from tests.objects.kept_programs import KEPT, programs
from tests.objects.oracle import Oracle, Report
from tests.objects.random_programs import Step, program, replayed

pytestmark = [pytest.mark.shared_world]

STEPS = 320


def agree(oracle: Oracle, seed: str) -> Report:
    """Compare some programs; the first that differs is shown as small as it can be."""
    report = oracle.run(seed, STEPS)
    for name in report.differences:
        pytest.fail(f"{len(report.differences)} of {report.programs}:\n{oracle.explain(name)}")
    assert report.steps >= STEPS
    return report


@pytest.mark.kernel
@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_object_is_changed_by_one_side(two: Notebook, ranks: int) -> None:
    """All values and identities on the ranks are those of a plain kernel, and no line is shown."""
    agree(Oracle(two, ranks), "each")


@pytest.mark.kernel
@pytest.mark.parametrize("ranks", [1, 3])
def test_both_sides_change_an_object(two: Notebook, ranks: int) -> None:
    """The ranks' changes stay; the notebook's are there too, or a line says that they are not."""
    assert agree(Oracle(two, ranks, both=True), "both").conflicts > 5


@pytest.mark.kernel
@pytest.mark.parametrize("first", range(6))
def test_programs_that_were_kept(two: Notebook, first: int) -> None:
    """Each gives what a plain kernel does; some found a fault, the others have many situations."""
    oracle = Oracle(two, 3)
    for heading in [*programs()][first::6]:
        assert oracle.differs(heading) == "", heading


@pytest.mark.kernel
def test_the_oracle_is_right(two: Notebook) -> None:
    """It finds no difference where all statements run on the ranks, and one that is made."""
    oracle = Oracle(two, 2, in_one_place=True)
    agree(oracle, "whole")
    two.run("driver.in_one_place = False")
    steps = [
        Step("notebook", "a = [1]", ("a",)),
        Step("ranks", "b = a", ("b",), told=("b",)),
        Step("ranks", "b.append(__import__('os').getpid())", told=("a", "b")),
    ]
    found = two.value(f"driver.difference([oracle.Step(**each) for each in {[*map(vars, steps)]}])")
    assert found[0].startswith("step 2")
    assert "on rank 0" in found[0]


@pytest.mark.unit
def test_kept_programs_are_legal() -> None:
    """They are read as they are written, and a plain kernel can run them."""
    found = programs()
    assert len(found) >= 50
    for heading, steps in found.items():
        assert len(replayed(steps, 3)) == len(steps), heading
    text = KEPT.read_text()
    for steps in found.values():
        assert "\n".join(map(str, steps)) in text


@pytest.mark.unit
def test_programs_are_the_same_for_a_seed() -> None:
    """A program is written again by its seed, is legal, and has statements of both sides."""
    steps = program("1:1", 2, 40)
    assert steps == program("1:1", 2, 40)
    assert steps != program("1:2", 2, 40)
    assert len(replayed(steps, 2)) == 40
    assert {each.side for each in steps} == {"notebook", "ranks"}
