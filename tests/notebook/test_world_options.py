"""Tests of the options that describe a world, in a real notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.front_end import Notebook, body

pytestmark = pytest.mark.shared_world

OPTIONS = "-j 2x1 --name exp/run --env A=\"1 2\" --env 'B=3'"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Two workers on two simulated nodes, with a name and variables."""
    notebook = Notebook(
        "%load_ext nbdist",
        f"%dist_init {OPTIONS}",
        env={"HF_TOKEN": "hf_verysecret", "NBDIST_LOG_DIR": str(tmp_path_factory.mktemp("logs"))},
    )
    yield notebook
    notebook.close()


def environ(notebook: Notebook, *names: str) -> list[list[str]]:
    """What the ranks have of these variables, by rank."""
    notebook.run(f"%%distributed\nimport os; values = [os.environ.get(n, '') for n in {names}]")
    notebook.run("%dist_gather values")
    return notebook.value("values")  # type: ignore[no-any-return]


def test_status_shows_name_and_nodes(given: Notebook) -> None:
    """The head says what the workers are."""
    head = given.run("%dist_status").text.splitlines()[0]
    assert head.startswith("2 workers as 2x1 on ")
    assert head.endswith(" · gloo · ready · exp/run")


def test_workers_have_what_options_set(given: Notebook) -> None:
    """And what nbdist sets, each rank its own; a cell shows it, as the removed magic says."""
    names = ("A", "B", "RANK", "LOCAL_RANK", "NBDIST_WORLD", "HF_TOKEN")
    of_all = ["exp/run", "hf_verysecret"]
    assert environ(given, *names) == [["1 2", "3", str(r), "0", *of_all] for r in range(2)]
    assert "`%%distributed` shows them: `import os; os.environ`" in "".join(
        given.run("%dist_env").streams
    )


def test_restart_takes_all_options(given: Notebook, tmp_path: Path) -> None:
    """What it says is new, the rest stays; where that cannot start, a cell starts the old ones."""
    file = tmp_path / ".env"
    file.write_text("C=4\n")
    error = given.run("%dist_restart --wrap no-such-wrapper").error
    assert error.startswith("StartError: rank ")
    assert "could not start: no-such-wrapper: No such file or directory." in error
    assert body(given.run("%%distributed\nimport os; os.environ['A']"))[1] == "'1 2'"
    ready = given.run(f"%dist_restart -n 2 --env A=5 --env-file {file} --name again").text
    assert ready.startswith("2 workers ready · gloo · worker variables cleared")
    names = ("A", "B", "C", "LOCAL_RANK", "NBDIST_WORLD")
    assert environ(given, *names) == [["5", "3", "4", str(rank), "again"] for rank in range(2)]
    assert given.run("%dist_status").text.splitlines()[0].endswith(" · again")
