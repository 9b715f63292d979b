"""Notebooks whose workers are on other hosts: the texts of magics, and the tutorial."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import nbformat

from nbdist.output.mimes import WIDGET
from tests.hosts.network import Host
from tests.hosts.sshd import Sshd
from tests.notebook.debug_client import STEP, DebugClient
from tests.notebook.front_end import Notebook, body
from tests.notebook.test_widgets import Page
from tests.notebooks.test_notebooks import MANY_MACHINES, code_cells, run, text
from tests.waiting import wait_until

LOGS = "/tmp/nbt-logs"
"""A folder that each host has for itself."""


def test_magics_name_the_hosts_of_ranks(sshd: Sshd, hosts: list[Host], tmp_path: Path) -> None:
    """Magics name the hosts of ranks, log files and missing files, and notice a lost host."""
    (tmp_path / "mine.py").write_text("x = 1\n")
    environ = {**sshd.environ, "NBDIST_LOG_DIR": LOGS}
    with closing(Notebook(f"%cd -q {tmp_path}", "%load_ext nbdist", env=environ)) as notebook:
        line = "%%distributed --hosts node1:1,node2:1 --name logs --link-timeout 3"
        assert notebook.run(f"{line}\nprint('hello from', rank)").errors == []
        assert "── ranks 0 on node1, 1 on node2 same · idle ──" in notebook.run("%dist_stack").text
        last = notebook.run("%dist_status -v").text.splitlines()[-1]
        assert last == "refused connections without this world's keys: none"

        assert notebook.run("%dist_log --tail 3 --grep hello").text.splitlines() == [
            *("── rank 0 on node1 ──", "hello from 0", "── rank 1 on node2 ──", "hello from 1"),
            f"files: node1:{LOGS}/logs/node1/attempt_0/[0]/[stdout,stderr].log",
            f"files: node2:{LOGS}/logs/node2/attempt_0/[1]/[stdout,stderr].log",
        ]
        error = notebook.run("%dist_log --attempt 7").error
        assert "`--attempt 7`: there are 0, the last is now." in error
        cell = "%%distributed -r 1\nfrom IPython.display import HTML\nHTML('x' * 10_000_001)"
        assert "node2:/" in notebook.run(cell).text

        # A page's message to a widget reaches the rank.
        cell = "%%distributed -r 1\nimport ipywidgets\nslider = ipywidgets.IntSlider()\nslider"
        outcome = notebook.run(cell)
        (name,) = (each["data"][WIDGET]["model_id"] for each in outcome.displays[1:])
        Page(notebook).send(name, method="update", state={"value": 5}, buffer_paths=[])
        value = "%%distributed -r 1\nprint(slider.value)"
        wait_until(lambda: body(notebook.run(value))[-1] == "5", "the slider has moved")

        error = notebook.run("%%distributed -r 1\nimport mine").error
        assert "rank 1 on node2 failed after" in error
        assert "`mine.py` is in the notebook's folder, which node2 does not have: " in error
        assert "rank 1 on node2 (pid " in notebook.run("%dist_why").text

        def is_whole() -> bool:
            return "2 workers as 2x1 on node1 and node2 " in notebook.run("%dist_status").text

        hosts[1].link_down()
        wait_until(lambda: not is_whole(), "node2 is lost")
        assert "now 1 worker" in notebook.run("%%distributed\nmark = 1").text
        hosts[1].link_up()
        back = lambda: "now 2 workers" in notebook.run("%%distributed\nmark = 1").text  # noqa: E731
        wait_until(back, "node2 is back")


def test_a_breakpoint_stops_ranks_on_both_hosts(sshd: Sshd, hosts: list[Host]) -> None:
    """The ranks of two hosts stop at a breakpoint, step together, and are shown by turns."""
    with closing(Notebook("%load_ext nbdist", env=sshd.environ)) as notebook:
        assert notebook.run("%%distributed --hosts node1:1,node2:1\nimport os").errors == []
        debug = DebugClient(notebook)
        debug.start()
        debug.set_breakpoints(STEP, 3)
        debug.begin(STEP)
        thread, frame = debug.all_stopped(1, 0)
        assert (frame["name"], frame["line"]) == ("rank 0 · train_step", 3)
        debug.request("next", threadId=thread)
        thread, frame = debug.all_stopped(0, 1)
        assert (frame["name"], frame["line"]) == ("rank 1 · train_step", 4)
        assert debug.evaluate(frame, "os.uname().nodename") == "'node2'"
        debug.request("continue", threadId=thread)
        assert "weight 3.0" in debug.finish(goes_on=True).seen
        debug.stop()


def test_the_tutorial_runs_over_ssh(hosts: list[Host], path: None, tmp_path: Path) -> None:
    """With the first line for ssh, the notebook on many machines names ranks of two hosts."""
    notebook = nbformat.read(MANY_MACHINES, as_version=4)
    _, first, *_ = code_cells(notebook)
    assert first.source.startswith("%%distributed -j 2x2\n")
    first.source = first.source.replace("-j 2x2", "--hosts node1:2,node2:2", 1)
    with closing(Notebook()) as kernel:
        shown = text(run(notebook, kernel, tmp_path))
    assert "rank 2 is worker 0 of node 1" in shown
    assert "4 workers as 2x2 on node1 and node2 · gloo · ready" in shown
    failed, died = (line for line in shown.splitlines() if line.startswith("Worker"))
    assert "rank 3 on node2" in failed
    assert "rank 1 on node1" in died
    assert "ranks that answer: 4" in shown
