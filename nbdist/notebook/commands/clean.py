"""Memory of the workers that nothing uses any more: released, and shown before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.notebook.command import Line, command
from nbdist.notebook.options import ranks_option
from nbdist.notebook.tables import Shown, table
from nbdist.output.wording import fold_ranks
from nbdist.words import format_ranks, name_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.wire.ops import Cleaned

TITLES = ("memory", "GPU tensors", "GPU held by torch")


@command(ranks_option, short_for="`%dist_memory --free`")
def dist_clean(line: Line) -> Shown:
    """Free memory held by tracebacks, Out and torch's cache, and show how much it was.

    Of the last traceback and what its frames hold, of `Out` and `_`, of cycles, of the GPU
    memory that torch keeps for the next tensors.  Variables stay.
    """
    return freed(line)


def freed(line: Line) -> Shown:
    """Have the ranks free what nothing uses, and draw the sizes before and after."""
    head = f"{name_ranks(line.ranks)} · tracebacks, Out and _, cycles, cached GPU memory released"
    return table(head, rows(line.call("clean")))


def rows(found: Mapping[int, Cleaned]) -> list[tuple[str, ...]]:
    """Lay out headings, and a row for all ranks whose figures are the same."""
    same = fold_ranks({rank: _sizes(cleaned) for rank, cleaned in found.items()})
    # Without GPUs there are no columns for them.
    shown = [
        index
        for index in range(len(TITLES))
        if index == 0 or any(float(text.split()[0]) for sizes in same for text in sizes[index])
    ]
    headings = ("ranks", *(title for i in shown for title in (f"{TITLES[i]} before", "after")))
    return [
        headings,
        *(
            (format_ranks(ranks), *(text for index in shown for text in sizes[index]))
            for sizes, ranks in same.items()
        ),
    ]


def _sizes(cleaned: Cleaned) -> tuple[tuple[str, str], ...]:
    pairs = (cleaned.memory, cleaned.on_gpu, cleaned.held_on_gpu)
    return tuple((size_text(before), size_text(after)) for before, after in pairs)


def size_text(size: int) -> str:
    """Write `43 MiB`, `240 MiB`, `1.2 GiB`: in as many digits as two ranks can share."""
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    number = size / 2**20
    return f"{round(number, -1) if number >= 100 else round(number):.0f} MiB"
