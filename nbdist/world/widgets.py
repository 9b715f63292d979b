"""The widgets of ranks, as the notebook's page shows them: their models, and captured outputs.

Runs in the notebook's process and does no I/O.  `nbdist.world.world_outputs` makes `Widgets` at the
first message of a widget, and passes the ranks' outputs through it.  `nbdist.notebook.rich_output`
passes messages to the page and from the page.  `Widgets` has a lock, because another thread may
pass messages of the page while a cell runs.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.output import events
from nbdist.output.events import (
    Clear,
    Comm,
    Died,
    Display,
    DisplayUpdate,
    Done,
    Failure,
    Output,
    Text,
)
from nbdist.output.mimes import WIDGET

NOT_ITS_OWN = "(a message was dropped: it is for a widget of another rank)"
UNKNOWN_WIDGET = "(this page does not have this widget: run the cell again that makes it)"

MAX_WIDGET_OUTPUTS, MAX_WIDGET_TEXT = 500, 200_000
"""The most outputs that an `Output` widget keeps, and the most characters of each text in it."""


@dataclass
class Model:
    """The model of a widget: its rank and its present state.

    `buffers` are the binary parts of the state, by their paths in the state.  `clears_next` is True
    if an `Output` widget has to be cleared before its next output (`clear_output(wait=True)`).
    """

    rank: int
    state: dict[str, Any] = field(default_factory=dict)
    buffers: dict[tuple[Any, ...], bytes] = field(default_factory=dict)
    clears_next: bool = False

    @property
    def captures(self) -> bool:
        """Whether the widget is an `Output`, which captures what its `with` block outputs."""
        return self.state.get("_model_name") == "OutputModel"

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """The outputs that an `Output` widget shows, as a notebook file has them.

        Items that are no dicts are left out.
        """
        outputs = self.state.get("outputs")
        parts = outputs if isinstance(outputs, list | tuple) else ()
        return [each for each in parts if isinstance(each, dict)]

    def change(self, comm: Comm) -> None:
        """Update the state from a message, if the message has the state or a part of the state."""
        state = comm.data.get("state")
        if not isinstance(state, Mapping):
            return
        self.state.update(state)
        self.buffers = {path: each for path, each in self.buffers.items() if path[0] not in state}
        paths = comm.data.get("buffer_paths") or ()
        self.buffers.update(zip(map(tuple, paths), comm.buffers, strict=False))

    def whole(self) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        """Return the data of a message with the whole state, and the buffers of the state."""
        data = {"state": self.state, "buffer_paths": [[*path] for path in self.buffers]}
        return data, (*self.buffers.values(),)


class Widgets:
    """The models of all widgets of a world's ranks."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.ended_widgets: dict[str, int] = {}
        """By id: the rank of each widget that `end` has closed.

        The notebook replaces these widgets in its panels by texts, and then empties the table.
        """
        self._messages: list[Comm] = []
        # By rank: the ids of the `Output` widgets that capture its outputs, the innermost last.
        self._capturing: dict[int, list[str]] = {}
        self._written: dict[str, None] = {}  # ids of `Output` widgets whose new outputs pages lack
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<Widgets {len(self.models)} models, {len(self._messages)} messages wait>"

    def handle_output(self, rank: int, output: Output) -> Output | None:
        """Handle an output of a rank; return the output that the cell shows, None if it shows none.

        A message of a widget updates the widget's model.  Output in the `with` block of an `Output`
        widget is added to that widget, and the cell does not show it.
        """
        with self._lock:
            match output:
                case Comm(id=name):
                    if name in self.models and self.models[name].rank != rank:
                        return Display({"text/plain": NOT_ITS_OWN}, {})
                    self._handle_comm(rank, output)
                    return None
                case Died():
                    self.end([rank])
                case Done():  # ends an open capture; a callback may begin another one later
                    self._capturing.pop(rank, None)
                case Text() | Display() | Clear() | Failure(connections="") if inside := (
                    self._capturing.get(rank)
                ):
                    self._capture(inside[-1], output)
                    return None
                case Display() | DisplayUpdate() if WIDGET in output.data:
                    return self._shown(output)
            return output

    def _handle_comm(self, rank: int, comm: Comm) -> None:
        if comm.kind == "comm_open":
            self.models[comm.id] = model = Model(rank)
            model.change(comm)
        elif (existing := self.models.get(comm.id)) is None:  # opened before this notebook attached
            return
        elif comm.kind == "comm_close":
            self._forget(comm.id)
        else:
            model = existing
            model.change(_without_echoed_outputs(comm) if model.captures else comm)
        if comm.id in self.models and model.captures:
            self._begin_or_end(model, comm)
        self._messages.append(comm)

    def _begin_or_end(self, model: Model, comm: Comm) -> None:
        """Begin or end the capturing of a rank's outputs by an `Output` widget.

        A message with a `msg_id` begins it, a message with an empty `msg_id` ends it.  Other
        messages change nothing.
        """
        inside = self._capturing.setdefault(model.rank, [])
        begins = bool(model.state.pop("msg_id", ""))
        if "msg_id" in (comm.data.get("state") or {}):
            inside[:] = [each for each in inside if each != comm.id]
            if begins:
                inside.append(comm.id)
        if not inside:
            del self._capturing[model.rank]

    def _capture(self, name: str, output: Text | Display | Clear | Failure) -> None:
        model = self.models[name]
        outputs = model.outputs
        if model.clears_next or (isinstance(output, Clear) and not output.wait):
            outputs, model.clears_next = [], False
        match output:
            case Clear(wait=wait):
                model.clears_next = wait
            case Text(stream, text):
                last = outputs[-1] if outputs else {}
                if last.get("name") == stream and isinstance(before := last.get("text"), str):
                    text = before + text
                    outputs.pop()
                saved = {"output_type": "stream", "name": stream, "text": text[-MAX_WIDGET_TEXT:]}
                outputs.append(saved)
            case _:
                outputs.append(as_saved(output))
        model.state["outputs"] = outputs[-MAX_WIDGET_OUTPUTS:]
        self._written[name] = None

    def _shown(self, output: Display | DisplayUpdate) -> Display | DisplayUpdate:
        """Return a widget's display; if its model is not known, a text with a remedy instead."""
        view = output.data[WIDGET]
        name = str(view.get("model_id", "")) if isinstance(view, Mapping) else ""
        if name in self.models:
            return output
        text = f"{events.plain_of({**output.data, WIDGET: ''})} {UNKNOWN_WIDGET}"
        return output._replace(data={"text/plain": text})

    # --- for pages ------------------------------------------------------------------------

    def pop_messages(self) -> list[tuple[int, Comm]]:
        """Return the messages for pages and for ranks since the last call.

        Each message is in a pair with the rank to which it must be sent, -1 for pages.
        """
        with self._lock:
            comms, self._messages = merged(map(self._for_page, self._messages)), []
            messages = [(-1, each) for each in comms]
            for name in self._written:
                if model := self.models.get(name):
                    data = {"method": "update", "state": {"outputs": model.state["outputs"]}}
                    comm = Comm("comm_msg", name, {**data, "buffer_paths": []}, {})
                    # The rank's own widget gets the outputs too, as from a page that shows it.
                    messages += [(-1, comm), (model.rank, comm)]
            self._written.clear()
            return messages

    def _for_page(self, comm: Comm) -> Comm:
        """Return a message without the parts by which a page would capture outputs itself.

        `msg_id` and echoes of outputs are left out, because `Widgets` captures outputs itself.
        """
        model = self.models.get(comm.id)
        if model is None or not model.captures:
            return comm
        return _without(_without_echoed_outputs(comm), "msg_id")

    def from_page(self, comm: Comm) -> int | None:
        """Update a model by a message of a page; return the rank to which the message must be sent.

        Returns None if there is no such model.
        """
        with self._lock:
            if (model := self.models.get(comm.id)) is None:
                return None
            if comm.kind == "comm_close":
                self._forget(comm.id)
            elif comm.data.get("method") == "update":
                model.change(comm)
            return model.rank

    def whole(self, name: str) -> Comm | None:
        """Return a message for a page with the whole state of a model; None without this model."""
        with self._lock:
            if (model := self.models.get(name)) is None:
                return None
            data, buffers = model.whole()
            return Comm("comm_msg", name, {"method": "update", **data}, {}, buffers)

    # --- ends and new numbers of ranks ----------------------------------------------------

    def end(self, ranks: Collection[int] | None = None) -> None:
        """Close the widgets of ranks that have ended, by default of all ranks."""
        with self._lock:
            for name, model in [*self.models.items()]:
                if ranks is None or model.rank in ranks:
                    self._forget(name)
                    self.ended_widgets[name] = model.rank
                    self._messages.append(Comm("comm_close", name, {}, {}))

    def renumber(self, became: Mapping[int, int]) -> None:
        """Change the models' ranks to the new numbers; close the widgets of ranks that are gone."""
        with self._lock:
            self.end({model.rank for model in self.models.values()} - became.keys())
            self._capturing.clear()
            for model in self.models.values():
                model.rank = became[model.rank]

    def _forget(self, name: str) -> None:
        model = self.models.pop(name)
        if name in (inside := self._capturing.get(model.rank, [])):
            inside.remove(name)
            if not inside:
                del self._capturing[model.rank]


