"""Tests of `nbdist.notebook.commands.inspect`: a table drawn in the place of the one before."""

from __future__ import annotations

import os
import sys

import pexpect
import pytest

from nbdist.notebook.commands.inspect import MovingPicture
from nbdist.notebook.display import PlainDisplay, block
from tests.waiting import SOON

SCRIPT = """
from nbdist.notebook.display import PlainDisplay
from nbdist.notebook.commands.inspect import MovingPicture
from nbdist.notebook.display import block
picture = MovingPicture(PlainDisplay())
for text in ("one\\ntwo\\n" + "x" * 100, "three"):
    picture.show(block(text))
print("end")
"""


@pytest.mark.kernel
def test_in_a_terminal():
    """Over the lines before, none of them so long that it would be two."""
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    shown = pexpect.spawn(
        *(sys.executable, ["-c", SCRIPT]),
        dimensions=(20, 40),
        encoding="utf-8",
        timeout=SOON,
        env=env,
    )
    shown.expect(pexpect.EOF)
    text = shown.before.replace("\r", "")
    shown.close()
    long = "x" * 39
    assert text == (f"one\x1b[K\ntwo\x1b[K\n{long}\x1b[K\n\x1b[J\x1b[3Fthree\x1b[K\n\x1b[Jend\n")


def test_in_a_log(capsys: pytest.CaptureFixture[str]):
    """One below the other, whole and without codes."""
    picture = MovingPicture(PlainDisplay())
    for text in ("one\ntwo", "x" * 500):
        picture.show(block(text))
    assert capsys.readouterr().out == f"one\ntwo\n{'x' * 500}\n"
