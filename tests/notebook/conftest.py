"""Fixtures for the tests of the magics: notebooks, and the pools of a notebook without a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from nbdist.notebook.command import find_commands
from nbdist.notebook.options import NbDist
from nbdist.notebook.pool import Pools
from tests.notebook.front_end import Notebook, lasting

kernel = lasting("%load_ext nbdist")
two = lasting("%load_ext nbdist", "%dist_init -n 2")


@pytest.fixture
def notebook(kernel: Notebook) -> Notebook:
    """The module's notebook with four workers, which are restarted if a cell on them fails."""
    if kernel.run("%%distributed -n 4\npass").errors:
        assert kernel.run("%dist_restart -n 4").errors == []
    return kernel


@pytest.fixture
def fresh() -> Iterator[Callable[..., Notebook]]:
    """A function that makes notebooks for this test alone; they are closed after the test."""
    made: list[Notebook] = []

    def make(*cells: str, env: dict[str, str] | None = None) -> Notebook:
        made.append(Notebook(*cells, env=env))
        return made[-1]

    yield make
    for notebook in made:
        notebook.close()


class Shell:
    """A stand-in for IPython's shell that is enough for commands that start no workers."""

    def __init__(self) -> None:
        self.user_ns: dict[str, object] = {}
        self.transform_cell = TransformerManager().transform_cell


@pytest.fixture
def pools() -> Pools:
    """The pools of a notebook without workers and without a kernel; output is plain lines."""
    return Pools(Shell(), NbDist(display="plain"))  # type: ignore[arg-type]


@pytest.fixture
def typed(pools: Pools, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """A function that runs a line or cell with a magic, such as `%dist_why`; returns its output."""
    magics = {each.shown_name: each.magic(pools) for each in find_commands()}

    def run(source: str) -> str:
        line, _, cell = source.partition("\n")
        name, _, text = line.partition(" ")
        magics[name](text, cell)
        return capsys.readouterr().out

    return run
