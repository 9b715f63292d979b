"""The models of ranks' widgets as the notebook's page is to have them."""

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
    """With the slider of rank 0, of which pages know."""
    found = Widgets()
    assert found.handle_output(0, opened("s", value=1, image={}, buffers=(b"png",))) is None
    found.pop_messages()
    return found


def test_changes_from_both_sides(widgets: Widgets) -> None:
    """The state that a page asks for has what the rank, and what a page, has changed."""
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


def test_a_loop_is_one_message() -> None:
    """Changes of a state that follow one another; what opens, closes or is custom has its place."""
    custom = Comm("comm_msg", "b", {"method": "custom"}, {})
    said = [changed("a", x=1), changed("b", y=1), changed("a", x=2, z=3), custom, changed("a", x=4)]
    assert merged(said) == [changed("a", x=2, z=3), changed("b", y=1), custom, changed("a", x=4)]
    calls = [changed("a", call={"y": 1}), changed("a", call=None), changed("a", call={"y": 2})]
    assert merged(calls) == calls


def test_a_new_widget_is_opened_as_it_is() -> None:
    """With all that it became since, unless that refers to widgets which are opened later."""
    child = changed("box", children=["IPY_MODEL_b"])
    said = [opened("box", x=1), changed("box", call={}), opened("b"), changed("box", x=2), child]
    custom = Comm("comm_msg", "b", {"method": "custom"}, {})
    after = [custom, changed("b", y=1)]
    assert merged([*said, *after]) == [opened("box", x=2, call={}), opened("b"), child, *after]
    with_buffer = [opened("image", buffers=(b"png",), image={}), changed("image", image={})]
    assert merged(with_buffer) == with_buffer


def test_what_an_output_captures(widgets: Widgets) -> None:
    """What its rank shows inside of it; the page gets that, and so does the rank."""
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
    *before, (page, shown), (rank, same) = widgets.pop_messages()
    assert (page, rank, shown) == (-1, 0, same)
    assert all("msg_id" not in comm.data["state"] for _, comm in before)
    kinds = [each["output_type"] for each in shown.data["state"]["outputs"]]
    assert kinds == ["stream", "display_data", "error"]
    assert shown.data["state"]["outputs"][0]["text"] == "ab\n"
    assert widgets.pop_messages() == []
    widgets.handle_output(0, changed("out", msg_id="8"))
    assert widgets.handle_output(0, inside[0]) is None
    done = Done("error", 0.0)
    assert widgets.handle_output(0, done) is done  # the cell has ended, whatever became of it
    assert widgets.handle_output(0, inside[0]) == inside[0]


ODD_OUTPUTS = (None, 5, "text", {"a": 1}, [1, "x"], [{"name": "stdout"}])


@pytest.mark.parametrize("outputs", [*ODD_OUTPUTS, [{"name": "stdout", "text": 5}]])
def test_outputs_that_are_none(widgets: Widgets, outputs: Any) -> None:
    """An `Output` whose outputs are malformed captures the text that follows."""
    state = {"_model_name": "OutputModel", "outputs": outputs, "msg_id": "7"}
    widgets.handle_output(0, opened("out", **state))
    assert widgets.handle_output(0, Text("stdout", "a")) is None
    shown = widgets.models["out"].outputs[-1]
    assert shown == {"output_type": "stream", "name": "stdout", "text": "a"}


def test_a_message_for_a_widget_of_another_rank(widgets: Widgets) -> None:
    """The message becomes a line, and the widget stays as it was."""
    for comm in (opened("s", value=5), changed("s", value=5), Comm("comm_close", "s", {}, {})):
        assert widgets.handle_output(1, comm) == Display({"text/plain": NOT_ITS_OWN}, {})
    assert widgets.models["s"].state["value"] == 1


def test_widgets_that_no_page_has(widgets: Widgets) -> None:
    """Those of an earlier notebook are a line with what to do."""
    assert widgets.handle_output(0, VIEW) == VIEW
    unknown = VIEW._replace(data={**VIEW.data, WIDGET: {"model_id": "before"}})
    assert widgets.handle_output(0, unknown) == Display(
        {"text/plain": f"IntSlider() {UNKNOWN_WIDGET}"}, {}
    )


def test_ranks_that_end_or_become_others(widgets: Widgets) -> None:
    """The widgets of a rank that has ended are closed; others follow their rank's number."""
    widgets.handle_output(3, opened("t", value=1))
    widgets.pop_messages()
    widgets.renumber({3: 1})
    assert [*widgets.models] == ["t"]
    assert [(comm.kind, comm.id) for _, comm in widgets.pop_messages()] == [("comm_close", "s")]
    assert widgets.from_page(changed("t", value=2)) == 1
    widgets.end([1])
    assert widgets.ended_widgets == {"s": 0, "t": 1}
