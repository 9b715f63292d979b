"""Tests of `nbdist.notebook.completion`, which offers workers' names while a user types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.notebook.command import find_commands
from nbdist.notebook.completion import choices
from nbdist.notebook.pool import Pools
from nbdist.output.ansi import strip
from nbdist.output.events import Done
from nbdist.world.sent_objects import NOTHING_SENT
from nbdist.world.states import Event
from nbdist.world.world import World
from tests.notebook.front_end import Notebook, lasting
from tests.waiting import wait_until

ON_WORKERS = """%%distributed -n 2
import torch.nn as nn
class Net(nn.Module):
    '''A net of mine.'''
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4)
net, batch, mine = Net(), {"images": 1}, 1
def train_for(net, steps=3):
    '''Train it for so many steps.'''
"""


two = lasting(
    "%load_ext nbdist",
    "here_only = net_here = 'text'",
    ON_WORKERS,
    "%%rank 1\nnet_of_one = 1",
    "net = 3j",
    "%%distributed\nnet = Net()",
)
"""A notebook with two workers: its own `net` is a complex number, that of the workers a `Net`."""


def complete(notebook: Notebook, code: str) -> list[str]:
    """Return the completions that a front end gets with the cursor at the end of the code."""
    reply: dict[str, Any] = notebook.client.complete(code, reply=True, timeout=20)["content"]
    assert (reply["status"], reply["cursor_end"]) == ("ok", len(code))
    typed = reply["metadata"].get("_jupyter_types_experimental", [])
    assert [each["text"] for each in typed] == reply["matches"]
    return [*reply["matches"]]


def inspect(notebook: Notebook, code: str) -> str:
    """Return the help that a front end shows at Shift-Tab at the end of the code."""
    reply: dict[str, Any] = notebook.client.inspect(code, reply=True, timeout=20)["content"]
    return strip(reply["data"].get("text/plain", ""))


def wait_for_names(notebook: Notebook, code: str, *names: str) -> None:
    """Wait until the completions of the code include all these names."""
    wait_until(lambda: {*names} <= {*complete(notebook, code)}, code)


def wait_for_help(notebook: Notebook, code: str, *texts: str) -> None:
    """Wait until the help on the code has all these texts."""
    wait_until(lambda: all(text in inspect(notebook, code) for text in texts), code)


def test_workers_cells_offer_workers_names_and_attributes(two: Notebook) -> None:
    """Cells of the workers also offer the notebook's names; plain cells offer no workers' names."""
    wait_for_names(two, "%%rank 1\nne", "net", "net_of_one", "net_here")
    assert "net_of_one" not in complete(two, "%%rank 0\nne")
    wait_for_names(two, "# a comment\n%%distributed\ntrai", "train_for")
    wait_for_names(two, "%%distributed\nnet.", "encoder", "forward")
    wait_for_names(two, "%%distributed\nnet.encoder.we", "weight")
    wait_for_names(two, '%%distributed\nbatch["', "images")
    wait_for_names(two, "%%distributed\nhere_only.isd", "isdigit")
    assert complete(two, "%%distributed\nnet.imag") == []
    assert "train_for" not in complete(two, "trai")
    assert complete(two, "net.imag") == ["imag"]
    assert two.value("'train_for' in globals()") is False


SLOW = """%%distributed
class Slow:
    def __dir__(self):
        import time
        time.sleep(0.6)
        return ["comes_late"]
slow = Slow()"""


def test_a_late_answer_is_offered_at_the_next_request(two: Notebook) -> None:
    """If a rank answers too late for a request, a front end's next request has the names."""
    two.run(SLOW)
    wait_for_names(two, "%%distributed\nslow.", "comes_late")
    two.run("%%distributed\nSlow.__dir__ = lambda self: ['other']")
    wait_until(lambda: "other" in complete(two, "%%distributed\nslow."), "the cell has changed it")


def test_help_describes_the_workers_objects(two: Notebook) -> None:
    """Help in a workers' cell describes their object, or the notebook's if they lack the name."""
    expected = ("train_for(net, steps=3)", "Train it for so many steps.", "\nRank:      0")
    wait_for_help(two, "%%distributed\ntrain_for(net,", *expected)
    wait_for_help(two, "%%distributed\nnet", "A net of mine.")
    assert "complex" in inspect(two, "net")
    wait_for_help(two, "%%distributed\nhere_only", "str")
    assert inspect(two, "%%distributed\nnowhere") == ""


def test_lines_of_magics_offer_variables_and_help(two: Notebook) -> None:
    """The line of a magic offers the workers' variables, and Shift-Tab shows its options."""
    assert complete(two, "x = 1\n%dist_gather net_of") == ["net_of_one"]
    assert "--max-restarts N" in inspect(two, "%%distributed -n 2")