def _without_echoed_outputs(comm: Comm) -> Comm:
    """Return a message of an `Output` widget, without the outputs if the message is an echo.

    A rank echoes the outputs that it has got (`Widgets.pop_messages`).  Meanwhile the widget may
    have captured more outputs, which the echo lacks.
    """
    return _without(comm, "outputs") if comm.data.get("method") == "echo_update" else comm


def _without(comm: Comm, name: str) -> Comm:
    """Return a message whose state lacks one name."""
    state = comm.data.get("state")
    if not isinstance(state, Mapping):
        return comm
    kept = {key: value for key, value in state.items() if key != name}
    return comm._replace(data={**comm.data, "state": kept})


MODEL_REFERENCE = "IPY_MODEL_"  # the prefix of an id in a state that refers to another model


def merged(comms: Iterable[Comm]) -> list[Comm]:
    """Return the messages, with successive changes of a widget's state joined to one message.

    Without this, a loop that moves a slider would send the page a message for each step and rank,
    and Jupyter's server drops messages beyond 1,000 a second.

    Only changes to numbers and texts are joined, so that a later value replaces an earlier one.
    Values of other types must all arrive: plotly, for example, sends a call as a dict and then
    sends None.

    Changes that directly follow the opening of a widget are put into the message that opens it.
    Otherwise anywidget would lose changes that arrive while a page loads the widget's code.
    """
    result: list[Comm] = []
    fresh: dict[str, int] = {}  # by id, the index in `result` of an opening message without buffers
    joined: dict[tuple[str, str], Comm] = {}
    for comm in comms:
        state = comm.data.get("state")
        is_change = comm.kind == "comm_msg" and isinstance(state, Mapping) and not comm.buffers
        new: dict[str, Any] = {**state} if is_change and state else {}
        if is_change and comm.id in fresh and MODEL_REFERENCE not in repr(new):
            result[fresh[comm.id]] = _changed(result[fresh[comm.id]], new)
            continue
        fresh.pop(comm.id, None)
        key = comm.id, str(comm.data.get("method"))
        before = joined[key].data["state"] if key in joined else {}
        values = (*before.values(), *new.values())
        if not is_change or not all(isinstance(each, int | float | str) for each in values):
            result += joined.values()
            joined.clear()
        if not is_change:
            if comm.kind == "comm_open" and not comm.buffers:
                fresh[comm.id] = len(result)
            result.append(comm)
        elif new:
            joined[key] = _changed(joined[key], new) if key in joined else comm
    return [*result, *joined.values()]


def _changed(comm: Comm, new: Mapping[str, Any]) -> Comm:
    return comm._replace(data={**comm.data, "state": {**comm.data.get("state", {}), **new}})


def as_saved(output: Display | Failure) -> dict[str, Any]:
    """Return an output in the format of a notebook file."""
    if isinstance(output, Failure):
        trace = [*output.traceback]
        error = {"ename": output.name, "evalue": output.message, "traceback": trace}
        return {"output_type": "error", **error}
    data, metadata = {**output.data}, {**output.metadata}
    return {"output_type": "display_data", "data": data, "metadata": metadata}
