"""Widgets of ranks, tested by a page that sends and receives Jupyter's messages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

from nbdist.output.mimes import WIDGET
from tests.notebook.front_end import Notebook, Outcome, body, execute, lasting
from tests.waiting import SOON

pytestmark = pytest.mark.shared_world

pytest.importorskip("ipywidgets")

notebook = lasting("%load_ext nbdist", "%dist_init -n 2")

LINE = "IntSlider(value=1) (this widget ended with its rank)"


class Page:
    """A page: the widget models that the kernel's messages have made, by their ids."""

    def __init__(self, notebook: Notebook) -> None:
        self._client = notebook.client
        self.states: dict[str, dict[str, Any]] = {}
        self.updates: list[dict[str, Any]] = []

    def send(self, name: str, kind: str = "comm_msg", **data: Any) -> None:
        """Send a message to the kernel on the comm with the id `name`."""
        content = {"comm_id": name, "data": data, "target_name": "jupyter.widget.control"}
        channel = self._client.shell_channel
        channel.send(self._client.session.msg(kind, content, metadata={"version": "1.0.0"}))

    def until(self, is_so: Callable[[], bool]) -> None:
        """Receive messages of the kernel until `is_so()` is true, also while no cell runs."""
        deadline = time.monotonic() + SOON
        while not is_so():
            assert time.monotonic() < deadline
            with suppress(Empty):
                self._client.get_iopub_msg(timeout=0.2)

    def apply(self, message: dict[str, Any]) -> None:
        """Apply a message of the kernel to the page."""
        content, kind = message["content"], message["msg_type"]
        name, data = content.get("comm_id", ""), content.get("data") or {}
        if kind == "comm_open":
            self.states[name] = data["state"]
        elif kind == "comm_close":
            self.states.pop(name, None)
        elif kind == "comm_msg" and data.get("method") == "update_states":
            self.states = {key: each["state"] for key, each in data["states"].items()}
        elif kind == "comm_msg" and name in self.states:
            self.states[name] |= data["state"]
        elif kind == "update_display_data":
            self.updates.append(content["data"])

    def of(self, model: str) -> set[str]:
        """Return the ids of the models of this class."""
        return {name for name, state in self.states.items() if state["_model_name"] == model}

    def printed(self) -> list[str]:
        """Return the first text in each `Output` widget, sorted."""
        return sorted(self.states[name]["outputs"][0]["text"] for name in self.of("OutputModel"))