def test_code_after_a_magic_is_completed_like_a_cell(two: Notebook) -> None:
    """Code after `%distributed` offers names and attributes of the workers, and no files."""
    wait_for_names(two, "x = 1\n%distributed -r 1 ne", "net", "net_of_one", "net_here")
    wait_for_names(two, "%distributed print(net.", "encoder", "forward")
    wait_for_names(two, "%distributed y = batc", "batch")
    assert "net_of_one" not in complete(two, "%distributed -r 0 ne")
    assert complete(two, "%distributed --no-w") == ["--no-wait"]
    assert not any("/" in each for each in complete(two, "%distributed n"))


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """The path of a file for which a cell waits; the file is created when the test has ended."""
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()


def compute_until(notebook: Notebook, gate: Path, magic: str) -> None:
    """Let ranks compute in the background until the file `gate` exists."""
    loop = f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)"
    outcome = notebook.run(f"{magic} --no-wait\nimport pathlib, time\n{loop}")
    assert outcome.errors == []


def test_an_idle_worker_answers(two: Notebook, gate: Path) -> None:
    """While rank 0 computes, the idle rank 1 answers in its place, with names and with help."""
    compute_until(two, gate, "%%distributed -r 0")
    wait_for_names(two, "%%rank 0\nmin", "mine")
    wait_for_help(two, "%%rank 0\nmine", "Rank:      1")


def test_names_are_offered_while_all_ranks_compute(two: Notebook, gate: Path) -> None:
    """Names of workers and notebook are offered, but no attributes of the notebook's own `net`."""
    compute_until(two, gate, "%%distributed")
    for code, matches in (
        ("ne", ["net", "net_here", "net_of_one"]),
        ("world_s", ["world_size"]),
        ("net.imag", []),
        ("net[0].imag", []),
        ('batch["', []),
    ):
        assert complete(two, f"%%distributed\n{code}") == matches
    assert inspect(two, "%%distributed\nnet") == ""


def test_the_kernel_answers_without_workers_or_nbdist(two: Notebook) -> None:
    """Without workers the notebook's names are offered, and also after `%unload_ext`.

    `%unload_ext` restores the kernel's methods.
    """
    two.run("%dist_shutdown")
    assert "here_only" in complete(two, "%%distributed\nhere")
    assert "here_only" in complete(two, "%distributed print(here")
    two.run("%unload_ext nbdist")
    assert two.value("[*{'do_complete', 'do_inspect'} & {*vars(get_ipython().kernel)}]") == []
    assert "here_only" in complete(two, "here")


COMMANDS = {each.name: each for each in find_commands()}


@pytest.fixture
def with_two(pools: Pools) -> Pools:
    """The pools of a notebook with `here` and `data`, whose two workers have `loss` and `model`."""
    pools.shell.user_ns |= {"here": 1, "data": 2, "_oh": {}}
    pools.shell.user_ns_hidden = {"_oh": {}}
    world = pools.default.world = World(2, log_dir="")
    for rank in (0, 1):
        done = Done("ok", 0.0, frozenset({"loss", "model", "np"}), {"np": "numpy"})
        world.engine.names.record_finished(rank, done, NOTHING_SENT)
    for event in (Event.START, Event.STARTED):
        world.engine.advance(event)
    return pools


def texts(pools: Pools, line: str) -> list[str]:
    """Return the texts that are offered at the end of a line, which lacks its `%`."""
    name, space, text = line.partition(" ")
    candidates, begun = choices(pools, COMMANDS[name], space + text, None)
    assert text.endswith(begun)
    return [each.text for each in candidates]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("distributed --back", ["--backend"]),
        ("dist_gather lo", ["loss"]),
        ("dist_gather loss ", ["model"]),
        ("dist_push ", ["data", "here"]),
        ("dist_sync model,", ["loss"]),
        ("dist_auto on ", ["--pool"]),
        ("dist_shutdown x", []),
    ],
)
def test_a_line_offers_options_or_names(with_two: Pools, line: str, expected: list[str]) -> None:
    """A line offers its options, or the variables of the side from which the magic takes them."""
    assert texts(with_two, line) == expected


def test_options_are_offered_with_their_help(with_two: Pools) -> None:
    """Options that the line lacks are offered; without workers, no variable of workers is."""
    candidates, _ = choices(with_two, COMMANDS["distributed"], " -n 2 --", None)
    flags = {each.text: each for each in candidates}
    assert next(iter(flags)) == "--ranks"  # the first option of the help
    assert not {"-n", "--auto"} & {*flags}  # already in the line, and internal
    assert (flags["--backend"].type, "gloo" in flags["--backend"].signature) == ("option", True)
    assert {"--backend", "--ranks", "-n"} <= {*texts(with_two, "distributed ")}
    with_two.default.world = None
    assert texts(with_two, "dist_gather ") == []
