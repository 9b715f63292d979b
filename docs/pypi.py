"""Makes the text of nbdist's page on PyPI from README.md, as hatchling builds sdist and wheel.

PyPI shows the README on a page of its own, so links and pictures need whole addresses.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Adds the README to the metadata; the addresses begin with that of the source."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`, which pyproject.toml therefore names as dynamic."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source, tag = metadata["urls"]["Source"], f"v{metadata['version']}"
        whole = with_whole_addresses(text, source, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": whole}


def with_whole_addresses(text: str, source: str, tag: str) -> str:
    """Return Markdown whose relative links lead to the files of a tag of the source's repository.

    The addresses are those of GitHub: pages are under `blob`, pictures under `raw`.
    """

    def whole(link: re.Match[str]) -> str:
        mark, words, path = link.groups()
        kind = "raw" if mark else "blob"
        return f"{mark}[{words}]({source}/{kind}/{tag}/{path})"

    return RELATIVE.sub(whole, text)
