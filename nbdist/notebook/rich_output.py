"""Rich output of ranks beside their panel: figures in files, displays below it, and widgets."""

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
from nbdist.output.events import Comm, CommKind, Display, MimeBundle, plain_of
from nbdist.output.html import MOST_BELOW, leftovers
from nbdist.output.transcript import Transcript
from nbdist.output.wording import bold, panel
from nbdist.system.folders import PRIVATE_FILE, make_private, whole_file
from nbdist.wire.messages import ToWidget
from nbdist.words import format_ranks, in_pool, name_ranks
from nbdist.world.session import Session
from nbdist.world.spec import default_log_dir

if TYPE_CHECKING:  # most notebooks have no widgets
    from nbdist.world.widgets import Widgets

# --- figures where no page draws: each in a file of its own, beside the log of its rank ----------

SUFFIXES = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/webp": "webp",
    "image/svg+xml": "svg",
}

FIGURES = "figures"  # in the log folder, where those of ranks on other machines go


def save_figures(transcript: Transcript, logs: Mapping[int, str]) -> Iterator[str]:
    """Write each figure of a cell to a file, and say which: `figure of rank 0: PATH`.

    One for ranks that have the same; its name is made of what is in it, so that it is written
    once however often it is shown.  `logs` are the log files of ranks.
    """
    for group in transcript.groups():
        for shown in group.displays:
            if (found := _image(shown.display.data)) is not None:
                where = _saved(*found, logs.get(group.ranks[0]))
                yield f"figure of {name_ranks(group.ranks)}: {where}"


def _image(data: MimeBundle) -> tuple[str, bytes] | None:
    for kind, suffix in SUFFIXES.items():
        if kind in data:
            text = "".join(data[kind])
            try:
                return suffix, text.encode() if suffix == "svg" else b64decode(text)
            except (BadBase64, UnicodeError):
                return None
    return None


def _saved(suffix: str, image: bytes, log: str | None) -> str:
    if log is None:
        return "not saved: there is no log folder (NBDIST_LOG_DIR)"
    digest = hashlib.blake2b(image, digest_size=6).hexdigest()
    # `node1:/...` is a file of another machine's.
    is_here = log.startswith("/")
    folder = Path(log).parent if is_here else Path(default_log_dir(), FIGURES)
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


# --- what a panel cannot embed, in displays of its own below it -------------------------------

NOTHING = "<span></span>"  # what a page draws of a figure that the panel shows already

EMPTY = Display({"text/html": NOTHING, "text/plain": ""}, {})


class Below:
    """The displays below one panel, under captions that name their ranks."""

    def __init__(self, pool: str = "") -> None:
        self._pool = pool
        self._id = f"nbdist-{uuid.uuid4().hex}"
        self._shown: list[Display] = []

    @property
    def count(self) -> int:
        """How many displays there are."""
        return len(self._shown)

    def add(self, transcript: Transcript, of: Collection[int] | None = None) -> None:
        """Show what ranks have that is new, below all else: nothing moves, as a page may draw."""
        now = below_panel(transcript, of, self._pool)
        if now[: len(self._shown)] == self._shown:
            self._append(now)

    def end(self, transcript: Transcript) -> None:
        """Show those of all ranks, in the order of these."""
        now = below_panel(transcript, pool=self._pool)
        self._change(now)
        self._append(now)

    def _append(self, now: Sequence[Display]) -> None:
        for shown in now[len(self._shown) :]:
            self._draw(display, len(self._shown), shown)
            self._shown.append(shown)
            OUTPUTS.number += 1

    def change(self, transcript: Transcript) -> None:
        """Show what has changed in its place; there is no room for more displays than before."""
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
    """Return what the page has to render itself, each run of it below a caption.

    `MOST_BELOW` at most, unless it is `of` these ranks alone; a line says which have more.
    """
    found = leftovers(transcript, of)
    most = MOST_BELOW if of is None else len(found)
    shown: list[Display] = []
    for ranks, run in groupby(found[:most], key=itemgetter(0)):
        shown += [_caption(name_ranks(ranks)), *(_readable(each) for _, each in run)]
    if left := found[most:]:
        ranks = sorted({rank for those, _ in left for rank in those})
        again = in_pool(f"`%dist_output -r {format_ranks(ranks)}` shows them", pool)
        shown.append(_caption(f"… {len(left)} more displays of {name_ranks(ranks)}: {again}"))
    return shown


def _readable(shown: Display) -> Display:
    """Give a display a text that says what it holds, and not the name of its class."""
    return shown._replace(data={**shown.data, "text/plain": plain_of(shown.data)})


def _caption(text: str) -> Display:
    return Display({"text/html": panel(bold(text)), "text/plain": text}, {})


# --- widgets: messages from the ranks to their models on the page, and back -----------------------

# Each model has a connection of the notebook's own kernel to the page, with the id that it has on
# its rank.  What a page says is sent to the rank at once, from whichever thread the kernel hears it
# in.

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
