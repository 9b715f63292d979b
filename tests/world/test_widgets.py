"""Tests of `nbdist.world.widgets`: the models of ranks' widgets, as notebook pages have them."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.output.events import Clear, Comm, Display, Done, Failure, Output, Text
from nbdist.output.mimes import WIDGET
from nbdist.world.widgets import NOT_ITS_OWN, UNKNOWN_WIDGET, Widgets, merged

VIEW = Display({"text/plain": "IntSlider()", WIDGET: {"model_id": "s"}}, {})


def opened(name: str, buffers: Any = (), **state: Any) -> Comm:
    data = {"state": state, "buffer_paths": [["image", "data"]][: len(buffers)]}
    return Comm("comm_open", name, data, {}, buffers, "jupyter.widget")


def changed(name: str, **state: Any) -> Comm:
    return Comm("comm_msg", name, {"method": "update", "state": state}, {})


@pytest.fixture
def widgets() -> Widgets:
    """The widgets of a world: a slider of rank 0, which was sent to the pages of the notebook."""
    table = Widgets()
    assert table.handle_output(0, opened("s", value=1, image={}, buffers=(b"png",))) is None
    table.pop_messages()
    return table


def test_a_widgets_state_has_changes_of_both_sides(widgets: Widgets) -> None:
    """The state for a page has all changes that were made by the rank or by a page."""
    widgets.handle_output(0, changed("s", value=2, low=0))
    assert widgets.from_page(changed("s", low=1)) == 0
    whole = widgets.whole("s")
    assert whole is not None
    assert whole.data["state"] == {"value": 2, "low": 1, "image": {}}
    assert (whole.data["buffer_paths"], whole.buffers) == ([["image", "data"]], (b"png",))
    widgets.handle_output(0, changed("s", image={}))
    assert widgets.models["s"].buffers == {}
    widgets.handle_output(0, Comm("comm_close", "s", {}, {}))
    assert widgets.whole("s") is None
    assert widgets.from_page(changed("s", value=5)) is None


def test_successive_changes_are_one_message() -> None:
    """Successive changes become one message; custom messages and dicts are not joined."""
    custom = Comm("comm_msg", "b", {"method": "custom"}, {})
    messages = [
        changed("a", x=1),
        changed("b", y=1),
        changed("a", x=2, z=3),
        custom,
        changed("a", x=4),
    ]
    assert merged(messages) == [
        changed("a", x=2, z=3),
        changed("b", y=1),
        custom,
        changed("a", x=4),
    ]
    calls = [changed("a", call={"y": 1}), changed("a", call=None), changed("a", call={"y": 2})]
    assert merged(calls) == calls


def test_a_new_widget_is_opened_with_later_changes() -> None:
    """The message that opens a widget has later changes, unless they refer to a later widget."""
    child = changed("box", children=["IPY_MODEL_b"])
    messages = [
        opened("box", x=1),
        changed("box", call={}),
        opened("b"),
        changed("box", x=2),
        child,
    ]
    custom = Comm("comm_msg", "b", {"method": "custom"}, {})
    after = [custom, changed("b", y=1)]
    assert merged([*messages, *after]) == [opened("box", x=2, call={}), opened("b"), child, *after]
    with_buffer = [opened("image", buffers=(b"png",), image={}), changed("image", image={})]
    assert merged(with_buffer) == with_buffer


def test_an_output_widget_captures_its_ranks_outputs(widgets: Widgets) -> None:
    """Captured outputs go into the widget's state, which pages and the rank get."""
    inside: list[Output] = [
        Text("stdout", "gone"),
        Clear(wait=True),
        Text("stdout", "a"),
        Text("stdout", "b\n"),
        Display({"text/plain": "x"}, {}),
        Failure("ValueError", "bad", ("line",), 0),
    ]
    widgets.handle_output(0, opened("out", _model_name="OutputModel", outputs=[], msg_id=""))
    widgets.handle_output(0, changed("out", msg_id="7"))
    assert [widgets.handle_output(0, each) for each in inside] == [None] * len(inside)
    assert widgets.handle_output(1, inside[0]) == inside[0]
    widgets.handle_output(0, changed("out", msg_id=""))
    assert widgets.handle_output(0, inside[0]) == inside[0]
    *before, (page, page_message), (rank, rank_message) = widgets.pop_messages()
    assert (page, rank, page_message) == (-1, 0, rank_message)
    assert all("msg_id" not in comm.data["state"] for _, comm in before)
    kinds = [each["output_type"] for each in page_message.data["state"]["outputs"]]
    assert kinds == ["stream", "display_data", "error"]
    assert page_message.data["state"]["outputs"][0]["text"] == "ab\n"
    assert widgets.pop_messages() == []
    widgets.handle_output(0, changed("out", msg_id="8"))
    assert widgets.handle_output(0, inside[0]) is None
    done = Done("error", 0.0)
    assert widgets.handle_output(0, done) is done  # the end of a cell ends the capture
    assert widgets.handle_output(0, inside[0]) == inside[0]


