"""What `%dist_clean` does and shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.errors import WorldNotStarted, format_ranks, name_ranks
from nbdist.notebook.desk import ranks_of
from nbdist.notebook.status import status_html, status_text
from nbdist.wire.cleaned import CLEAN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.notebook.desk import Desk
    from nbdist.wire.cleaned import Cleaned

TITLES = ("memory", "GPU tensors", "GPU held by torch")


def clean_workers(desk: Desk, ranks: str | None) -> None:
    """Have workers let go of memory that nobody needs, and say how much it was."""
    if desk.world is None or not desk.world.state.has_workers:
        raise WorldNotStarted("`%dist_clean`")
    on = ranks_of(ranks, desk.world)
    found: dict[int, Cleaned] = dict(zip(on, desk.values(desk.world, CLEAN, on), strict=True))
    head = f"{name_ranks(on)} · tracebacks, Out and _, cycles, cached GPU memory let go"
    table = rows(found)
    desk.display().show_table(status_html(head, table), status_text(head, table))


def rows(found: Mapping[int, Cleaned]) -> list[tuple[str, ...]]:
    """A line of headings, and one for all ranks that it is the same for."""
    same: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, cleaned in sorted(found.items()):
        pairs = (cleaned.memory, cleaned.on_gpu, cleaned.held_on_gpu)
        said = tuple((size_text(before), size_text(after)) for before, after in pairs)
        same.setdefault(said, []).append(rank)
    # Without GPUs there is nothing to say of them.
    shown = [
        index
        for index in range(len(TITLES))
        if index == 0 or any(float(text.split()[0]) for said in same for text in said[index])
    ]
    headings = ("ranks", *(title for i in shown for title in (f"{TITLES[i]} before", "after")))
    return [
        headings,
        *(
            (format_ranks(ranks), *(text for index in shown for text in said[index]))
            for said, ranks in same.items()
        ),
    ]


def size_text(size: int) -> str:
    """`43 MiB`, `240 MiB`, `1.2 GiB`: as much of it as two ranks can have in common."""
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    number = size / 2**20
    return f"{round(number, -1) if number >= 100 else round(number):.0f} MiB"
