"""What a newcomer does wrong, and what is said: a table, in a notebook and in a terminal."""

from __future__ import annotations

import builtins

import pytest

from tests.notebook.front_end import Notebook, lasting
from tests.notebook.mistakes import AHEAD, MISTAKES, Mistake

pytestmark = pytest.mark.shared_world

beginner = lasting(
    "import os; os.chdir('{folder}'); os.environ['NBDIST_SNAPSHOT_DIR'] = '{folder}/snapshots'",
    *AHEAD,
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake(beginner: Notebook, mistake: Mistake) -> None:
    """One line says what is wrong and what to type next, and no line is of nbdist's insides."""
    *before, last = mistake.cells
    for cell in before:
        assert beginner.run(cell).errors == []
    outcome = beginner.run(last)
    for said in mistake.said:
        assert said in outcome.seen
    for error in outcome.errors:
        # Python's own errors have their calls, and a syntax error its line.
        is_pythons = hasattr(builtins, error["ename"]) or "SyntaxError" in error["ename"]
        assert is_pythons or len(error["traceback"]) == 1
        assert len(error["evalue"]) < 500
