"""The widgets of ranks as the notebook's page is to have them: their models, and what they capture.

Pure, in the notebook's process, made at the first message of a widget.  Its news are passed on by
`nbdist.notebook.rich_output`; a page may speak in another thread while a cell runs: hence the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.output import events
from nbdist.output.events import (
    WIDGET,
    Clear,
    Comm,
    Died,
    Display,
    Done,
    Failure,
    Output,
    Text,
    Update,
)

NOT_ITS_OWN = "(a message was dropped: it is for a widget of another rank)"
UNKNOWN = "(this page does not have this widget: run the cell again that makes it)"

MOST_OUTPUTS, MOST_TEXT = 500, 200_000
"""The numbers of an `Output` widget's last outputs, and of a text's last characters, to keep."""


@dataclass
class Model:
    """A widget's model: its rank, and its state now; `buffers` are parts of that by path."""

    rank: int
    state: dict[str, Any] = field(default_factory=dict)
    buffers: dict[tuple[Any, ...], bytes] = field(default_factory=dict)
    clears_next: bool = False

    @property
    def captures(self) -> bool:
        """Whether it is an `Output`, which shows what is printed inside of it."""
        return self.state.get("_model_name") == "OutputModel"

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """A list of what an `Output` shows, without parts that no page could show."""
        found = self.state.get("outputs")
        parts = found if isinstance(found, list | tuple) else ()
        return [each for each in parts if isinstance(each, dict)]

    def change(self, comm: Comm) -> None:
        """Take in the state that a message has, or a part of it."""
        state = comm.data.get("state")
        if not isinstance(state, Mapping):
            return
        self.state.update(state)
        self.buffers = {path: each for path, each in self.buffers.items() if path[0] not in state}
        paths = comm.data.get("buffer_paths") or ()
        self.buffers.update(zip(map(tuple, paths), comm.buffers, strict=False))

    def whole(self) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        """Return the state with the places of its buffers, as messages have it; and these."""
        data = {"state": self.state, "buffer_paths": [[*path] for path in self.buffers]}
        return data, (*self.buffers.values(),)


