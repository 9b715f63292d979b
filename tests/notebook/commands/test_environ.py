"""Tests of the options that describe a world, and of `%dist_env`, in a real notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist.notebook.commands.environ import chosen_names, rows_of
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


def rows(text: str) -> list[list[str]]:
    """The table below the head and the headings, by its columns."""
    return [line.split(maxsplit=2) for line in text.splitlines()[2:]]


def test_status_shows_name_and_nodes(given: Notebook) -> None:
    """The head says what the workers are."""
    head = given.run("%dist_status").text.splitlines()[0]
    assert head.startswith("2 workers as 2x1 on ")
    assert head.endswith(" · gloo · ready · exp/run")


def test_env_shows_what_was_set_once(given: Notebook) -> None:
    """What nbdist and the options set; a rank's own number is one row too."""
    table = rows(given.run("%dist_env").text)
    for row in (
        ["A", "0-1", "1 2"],
        ["B", "0-1", "3"],
        ["RANK", "0-1", "{rank}"],
        ["LOCAL_RANK", "0-1", "0"],
        ["NBDIST_WORLD", "0-1", "exp/run"],
    ):
        assert row in table
    assert not {"PATH", "HOME", "HF_TOKEN"} & {row[0] for row in table}
    errors = next(row for row in table if row[0] == "TORCHELASTIC_ERROR_FILE")
    assert errors[1] == "0-1"
    assert errors[2].endswith("/exp/run/attempt_0/{rank}/error.json")


def test_env_shows_chosen_names_and_no_secrets(given: Notebook) -> None:
    """Patterns choose, `-r` too; a token is there and not shown, also not in the saved notebook."""
    outcome = given.run("%dist_env HF_* A,GROUP_R*")
    assert rows(outcome.text) == [
        ["A", "0-1", "1 2"],
        ["GROUP_RANK", "0-1", "{rank}"],
        ["HF_TOKEN", "0-1", "(not shown)"],
    ]
    assert "verysecret" not in str(outcome.displays)
    assert rows(given.run("%dist_env -r 1 RANK").text) == [["RANK", "1", "1"]]
    assert (
        "`%dist_env NOPE_*`: the ranks have no such variable."
        in given.run("%dist_env NOPE_*").error
    )


def test_a_cell_may_say_what_is_so(given: Notebook) -> None:
    """The cell that started the workers can be run again, and says more of them."""
    line = f"%%distributed {OPTIONS}\nimport os; print(os.environ['A'])"
    assert body(given.run(line)) == ["── ranks 0-1 (same) ──", "1 2"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("-j 1x2", "have `-j 2x1`, not `-j 1x2`. `%dist_restart -j 1x2` starts new ones."),
        ("--env A=2", "have `--env A=1 2`, not `--env A=2`. `%dist_restart --env A=2` starts"),
        ("--env B=3 --env C=2", "have no `--env`. `%dist_restart --env C=2` starts new ones."),
        ("--env MY_KEY=hidden", "have no `--env`. `%dist_restart --env MY_KEY=...` starts"),
        ("--debug", "have no `--debug`. `%dist_restart --debug` starts new ones."),
        ("--no-fork", "have no `--no-fork`. `%dist_restart --no-fork` starts"),
        ('--wrap="nice -n 5"', 'have no `--wrap`. `%dist_restart --wrap "nice -n 5"` starts'),
        ("--python /x", "have no `--python`. `%dist_restart --python /x` starts new ones."),
        ("--share-gpus", "have no `--share-gpus`. `%dist_restart --share-gpus` starts new ones."),
        ("--name other", "have `--name exp/run`, not `--name other`."),
        ("--gpus 0", "have no `--gpus`. `%dist_restart --gpus 0` starts new ones."),
    ],
)
def test_a_cell_that_says_otherwise_does_not_run(given: Notebook, options: str, said: str) -> None:
    """One line says what the workers have, and how to get others."""
    assert said in given.run(f"%%distributed {options}\n1").error


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "%dist_restart -n 8 -j 2x4",
            "`-n 8 -j 2x4`: `-j 2x4` is nodes x workers per node",
        ),
        ("%dist_restart -j 0x4", "`-j 0x4`: it takes at least one node and one worker. Use `-j 4`"),
        ("%dist_restart --env A", "`--env A`: a name and its value, such as `--env SEED=1`."),
        ("%dist_restart --env RANK=1", "RANK is set by nbdist and cannot be changed."),
        ("%dist_restart --env-file /nowhere", "`--env-file /nowhere`: No such file"),
        ("%dist_restart --name /x", "`--name /x`: it names a folder below the log folder"),
        ("%dist_restart --python /nowhere", "`--python /nowhere`: this program does not exist."),
        (
            "%dist_restart -r 1 --debug",
            "the options of workers can only be changed for all of them",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_changes_nothing(
    given: Notebook, line: str, said: str
) -> None:
    """The workers that run go on."""
    given.run("%%distributed\nkept = rank")
    assert said in given.run(line).error
    given.run("%dist_gather kept")
    assert given.value("kept") == [0, 1]


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
    assert rows(given.run("%dist_env A B C NBDIST_WORLD LOCAL_RANK").text) == [
        ["A", "0-1", "5"],
        ["B", "0-1", "3"],
        ["C", "0-1", "4"],
        ["LOCAL_RANK", "0-1", "{rank}"],
        ["NBDIST_WORLD", "0-1", "again"],
    ]
    assert given.run("%dist_status").text.splitlines()[0].endswith(" · again")


# --- without a notebook -------------------------------------------------------------------


def test_rows_fold_equal_values() -> None:
    """A row for each value, one where only the rank's number differs, and what is not set."""
    environs = {
        rank: {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "F": f"/0/{rank}/x", "Z": "z"}
        for rank in range(4)
    }
    del environs[3]["Z"]
    assert rows_of("RANK", environs) == [("RANK", "0-3", "{rank}")]
    assert rows_of("F", environs) == [("F", "0-3", "/0/{rank}/x")]
    assert rows_of("LOCAL_RANK", environs) == [("LOCAL_RANK", "0,2", "0"), ("", "1,3", "1")]
    assert rows_of("Z", environs) == [("Z", "0-2", "z"), ("", "3", "(not set)")]


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "aws_secret", "DB_PASSWORD", "GOOGLE_CREDENTIALS"]
)
def test_secrets_are_not_shown(name: str) -> None:
    """By their names; that one is there and empty is seen."""
    assert rows_of(name, {0: {name: "hidden"}}) == [(name, "0", "(not shown)")]
    assert rows_of(name, {0: {name: ""}}) == [(name, "0", "")]


def test_names_are_chosen_by_patterns() -> None:
    """Any of them; none means the usual ones that are there."""
    environs = {0: {"A": "", "B1": "", "B2": ""}}
    assert chosen_names(environs, [], frozenset("AX")) == ["A"]
    assert chosen_names(environs, ["B?", "A"], frozenset()) == ["A", "B1", "B2"]
    assert chosen_names(environs, ["B1,A"], frozenset()) == ["A", "B1"]
