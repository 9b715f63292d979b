"""Tests of `nbdist.notebook.border.choices`: what can stand in a magic's line."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbdist.notebook.border.choices import Choices, spot_in
from nbdist.notebook.border.flags import Argument, arguments_of
from nbdist.notebook.command import find_commands
from nbdist.notebook.pools import Pools
from nbdist.output.events import Done
from nbdist.world.states import State
from nbdist.world.world import World

COMMANDS = {each.name: each.run for each in find_commands()}


@pytest.fixture
def choices(pools: Pools) -> Choices:
    """Of a notebook that has `here` and `data`; `loss` and `model` are on its two workers."""
    pools.shell.user_ns |= {"here": 1, "data": 2, "_oh": {}}
    pools.shell.user_ns_hidden = {"_oh": {}}
    pools.at("trainer")
    world = pools.default.world = World(2, log_dir="")
    for rank in (0, 1):
        done = Done("ok", 0.0, frozenset({"loss", "model", "np"}), {"np": "numpy"})
        world.session.names.finished(rank, done, {})
    world.session.state = State.READY
    return Choices(pools)


def texts(choices: Choices, line: str) -> list[str]:
    name, space, text = line.partition(" ")
    found = choices.complete(name, COMMANDS[name], space + text, None)
    assert found.end == len(space + text)
    return [each.text for each in found.candidates]


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
        ("dist_shutdown x", []),
    ],
)
def test_what_can_stand_there(choices: Choices, line: str, wanted: list[str]) -> None:
    """Options, their values, names of whoever has them."""
    assert texts(choices, line) == wanted


def test_all_options(choices: Choices) -> None:
    """With their help, those that have been given left out; also where nothing has been typed."""
    found = choices.complete("distributed", COMMANDS["distributed"], " -n 2 --", None)
    flags = {each.text: each for each in found.candidates}
    assert "-n" not in flags
    assert flags["--backend"].type == "option"
    assert "gloo" in flags["--backend"].signature
    assert "--auto" not in flags  # which nobody types
    assert {"--backend", "--ranks", "-n"} <= {*texts(choices, "distributed ")}


def test_common_options_come_first(choices: Choices) -> None:
    """Those of the cell before those that describe workers, in one order for all magics."""
    usual = ["--ranks", "--out", "--no-wait", "--timeout", "--setup"]
    assert texts(choices, "distributed --")[: len(usual)] == usual
    assert texts(choices, "dist_restart --")[:2] == ["--ranks", "--keep"]


def test_snapshots(
    choices: Choices, pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that there are; none where they cannot be read."""
    pools.default.world = None
    monkeypatch.setenv("NBDIST_SNAPSHOT_DIR", str(tmp_path / "there"))
    assert texts(choices, "dist_restore --name ") == []
    assert texts(choices, "dist_restore ") == []
    (tmp_path / "there").write_text("no folder")
    assert texts(choices, "dist_restore ") == []


def test_without_workers(pools: Pools) -> None:
    """There are no variables of theirs."""
    choices = Choices(pools)
    assert texts(choices, "dist_gather ") == []
    assert texts(choices, "distributed -r ") == ["all"]


def test_an_argument_that_takes_one_value() -> None:
    """What comes after it is for the next one, and for none where there is none."""
    file, names = Argument((), "file", ""), Argument((), "names", "", takes_many=True)
    assert [spot_in((file, names), text).wanted for text in (" ", " a ", " a b ")] == [
        file,
        names,
        names,
    ]
    assert spot_in(arguments_of(COMMANDS["dist_scale"]), " 4 ").wanted is None
