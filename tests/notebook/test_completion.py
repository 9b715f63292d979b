"""Tests of `nbdist.notebook.completion`: workers' names while somebody types."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import ipykernel
import pytest

from nbdist.notebook.command import find_commands
from nbdist.notebook.completion import choices, workers_cell
from nbdist.notebook.pool import Pools
from nbdist.output.ansi import strip
from nbdist.output.events import Done
from nbdist.world.states import State
from nbdist.world.world import World
from tests.notebook.front_end import Notebook, Outcome, lasting
from tests.waiting import SOON, wait_until

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
    NBDIST_SNAPSHOT_DIR="{folder}",
)
"""A notebook with two workers; `net` is something else here."""


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


def offers(notebook: Notebook, code: str, *wanted: str) -> None:
    """These alone are offered: once a rank has said them in time, late where all are busy."""
    wait_until(lambda: complete(notebook, code) == [*wanted], code)


def has(notebook: Notebook, code: str, *wanted: str) -> None:
    """These are offered."""
    wait_until(lambda: {*wanted} <= {*complete(notebook, code)}, code)


def tells(notebook: Notebook, code: str, *texts: str) -> None:
    """Shift-Tab shows these."""
    wait_until(lambda: all(text in inspect(notebook, code) for text in texts), code)


def test_names_and_attributes(two: Notebook) -> None:
    """Of the workers in their cells, beside the notebook's names; in plain cells of neither."""
    has(two, "%%rank 1\nne", "net", "net_of_one", "net_here")
    assert "net_of_one" not in complete(two, "%%rank 0\nne")
    has(two, "# a comment\n%%distributed\ntrai", "train_for")
    offers(two, "%%distributed\nnet.enc", "encoder")
    first = "%%distributed\nnet."  # before all that torch has
    wait_until(lambda: complete(two, first)[:1] == ["encoder"], first)
    has(two, "%%distributed\nnet.encoder.we", "weight")
    has(two, "%%distributed\nhere_only.isd", "isdigit")
    assert "train_for" not in complete(two, "trai")
    assert "encoder" not in complete(two, "net.enc")
    assert complete(two, "net.imag") == ["imag"]
    assert two.value("'train_for' in globals()") is False


def test_signatures_and_help(two: Notebook) -> None:
    """What it is on the workers, not here; of the notebook's own names the notebook's."""
    told = ("train_for(net, steps=3)", "Train it for so many steps.", "\nRank:      0")
    tells(two, "%%distributed\ntrain_for(net,", *told)
    tells(two, "%%distributed\nnet", "A net of mine.")
    assert "complex" in inspect(two, "net")
    tells(two, "%%distributed\nhere_only", "str")
    assert inspect(two, "%%distributed\nnowhere") == ""


def test_the_lines_of_magics(two: Notebook) -> None:
    """Options, names that the workers have, snapshots; and the help of a magic."""
    assert complete(two, "%%distributed --back") == ["--backend"]
    assert complete(two, "x = 1\n%dist_gather net_of") == ["net_of_one"]
    two.run("%dist_snapshot batch --name before")
    assert complete(two, "%dist_restore --name be") == ["before"]
    assert complete(two, "%dist_restore ba") == ["batch"]
    assert "--max-restarts N" in inspect(two, "%%distributed -n 2")


needs_threads = pytest.mark.skipif(
    int(ipykernel.__version__.split(".")[0]) < 7, reason="ipykernel 6 has one thread for requests"
)


class Gate:
    """A file for which a cell waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wait = f"import pathlib, time\nwhile not pathlib.Path({str(path)!r}).exists(): " \
                    "time.sleep(0.01)"  # fmt: skip

    def open(self) -> None:
        self.path.touch()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.open()


def ask_meanwhile(notebook: Notebook, cell: str, gate: Gate, ask: Callable[[], str]) -> Any:
    """The reply to what is asked while a cell runs, which waits for the gate."""
    asked: list[dict[str, Any]] = []

    def meanwhile(outcome: Outcome) -> None:
        # That the kernel is busy it says before the cell begins; what is asked then has its turn.
        if (outcome.displays or outcome.streams) and not asked:
            asked.append(notebook.reply_to(ask()))
            gate.open()

    ran = notebook.run(cell, meanwhile)
    assert ran.errors == []
    return asked[0]


def begun(notebook: Notebook, gate: Gate) -> str:
    """A cell that runs, and waits for the gate."""
    request: str = notebook.client.execute("print('begun', flush=True)\n" + gate.wait)
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        said = notebook.client.get_iopub_msg(timeout=SOON)
        if said["parent_header"].get("msg_id") == request and said["msg_type"] == "stream":
            return request
    raise AssertionError(f"not begun within {SOON} s")


@needs_threads
def test_the_workers_answer(two: Notebook, gate: Gate, tmp_path: Path) -> None:
    """Before the cell has ended: names, what they are, options, nothing."""
    cell = "print('begun', flush=True)\n" + gate.wait
    client = two.client
    reply = ask_meanwhile(two, cell, gate, lambda: client.complete("%%distributed\nmin"))
    assert "mine" in reply["matches"]
    assert (reply["cursor_start"], reply["cursor_end"]) == (14, 17)

    def ask_again(name: str, ask: Callable[[], str]) -> Any:
        again = Gate(tmp_path / name)
        cell = "%%distributed\nprint('begun')\n" + again.wait
        try:
            return ask_meanwhile(two, cell, again, ask)
        finally:
            again.open()

    reply = ask_again("d", lambda: client.inspect("%%distributed\nmine"))
    assert "int" in reply["data"]["text/plain"]
    reply = ask_again("a", lambda: client.complete("%%distributed --back"))
    assert reply["matches"] == ["--backend"]
    assert ask_again("b", lambda: client.complete("%%distributed\nnope."))["matches"] == []
    reply = ask_again("c", lambda: client.inspect("%%distributed\nnope"))
    assert (reply["found"], reply["status"]) == (False, "ok")


@needs_threads
def test_the_state_that_front_ends_show(two: Notebook, gate: Gate) -> None:
    """A reply is complete for them when an idle state has come; the cell goes on, busy."""
    client: Any = two.client
    cell = begun(two, gate)
    request = client.complete("%%distributed\nmin")
    states, deadline = [], time.monotonic() + SOON
    while states != ["idle", "busy"] and time.monotonic() < deadline:
        said = client.get_iopub_msg(timeout=SOON)
        if said["parent_header"].get("msg_id") == request and said["msg_type"] == "status":
            states.append(said["content"]["execution_state"])
    assert states == ["idle", "busy"]
    gate.open()
    assert two.reply_to(cell)["status"] == "ok"


@needs_threads
def test_everything_else_waits_for_the_cell(two: Notebook, gate: Gate) -> None:
    """Also what nobody has signed; and afterwards the notebook's kernel answers again."""
    client: Any = two.client
    cell = begun(two, gate)
    plain = client.complete("prin")
    forged = client.session.msg(
        "complete_request", {"code": "%%distributed\nmin", "cursor_pos": 17}
    )
    key, client.session.key = client.session.key, b"wrong"
    client.shell_channel.send(forged)
    client.session.key = key
    gate.open()
    assert two.reply_to(cell)["status"] == "ok"
    assert "print" in two.reply_to(plain)["matches"]
    with pytest.raises(Empty):
        client.get_shell_msg(timeout=0.3)
    assert (
        "mine"
        in client.complete("%%distributed\nmin", reply=True, timeout=SOON)["content"]["matches"]
    )


