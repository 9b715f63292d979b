"""Random programs give equal values on the ranks and in one plain kernel, for both sides' cells."""

from __future__ import annotations

import pytest

from tests.notebook.front_end import Notebook
from tests.objects.kept_programs import KEPT, programs
from tests.objects.oracle import Oracle, Report
from tests.objects.random_programs import Step, program, replayed

pytestmark = [pytest.mark.shared_world]

STEPS = 320


def agree(oracle: Oracle, seed: str) -> Report:
    """Compare some programs; fail with the first that differs, made as small as possible."""
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
    """The ranks' changes stay; the notebook's arrive too, or a line shows that some are lost."""
    assert agree(Oracle(two, ranks, both=True), "both").conflicts > 5


@pytest.mark.kernel
@pytest.mark.parametrize("first", range(6))
def test_kept_programs_agree_with_a_plain_kernel(two: Notebook, first: int) -> None:
    """Each kept program gives the same values on the ranks as in a plain kernel."""
    oracle = Oracle(two, 3)
    for heading in [*programs()][first::6]:
        assert oracle.differs(heading) == "", heading


@pytest.mark.kernel
def test_the_oracle_finds_only_real_differences(two: Notebook) -> None:
    """The oracle finds no difference if all statements run on ranks, and finds a wrong value."""
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
    """A kept program's steps give its text again, and a plain kernel can run them."""
    found = programs()
    assert len(found) >= 50
    for heading, steps in found.items():
        assert len(replayed(steps, 3)) == len(steps), heading
    text = KEPT.read_text()
    for steps in found.values():
        assert "\n".join(map(str, steps)) in text


@pytest.mark.unit
def test_programs_are_the_same_for_a_seed() -> None:
    """A seed always makes the same program, which is legal and has statements of both sides."""
    steps = program("1:1", 2, 40)
    assert steps == program("1:1", 2, 40)
    assert steps != program("1:2", 2, 40)
    assert len(replayed(steps, 2)) == 40
    assert {each.side for each in steps} == {"notebook", "ranks"}
