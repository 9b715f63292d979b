"""Tests of `nbdist.notebook.border.completion`: workers' names while somebody types."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.notebook.border.completion import workers_cell
from nbdist.output.ansi import strip
from tests.notebook.front_end import Notebook

ON_WORKERS = """%%distributed -n 2
import torch.nn as nn
class Net(nn.Module):
    '''A net of mine.'''
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4)
net, batch = Net(), {"images": 1}
def train_for(net, steps=3):
    '''Train it for so many steps.'''
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook with two workers; `net` is something else here."""
    first = ("%load_ext nbdist", "here_only = 'text'", ON_WORKERS)
    env = {"NBDIST_SNAPSHOT_DIR": str(tmp_path_factory.mktemp("snapshots"))}
    notebook = Notebook(*first, env=env)
    notebook.run("%%rank 1\nnet_of_one = 1")
    notebook.run("net = 3j")
    notebook.run("%%distributed\nnet = Net()")
    yield notebook
    notebook.close()


def complete(notebook: Notebook, code: str) -> list[str]:
    """What a front end offers at the end of the code."""
    reply: dict[str, Any] = notebook.client.complete(code, reply=True, timeout=20)["content"]
    assert reply["status"] == "ok"
    assert reply["cursor_end"] == len(code)
    typed = reply["metadata"].get("_jupyter_types_experimental", [])
    assert [each["text"] for each in typed] == reply["matches"]
    return [*reply["matches"]]


def inspect(notebook: Notebook, code: str) -> str:
    """What a front end shows at Shift-Tab."""
    reply: dict[str, Any] = notebook.client.inspect(code, reply=True, timeout=20)["content"]
    return strip(reply["data"].get("text/plain", ""))


def test_names_and_attributes(two: Notebook) -> None:
    """Of the workers in their cells, beside the notebook's names; in plain cells of neither."""
    assert {"net", "net_of_one"} <= {*complete(two, "%%rank 1\nne")}
    assert "net_of_one" not in complete(two, "%%rank 0\nne")
    assert "train_for" in complete(two, "# a comment\n%%distributed\ntrai")
    assert complete(two, "%%distributed\nnet.enc") == ["encoder"]
    assert complete(two, "%%distributed\nnet.")[0] == "encoder"  # before all that torch has
    assert "weight" in complete(two, "%%distributed\nnet.encoder.we")
    assert {"here_only", "help"} <= {*complete(two, "%%distributed\nhe")}
    assert "isdigit" in complete(two, "%%distributed\nhere_only.isd")
    assert "train_for" not in complete(two, "trai")
    assert "encoder" not in complete(two, "net.enc")
    assert complete(two, "net.imag") == ["imag"]
    assert two.value("'train_for' in globals()") is False


def test_signatures_and_help(two: Notebook) -> None:
    """What it is on the workers, not here; of the notebook's own names the notebook's."""
    shown = inspect(two, "%%distributed\ntrain_for(net,")
    assert "train_for(net, steps=3)" in shown
    assert "Train it for so many steps." in shown
    assert shown.endswith("\nRank:      0")
    assert "A net of mine." in inspect(two, "%%distributed\nnet")
    assert "complex" in inspect(two, "net")
    assert "str" in inspect(two, "%%distributed\nhere_only")
    assert inspect(two, "%%distributed\nnowhere") == ""


def test_the_lines_of_magics(two: Notebook) -> None:
    """Options, their values, names that the workers have, snapshots."""
    assert complete(two, "%%distributed --back") == ["--backend"]
    assert "gloo" in complete(two, "%%distributed -n 2 --backend ")
    assert complete(two, "x = 1\n%dist_gather net_of") == ["net_of_one"]
    two.run("%dist_snapshot batch --name before")
    assert complete(two, "%dist_restore --name be") == ["before"]
    assert complete(two, "%dist_restore ba") == ["batch"]
    two.run("%dist_snapshot --remove before")
    assert complete(two, "%dist_restore --name be") == []
    assert "--max-restarts N" in inspect(two, "%%distributed -n 2")
    assert "Copy variables from all ranks" in inspect(two, "x = 1\n%dist_gather")
    (found,) = two.client.complete("%%rank 1\nx", 8, reply=True, timeout=20)["content"]["matches"]
    assert found == "1"


def test_while_all_ranks_are_at_work(two: Notebook, tmp_path: Path) -> None:
    """Without running users' code; IPython's own answer is back when they are free."""
    gate = tmp_path / "gate"
    two.run("%%distributed\nimport pathlib, threading, time")
    two.run(
        "import threading\n"
        "from nbdist.notebook import extension\n"
        "((pools, *_),) = extension._loaded.values()\n"
        "world = pools.default.world\n"
        f"task = world.task('while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)')\n"
        "running = world.submit(task)"
    )
    try:
        assert complete(two, "%%distributed\nnet.enc") == ["encoder"]
        assert complete(two, "%%distributed\nbatch['im") == ["images"]
        assert "train_for(net, steps=3)" in inspect(two, "%%distributed\ntrain_for(")
    finally:
        gate.touch()
        two.run("for _ in world.follow(running): pass")
    deadline = time.monotonic() + 20  # jedi has much to read at first
    while "weight" not in complete(two, "%%distributed\nnn.Linear(1, 1).wei"):
        assert time.monotonic() < deadline


def test_without_workers_and_without_nbdist(two: Notebook) -> None:
    """The notebook's kernel answers as ever."""
    two.run("%dist_shutdown")
    assert "here_only" in complete(two, "%%distributed\nhere")
    two.run("%unload_ext nbdist")
    assert two.value("[*{'do_complete', 'do_inspect'} & {*vars(get_ipython().kernel)}]") == []
    assert "here_only" in complete(two, "here")


@pytest.mark.parametrize(
    ("code", "is_theirs"),
    [
        ("%%distributed -n 4\nx", True),
        ("%%rank 0\nx", True),
        ("%%time\nx", False),
        ("x", False),
        ("%%distributed -n", False),
    ],
)
def test_whose_the_cell_is(code: str, is_theirs: bool) -> None:  # noqa: FBT001
    """The workers', below the line of their magic."""
    assert (workers_cell(code, len(code)) is not None) == is_theirs
