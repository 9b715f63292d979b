"""Tests of `nbdist.terminal.__main__`: the command `nbdist` as people type it."""

from __future__ import annotations

import pytest

from nbdist.terminal.__main__ import main


@pytest.mark.parametrize("words", [["stop"], ["top", "-f", "0"], ["status", "-f", "x"]])
def test_a_wrong_command_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong words after `nbdist` end with exit code 2 and a line of help."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: nbdist" in capsys.readouterr().err


def test_the_command_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`nbdist` without words lists its commands, as `nbdist --help` does."""
    assert main([]) == 0
    alone = capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert (ended.value.code, alone.err) == (0, "")
    assert alone.out == capsys.readouterr().out
    assert "\n    doctor " in alone.out


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["k8s", "10.0.0.1:1", "-j", "2x4"], 'copy the Job of the section "Kubernetes" in'),
        (
            ["enable", "--yes"],
            'add the line `c.InteractiveShellApp.extensions.append("nbdist")`',
        ),
        (["disable"], "delete what nbdist has in ipython_config.json"),
    ],
)
def test_a_removed_command_says_what_to_do_instead(
    words: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command of earlier versions is refused with a line that says what to do instead."""
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"nbdist: `nbdist {words[0]}` was removed: {instead}")
    assert (said.out, said.err.count("\n")) == ("", 1)
