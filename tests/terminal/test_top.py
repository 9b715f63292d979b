"""Tests of `nbdist.terminal.worlds`: drawn over and over in a terminal, with rich and without."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pexpect
import pytest

from nbdist.terminal.worlds import OFF, rich_picture
from nbdist.world.world import World
from tests.terminal.test_worlds import SEEN
from tests.waiting import SOON
from tests.worlds import NewWorld

pytestmark = pytest.mark.shared_world


@pytest.fixture(scope="module")
def world(new_world: NewWorld) -> Iterator[World]:
    with new_world(1) as started:
        yield started


@pytest.mark.parametrize("has_rich", [True, False])
def test_in_a_terminal(world: World, has_rich: bool) -> None:  # noqa: FBT001
    """Another screen, drawn again; `q` and Ctrl-C end it, and the terminal is as it was."""
    hide = "" if has_rich else "import sys; sys.modules['rich.live'] = None; "
    command = f"{hide}from nbdist.terminal.worlds import show_top; show_top(0.5)"
    # pytest loads readline, which has LINES and COLUMNS in the environment of what is started
    # from then on; they count for more than the terminal's size.
    environ = {
        name: value for name, value in os.environ.items() if name not in ("LINES", "COLUMNS")
    }
    shown = pexpect.spawn(
        sys.executable,
        ["-c", command],
        env=environ,
        dimensions=(300, 120),
        encoding="utf-8",
        timeout=SOON,
    )
    try:
        shown.expect_exact("\x1b[?1049h")
        for _ in range(2):
            shown.expect("rank.*state")
            shown.expect_exact(str(world.pids[0]))
        if has_rich:
            shown.sendintr()
        else:
            shown.send("xq")
        shown.expect_exact(OFF[-8:])
        shown.expect(pexpect.EOF)
    finally:
        shown.close()
    assert shown.exitstatus == 0


def test_a_narrow_window():
    """Cuts what is long, and keeps numbers whole."""
    console = pytest.importorskip("rich.console")
    narrow = console.Console(width=72, force_terminal=False)
    with narrow.capture() as captured:
        narrow.print(rich_picture([(SEEN, {0: 99.0})]))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 72
    assert "200 MiB" in captured.get()
    assert "busy 12 s " in captured.get()
    assert "none of your worlds" in str(rich_picture([]))
