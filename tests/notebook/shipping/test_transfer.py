"""Tests of how far a transfer is, and of Stop in the middle of one."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from nbdist.notebook import display
from nbdist.notebook.display import PlainDisplay, moved, progress_text
from tests.notebook.front_end import Notebook, lasting

pytestmark = pytest.mark.shared_world


def test_what_is_said_of_a_transfer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Nothing at first, nor in lines that cannot change; Stop releases at once what there is."""
    assert progress_text("x", 1 << 20, 3 << 20, 2.0) == "x: 1 MiB of 3 MiB · 512 KiB/s"
    ended: list[str] = []

    def copying() -> Generator[int, None, str]:
        """Copies 3 KiB."""
        try:
            yield from (1024, 2048, 3072)
        finally:
            ended.append("released")
        return "made"

    assert moved(copying(), 3072, PlainDisplay(), "shipping x") == "made"
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(display, "FIRST_SHOWN", 0.0)
    moved(copying(), 3072, PlainDisplay(), "shipping x")
    assert capsys.readouterr().out.startswith("shipping x: 1 KiB of 3 KiB · ")

    class Stopped(PlainDisplay):
        def wait_for(self, text: str) -> None:
            raise KeyboardInterrupt

    ended.clear()
    with pytest.raises(KeyboardInterrupt):
        moved(copying(), 3072, Stopped(), "shipping x")
    assert ended == ["released"]


SLOWLY = """
from unittest.mock import patch
import numpy as np
patch.multiple("nbdist.notebook.display", FIRST_SHOWN=0, REDRAW=0).start()
patch("nbdist.values.shared_memory.PIECE", 1 << 17).start()
old = np.arange(5)
"""

HELD = """
import os
def held():
    links = []
    for n in os.listdir('/proc/self/fd'):
        try: links.append(os.readlink(f'/proc/self/fd/{n}'))
        except OSError: pass
    return sum('memfd:nbdist' in link for link in links)
"""

STOPS = """
import signal
publisher = get_ipython().display_pub

def stop_at(text):
    'Has Stop come when this is about to be shown: while it is so.'
    def press(message):
        if text in message['content']['data'].get('text/plain', ''):
            publisher.unregister_hook(press)
            signal.raise_signal(signal.SIGINT)
        return message
    publisher.register_hook(press)
"""

THERE = f"""%%distributed -n 2
{HELD}
import nbdist.values.shared_memory, nbdist.worker.namespace
nbdist.values.shared_memory.PIECE = 1 << 17
nbdist.worker.namespace.MOVED_EVERY = 0
import numpy as np
theirs = np.ones(5_000_000)
"""


slow = lasting("%load_ext nbdist", SLOWLY, HELD, STOPS, THERE)
"""A notebook and two workers that copy a little at a time, and say so at once."""


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("%dist_push new", "sending new: "),
        ("%%distributed\nnew[0]", "sending new: "),
        ("%dist_gather theirs --as new", "gathering theirs: "),
    ],
)
def test_stop_in_the_middle(slow: Notebook, line: str, what: str):
    """The name is what it was, here and there, and no memory is left; then it works."""
    is_sent = "gather" not in line
    slow.run("new = np.arange(5_000_000.)")
    if is_sent:
        slow.run("%%distributed\nnew = 'as it was'")
        slow.run("new = np.arange(5_000_001.)")
    slow.run(f"stop_at({what!r})")
    assert "KeyboardInterrupt: Stopped on ranks 0-1" in slow.run(line).error
    assert slow.value("bool(new.sum() > 1e9), held()") == (True, 0)
    if is_sent:
        slow.run("%dist_gather (type(new).__name__,held()) --as there")
        assert slow.value("there") == [("str", 0)] * 2
    outcome = slow.run(line)
    assert outcome.errors == []
    drawn = [each["data"]["text/plain"] for each in (*outcome.displays, *outcome.updates)]
    assert any(what in each and "MiB/s" in each for each in drawn)
    if is_sent:
        slow.run("%dist_gather len(new) --as there")
        assert slow.value("there") == [5_000_001] * 2
    else:
        assert slow.value("[float(each.sum()) for each in new]") == [5e6, 5e6]
