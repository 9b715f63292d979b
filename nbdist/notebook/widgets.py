"""The widgets of ranks on the page: messages from the ranks to their models there, and back.

In the notebook's process, imported at the first widget.  Each model has a connection of the
notebook's own kernel to the page, with the id that it has on its rank.  What a page says is sent to
the rank at once, from whichever thread the kernel hears it in.
"""

from __future__ import annotations

import sys
from base64 import b64decode
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from packaging.version import Version

from nbdist.output.events import Comm, CommKind
from nbdist.wire.messages import ToWidget
from nbdist.world.session import Session
from nbdist.world.widgets import Widgets

CONTROL = "jupyter.widget.control"
"""By which a page asks for the state of all widgets, once it was reloaded."""


class WidgetRelay:
    """Passes on what the ranks' `widgets` and the pages of this notebook say to one another."""

    def __init__(self, shell: InteractiveShell, widgets: Widgets, session: Session) -> None:
        self.widgets = widgets
        self._session = session
        self._shell = shell
        self._manager: Any = shell.kernel.comm_manager  # type: ignore[attr-defined]
        self._open: dict[str, Any] = {}
        _RELAYS.append(self)
        shell.events.register("post_run_cell", self._answer_pages)
        self._answer_pages()

    def __repr__(self) -> str:
        return f"<WidgetRelay {len(self._open)} connections of {self.widgets}>"

    def show(self) -> None:
        """Send pages what the ranks have said, and the ranks what pages would say of that."""
        for rank, comm in self.widgets.news():
            if rank >= 0:
                self._send(rank, comm)
            elif comm.kind == "comm_open":
                self._connect(comm)
            elif (known := self._open.get(comm.id)) is None:  # a page has closed it
                continue
            elif comm.kind == "comm_msg":
                known.send({**comm.data}, {**comm.metadata}, [*comm.buffers])
            else:
                del self._open[comm.id]
                known.close()

    def close(self) -> None:
        """Close all connections, and answer pages no more."""
        self.widgets.end()
        self.show()
        _RELAYS.remove(self)
        self._shell.events.unregister("post_run_cell", self._answer_pages)
        if not _RELAYS:
            self._manager.targets.pop(CONTROL, None)
            if (ipywidgets := sys.modules.get("ipywidgets")) is not None:
                ipywidgets.register_comm_target()

    def _connect(self, comm: Comm) -> None:
        opened = create_comm(
            target_name=comm.target,
            comm_id=comm.id,
            data={**comm.data},
            metadata={**comm.metadata},
            buffers=[*comm.buffers],
        )
        opened.on_msg(partial(self._hear, "comm_msg", comm.id))
        opened.on_close(partial(self._hear, "comm_close", comm.id))
        self._open[comm.id] = opened

    def _hear(self, kind: CommKind, name: str, message: Mapping[str, Any]) -> None:
        """Pass on what a page says; answer at once what can be answered here."""
        content = message["content"]
        data = content.get("data") or {}
        if data.get("method") == "request_state":  # of an older page, which was reloaded
            if whole := self.widgets.whole(name):
                self._open[name].send({**whole.data}, {}, [*whole.buffers])
            return
        buffers = tuple(map(bytes, message.get("buffers") or ()))
        comm = Comm(kind, name, data, message.get("metadata") or {}, buffers)
        if kind == "comm_close":
            self._open.pop(name, None)
        if (rank := self.widgets.from_page(comm)) is not None:
            self._send(rank, comm)

    def _send(self, rank: int, comm: Comm) -> None:
        link = self._session.link
        if link.is_up:
            link.send(ToWidget(rank, comm))

    def _answer_pages(self, *_: object) -> None:
        """Be asked for all widgets; `import ipywidgets` takes that for itself."""
        if self._manager.targets.get(CONTROL) is not answer_page:
            self._manager.register_target(CONTROL, answer_page)


_RELAYS: list[WidgetRelay] = []


def answer_page(control: Any, _: Mapping[str, Any]) -> None:
    """Answer a page that opens this connection to ask for the widgets that there are."""
    control.on_msg(partial(_send_states, control))


def _send_states(control: Any, message: Mapping[str, Any]) -> None:
    if message["content"]["data"].get("method") != "request_states":
        return
    states: dict[str, Any] = {}
    paths: list[list[Any]] = []
    buffers: list[bytes] = []
    for name, state, found in _states():
        states[name] = {
            "model_name": state["_model_name"],
            "model_module": state["_model_module"],
            "model_module_version": state["_model_module_version"],
            "state": state,
        }
        for path, buffer in found.items():
            paths.append([name, "state", *path])
            buffers.append(buffer)
    data = {"method": "update_states", "states": states, "buffer_paths": paths}
    control.send(data, buffers=buffers)


def _states() -> Iterator[tuple[str, Mapping[str, Any], Mapping[tuple[Any, ...], bytes]]]:
    """Yield id, state and buffers of all models: the ranks', and the notebook's own."""
    for relay in _RELAYS:
        for name, model in [*relay.widgets.models.items()]:
            yield name, {**model.state}, {**model.buffers}
    if (ipywidgets := sys.modules.get("ipywidgets")) is not None:
        for name, own in ipywidgets.Widget.get_manager_state()["state"].items():
            found = {
                tuple(each["path"]): b64decode(each["data"]) for each in own.get("buffers", ())
            }
            yield name, own["state"], found


def create_comm(**options: Any) -> Any:
    """Open a connection to the page, also with an ipykernel that is older than `comm`."""
    if Version(version("ipykernel")) < Version("6.18"):
        from ipykernel.comm import Comm as OwnComm

        return OwnComm(**options)
    import comm

    return comm.create_comm(**options)
