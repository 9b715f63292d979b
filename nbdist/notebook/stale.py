"""What is said where a module was edited after workers have imported it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from nbdist.words import name_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.output.transcript import Transcript


def stale_texts(transcript: Transcript) -> Iterator[str]:
    """Say of each file which ranks of a cell that has ended run what it was before."""
    ranks = defaultdict(list)
    for track in transcript:
        for file in track.done.changed if track.done is not None else ():
            ranks[file].append(track.rank)
    for file, imported in ranks.items():
        name = file.rpartition("/")[2]
        yield (
            f"{name} changed after {name_ranks(imported)} imported it: "
            "`%autoreload 2` under %%distributed, or `%dist_restart`"
        )
