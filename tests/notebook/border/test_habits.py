"""Tests of `nbdist.notebook.border.habits`: what people type who come from elsewhere."""

from __future__ import annotations

import pytest

from nbdist.notebook.border.flags import flags_of
from nbdist.notebook.border.habits import (
    MAGICS,
    SAME,
    hint_on_magic,
    in_our_words,
    meant_by,
    old_flags,
    our_flag,
)
from nbdist.notebook.command import find_commands

COMMANDS = {each.name: each for each in find_commands()}
FLAGS = flags_of(COMMANDS["distributed"].run)
SHOWN = [each.shown_name for each in COMMANDS.values()]


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("--nproc-per-node 4", "-n 4"),
        ("--nproc_per_node=4 --debug", "-n=4 --debug"),
        ("--num-processes 2 --gpu-ids 0,1", "-n 2 --gpus 0,1"),
        ("--targets 0 --name --nproc", "-r 0 --name --nproc"),
        ("--env X=--targets", "--env X=--targets"),
        ("--on_failure stop --max_restarts=3", "--on-failure stop --max-restarts=3"),
        ("-n 4", "-n 4"),
    ],
)
def test_what_means_the_same(line: str, ours: str) -> None:
    """It is written as ours, and nothing else is touched."""
    assert in_our_words(line, FLAGS) == ours


def test_only_where_a_magic_has_ours() -> None:
    """A flag that a magic has itself stays, and one that has no meaning there does."""
    assert our_flag("--targets", {"-n": 1}) == "--targets"
    assert our_flag("--targets", {"-r": 1, "--targets": 1}) == "--targets"
    assert set(SAME.values()) <= set(FLAGS)


def test_flags_as_they_were_called_before() -> None:
    """They are taken for the new ones where a magic has these, and a line says so."""
    flags = {"-r": 1, "--here-too": 1}
    assert in_our_words("--local --rank=1", flags) == "--here-too -r=1"
    said = "`--local` is now `--here-too`, `--rank` is now `-r`"
    assert old_flags("--local --rank=1 --local", flags) == said
    assert old_flags("--rank 1", {"-n": 1}) == ""
    assert old_flags("-r 1 --here-too", flags) == ""


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--num-procs 4", "unknown option `--num-procs`: did you mean `-n`?"),
        ("--num-procs=4", "unknown option `--num-procs`: did you mean `-n 4`?"),
        ("--rdzv-id 7", "`--rdzv-id`: `--name` names the run."),
        (
            "--standalone --nnodes=1 --tee 3",
            "`--standalone`: leave it out, as one machine is the default; `--nnodes`: `-j 2x4` "
            "starts 2 nodes with 4 workers each, `--hosts a,b` names machines; `--tee`: all output "
            "of all ranks is shown and kept: `%dist_output --log`.",
        ),
        (
            "--log_dir x",
            "`--log-dir`: NBDIST_LOG_DIR in the environment is where logs are, `--name` names "
            "their folder.",
        ),
        ("--hang-timout 3", "unknown option `--hang-timout`: did you mean `--hang-timeout`?"),
        ("--bogus", "unknown option `--bogus`."),
        ("4", "unexpected `4`: did you mean `-n 4`?"),
        ("model", ""),
    ],
)
def test_what_was_meant(typed: str, said: str) -> None:
    """By what argparse does not know; of other words it has said enough."""
    assert meant_by(f"unrecognized arguments: {typed}", FLAGS) == said
    assert meant_by("argument -n: expected one argument", FLAGS) == ""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Line magic function `%dist_gahter` not found.", "Did you mean `%dist_gather`?"),
        ("Cell magic `%%distribute` not found.", "Did you mean `%%distributed`?"),
        ("Cell magic `%%px` not found.", "In nbdist begin the cell with `%%distributed`."),
        ("Line magic function `%matplotlob` not found.", ""),
        (
            "Line magic function `%distributed` not found (But cell magic `%%distributed` exists, "
            "did you mean that instead?).",
            "",
        ),
        ("argument -n: expected one argument", ""),
    ],
)
def test_a_magic_that_is_not_there(message: str, said: str) -> None:
    """One of ours that is spelt nearly so, or what does the same as somebody else's."""
    assert hint_on_magic(message, SHOWN) == said


def test_what_is_named_is_there() -> None:
    """The answers name magics that exist, and none of others' is one of ours."""
    assert not MAGICS.keys() & COMMANDS.keys()
    named = {word.strip("`") for text in MAGICS.values() for word in text.split() if "`%" in word}
    assert named <= set(SHOWN)
