"""Notebooks for the tests of the magics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from nbdist.notebook.command import find_commands
from nbdist.notebook.pools import Pools
from nbdist.notebook.settings import NbDist
from tests.notebook.front_end import Notebook


@pytest.fixture(scope="module")
def kernel() -> Iterator[Notebook]:
    """One notebook for all tests of the module."""
    notebook = Notebook("%load_ext nbdist")
    yield notebook
    notebook.close()


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a notebook in which is completed what is no magic.

    The notebooks of other tests write what jedi has read in place, and who reads one of those
    files meanwhile completes nothing.
    """
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture
def notebook(kernel: Notebook) -> Notebook:
    """The notebook with four workers; those of the tests before, if they are in order."""
    if kernel.run("%%distributed -n 4\npass").errors:
        assert kernel.run("%dist_restart -n 4").errors == []
    return kernel


@pytest.fixture
def fresh() -> Iterator[Callable[..., Notebook]]:
    """Makes notebooks of the test's own."""
    made: list[Notebook] = []

    def make(*first: str, env: dict[str, str] | None = None) -> Notebook:
        made.append(Notebook(*first, env=env))
        return made[-1]

    yield make
    for notebook in made:
        notebook.close()


class Shell:
    """As much of IPython's as commands need that start nothing."""

    def __init__(self) -> None:
        self.user_ns: dict[str, object] = {}


@pytest.fixture
def pools() -> Pools:
    """Without workers and without a notebook kernel, shown as plain lines."""
    return Pools(Shell(), NbDist(display="plain"))  # type: ignore[arg-type]


@pytest.fixture
def typed(pools: Pools, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs a line such as `%dist_why` there, and gives what it shows."""
    magics = {each.shown_name: each.magic(pools) for each in find_commands()}

    def run(line: str) -> str:
        name, _, text = line.partition(" ")
        magics[name](text)
        return capsys.readouterr().out

    return run
