"""A table of mime types of displays, with how a panel shows content of each type.

Workers and the notebook's process read this table.  Pure: no I/O here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

Embedding = Literal["text", "html", "image", "other form", "page"]
"""How a panel shows content of a mime type.

"text": as lines, if the display has no other content.  "html": unchanged.  "image": as an `<img>`.
"page": not at all, since only renderers of the page can show such content.  "other form": like
"page", but if the display also has HTML or an image, the panel shows the HTML or the image.
"""


class Mime(NamedTuple):
    """The mime type `kind`; `suffix` is for files with such content, and messages use `name`.

    If `name` is "", messages use `kind`.  `is_base64` is True if a display has the content as
    base64.  `is_readable` is True if people can read the source, such as Markdown, in a terminal.
    """

    kind: str
    suffix: str
    embedding: Embedding
    name: str = ""
    is_base64: bool = False
    is_readable: bool = False


WIDGET = "application/vnd.jupyter.widget-view+json"
"""The mime type of a display that shows a widget; the page has the widget's model."""

MIMES = (
    Mime("text/plain", "txt", "text"),
    Mime("text/html", "html", "html", "HTML"),
    # Of the images of a display, a panel can show only the one whose type is listed first here.
    Mime("image/svg+xml", "svg", "image"),
    Mime("image/png", "png", "image", is_base64=True),
    Mime("image/jpeg", "jpg", "image", is_base64=True),
    Mime("image/gif", "gif", "image", is_base64=True),
    Mime("image/webp", "webp", "image", is_base64=True),
    Mime("image/avif", "avif", "image", is_base64=True),
    Mime("text/markdown", "md", "other form", "Markdown", is_readable=True),
    Mime("text/latex", "tex", "other form", "LaTeX", is_readable=True),
    Mime("application/vnd.dataresource+json", "json", "other form"),
    Mime("application/json", "json", "page", "JSON", is_readable=True),
    Mime("application/geo+json", "json", "page", "GeoJSON", is_readable=True),
    Mime("application/vnd.plotly.v1+json", "json", "page", "plotly figure"),
    Mime(WIDGET, "json", "page", "widget"),
)
_BY_KIND = {each.kind: each for each in MIMES}


def mime_of(kind: str) -> Mime:
    """Return the `Mime` of a mime type; only the page can show a type that nbdist does not know."""
    return _BY_KIND.get(kind) or Mime(kind, "txt", "page")


def images_in(data: Collection[str]) -> Iterator[Mime]:
    """Yield the types of images among these mime types, the preferred type first."""
    return (each for each in MIMES if each.embedding == "image" and each.kind in data)


def readable_in(data: Collection[str]) -> Iterator[Mime]:
    """Yield the readable types among these mime types, the preferred type first."""
    return (each for each in MIMES if each.is_readable and each.kind in data)