def test_without_workers_and_without_nbdist(two: Notebook) -> None:
    """The notebook's kernel answers as ever."""
    two.run("%dist_shutdown")
    assert "here_only" in complete(two, "%%distributed\nhere")
    two.run("%unload_ext nbdist")
    assert two.value("[*{'do_complete', 'do_inspect'} & {*vars(get_ipython().kernel)}]") == []
    assert "here_only" in complete(two, "here")


def test_whose_the_cell_is() -> None:
    """The workers', below the line of their magic."""
    cells = ["%%distributed -n 4\nx", "%%rank 0\nx", "%%time\nx", "x", "%%distributed -n"]
    found = [workers_cell(code, len(code)) is not None for code in cells]
    assert found == [True, True, False, False, False]


COMMANDS = {each.name: each for each in find_commands()}


@pytest.fixture
def with_two(pools: Pools) -> Pools:
    """Of a notebook that has `here` and `data`; `loss` and `model` are on its two workers."""
    pools.shell.user_ns |= {"here": 1, "data": 2, "_oh": {}}
    pools.shell.user_ns_hidden = {"_oh": {}}
    pools.at("trainer")
    world = pools.default.world = World(2, log_dir="")
    for rank in (0, 1):
        done = Done("ok", 0.0, frozenset({"loss", "model", "np"}), {"np": "numpy"})
        world.session.names.finished(rank, done, {})
    world.session.state = State.READY
    return pools


def texts(pools: Pools, line: str) -> list[str]:
    name, space, text = line.partition(" ")
    found, begun = choices(pools, COMMANDS[name], space + text, None)
    assert text.endswith(begun)
    return [each.text for each in found]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("distributed --back", ["--backend"]),
        ("distributed --backend ", ["gloo", "nccl", "cpu:gloo,cuda:nccl", "none"]),
        ("distributed --backend=nc", ["nccl"]),
        ("distributed --backend cpu:gloo,", ["cpu:gloo,cuda:nccl"]),
        ("distributed --on-failure re", ["restart-all"]),
        ("distributed -n 2 --pool t", ["trainer"]),
        ("distributed --launcher l", ["local"]),
        ("distributed -r ", ["all", "0", "1"]),
        ("distributed -r 0,", ["all", "1"]),
        ("distributed -n 2 -n", []),
        ("rank ", ["all", "0", "1"]),
        ("dist_gather lo", ["loss"]),
        ("dist_gather loss ", ["model"]),
        ("dist_gather --as loss ", ["loss", "model"]),
        ("dist_push ", ["data", "here"]),
        ("dist_scatter d", ["data"]),
        ("dist_sync model --from ", ["0", "1"]),
        ("dist_restart --keep loss,", ["model"]),
        ("dist_auto o", ["on", "off"]),
        ("dist_auto on ", ["--pool"]),
        ("dist_shutdown x", []),
    ],
)
def test_what_can_stand_there(with_two: Pools, line: str, wanted: list[str]) -> None:
    """Options, their values, names of whoever has them."""
    assert texts(with_two, line) == wanted


def test_all_options(with_two: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their help, but those that were given; without workers no variables of theirs."""
    found, _ = choices(with_two, COMMANDS["distributed"], " -n 2 --", None)
    flags = {each.text: each for each in found}
    assert next(iter(flags)) == "--ranks"  # as in the help
    assert not {"-n", "--auto"} & {*flags}  # which nobody types
    assert flags["--backend"].type == "option"
    assert "gloo" in flags["--backend"].signature
    assert {"--backend", "--ranks", "-n"} <= {*texts(with_two, "distributed ")}
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path / "there"))
    pools = with_two
    pools.default.world = None
    assert texts(pools, "dist_gather ") == []
    assert texts(pools, "distributed -r ") == ["all"]
    assert texts(pools, "dist_restore --name ") == []
    (tmp_path / "there").write_text("no folder")
    assert texts(pools, "dist_restore ") == []
