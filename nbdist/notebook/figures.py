"""Figures where no page draws: each in a file of its own, beside the log of its rank."""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from binascii import Error as BadBase64
from collections.abc import Iterator, Mapping
from pathlib import Path

from nbdist.folders import make_private, open_private
from nbdist.output.events import MimeBundle
from nbdist.output.transcript import Transcript
from nbdist.words import name_ranks
from nbdist.world.spec import default_log_dir

SUFFIXES = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/gif": "gif",
    "image/webp": "webp",
    "image/svg+xml": "svg",
}


FIGURES = "figures"
"""In the log folder, where those of ranks on other machines go."""

KITTY_TERMINALS = ("xterm-kitty", "xterm-ghostty")
CHUNK = 4096
"""Characters of one of kitty's escape sequences for images."""


def can_draw(environ: Mapping[str, str]) -> bool:
    """Say whether the terminal takes images as kitty does, by what it says of itself."""
    is_wrapped = "TMUX" in environ or "STY" in environ
    is_kin = environ.get("TERM") in KITTY_TERMINALS or environ.get("TERM_PROGRAM") == "WezTerm"
    return is_kin and not is_wrapped


def save_figures(
    transcript: Transcript, logs: Mapping[int, str], *, draws: bool = False
) -> Iterator[str]:
    """Write each figure of a cell to a file, and say which: `figure of rank 0: PATH`.

    With `draws` a PNG follows as what has kitty draw it.

    One for ranks that have the same; its name is made of what is in it, so that it is written
    once however often it is shown.  `logs` are the log files of ranks.
    """
    for group in transcript.groups():
        for shown in group.displays:
            if (found := _image(shown.display.data)) is not None:
                where = _saved(*found, logs.get(group.ranks[0]))
                yield f"figure of {name_ranks(group.ranks)}: {where}"
                if draws and found[0] == "png":
                    yield drawn(found[1])


def drawn(png: bytes) -> str:
    """Write what has kitty draw an image: its graphics protocol, and nothing in reply."""
    text = b64encode(png).decode()
    chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
    more = [*[1] * (len(chunks) - 1), 0]
    first = "f=100,a=T,"
    return "".join(
        f"\x1b_G{'' if number else first}q=2,m={left};{chunk}\x1b\\"
        for number, (chunk, left) in enumerate(zip(chunks, more, strict=True))
    )


def _image(data: MimeBundle) -> tuple[str, bytes] | None:
    """Find an image, with the suffix of its file."""
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
            with open(path, "wb", opener=open_private) as file:
                file.write(image)
    except OSError as error:
        return f"not saved in {path.parent}: {error.strerror}"
    return str(path)
