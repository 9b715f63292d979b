"""What is said below a cell: of modules edited since workers have imported them, and of `rank`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from nbdist.words import name_ranks
from nbdist.world.names import WORKERS_MODULES, WORKERS_OWN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.output.transcript import Transcript
    from nbdist.world.names import NameTable


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


def covered_texts(transcript: Transcript, table: NameTable) -> Iterator[str]:
    """Say which ranks have bound a name that every worker has of itself; once of each name."""
    ranks = defaultdict(list)
    for track in transcript:
        for name in track.done.covered if track.done is not None else ():
            ranks[name].append(track.rank)
    for name in sorted(ranks.keys() & (WORKERS_OWN | WORKERS_MODULES.keys())):
        if table.is_first_notice(f"{name} on the ranks"):
            was, who = WORKERS_MODULES.get(name, "each worker's own"), name_ranks(ranks[name])
            yield f"`{name}` was {was}; this cell gave it another value on {who}"
