"""Rich output of ranks outside of panels: figures in files, displays below a panel, and widgets.

Runs in the notebook's process.  `PlainDisplay` saves figures to files, `PanelDisplay` shows
displays below its panel, and `LateOutput` owns a `WidgetRelay`.
"""

from __future__ import annotations

import hashlib
import sys
import uuid
from base64 import b64decode
from binascii import Error as BadBase64
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display, update_display
from packaging.version import Version

from nbdist.notebook.output_count import OUTPUTS
from nbdist.output.events import Comm, CommKind, Display, MimeBundle, plain_of, text_of
from nbdist.output.html import MAX_DISPLAYS_BELOW, page_only_displays
from nbdist.output.html_parts import bold, panel
from nbdist.output.mimes import images_in
from nbdist.output.transcript import Transcript
from nbdist.system.folders import PRIVATE_FILE, make_private, whole_file
from nbdist.wire.messages import ToWidget
from nbdist.words import format_ranks, in_pool, name_ranks
from nbdist.world.engine import Engine
from nbdist.world.spec import default_log_dir

if TYPE_CHECKING:  # not imported otherwise, since most notebooks have no widgets
    from nbdist.world.widgets import Widgets

# --- figures in terminals: files beside the log of their rank -------------------------------------

FIGURES = "figures"  # folder in the log folder, for figures of ranks on other machines


def save_figures(transcript: Transcript, logs: Mapping[int, str]) -> Iterator[str]:
    """Write each figure of a cell to a file; yield a line for each: `figure of rank 0: PATH`.

    If a figure cannot be saved, its line says why.  Ranks whose outputs are alike share a file.
    The file's name has a digest of the image, so an image that is already in the folder is not
    written again.  `logs` has by rank the path of the log file.  The figure is saved beside the log
    file, or in the folder `FIGURES` if the log file is on another machine.
    """
    for group in transcript.groups():
        for shown in group.displays:
            if (image := _image(shown.display.data)) is not None:
                where = _saved(*image, logs.get(group.ranks[0]))
                yield f"figure of {name_ranks(group.ranks)}: {where}"


def _image(data: MimeBundle) -> tuple[str, bytes] | None:
    if (mime := next(images_in(data), None)) is None:
        return None
    text = text_of(data[mime.kind])
    try:
        return mime.suffix, b64decode(text) if mime.is_base64 else text.encode()
    except (BadBase64, UnicodeError):
        return None


def _saved(suffix: str, image: bytes, log: str | None) -> str:
    # The path of a log file on another machine begins with the machine's name: `node1:/...`.
    is_here = log is not None and log.startswith("/")
    own_folder = default_log_dir()
    if log is None or not (is_here or own_folder):
        return "not saved: there is no log folder (NBDIST_LOG_DIR)"
    digest = hashlib.blake2b(image, digest_size=6).hexdigest()
    folder = Path(log).parent if is_here else Path(own_folder).expanduser() / FIGURES
    path = folder / f"figure-{digest}.{suffix}"
    try:
        if not is_here:
            make_private(folder)
        if not path.exists():
            with whole_file(path, PRIVATE_FILE) as file:
                file.write(image)
    except OSError as error:
        return f"not saved in {path.parent}: {error.strerror}"
    return str(path)


# --- displays below a panel, for content that the panel cannot embed --------------------------

EMPTY_HTML = "<span></span>"  # replaces an output that a page shows elsewhere, or not any more

EMPTY = Display({"text/html": EMPTY_HTML, "text/plain": ""}, {})