class Widgets:
    """All models of the ranks of one world."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.gone: dict[str, int] = {}
        """By id the ranks of widgets that have ended with these, until the notebook shows that."""
        self._news: list[Comm] = []
        self._capturing: dict[int, list[str]] = {}  # by rank the `Output`s, the innermost last
        self._written: dict[str, None] = {}  # the `Output`s with other outputs than pages have
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<Widgets {len(self.models)} models, {len(self._news)} messages wait>"

    def take(self, rank: int, output: Output) -> Output | None:
        """Take in what a rank has said; return what of it is for the cell, None for nothing."""
        with self._lock:
            match output:
                case Comm(id=name):
                    if name in self.models and self.models[name].rank != rank:
                        return Display({"text/plain": NOT_ITS_OWN}, {})
                    self._take_comm(rank, output)
                    return None
                case Died():
                    self.end([rank])
                case Done():  # what it does later is in no `Output` of its cell
                    self._capturing.pop(rank, None)
                case Text() | Display() | Clear() | Failure(connections="") if inside := (
                    self._capturing.get(rank)
                ):
                    self._capture(inside[-1], output)
                    return None
                case Display() | Update() if WIDGET in output.data:
                    return self._shown(output)
            return output

    def _take_comm(self, rank: int, comm: Comm) -> None:
        if comm.kind == "comm_open":
            self.models[comm.id] = model = Model(rank)
            model.change(comm)
        elif (known := self.models.get(comm.id)) is None:  # another notebook has seen it opened
            return
        elif comm.kind == "comm_close":
            self._forget(comm.id)
        else:
            model = known
            model.change(comm)
        if comm.id in self.models and model.captures:
            self._begin_or_end(model, comm)
        self._news.append(comm)

    def _begin_or_end(self, model: Model, comm: Comm) -> None:
        """Note whether what its rank shows from now on is shown inside of this `Output`."""
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
                said = {"output_type": "stream", "name": stream, "text": text[-MOST_TEXT:]}
                outputs.append(said)
            case _:
                outputs.append(as_saved(output))
        model.state["outputs"] = outputs[-MOST_OUTPUTS:]
        self._written[name] = None

    def _shown(self, output: Display | Update) -> Display | Update:
        """Return it, or its text and what to do where no page has its model."""
        view = output.data[WIDGET]
        name = str(view.get("model_id", "")) if isinstance(view, Mapping) else ""
        if name in self.models:
            return output
        text = f"{events.plain_of({**output.data, WIDGET: ''})} {UNKNOWN}"
        return output._replace(data={"text/plain": text})

    # --- for pages ------------------------------------------------------------------------

    def news(self) -> list[tuple[int, Comm]]:
        """Return what pages have to know since this was last asked; and what the ranks have to.

        Each with its rank, which is -1 for pages.
        """
        with self._lock:
            said, self._news = merged(map(self._for_page, self._news)), []
            found = [(-1, each) for each in said]
            for name in self._written:
                if model := self.models.get(name):
                    data = {"method": "update", "state": {"outputs": model.state["outputs"]}}
                    comm = Comm("comm_msg", name, {**data, "buffer_paths": []}, {})
                    # As a page would that shows it: the rank's own has them too.
                    found += [(-1, comm), (model.rank, comm)]
            self._written.clear()
            return found

    def _for_page(self, comm: Comm) -> Comm:
        """Leave out by what an `Output` finds its outputs, and these: they are shown from here."""
        model = self.models.get(comm.id)
        state = comm.data.get("state")
        if model is None or not model.captures or not isinstance(state, Mapping):
            return comm
        echoes = comm.data.get("method") == "echo_update"
        own = {k: v for k, v in state.items() if k != "msg_id" and not (k == "outputs" and echoes)}
        return comm._replace(data={**comm.data, "state": own})

    def from_page(self, comm: Comm) -> int | None:
        """Take in what a page says; return the rank that it is for, None where that is gone."""
        with self._lock:
            if (model := self.models.get(comm.id)) is None:
                return None
            if comm.kind == "comm_close":
                self._forget(comm.id)
            elif comm.data.get("method") == "update":
                model.change(comm)
            return model.rank

    def whole(self, name: str) -> Comm | None:
        """Return the state of a model as the message that a page asks for; None if it is gone."""
        with self._lock:
            if (model := self.models.get(name)) is None:
                return None
            data, buffers = model.whole()
            return Comm("comm_msg", name, {"method": "update", **data}, {}, buffers)

    # --- what becomes of the ranks --------------------------------------------------------

    def end(self, ranks: Collection[int] | None = None) -> None:
        """Close the widgets of ranks that have ended, or of all."""
        with self._lock:
            for name, model in [*self.models.items()]:
                if ranks is None or model.rank in ranks:
                    self._forget(name)
                    self.gone[name] = model.rank
                    self._news.append(Comm("comm_close", name, {}, {}))

    def renumber(self, became: Mapping[int, int]) -> None:
        """Note which number each rank has now; one that has none has ended."""
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


REFERENCE = "IPY_MODEL_"  # begins what in a state stands for another model


def merged(said: Iterable[Comm]) -> list[Comm]:
    """Join the changes of a widget's state that follow one another, and those of one just opened.

    A loop that moves a slider would take the page a message for each step, times the ranks; and
    the server drops what exceeds 1,000 a second.  What is no number or text is not left out: for
    plotly a value is a call, and the None after it its end.  But a page that has not drawn it yet
    gets a widget as it is: anywidget loses messages that come while a page loads its code.
    """
    found: list[Comm] = []
    fresh: dict[str, int] = {}  # by id, the places of those that can take changes in
    joined: dict[tuple[str, str], Comm] = {}
    for comm in said:
        state = comm.data.get("state")
        is_change = comm.kind == "comm_msg" and isinstance(state, Mapping) and not comm.buffers
        new: dict[str, Any] = {**state} if is_change and state else {}
        if is_change and comm.id in fresh and REFERENCE not in repr(new):
            found[fresh[comm.id]] = _changed(found[fresh[comm.id]], new)
            continue
        fresh.pop(comm.id, None)
        key = comm.id, str(comm.data.get("method"))
        before = joined[key].data["state"] if key in joined else {}
        values = (*before.values(), *new.values())
        if not is_change or not all(isinstance(each, int | float | str) for each in values):
            found += joined.values()
            joined.clear()
        if not is_change:
            if comm.kind == "comm_open" and not comm.buffers:
                fresh[comm.id] = len(found)
            found.append(comm)
        elif new:
            joined[key] = _changed(joined[key], new) if key in joined else comm
    return [*found, *joined.values()]


def _changed(comm: Comm, new: Mapping[str, Any]) -> Comm:
    return comm._replace(data={**comm.data, "state": {**comm.data.get("state", {}), **new}})


def as_saved(output: Display | Failure) -> dict[str, Any]:
    """Return it as a notebook file has outputs."""
    if isinstance(output, Failure):
        trace = [*output.traceback]
        said = {"ename": output.name, "evalue": output.message, "traceback": trace}
        return {"output_type": "error", **said}
    data, metadata = {**output.data}, {**output.metadata}
    return {"output_type": "display_data", "data": data, "metadata": metadata}