@pytest.fixture
def page(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> Page:
    """A page that receives all messages of the notebook's kernel from now on."""
    page, receive = Page(notebook), notebook.client.get_iopub_msg

    def receive_and_apply(**options: Any) -> Any:
        page.apply(message := receive(**options))
        return message

    monkeypatch.setattr(notebook.client, "get_iopub_msg", receive_and_apply)
    return page


SLIDER = """%%distributed
import ipywidgets
slider = ipywidgets.IntSlider(value=rank)
slider.observe(lambda change: print("moved to", change.new), "value")
slider"""

UNTIL = """bar = ipywidgets.IntProgress()
display(bar)
bar.value = 5
while not pathlib.Path({end!r}).exists(): time.sleep(0.02)"""

VALUES = "%%distributed\nprint('has', slider.value)"

INSIDE = """%%distributed
out = ipywidgets.Output()
with out:
    print("inside", rank)
    1 / 0
print("outside")
@ipywidgets.interact(step=(0, 10))
def f(step):
    print("step", step)"""


def models(outcome: Outcome) -> list[str]:
    """Return the ids of the widgets that the cell shows, a widget for each rank."""
    return [each["data"][WIDGET]["model_id"] for each in outcome.displays[2::2]]


def press(page: Page, models: list[str], *values: int) -> None:
    """Move the widgets as a page does."""
    for name, value in zip(models, values, strict=True):
        page.send(name, method="update", state={"value": value}, buffer_paths=[])


def move(page: Page, models: list[str], *values: int) -> None:
    """Move the widgets, and wait until the ranks have sent the new values."""
    press(page, models, *values)
    page.until(lambda: [page.states[name]["value"] for name in models] == [*values])


def test_a_slider_can_be_moved_while_no_cell_runs(notebook: Notebook, page: Page) -> None:
    """The rank gets the value, its callback's output is shown, and a new page gets the widgets."""
    outcome = notebook.run(SLIDER)
    texts = [each["data"]["text/plain"] for each in outcome.displays[1:]]
    assert texts == ["rank 0", "IntSlider(value=0)", "rank 1", "IntSlider(value=1)"]
    shown = models(outcome)
    assert {*shown} == page.of("IntSliderModel")
    move(page, shown, 40, 41)
    page.until(lambda: any("moved to 41" in each["text/plain"] for each in page.updates))
    assert body(notebook.run(VALUES)) == ["── rank 0 ──", "has 40", "── rank 1 ──", "has 41"]

    notebook.run("import ipywidgets; own = ipywidgets.IntText(7)")
    before, page.states = page.states, {}
    page.send("control", "comm_open")
    page.send("control", method="request_states")
    page.until(lambda: bool(page.states))
    assert page.states.keys() == before.keys()
    assert [page.states[name]["value"] for name in shown] == [40, 41]
    assert len(page.of("IntTextModel")) == 1
    page.states[shown[0]] = {}
    page.send(shown[0], method="request_state")
    page.until(lambda: page.states[shown[0]].get("value") == 40)


def test_a_cell_sees_widgets_moved_before_it(notebook: Notebook, page: Page) -> None:
    """A cell never overtakes a widget's message that the page has sent before the cell."""
    shown = models(notebook.run(SLIDER))
    for value in range(2, 42):
        press(page, shown, value, value + 50)
        notebook.run("%%distributed\nseen = slider.value")
        notebook.run("%dist_gather seen")
        assert notebook.value("seen") == [value, value + 50]


AWAITS = """%%distributed --no-wait
import asyncio
while slider.value < 70: await asyncio.sleep(0.01)
print("has", slider.value)"""


def test_a_cell_that_awaits_sees_moved_widgets(notebook: Notebook, page: Page) -> None:
    """A cell that awaits in the background sees new values of a moved widget."""
    shown = models(notebook.run(SLIDER))
    notebook.run(AWAITS)
    press(page, shown, 70, 71)
    page.until(lambda: any("has 71" in each["text/plain"] for each in page.updates))


LOOPS = """%%distributed
import ipywidgets, pathlib, time
def loop(change):
    pathlib.Path(f"{folder}/{rank}").touch()
    if change.new == 5: exit()
    while True: time.sleep(0.01)
slider = ipywidgets.IntSlider(value=rank)
slider.observe(loop, "value")
slider"""


def test_stop_ends_a_widgets_callback(notebook: Notebook, page: Page, tmp_path: Path) -> None:
    """Ranks can run cells after a Stop in a widget's callback, and after `exit()` in a callback."""
    notebook.run(f"%%distributed\nfolder = {str(tmp_path)!r}")
    shown = models(notebook.run(LOOPS))
    press(page, shown, 5, 6)
    page.until(lambda: len([*tmp_path.iterdir()]) == 2)
    request = notebook.client.execute("%%distributed\nprint('goes on')", stop_on_error=False)
    time.sleep(0.5)  # the cell waits for rank 1
    notebook.manager.interrupt_kernel()
    notebook.reply_to(request)
    assert body(notebook.run(VALUES))[1::2] == ["has 5", "has 6"]


def test_a_widget_moves_while_its_cell_runs(notebook: Notebook, page: Page, tmp_path: Path) -> None:
    """A page shows a widget while the widget's cell runs: this cell ends only after that."""
    end = tmp_path / "end"

    def end_once_shown(outcome: Outcome) -> None:
        if len(models(outcome)) == 2:
            end.touch()

    cell = f"%%distributed\nimport ipywidgets, pathlib, time\n{UNTIL.format(end=str(end))}"
    outcome = notebook.run(cell, meanwhile=end_once_shown)
    assert [each["data"]["text/plain"] for each in outcome.displays[1::2]] == ["rank 0", "rank 1"]
    assert [page.states[name]["value"] for name in models(outcome)] == [5, 5]


def test_output_widgets_show_what_is_printed_inside(notebook: Notebook, page: Page) -> None:
    """Text printed inside of an `Output` or `interact` is in the widget, and not in the panel."""
    notebook.run("%%distributed\nimport ipywidgets")
    outcome = notebook.run(INSIDE)
    assert outcome.errors == []
    assert "ranks 0-1 (same)\noutside\ninteractive(" in outcome.seen.replace(" ──", "")
    assert "inside" not in outcome.displays[0]["data"]["text/plain"]
    assert page.printed() == ["inside 0\n", "inside 1\n", "step 5\n", "step 5\n"]
    move(page, [page.of("IntSliderModel").pop()], 9)
    page.until(lambda: page.printed()[-1] == "step 9\n")
    assert body(notebook.run("%%distributed\nprint(len(out.outputs))"))[-1] == "2"


PUBLISH = """%%distributed
kernel = get_ipython().kernel
def publish(kind, data, name="odd"):
    content = {"comm_id": name, "data": data, "target_name": "jupyter.widget"}
    kernel.session.send(kernel.iopub_socket, kind, content)
out = ipywidgets.Output()
deep = 1
for _ in range(500): deep = [deep]"""

ODD = (
    "publish('comm_open', {'state': slider.get_state(), 'buffer_paths': 5})",
    "publish('comm_open', {'state': {}})",
    "publish('comm_open', {'state': {**slider.get_state(), 'x': deep}})",
    "publish('comm_msg', {'method': 'update', 'state': None}, out.comm.comm_id)",
    "publish('comm_msg', {'method': 'update', 'state': {'outputs': 5, 'msg_id': '1'}},"
    " out.comm.comm_id); print('inside')",
)


@pytest.mark.parametrize("odd", ODD)
def test_malformed_messages_harm_no_other_widget(notebook: Notebook, page: Page, odd: str) -> None:
    """After a malformed message of a rank, cells run, and a new page gets the widgets' states."""
    shown = models(notebook.run(SLIDER))
    notebook.run(PUBLISH)
    assert notebook.run(f"%%distributed -r 1\n{odd}").errors == []
    assert body(notebook.run(VALUES))[1::2] == ["has 0", "has 1"]
    page.states = {}
    page.send("control", "comm_open")
    page.send("control", method="request_states")
    page.until(lambda: {*shown} <= page.states.keys())


def test_a_rank_that_dies_takes_its_widgets(notebook: Notebook, page: Page) -> None:
    """A dead rank's widgets are replaced by a line on the page; widgets of other ranks stay."""
    kept, lost = models(notebook.run(SLIDER))
    (pid,) = notebook.run("%%distributed -r 1\nimport os; print(os.getpid())").text.split()[-1:]
    os.kill(int(pid), signal.SIGKILL)
    page.until(lambda: lost not in page.states)
    page.until(lambda: any(LINE in each["text/plain"] for each in page.updates))
    page.send(lost, method="update", state={"value": 5})
    move(page, [kept], 6)
    assert body(notebook.run("%%distributed -r 0\nprint(slider.value)"))[-1] == "6"


def test_a_saved_file_has_the_last_states(notebook: Notebook) -> None:
    """nbclient saves the states of widgets, and nbconvert's page has the states."""
    moved = f"{SLIDER.removesuffix('slider')}slider.value = 8; display(slider)"
    saved = new_notebook(cells=[new_code_cell(moved)])
    execute(saved, notebook)
    states = saved.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert sum(each["state"].get("value") == 8 for each in states.values()) == 2
    html, _ = HTMLExporter().from_notebook_node(saved)
    assert '"value": 8' in html