class Below:
    """Shows displays below a panel; captions name the ranks if the cell ran on several ranks."""

    def __init__(self, pool: str = "") -> None:
        self._pool = pool
        self._id = f"nbdist-{uuid.uuid4().hex}"
        self._shown: list[Display] = []

    @property
    def count(self) -> int:
        """The number of displays, with the captions."""
        return len(self._shown)

    def add(self, transcript: Transcript, of: Collection[int] | None = None) -> None:
        """Show new displays of the ranks in `of`, by default of all ranks, below earlier displays.

        Does nothing if a new display belongs above a display that is shown, or if a display that is
        shown has changed: the page would have to rebuild the widgets of displays that move or
        change.
        """
        now = below_panel(transcript, of, self._pool)
        if now[: len(self._shown)] == self._shown:
            self._append(now)

    def end(self, transcript: Transcript) -> None:
        """Show the displays of a cell that has ended, by rank; redraw those that have changed."""
        now = below_panel(transcript, pool=self._pool)
        self._change(now)
        self._append(now)

    def _append(self, now: Sequence[Display]) -> None:
        for shown in now[len(self._shown) :]:
            self._draw(display, len(self._shown), shown)
            self._shown.append(shown)
            OUTPUTS.number += 1

    def change(self, transcript: Transcript) -> None:
        """Redraw the displays that have changed; do not add displays that came since `end`."""
        if self._shown:
            self._change(below_panel(transcript, pool=self._pool))

    def _change(self, now: Sequence[Display]) -> None:
        for number, before in enumerate(self._shown):
            shown = now[number] if number < len(now) else EMPTY
            if shown != before:
                self._shown[number] = shown
                self._draw(update_display, number, shown)

    def _draw(self, draw: Callable[..., object], number: int, shown: Display) -> None:
        data, metadata = dict(shown.data), dict(shown.metadata)
        draw(data, metadata=metadata, display_id=f"{self._id}-{number}", raw=True)


def below_panel(
    transcript: Transcript, of: Collection[int] | None = None, pool: str = ""
) -> list[Display]:
    """Return the displays that only the page can render, with captions that name the ranks.

    If the cell ran on one rank, captions are left out, since the panel's head names that rank.
    With `of`, returns all such displays of these ranks.  Without `of`, returns at most
    `MAX_DISPLAYS_BELOW` such displays, and a caption that says which ranks have more.
    """
    displays = page_only_displays(transcript, of)
    limit = MAX_DISPLAYS_BELOW if of is None else len(displays)
    shown: list[Display] = []
    for ranks, run in groupby(displays[:limit], key=itemgetter(0)):
        shown += [_caption(name_ranks(ranks))] if len(transcript.ranks) > 1 else []
        shown += (_readable(each) for _, each in run)
    if hidden := displays[limit:]:
        ranks = sorted({rank for group, _ in hidden for rank in group})
        again = in_pool(f"`%dist_output -r {format_ranks(ranks)}` shows them", pool)
        shown.append(_caption(f"… {len(hidden)} more displays of {name_ranks(ranks)}: {again}"))
    return shown


def _readable(shown: Display) -> Display:
    """Return a display whose text/plain describes the content and does not only name a class."""
    return shown._replace(data={**shown.data, "text/plain": plain_of(shown.data)})


def _caption(text: str) -> Display:
    return Display({"text/html": panel(bold(text)), "text/plain": text}, {})


# --- widgets: messages between a widget's object on a rank and its model on the page --------------

# Each widget has a comm, which is a Jupyter connection between the notebook's kernel and the page.
# The comm has the id of the widget on its rank.

CONTROL = "jupyter.widget.control"
"""The comm target by which a reloaded page asks for the state of all widgets."""


