"""Tests of `%%distributed --quiet`: a cell shows its output only if it fails or is stopped."""

from __future__ import annotations

import pytest

from tests.notebook.front_end import Notebook, Outcome
from tests.notebook.test_jobs import idle_until

pytestmark = pytest.mark.shared_world


def has_no_output(outcome: Outcome) -> bool:
    return not (outcome.drawn or outcome.streams or outcome.results or outcome.errors)


def test_a_quiet_cell_that_succeeds_shows_nothing(two: Notebook) -> None:
    """Nothing of a successful cell is shown; `-o` has its values, `%dist_output` its output."""
    cell = """%%distributed --quiet -o values
import sys, matplotlib.pyplot as plt
print("on stdout", rank)
print("on stderr", file=sys.stderr)
track(loss=1.0)
plt.plot([0, rank])
display({"text/markdown": "**a display**", "text/plain": "a display"}, raw=True)
rank + 10"""
    assert has_no_output(two.run(cell))
    assert two.value("[*values.values()]") == [10, 11]
    output = two.run("%dist_output").seen
    for text in ("on stdout 1", "on stderr", "loss 1", "figure of rank 0", "a display", "11"):
        assert text in output, text
    loop = (
        "for step in range(3):\n    %distributed --quiet -o x step * 2\n    assert x[1] == 2 * step"
    )
    assert has_no_output(two.run(loop))


def test_a_quiet_cell_that_fails_shows_all_its_output(two: Notebook) -> None:
    """A cell that raised, timed out or lost a rank has the panel and error of a usual cell."""
    for options, source, shown, error in (
        ("", "1 / (1 - rank)", "ZeroDivisionError: division by zero", "rank 1 failed, of 2"),
        ("--timeout 0.2", "import time; time.sleep(60)", "2 stopped", "stopped by `--timeout 0.2`"),
        ("", "import os\nif rank: os.kill(os.getpid(), 9)", "killed (SIGKILL)", "rank 1 on"),
        ("-r 0", "import sys; sys.exit(3)", "sys.exit(3)", "SystemExit: 3"),
    ):
        failed = two.run(f"%%distributed --quiet {options}\nprint('before')\n{source}")
        assert shown in failed.panel["text/plain"], source
        assert "\nbefore" in failed.panel["text/plain"], source
        assert error in failed.errors[0]["evalue"], source


def test_a_quiet_cell_that_is_stopped_shows_its_output(two: Notebook) -> None:
    """After Stop a quiet cell shows its output, and in which line Stop has hit each rank."""
    press = f"if rank == 0: os.kill({two.process.pid}, signal.SIGINT)"
    source = f"import os, signal, time\nprint('before')\ndist.barrier()\n{press}\ntime.sleep(60)"
    stopped = two.run(f"%%distributed --quiet\n{source}")
    assert [each["ename"] for each in stopped.errors] == ["Interrupted"]
    (text,) = stopped.drawn
    assert "2 ranks · ■ 2 stopped" in text
    assert "before\nCell In" in text


def test_a_quiet_cell_shows_notes_without_its_output(two: Notebook) -> None:
    """What a user must know is shown below the head: notes, and NaN among tracked numbers."""
    panel_text = two.run("%%distributed --quiet\nprint('hidden')\nworld_size = 5").text
    assert panel_text.splitlines()[0] == "2 ranks · ✓ 2"
    assert "`world_size` was each worker's own" in panel_text
    assert "hidden" not in panel_text
    nan_text = two.run("%%distributed --quiet\nprint('hidden')\ntrack(quality=float('nan'))").text
    assert "ranks 0-1: NaN or infinity" in nan_text
    assert "hidden" not in nan_text
    assert two.run("%%distributed\nworld_size = 2").errors == []


def test_a_quiet_cell_shows_which_ranks_wait(two: Notebook) -> None:
    """A panel says which rank waits for others; after success only the panel's head is left."""
    source = "import time\nprint('hidden')\nif rank: time.sleep(1.5)\ndist.barrier()"
    waited = two.run(f"%%distributed --quiet --hang-timeout 0.3\n{source}")
    assert waited.text == "2 ranks · ✓ 2"
    assert any("rank 0 waits in barrier, line 5" in text for text in waited.drawn)


def test_a_quiet_cell_asks_for_input(two: Notebook) -> None:
    """The input box of a quiet cell has the rank's prompt; at the end only the head is left."""
    ran = two.run("%%distributed --quiet -r 1 -o name\ninput('name: ')", typed=["ada"])
    assert ran.prompts == ["[rank 1] name: "]
    assert ran.texts[-1] == "rank 1 · ✓ 1"
    assert two.value("name[1]") == "ada"


def test_a_quiet_job_shows_that_it_runs_and_how_it_has_ended(two: Notebook) -> None:
    """A quiet job has a line while it runs, then its panel's head, or all output if it failed."""
    for source, end, has_output in (
        ("pass", "2 ranks · ✓ 2", False),
        ("1 / (1 - rank)", "rank 1 failed, of 2", True),
    ):
        cell = f"%%distributed --quiet --no-wait -o job\nprint('before')\n{source}"
        (sent,) = two.run(cell).displays
        assert "running on 2 ranks in the background" in sent["data"]["text/plain"]
        drawn = idle_until(two, sent["transient"]["display_id"], end)
        assert ("before" in drawn[-1][0]) == has_output
        assert not any("before" in text for text, _ in drawn[:-2])
        assert two.value("job.exception() is not None") == has_output
