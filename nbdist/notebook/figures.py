"""Figures where no page draws: each in a file of its own, beside the log of its rank."""

from __future__ import annotations

import hashlib
import uuid
from base64 import b64decode
from binascii import Error as BadBase64
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from IPython.display import display, update_display

from nbdist.output.events import Display, MimeBundle
from nbdist.output.html import MOST_BELOW, leftovers
from nbdist.output.transcript import Transcript
from nbdist.output.wording import bold, panel
from nbdist.system.folders import PRIVATE_FILE, make_private, whole_file
from nbdist.words import format_ranks, name_ranks
from nbdist.world.spec import default_log_dir

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

    def __init__(self) -> None:
        self._id = f"nbdist-{uuid.uuid4().hex}"
        self._shown: list[Display] = []

    def add(self, transcript: Transcript, of: Collection[int] | None = None) -> None:
        """Show what ranks have that is new, below all else: nothing moves, as a page may draw."""
        now = below_panel(transcript, of)
        if now[: len(self._shown)] == self._shown:
            self._append(now)

    def end(self, transcript: Transcript) -> None:
        """Show those of all ranks, in the order of these."""
        now = below_panel(transcript)
        self._change(now)
        self._append(now)

    def _append(self, now: Sequence[Display]) -> None:
        for shown in now[len(self._shown) :]:
            self._draw(display, len(self._shown), shown)
            self._shown.append(shown)

    def change(self, transcript: Transcript) -> None:
        """Show what has changed in its place; there is no room for more displays than before."""
        if self._shown:
            self._change(below_panel(transcript))

    def _change(self, now: Sequence[Display]) -> None:
        for number, before in enumerate(self._shown):
            shown = now[number] if number < len(now) else EMPTY
            if shown != before:
                self._shown[number] = shown
                self._draw(update_display, number, shown)

    def _draw(self, draw: Callable[..., object], number: int, shown: Display) -> None:
        data, metadata = dict(shown.data), dict(shown.metadata)
        draw(data, metadata=metadata, display_id=f"{self._id}-{number}", raw=True)


def below_panel(transcript: Transcript, of: Collection[int] | None = None) -> list[Display]:
    """Return what the page has to render itself, each run of it below a caption.

    `MOST_BELOW` at most, unless it is `of` these ranks alone; a line says which have more.
    """
    found = leftovers(transcript, of)
    most = MOST_BELOW if of is None else len(found)
    shown: list[Display] = []
    for ranks, run in groupby(found[:most], key=itemgetter(0)):
        shown += [_caption(name_ranks(ranks)), *(each for _, each in run)]
    if left := found[most:]:
        ranks = sorted({rank for those, _ in left for rank in those})
        again = f"`%dist_output -r {format_ranks(ranks)}` shows them"
        shown.append(_caption(f"… {len(left)} more displays of {name_ranks(ranks)}: {again}"))
    return shown


def _caption(text: str) -> Display:
    return Display({"text/html": panel(bold(text)), "text/plain": text}, {})