ODD_OUTPUTS = (None, 5, "text", {"a": 1}, [1, "x"], [{"name": "stdout"}])


@pytest.mark.parametrize("outputs", [*ODD_OUTPUTS, [{"name": "stdout", "text": 5}]])
def test_malformed_outputs_do_not_stop_a_capture(widgets: Widgets, outputs: Any) -> None:
    """An `Output` whose outputs are malformed captures the text that follows."""
    state = {"_model_name": "OutputModel", "outputs": outputs, "msg_id": "7"}
    widgets.handle_output(0, opened("out", **state))
    assert widgets.handle_output(0, Text("stdout", "a")) is None
    shown = widgets.models["out"].outputs[-1]
    assert shown == {"output_type": "stream", "name": "stdout", "text": "a"}


def test_an_echo_of_earlier_outputs_removes_no_captured_output(widgets: Widgets) -> None:
    """A rank's echo of earlier outputs does not remove outputs that were captured since."""
    widgets.handle_output(0, opened("out", _model_name="OutputModel", outputs=[], msg_id=""))
    widgets.handle_output(0, changed("out", msg_id="7"))
    widgets.handle_output(0, Text("stdout", "a"))
    ((_, first),) = [each for each in widgets.pop_messages() if each[0] == 0]
    widgets.handle_output(0, Failure("ValueError", "bad", ("line",), 0))
    echo = {"method": "echo_update", "state": first.data["state"]}
    widgets.handle_output(0, Comm("comm_msg", "out", echo, {}))
    ((_, second),) = [each for each in widgets.pop_messages() if each[0] == 0]
    kinds = [each["output_type"] for each in second.data["state"]["outputs"]]
    assert kinds == ["stream", "error"]
    assert widgets.models["out"].state["outputs"] == second.data["state"]["outputs"]


def test_a_rank_cannot_change_another_ranks_widget(widgets: Widgets) -> None:
    """A message from another rank is shown as a line, and the widget stays as it was."""
    for comm in (opened("s", value=5), changed("s", value=5), Comm("comm_close", "s", {}, {})):
        assert widgets.handle_output(1, comm) == Display({"text/plain": NOT_ITS_OWN}, {})
    assert widgets.models["s"].state["value"] == 1


def test_an_unknown_widget_is_shown_as_text(widgets: Widgets) -> None:
    """A widget that this notebook does not know is shown as a line with the remedy."""
    assert widgets.handle_output(0, VIEW) == VIEW
    unknown = VIEW._replace(data={**VIEW.data, WIDGET: {"model_id": "before"}})
    assert widgets.handle_output(0, unknown) == Display(
        {"text/plain": f"IntSlider() {UNKNOWN_WIDGET}"}, {}
    )


def test_widgets_follow_their_ranks_number(widgets: Widgets) -> None:
    """Widgets of a removed rank are closed; other widgets belong to their rank's new number."""
    widgets.handle_output(3, opened("t", value=1))
    widgets.pop_messages()
    widgets.renumber({3: 1})
    assert [*widgets.models] == ["t"]
    assert [(comm.kind, comm.id) for _, comm in widgets.pop_messages()] == [("comm_close", "s")]
    assert widgets.from_page(changed("t", value=2)) == 1
    widgets.end([1])
    assert widgets.ended_widgets == {"s": 0, "t": 1}