class WidgetRelay:
    """Passes messages between widgets of the ranks and the pages that show the widgets.

    `widgets` has the notebook's copy of the widgets' state.  Until the relay is closed, it also
    sends that state to pages that ask for the state of all widgets.
    """

    def __init__(self, shell: InteractiveShell, widgets: Widgets, engine: Engine) -> None:
        self.widgets = widgets
        self._engine = engine
        self._shell = shell
        self._manager: Any = shell.kernel.comm_manager  # type: ignore[attr-defined]
        self._open: dict[str, Any] = {}
        _RELAYS.append(self)
        shell.events.register("post_run_cell", self._answer_pages)
        self._answer_pages()

    def __repr__(self) -> str:
        return f"<WidgetRelay {len(self._open)} connections of {self.widgets}>"

    def show(self) -> None:
        """Send the ranks' new messages to the pages.

        The rank of an `Output` widget also gets the outputs that the widget has captured, as a page
        would send them.
        """
        for rank, comm in self.widgets.pop_messages():
            if rank >= 0:
                self._send(rank, comm)
            elif comm.kind == "comm_open":
                self._connect(comm)
            elif (opened := self._open.get(comm.id)) is None:  # a page has closed the comm
                continue
            elif comm.kind == "comm_msg":
                opened.send({**comm.data}, {**comm.metadata}, [*comm.buffers])
            else:
                del self._open[comm.id]
                opened.close()

    def close(self) -> None:
        """End the widgets, close their comms, and answer no more requests of pages for them."""
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
        opened.on_msg(partial(self._handle_message, "comm_msg", comm.id))
        opened.on_close(partial(self._handle_message, "comm_close", comm.id))
        self._open[comm.id] = opened

    def _handle_message(self, kind: CommKind, name: str, message: Mapping[str, Any]) -> None:
        """Pass a message of a page to the rank of its widget.

        A request for the widget's state is answered here, from the notebook's copy of the state.
        """
        content = message["content"]
        data = content.get("data") or {}
        if data.get("method") == "request_state":  # sent by a reloaded page with old ipywidgets
            opened, whole = self._open.get(name), self.widgets.whole(name)
            if opened is not None and whole is not None:
                opened.send({**whole.data}, {}, [*whole.buffers])
            return
        buffers = tuple(map(bytes, message.get("buffers") or ()))
        comm = Comm(kind, name, data, message.get("metadata") or {}, buffers)
        if kind == "comm_close":
            self._open.pop(name, None)
        if (rank := self.widgets.from_page(comm)) is not None:
            self._send(rank, comm)

    def _send(self, rank: int, comm: Comm) -> None:
        link = self._engine.connection.link
        if link.is_up:
            link.send(ToWidget(rank, comm))

    def _answer_pages(self, *_: object) -> None:
        """Register `answer_page` for requests of all widgets' states, if it is not registered now.

        This runs after each cell, because `import ipywidgets` in a cell registers a function that
        leaves out the ranks' widgets.
        """
        if self._manager.targets.get(CONTROL) is not answer_page:
            self._manager.register_target(CONTROL, answer_page)


_RELAYS: list[WidgetRelay] = []


def answer_page(control: Any, _: Mapping[str, Any]) -> None:
    """Answer requests for the state of all widgets on a comm that a page has opened."""
    control.on_msg(partial(_send_states, control))


def _send_states(control: Any, message: Mapping[str, Any]) -> None:
    if message["content"]["data"].get("method") != "request_states":
        return
    states: dict[str, Any] = {}
    paths: list[list[Any]] = []
    buffers: list[bytes] = []
    for name, state, buffers_by_path in _states():
        states[name] = {
            "model_name": state["_model_name"],
            "model_module": state["_model_module"],
            "model_module_version": state["_model_module_version"],
            "state": state,
        }
        for path, buffer in buffers_by_path.items():
            paths.append([name, "state", *path])
            buffers.append(buffer)
    data = {"method": "update_states", "states": states, "buffer_paths": paths}
    control.send(data, buffers=buffers)


def _states() -> Iterator[tuple[str, Mapping[str, Any], Mapping[tuple[Any, ...], bytes]]]:
    """Yield id, state and buffers of each widget model, of the ranks and of the notebook."""
    for relay in _RELAYS:
        for name, model in [*relay.widgets.models.items()]:
            yield name, {**model.state}, {**model.buffers}
    if (ipywidgets := sys.modules.get("ipywidgets")) is not None:
        for name, state in ipywidgets.Widget.get_manager_state()["state"].items():
            buffers = {
                tuple(each["path"]): b64decode(each["data"]) for each in state.get("buffers", ())
            }
            yield name, state["state"], buffers


def create_comm(**options: Any) -> Any:
    """Open a comm to the page, also with an ipykernel that is older than the package `comm`."""
    if Version(version("ipykernel")) < Version("6.18"):
        from ipykernel.comm import Comm as OwnComm

        return OwnComm(**options)
    import comm

    return comm.create_comm(**options)
